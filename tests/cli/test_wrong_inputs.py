"""Wrong inputs: each is told at once, with the way out, and nothing is written."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from record_factory import CONFIG, make_profile
from typer.testing import CliRunner, Result

import autotune.probe.run
import autotune.search.run
from autotune.cli import app
from autotune.errors import TargetError
from autotune.presets import load_presets

WORKLOAD = """
class Own:
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def compute_loss(self, model, batch): ...
workload = Own()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mod.py").write_text(WORKLOAD)
    return tmp_path


def run(typed: str, **environment: str) -> Result:
    return CliRunner().invoke(app, typed.split(), env=environment)


def make_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def settings(text: str) -> dict[str, str]:
    return {"pyproject.toml": f"[tool.autotune]\n{text}\n"}


PRESET = load_presets()[0].to_json()
ANSWER = make_profile().to_json()
UNCHANGED = json.dumps(json.loads(ANSWER) | {"config": CONFIG.model_dump(mode="json")})
WRONG: dict[str, tuple[dict[str, str], int, str, str]] = {
    "search --resume": ({}, 2, "no search was made in this folder", "leave --resume out, or name its target"),
    "search --train-for 8": ({}, 2, "--train-for '8' has no unit that is known", "write 8h, 8epochs, 8samples"),
    "search --train-for 8x": ({}, 2, "--train-for '8x' has no unit that is known", "30epochs, 30samples"),
    "search mod:workload": (
        settings('budget = "20"'),
        2,
        "pyproject.toml: budget '20' is not a duration",
        "20m or 20s?",
    ),
    "search --dry-run mod:workload": (settings('max_drift = "1"'), 2, "pyproject.toml: max_drift '1'", "1% or 1pp?"),
    "search --seed 1 mod:workload": (settings('memory_limit = "x"'), 2, "pyproject.toml: memory_limit 'x'", "16GiB"),
    "search --budget 20 mod:workload": (settings('budget = "5m"'), 2, "--budget '20' is not", "20m or 20s?"),
    "train mod:workload --run-dir own": (
        {"own/notes": ""},
        2,
        "own is not empty, and holds no run",
        "choose a new folder",
    ),
    "search --seed 2 mod:workload": ({".autotune": ""}, 8, ".autotune is a file", "move it away"),
    "show": ({"best.json": PRESET}, 7, "best.json is a preset, not the answer of a search", "--preset best.json"),
    "export --to torch": ({"best.json": PRESET}, 7, "best.json is a preset", "--preset best.json"),
    "show best.json": ({"best.json": ANSWER.replace('"precision"', '"precison"')}, 7, "did you mean 'precision'?", ""),
    "show ./best.json": ({"best.json": UNCHANGED}, 7, "improved, and config is the same as baseline_config", ""),
    "search --max-drift foo:1% --metric-regex acc=(.*) --direction maximize -- python train.py": (
        {"train.py": "import torch\n"},
        2,
        "a limit is given for 'foo', and the training has no metric of that name",
        "its metrics are acc",
    ),
    "search --metric-limit foo=1% --metric-regex acc=(.*) --direction maximize -- python train.py": (
        {"train.py": "import torch\n"},
        2,
        "a limit is given for 'foo', and the training has no metric of that name",
        "its metrics are acc",
    ),
    "search --only wrkers -- python train.py": (
        {"train.py": "import torch\n"},
        2,
        "'wrkers' is no knob",
        "did you mean workers? the knobs are workers, prefetch,",
    ),
    "search --max-loss-increase accuracy=1% mod:workload": (
        {},
        2,
        "'accuracy=1%' is not a limit",
        "write --metric-limit accuracy=1%",
    ),
    "search --max-loss-increase accuracy:1% mod:workload": ({}, 2, "is not a limit", "--metric-limit accuracy=1%"),
    "train mod:workload --preset mine.json": (
        {"mine.json": "[settings]"},
        7,
        "mine.json is not valid JSON",
        "autotune presets --json shows how one is written",
    ),
    "search --metric-limit accuracy:1% mod:workload": ({}, 2, "'accuracy:1%' is not a limit", "write accuracy=1%"),
    "search --max-loss-increase 5 mod:workload": ({}, 2, "--max-loss-increase '5' is a number without", "5%?"),
    "search --budget 15s mod:workload": ({}, 2, "--budget is 15 s, too short to start", "give at least 20s"),
    "search --max-drift 150%": ({}, 2, "--max-drift '150%' is out of range", "below 100%"),
    "search --max-drift 1% --max-drift a:2": ({}, 2, "--max-drift 'a:2' is a number", "a:2% or a:2pp?"),
    "search --memory-limit 8": ({}, 2, "--memory-limit '8' is not a size with a unit", "16GiB"),
    "search train.py": ({}, 2, "there is no file 'train.py'", "it is looked up in"),
    "search missing.py:workload --budget 60s": ({}, 2, "there is no file 'missing.py'", ""),
    "search --out no/such/best.json": ({}, 2, "there is no folder", "create it first"),
    "search": (settings('budgets = "20m"'), 2, "unknown key 'budgets'", "did you mean budget?"),
    "report": ({}, 2, "no search with an answer was made in this folder", "run autotune search first"),
    "export --to htf": ({}, 2, "there is no exporter 'htf'", "did you mean hf?"),
    "show nothere.json": ({}, 7, "there is no answer nothere.json", "autotune search writes one"),
}


@pytest.mark.parametrize("typed", WRONG)
def test_it_is_told_with_the_way_out_and_nothing_is_written(folder: Path, typed: str) -> None:
    files, status, message, hint = WRONG[typed]
    make_files(folder, files)
    before = sorted(folder.rglob("*"))
    shown = run(typed)
    assert shown.exit_code == status, shown.stderr
    *_, first, second = shown.stderr.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert hint in second
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no answer best.json"),
        ("{", "is not valid JSON"),
        ('{"schema_version": 99}', "was written by a newer version (schema 99, this one reads 1)"),
        ('{"verdict": "improved"}', "'config' is missing"),
    ],
)
@pytest.mark.fault("37", injected="a profile missing, torn, newer, without fields", outcome="exit 7, one line")
def test_a_bad_profile_is_refused_by_name(folder: Path, content: str | None, message: str) -> None:
    make_files(folder, {} if content is None else {"best.json": content})
    shown = run("train --profile best.json")
    assert shown.exit_code == 7
    assert message in shown.stderr


@pytest.mark.parametrize("typed", ["show", "show --json"])
def test_the_traceback_that_is_asked_for_changes_neither_the_exit_status_nor_the_json(folder: Path, typed: str) -> None:
    usual, shown = run(typed), run(typed, AUTOTUNE_DEBUG="1")
    assert (shown.exit_code, shown.stdout) == (usual.exit_code, usual.stdout)
    assert shown.exit_code == 7
    assert "Traceback" not in usual.stderr
    assert "Traceback (most recent call last)" in shown.stderr
    assert "in show" in shown.stderr


def stop(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    raise TargetError("the training was ended in its first steps")


STOPPED = {
    "probe mod:workload": "stopped: nothing is kept of this probe",
    "search mod:workload": "stopped before your settings were measured: there is no answer yet; go on with: "
    "autotune search --resume mod:workload",
}


@pytest.mark.parametrize("typed", STOPPED)
def test_what_is_left_of_a_command_that_is_stopped_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr(autotune.probe.run, "run_probe", stop)
    monkeypatch.setattr(autotune.search.run, "run_search", stop)
    shown = run(typed)
    assert shown.exit_code == 128 + signal.SIGINT
    assert " ".join(shown.stderr.split()) == STOPPED[typed]
