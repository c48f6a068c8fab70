"""What is trained without a target: what this user's own search here was of, and nothing that a stranger has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_factory import make_report, make_state

from autotune.errors import UsageError
from autotune.records.codec import write_record
from autotune.records.script import Script
from autotune.records.trial import Target
from autotune.search.run import SearchOptions, _open_folder
from autotune.search.store.folder import SearchFolder
from autotune.train.settings.target import resolve_training_target

EVIL = "import pathlib\npathlib.Path({marker!r}).touch()\nclass workload: pass\n"


def plant_search(folder: Path, named: Target) -> SearchFolder:
    """Leave a search in a folder as a checkout of somebody else's would."""
    search = SearchFolder(folder / ".autotune/x-20261122-100000")
    search.trials.mkdir(parents=True)
    (folder / ".autotune").chmod(0o755)
    write_record(search.state_file, make_state(target=named))
    return search


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "autotune", "train", "--steps", "2", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


SPECS = ["evil.py:workload", "../outside/evil.py:workload", "evil:workload", "script"]


@pytest.mark.slow_cases("train-evil:workload", "resume-../outside", "resume-evil.py")
@pytest.mark.fault(
    "F4", injected="a stranger's search.json names code", outcome="exit 2, nothing run, the command named"
)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("arguments", [[], ["--resume"]], ids=["train", "resume"])
def test_a_strangers_folder_runs_nothing(tmp_path: Path, spec: str, arguments: list[str]) -> None:
    folder, marker = tmp_path / "checkout", tmp_path / "marker"
    for place in (folder, tmp_path / "outside"):
        place.mkdir()
        (place / "evil.py").write_text(EVIL.format(marker=str(marker)))
    script = Script(command=("python", "evil.py", "$(touch marker)")) if spec == "script" else None
    asked = Target(spec="python evil.py" if script else spec, folder=str(folder), script=script)
    search = plant_search(folder, asked)
    (search.path / "seal").write_text("0" * 64)
    ended = train(folder, *arguments)
    assert ended.returncode == 2, ended.stderr
    assert "may be somebody else's" in ended.stderr
    words = "-- python evil.py '$(touch marker)'" if script else spec
    assert f"name the target: autotune train --profile best.json {words}\n" in ended.stderr
    assert not marker.exists()


def test_ones_own_search_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    asked = Target(spec="toy.py:workload", folder=str(tmp_path))
    search = _open_folder(tmp_path, asked, SearchOptions())
    resolved = resolve_training_target(None, tmp_path)
    assert (resolved.target, resolved.origin) == (asked, "search")
    (search.path / "seal").unlink()
    with pytest.raises(UsageError, match="may be somebody else's"):
        resolve_training_target(None, tmp_path)


def test_whoever_names_the_target_is_not_asked_whose_search_it_is(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    plant_search(tmp_path, Target(spec="evil.py:workload", folder=str(tmp_path)))
    assert resolve_training_target("toy.py:workload", tmp_path).origin == "argument"
    (tmp_path / "autotune.toml").write_text('target = "toy.py:workload"\n')
    assert resolve_training_target(None, tmp_path).target.spec == "toy.py:workload"


@pytest.mark.fault("F18", injected="the newest search has failed at once", outcome="the one before it is remembered")
def test_a_search_that_measured_nothing_is_not_what_is_trained(tmp_path: Path) -> None:
    for name in ("toy.py", "typo.py"):
        (tmp_path / name).write_text("from elsewhere import *\n")
    answered = _open_folder(tmp_path, Target(spec="toy.py:workload", folder=str(tmp_path)), SearchOptions())
    answered.write_probe(make_report())
    failed = _open_folder(tmp_path, Target(spec="typo.py:workload", folder=str(tmp_path)), SearchOptions())
    assert failed.path != answered.path
    assert resolve_training_target(None, tmp_path).target.spec == "toy.py:workload"
    (answered.path / "probe.json").unlink()
    assert resolve_training_target(None, tmp_path).target.spec == "typo.py:workload"


def test_a_damaged_search_is_none(tmp_path: Path) -> None:
    search = plant_search(tmp_path, Target(spec="evil.py:workload", folder=str(tmp_path)))
    search.state_file.write_text("{")
    assert resolve_training_target(None, tmp_path).origin == "demo"


@pytest.mark.slow
def test_train_after_search_needs_no_target(tmp_path: Path) -> None:
    workload = Path(__file__).with_name("noisy_workload.py")
    (tmp_path / "noisy_workload.py").write_text(workload.read_text())
    words = ["search", "noisy_workload.py:noisy", "--budget", "60s"]
    searched = subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "probe" in searched.stderr
    trained = train(tmp_path, "--json")
    assert trained.returncode == 0, trained.stderr
    assert "target: noisy_workload.py:noisy (from the search in this folder)" in trained.stderr
    assert json.loads(trained.stdout)["target"]["label"] == "noisy_workload.py:noisy"
