"""What a search leaves for later ones, who begins with it, and that it is never evidence."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_model
from simulated import BASELINE, Machine, Run, all_equal, make_report, run_simulated
from typer.testing import CliRunner

from autotune.cli import app
from autotune.records import ProbeReport, TrainConfig, TrialStatus
from autotune.records.codec import read_record, write_record
from autotune.records.search import KnownEffect, PastSearch, Recalled
from autotune.search.explore.prior import FAILED, make_prior
from autotune.search.store import history
from autotune.search.store.history import RELATIVE_SD, SAME_SD, digest_folder, forget, list_past, recall, remember

NOW = 2e9
ONLY = ("num_workers", "precision", "optimizer_implementation")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is remembered, not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autotune" / "history"


def workers_win(config: TrainConfig) -> float:
    return 1.5 if config.num_workers else 1.0


def search(work: Path, machine: Machine | None = None, **asked: Any) -> Run:
    machine = machine or Machine(speed=workers_win)
    return run_simulated(machine, work, budget=120.0, **({"uses_history": True, "only": ONLY} | asked))


def find_first(run: Run) -> TrainConfig:
    """Return what a search launched first beside the user's own settings."""
    launched = (spec.config for spec in run.machine.specs if spec.purpose == "measure")
    return next(config for config in launched if config is not None and config != BASELINE)


def make_past(report: ProbeReport | None = None, work: Path = Path("/work"), **changes: Any) -> PastSearch:
    report = report or make_report(Machine())
    fields = {
        "ended_at": NOW,
        "label": report.target.label,
        "folder": digest_folder(work),
        "fingerprint": report.target.fingerprint,
        "hardware": report.hardware.fingerprint,
        "software": report.software.fingerprint,
        "device": report.target.device,
        "model": report.target.model,
        "baseline": report.target.baseline,
        "verdict": "keep",
        "config": report.target.baseline,
        "effects": (
            KnownEffect(knob="num_workers", value=2, log_speedup=0.3, log_sd=0.04),
            KnownEffect(knob="user_knobs.kernel", value="new", log_speedup=0.2, log_sd=0.04),
            KnownEffect(knob="precision", value="bf16", log_speedup=0.0, log_sd=0.2, failed=True),
        ),
    }
    return PastSearch(**(fields | changes))


def take(work: Path = Path("/work"), report: ProbeReport | None = None) -> Recalled:
    return recall(report or make_report(Machine()), work, now=NOW + 7200)


def test_the_next_search_begins_with_what_the_last_has_read(tmp_path: Path) -> None:
    first = search(tmp_path)
    assert first.profile.verdict == "improved"
    assert find_first(first).num_workers == 0
    second = search(tmp_path)
    assert second.profile.verdict == "improved"
    assert find_first(second).num_workers > 0
    recalled = second.folder.recall(second.log.problem.report)
    assert "the last search of it, " in recalled.sentence
    known = {(one.knob, one.value): one for one in recalled.effects}
    best = max(known.values(), key=lambda one: one.log_speedup)
    assert best.knob == "num_workers"
    assert best.log_speedup == pytest.approx(math.log(1.5), abs=0.15)  # it was not expected, which counts too
    assert best.log_sd >= SAME_SD
    assert len(list_past()) == 1  # the newer in the older one's place


def test_what_was_read_while_others_had_the_cpus_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "is_disturbed", lambda result: result.measurement is not None)
    search(tmp_path)
    (past,) = list_past()
    assert past.effects == ()


def test_what_is_remembered_is_no_evidence(tmp_path: Path, folder: Path) -> None:
    """However fast it is said to have been: where nothing is faster now, nothing is claimed."""
    search(tmp_path)
    (path,) = folder.iterdir()
    past = read_record(path, PastSearch)
    lies = tuple(one.replace(log_speedup=0.7, log_sd=0.0) for one in past.effects)
    for seed in range(3):
        write_record(path, past.replace(effects=lies))
        run = search(tmp_path, Machine(speed=all_equal, noise=0.03, seed=seed))
        assert run.folder.recall(run.log.problem.report).effects[0].log_speedup == 0.7
        assert run.profile.verdict != "improved"


def test_what_made_launches_fail_comes_last(tmp_path: Path) -> None:
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config.precision == "bf16" else TrialStatus.COMPLETED

    first = search(tmp_path, Machine(speed=workers_win, fate=fate))
    (past,) = list_past()
    assert [(one.knob, one.value) for one in past.effects if one.failed] == [("precision", "bf16")]
    assert make_prior(first.log.problem.report, past.effects).find("precision", "bf16") == FAILED
    again = search(tmp_path, Machine(speed=workers_win, fate=fate))
    assert find_first(first).precision == "bf16"
    assert find_first(again).precision == "fp32"


def test_a_search_that_is_resumed_goes_on_with_the_same(tmp_path: Path) -> None:
    search(tmp_path, Machine(speed=workers_win, stop_after=6))
    begun = search(tmp_path, Machine(speed=workers_win, stop_after=4))
    recalled = read_record(begun.folder.path / "recalled.json", Recalled)
    assert recalled.effects
    forget()
    assert begun.folder.recall(begun.log.problem.report) == recalled


def test_without_history_nothing_is_read_or_left(tmp_path: Path, folder: Path) -> None:
    remember(make_past(work=tmp_path))
    (path,) = folder.iterdir()
    before = path.read_bytes()
    run = search(tmp_path, uses_history=False)
    assert run.folder.recall(run.log.problem.report) == Recalled()
    assert [path.read_bytes() for path in folder.iterdir()] == [before]


def test_of_the_same_all_is_taken_a_little_less_sure() -> None:
    remember(make_past())
    recalled = take()
    assert [one.knob for one in recalled.effects] == ["num_workers", "user_knobs.kernel", "precision"]
    assert recalled.effects[0].log_sd == pytest.approx(math.hypot(0.04, SAME_SD))
    assert (
        recalled.sentence
        == "the last search of it, 2h00m ago, says what to try first: a guess about 3 changes, no proof"
    )


def test_a_target_that_was_changed_begins_with_what_it_was_before() -> None:
    remember(make_past(fingerprint="f" * 12))
    recalled = take()
    assert [one.knob for one in recalled.effects] == ["num_workers", "user_knobs.kernel"]  # what failed may work now
    assert recalled.effects[0].log_sd == pytest.approx(math.hypot(0.04, RELATIVE_SD))
    assert "a search of it as it was" in recalled.sentence


def test_a_file_of_the_same_name_elsewhere_is_another_target() -> None:
    remember(make_past(fingerprint="f" * 12))
    elsewhere = take(Path("/elsewhere"))
    assert [one.knob for one in elsewhere.effects] == ["num_workers"]  # a relative: its own knobs are its own
    assert "a search of toy.py:workload" in elsewhere.sentence


def test_the_nearest_relative_is_taken() -> None:
    report = make_report(Machine())
    size = report.target.model.parameter_count
    far, near = (KnownEffect(knob="num_workers", value=2, log_speedup=gain, log_sd=0.04) for gain in (0.1, 0.3))
    for label, factor, effect in (("far", 7, far), ("near", 3, near), ("beyond", 20, far)):
        model = report.target.model.replace(parameter_count=factor * size)
        remember(make_past(label=label, model=model, effects=(effect,)))
    recalled = take()
    assert "a search of near" in recalled.sentence
    assert [one.log_speedup for one in recalled.effects] == [0.3]


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": "another"},
        {"software": "another"},
        {"device": "cuda"},
        {"label": "other", "model": make_model(has_batch_norm=True, has_4d_convolution=True)},
        {"effects": ()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_alike_says_nothing(changes: dict[str, Any]) -> None:
    remember(make_past(**changes))
    assert take() == Recalled()


def test_the_prior_is_moved_by_as_much_as_the_reading_is_sure() -> None:
    report = make_report(Machine())
    usual = make_prior(report).find("num_workers", 2)
    sure, unsure = (
        make_prior(report, [KnownEffect(knob="num_workers", value=2, log_speedup=0.5, log_sd=sd)])
        for sd in (0.001, usual.sd)
    )
    assert sure.find("num_workers", 2).mean == pytest.approx(0.5, abs=0.01)
    assert unsure.find("num_workers", 2).mean == pytest.approx((0.5 + usual.mean) / 2)
    assert unsure.find("num_workers", 2).sd == pytest.approx(usual.sd / math.sqrt(2))
    assert unsure.find("num_workers", 4) == usual


def test_it_is_private_small_and_what_is_damaged_is_as_if_absent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_KEPT", 3)
    for number in range(5):
        assert remember(make_past(label=f"target-{number}", ended_at=NOW + number))
    (folder / "torn.json").write_text("{")
    assert [one.label for one in list_past()] == ["target-4", "target-3", "target-2"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("[0-9a-f]*.json")} == {0o600}


def test_whatever_a_target_is_called_is_kept() -> None:
    label = "python train.py " + "--flag 'a\nb\x1b[31m' " * 100
    assert remember(make_past(label=label))
    assert [one.label for one in list_past()] == [label]
    shown = CliRunner().invoke(app, ["history"]).stdout
    assert "\x1b" not in shown


def test_where_it_cannot_be_kept_nothing_breaks(tmp_path: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    assert not remember(make_past())
    assert search(tmp_path).profile.verdict == "improved"


def test_the_command_lists_and_forgets() -> None:
    invoke = CliRunner().invoke
    assert "no search is remembered yet" in invoke(app, ["history"]).output
    remember(make_past())
    shown = invoke(app, ["history"]).stdout
    assert "toy.py:workload" in shown
    assert "keep" in shown
    assert "workers=2 1.35x" in shown
    assert "precision=bf16 failed" in shown
    (listed,) = json.loads(invoke(app, ["history", "--json"]).stdout)
    assert listed["label"] == "toy.py:workload"
    assert "forgotten: 1 search" in invoke(app, ["history", "--clear"]).output
    assert list_past() == []


def test_the_presets_are_listed() -> None:
    invoke = CliRunner().invoke
    shown = invoke(app, ["presets"]).stdout
    assert "reproducible (Changes no number: losses are bit for bit your own)" in shown
    assert "num_workers=2" in shown
    assert [one["name"] for one in json.loads(invoke(app, ["presets", "--json"]).stdout)] == [
        "balanced",
        "baseline",
        "low-memory",
        "reproducible",
    ]
