"""A probe that was just made is taken by the search; one of anything else is not, and the reason is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_state, make_target
from simulated import Machine, make_report, run_simulated

from autotune.machine.hardware import read_hardware, read_software
from autotune.records import ProbeReport
from autotune.records.codec import read_record, write_record
from autotune.records.search import KeptProbe, SearchState
from autotune.records.trial import TrialResult
from autotune.search.store.folder import SearchFolder, create_search_folder
from autotune.search.store.kept_probe import keep_probe, read_environment, take_kept_probe
from autotune.targets.source.fingerprint import fingerprint_target

SOURCE = "workload = None\n"


def state_of(work: Path, **asked: Any) -> SearchState:
    return make_state(target=make_target(folder=work), **asked)


@contextmanager
def quiet_pytest() -> Iterator[None]:
    """Leave out the variable that pytest changes from one phase of a test to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        yield


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a working folder with a target and a probe of it that was just made."""
    (tmp_path / "toy.py").write_text(SOURCE)
    run = run_simulated(Machine(stop_after=2), tmp_path)
    trial = next(one for one in run.folder.read_trials() if one.spec.purpose == "probe")
    report = make_report(Machine())
    facts = report.target.replace(fingerprint=fingerprint_target(state_of(tmp_path).target) or "")
    report = report.replace(target=facts, hardware=read_hardware(), software=read_software())
    with quiet_pytest():
        keep_probe(tmp_path, state_of(tmp_path).target, report, trial.replace(facts=facts))
    return tmp_path


def take(work: Path, **asked: Any) -> tuple[str | None, SearchFolder]:
    place = create_search_folder(work, "toy.py:workload")
    state = state_of(work, **asked)
    place.write_state(state)
    with quiet_pytest():
        return take_kept_probe(work, state, place), place


def rewrite(work: Path, change: Callable[[KeptProbe], KeptProbe]) -> None:
    path = work / ".autotune" / "kept-probe.json"
    write_record(path, change(read_record(path, KeptProbe)))


def test_a_search_that_has_taken_a_probe_starts_none(work: Path) -> None:
    told, place = take(work)
    assert told is not None
    assert told.startswith("probe: taken from `autotune probe`, ")
    assert place.next_number() == 1
    run = run_simulated(Machine(), work, folder=place)
    assert [spec.purpose for spec in run.machine.specs].count("probe") == 0
    assert run.profile.verdict == "improved"
    trials = run.folder.read_trials()
    assert [(one.spec.number, one.spec.purpose) for one in trials][:2] == [(0, "probe"), (1, "measure")]
    (work / "alone").mkdir()
    alone = run_simulated(Machine(), work / "alone")  # without one, it is the first thing that is started
    assert [spec.purpose for spec in alone.machine.specs].count("probe") == 1


def disturbed(report: ProbeReport) -> ProbeReport:
    return report.replace(verdict=report.verdict.replace(limit="unreliable"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: one.replace(made_at=time.time() - 3700), "it is 1h"),
        (lambda one: one.replace(made_at=time.time() + 60), "the clock was set back"),
        (lambda one: one.replace(report=other_machine(one.report)), "the machine is another"),
        (lambda one: one.replace(report=other_versions(one.report)), "the versions are others"),
        (lambda one: one.replace(target=one.target.replace(folder="/elsewhere")), "its options were others"),
        (lambda one: one.replace(target=one.target.replace(spec="other.py:workload")), "it was of other.py:workload"),
        (lambda one: one.replace(trial=other_seed(one.trial)), "its seed was another"),
        (lambda one: one.replace(report=disturbed(one.report)), "it was not reliable"),
    ],
)
def test_another_probe_is_not_taken(work: Path, change: Callable[[KeptProbe], KeptProbe], reason: str) -> None:
    rewrite(work, change)
    told, place = take(work)
    assert told is not None
    assert told.startswith(f"probe: made again, and the last one is not used: {reason}")
    assert place.read_probe() is None
    assert place.read_all_trials() == []


def other_machine(report: ProbeReport) -> ProbeReport:
    return report.replace(hardware=report.hardware.replace(usable_cpu_count=report.hardware.usable_cpu_count + 1))


def other_versions(report: ProbeReport) -> ProbeReport:
    return report.replace(software=report.software.replace(torch="1.0"))


def other_seed(trial: TrialResult) -> TrialResult:
    return trial.replace(spec=trial.spec.replace(seeds=(7,)))


@pytest.mark.parametrize(("source", "reason"), [("workload = 1\n", "has changed"), (None, "was not found")])
def test_a_probe_of_other_code_is_not_taken(work: Path, source: str | None, reason: str) -> None:
    (work / "toy.py").unlink()
    if source is not None:
        (work / "toy.py").write_text(source)
    assert reason in (take(work)[0] or "")


@pytest.mark.parametrize(
    "name", ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "LD_PRELOAD", "BATCH_SIZE"]
)
def test_a_probe_under_another_environment_is_not_taken(work: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, os.environ.get(name, "") + "1")
    told = take(work)[0] or ""
    assert "the environment has changed: " in told
    assert told.endswith("a variable of your own" if name == "BATCH_SIZE" else name)


def test_what_a_terminal_sets_is_no_other_environment(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERM", "SHLVL", "COLUMNS", "_"):
        monkeypatch.setenv(name, "another")
    assert "taken from" in (take(work)[0] or "")


def test_a_probe_on_other_cpus_is_not_taken(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 63})
    assert "the CPUs it may run on" in (take(work)[0] or "")


def test_no_value_of_a_variable_is_kept() -> None:
    known = read_environment({"LD_PRELOAD": "libsecret.so", "TOKEN": "hunter2"})
    assert not any(word in f"{known}" for word in ("libsecret", "hunter2"))


@pytest.mark.fault("29", injected="a damaged probe.json", outcome="probed anew")
def test_without_a_probe_and_with_a_damaged_one_nothing_is_said(work: Path) -> None:
    file = work / ".autotune" / "kept-probe.json"
    file.write_text("{")
    assert take(work)[0] is None
    file.unlink()
    assert take(work)[0] is None
