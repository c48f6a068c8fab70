from __future__ import annotations

import pytest
from record_factory import make_state, make_target, read_drift_limits
from simulated import Machine, run_simulated

from autotune.errors import UsageError
from autotune.machine.hardware import read_software
from autotune.records import Profile
from autotune.records.objective import Objective
from autotune.records.trial import DEVICE_VARIABLE
from autotune.search.run import SearchOptions, _read_proof, _replaces, run_search
from autotune.search.store.folder import find_search_folder
from autotune.targets.source.fingerprint import fingerprint_workload

TOY = "from elsewhere import *\n"  # nothing of it is run, and its names cannot be told by reading


def test_a_proven_answer_is_known_as_such(tmp_path):
    improved = run_simulated(Machine(), tmp_path).profile
    improved.save(tmp_path / "best.json")
    begun = improved.replace(verdict="keep", config=improved.baseline_config)
    assert _read_proof(tmp_path / "best.json", begun) == improved
    other = begun.replace(target=begun.target.replace(fingerprint="ba9876543210"))
    assert not _read_proof(tmp_path / "best.json", other)
    begun.save(tmp_path / "best.json")
    assert not _read_proof(tmp_path / "best.json", begun)
    assert not _read_proof(tmp_path / "missing.json", begun)


def test_what_was_proven_before_stays_until_a_search_has_come_to_something(tmp_path):
    found = run_simulated(Machine(), tmp_path)
    assert found.profile.verdict == "improved"
    proven = found.profile
    assert _replaces(proven, proven, searches_all=False)
    unproven = [one for one in found.saved if one.verdict != "improved"]
    assert unproven  # before the proof, and while it was under way
    assert not [one for one in unproven if _replaces(one, proven, searches_all=True)]
    done = found.profile.evidence.replace(stop_reason="budget")
    ended = [found.profile.replace(verdict=one, evidence=done) for one in ("keep", "inconclusive", "not-tested")]
    assert [_replaces(one, proven, searches_all=True) for one in ended] == [True, False, False]
    assert not _replaces(ended[0], proven, searches_all=False)
    assert not _replaces(ended[0], proven.replace(objective=Objective.TIME_TO_FINISH), searches_all=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_drift": read_drift_limits(["1%", "accuracy:0.1pp"])},
            r"--resume: max_drift was loss \+0.50%, metrics \+0.50% when the search began "
            r"and is loss \+1.00%, metrics \+1.00%, accuracy \+0.0010 now",
        ),
        (
            {"objective": Objective.MEMORY},
            "--resume: objective was throughput when the search began and is memory now",
        ),
        ({"seed": 3}, "--resume: seed was 0 when the search began and is 3 now"),
        ({"memory_limit_bytes": 10}, "--resume: memory_limit_bytes was None"),
        ({"exclude": ("precision",)}, "--resume: exclude was not given when the search began and is precision now"),
    ],
)
def test_a_resumed_search_must_ask_for_the_same(tmp_path, options, message):
    run_simulated(Machine(stop_after=3), tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    with pytest.raises(UsageError, match=message):
        run_search("toy.py:workload", SearchOptions(resume=True, **options), folder=tmp_path)


def test_a_resumed_search_for_memory_need_not_say_so_again(tmp_path, monkeypatch):
    run_simulated(Machine(stop_after=3), tmp_path, objective=Objective.MEMORY)
    (tmp_path / "toy.py").write_text(TOY)
    resumed = []
    monkeypatch.setattr("autotune.search.run._search", lambda place, *_: resumed.append(place.read_state().objective))
    monkeypatch.setattr("autotune.search.run.find_difference", lambda *_: None)
    run_search("toy.py:workload", SearchOptions(resume=True, seed=0), folder=tmp_path)
    assert resumed == [Objective.MEMORY]
    with pytest.raises(UsageError, match="--resume: objective was memory when the search began and is throughput now"):
        run_search("toy.py:workload", SearchOptions(resume=True, objective=Objective.THROUGHPUT), folder=tmp_path)


def test_a_copied_folder_is_not_resumed(tmp_path):
    run_simulated(Machine(stop_after=3), tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    found = find_search_folder(tmp_path)
    assert found is not None
    found.write_state(make_state(target=make_target(folder="/elsewhere")))
    with pytest.raises(UsageError, match="--resume: target was"):
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)


CHANGES = {
    "the target has changed": "target",
    "the machine or its software has changed": "machine",
    "the search was begun by an older version, which did not look at what the target imports": "version",
}


@pytest.mark.parametrize(("message", "what"), CHANGES.items(), ids=CHANGES.values())
@pytest.mark.fault(
    "F3", injected="a helper edited between search and --resume", outcome="refused: the target has changed"
)
@pytest.mark.fault(
    "52", injected="a search of a version that did not look at imports", outcome="refused, and told as such"
)
def test_a_search_is_not_resumed_for_something_else(tmp_path, message, what):
    folder = run_simulated(Machine(stop_after=3), tmp_path).folder
    (tmp_path / "toy.py").write_text(TOY + "import helper\n")
    (tmp_path / "helper.py").write_text("LEARNING_RATE = 0.05\n")
    report = folder.read_probe()
    assert report is not None
    fingerprint = fingerprint_workload("toy.py:workload", folder=tmp_path)
    if what == "version":
        fingerprint = "0123456789ab"
    if what == "machine":
        report = report.replace(software=read_software().replace(torch="1.0"))
    folder.write_probe(report.replace(target=report.target.replace(fingerprint=fingerprint)))
    if what == "target":
        (tmp_path / "helper.py").write_text("LEARNING_RATE = 5.0\n")
    with pytest.raises(UsageError, match=f"--resume: {message}"):
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)


def test_a_search_of_the_gpu_is_not_resumed_on_the_cpu(tmp_path, monkeypatch):
    folder = run_simulated(Machine(stop_after=3), tmp_path).folder
    (tmp_path / "toy.py").write_text(TOY)
    report = folder.read_probe()
    assert report is not None
    fingerprint = fingerprint_workload("toy.py:workload", folder=tmp_path)
    folder.write_probe(report.replace(target=report.target.replace(device="cuda", fingerprint=fingerprint)))
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    with pytest.raises(UsageError, match="--device cpu: the search to resume is of the GPU"):
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)


def test_an_unwritable_answer_is_the_machines_fault_not_a_traceback(tmp_path):
    profile = run_simulated(Machine(stop_after=3), tmp_path).profile
    assert isinstance(profile, Profile)
    (tmp_path / "toy.py").write_text(TOY)
    with pytest.raises(UsageError, match="there is no folder"):
        run_search("toy.py:workload", SearchOptions(out="no/such/best.json"), folder=tmp_path)
