"""The recorded answers in profiles/examples: each is read, shown and exported, and names no machine's folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.records import Profile
from autotune.records.config import changed_fields
from autotune.targets.demo import DemoWorkload

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiles" / "examples"
RECORDED = sorted(FOLDER.glob("*.json"))
SYSTEM_LIBRARY = re.compile(r"/(usr/)?lib/[a-z0-9_/.-]+\.so[.0-9]*")
"""Where a distribution's package puts one: the same on every machine."""


def test_there_is_one_of_the_demo_and_of_each_example_with_a_workload() -> None:
    examples = {path.parent.name for path in (ROOT / "examples").glob("*/workload.py")}
    assert {"demo", *examples} == {path.stem for path in RECORDED}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_it_is_an_answer_of_that_training(path: Path) -> None:
    profile = Profile.load(path)
    assert profile.evidence.stop_reason != "running"
    assert profile.evidence.baseline_samples_per_second
    assert profile.evidence.trials.get("completed", 0) > 1
    label = "autotune.targets.demo:workload" if path.stem == "demo" else f"examples/{path.stem}/workload.py:workload"
    assert profile.target.label == label
    assert path.stem != "demo" or DemoWorkload.__module__ == label.partition(":")[0]
    assert path.stem == "demo" or (ROOT / label.partition(":")[0]).is_file()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_path_or_name_of_a_machine_is_in_it(path: Path) -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for one in (*value, *value.values()) for text in texts(one)]
        if isinstance(value, list):
            return [text for one in value for text in texts(one)]
        return [value] if isinstance(value, str) else []

    held = texts(json.loads(path.read_text()))
    assert [text for text in held if text.startswith("/") and not SYSTEM_LIBRARY.fullmatch(text)] == []
    assert [text for text in held if re.search(r"/(home|root|tmp|work|Users|mnt)\b", text)] == []


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_it_is_shown_and_exported(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = Profile.load(path)
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0, shown.stderr
    beginnings = {"improved": "improved: at least ", "keep": "keep your settings", "inconclusive": "inconclusive: keep"}
    assert shown.stdout.startswith(beginnings[profile.verdict])
    exported = CliRunner().invoke(app, ["export", "--to", "torch", str(path), "--json"])
    assert exported.exit_code == 0, exported.stderr
    told = json.loads(exported.stdout)
    for name in changed_fields(profile.config, profile.baseline_config):
        assert name.partition(".")[0] in {*told["mapped"], *told["unmapped"]}  # own knobs are one entry


def test_the_readme_has_a_row_of_each() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert {row.partition("](")[2].partition(")")[0] for row in rows} == {path.name for path in RECORDED}
    for path in RECORDED:
        (row,) = (row for row in rows if f"]({path.name})" in row)
        assert f"| {Profile.load(path).verdict} " in row
