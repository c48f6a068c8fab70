"""`show`, `status` and `env`: what is known, what is at work, and where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from record_factory import (
    MIB,
    make_interval,
    make_measurement,
    make_plan,
    make_profile,
    make_result,
    make_spec,
    make_state,
    make_target,
)
from typer.testing import CliRunner

from autotune.cli import app
from autotune.format import format_rate
from autotune.records import Evidence, PeakMemory, TrainConfig
from autotune.records.profile import Candidate, Profile
from autotune.search.store.folder import create_search_folder, lock_searches
from autotune.train.runs.folder import locked_run
from autotune.train.runs.status import read_status

BASELINE, TUNED = TrainConfig(), TrainConfig(num_workers=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*words])
    return done.exit_code, done.stdout, done.stderr


def save(path: Path, **changes: Any) -> Profile:
    profile = make_profile(verdict="improved", speedup=make_interval(1.4, 1.3, 1.5), **changes)
    profile.save(path)
    return profile


def test_an_answer_is_shown_once_more(folder: Path) -> None:
    before, after = (PeakMemory(host_bytes=size * MIB) for size in (292, 439))
    profile = save(folder / "best.json", baseline_memory=before, memory=after)
    code, shown, said = invoke("show")
    assert code == 0
    assert shown.startswith("improved: at least 1.30x faster")
    assert "439 MiB" in shown
    assert said.splitlines()[0] == "next: autotune train --profile best.json"
    assert "autotune report" in said
    assert json.loads(invoke("show", "best.json", "--json")[1]) == json.loads(profile.to_json())
    assert invoke("show", "other.json")[0] == 7


@pytest.mark.parametrize(
    ("verdict", "passed", "said"),
    [
        ("keep", False, "nothing to change: train as before"),
        ("not-tested", False, "nothing to change: train as before"),
        ("inconclusive", False, "next: autotune search --resume --budget "),
        ("inconclusive", True, "next: autotune train --profile best.json --use-candidate, for settings that are not"),
    ],
)
def test_what_to_do_next_is_nothing_where_no_setting_changes(
    folder: Path, verdict: Any, passed: bool, said: str
) -> None:
    candidate = Candidate(config=TUNED, passed_checks=True, reason="few pairs") if passed else None
    make_profile(verdict=verdict, candidate=candidate).save(folder / "best.json")
    assert invoke("show")[2].startswith(said)


@pytest.mark.parametrize(
    ("launches", "stop", "tells"), [(3, "budget", True), (9, "budget", False), (3, "bound", False)]
)
def test_a_search_that_had_time_for_little_says_how_to_go_on(
    folder: Path, launches: int, stop: Any, tells: bool
) -> None:
    profile = make_profile(verdict="keep")
    evidence = profile.evidence.replace(pairs=0, trials={"completed": launches, "crashed": 2}, stop_reason=stop)
    profile.replace(evidence=evidence).save(folder / "best.json")
    assert invoke("show")[2].startswith("next: train as before, or autotune search --resume --budget ") == tells


def test_an_export_goes_to_a_new_file_and_takes_the_answer_that_is_there(folder: Path) -> None:
    save(folder / "best.json")
    code, printed, _ = invoke("export", "--to", "torch")
    assert code == 0
    assert invoke("export", "best.json", "--to", "torch", "-o", "tuned.py")[:2] == (0, "")
    assert (folder / "tuned.py").read_text() == printed
    code, _, said = invoke("export", "--profile", "best.json", "--to", "torch", "--out", "tuned.py")
    assert (code, said) == (2, "error: tuned.py exists\n  choose another --out\n")


def test_nothing_is_at_work_in_an_empty_folder(folder: Path) -> None:
    code, shown, _ = invoke("status")
    assert code == 0
    assert "none is at work in this folder" in shown
    assert [*folder.iterdir()] == []


def test_a_search_at_work_is_told_with_how_far_it_is(folder: Path) -> None:
    search = create_search_folder(folder, "toy.py:workload")
    search.write_state(make_state(target=make_target(folder=folder)))
    for number in range(3):
        place = search.trials / f"{number:04d}"
        place.mkdir()
        spec = make_spec(number=number, config=BASELINE if number else TUNED)
        (place / "result.json").write_text(make_result(spec, measurement=make_measurement()).to_json())
    assert "3 launches; ended before your own settings were measured" in invoke("status")[1]
    with lock_searches(folder):
        assert "3 launches; your own settings are not measured yet" in invoke("status")[1]
    evidence = Evidence(stop_reason="running", baseline_samples_per_second=512.0)  # what the probe read
    make_profile(baseline_config=BASELINE, evidence=evidence).save(search.profile)
    with lock_searches(folder):
        _, shown, _ = invoke("status")
    assert f"at work: process {os.getpid()} on " in shown
    own = format_rate(make_measurement().samples_per_second)
    assert f"3 launches; no answer yet; your settings: {own}" in shown
    told = "its search is still at work, or was cut off: autotune status says which"
    assert told in invoke("show", str(search.profile))[2]
    save(search.profile, evidence=evidence.replace(stop_reason="budget"))
    assert told not in invoke("show", str(search.profile))[2]
    assert "improved: at least 1.30x faster" in invoke("status")[1]


def test_a_training_at_work_is_told_with_its_last_line(folder: Path) -> None:
    run = folder / "runs" / "toy-001"
    run.mkdir(parents=True)
    (run / "run.json").write_text(make_plan(steps=400).to_json())
    lines = [{"step": 100, "loss": 0.5, "samples_per_second": 80.0}, {"step": 100, "accuracy": 0.9}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    assert read_status(folder).trainings == ()
    with locked_run(run):
        _, shown, _ = invoke("status")
        listed = json.loads(invoke("status", "--json")[1])
    assert "training (runs/toy-001)" in shown
    assert "step 100 (25 %), loss 0.5000, 80 samples/s" in shown
    assert listed["trainings"][0]["planned_steps"] == 400


def test_the_machine_is_told_for_a_bug_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    _, shown, _ = invoke("env")
    assert "torch" in shown
    assert "usable CPU" in shown
    listed = invoke("env", "--json")[1]
    assert json.loads(listed).keys() == {"software", "hardware"}
    for text in (shown, listed):
        assert "hf_abcdef" not in text
        assert str(Path.home()) + "/" not in text
