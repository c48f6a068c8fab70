from __future__ import annotations

import pytest
from simulated import Machine, run_simulated

from autotune.errors import UsageError
from autotune.probe.machine.hardware import read_software
from autotune.records import DriftLimits, Profile, Target
from autotune.records.search import SearchState
from autotune.search.folder import find_search_folder
from autotune.search.run import SearchOptions, _holds_proof, run_search
from autotune.targets.drift_limits import read_drift_limits

STATE = {"seed": 0, "max_drift": DriftLimits(), "memory_limit_bytes": None, "measure_seconds": 2.0}


def test_a_proven_answer_is_known_as_such(tmp_path):
    improved = run_simulated(Machine(), tmp_path).profile
    improved.save(tmp_path / "best.json")
    begun = improved.replace(verdict="keep", config=improved.baseline_config)
    assert _holds_proof(tmp_path / "best.json", begun)
    other = begun.replace(target=begun.target.replace(fingerprint="ba9876543210"))
    assert not _holds_proof(tmp_path / "best.json", other)
    begun.save(tmp_path / "best.json")
    assert not _holds_proof(tmp_path / "best.json", begun)
    assert not _holds_proof(tmp_path / "missing.json", begun)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_drift": read_drift_limits(["1%", "accuracy:0.1pp"])},
            r"--resume: max_drift was loss \+0.50%, metrics \+0.50% when the search began "
            r"and is loss \+1.00%, metrics \+1.00%, accuracy \+0.0010 now",
        ),
        ({"seed": 3}, "--resume: seed was 0 when the search began and is 3 now"),
        ({"memory_limit_bytes": 10}, "--resume: memory_limit_bytes was None"),
    ],
)
def test_a_resumed_search_must_ask_for_the_same(tmp_path, options, message):
    run_simulated(Machine(stop_after=3), tmp_path)
    with pytest.raises(UsageError, match=message):
        run_search("toy.py:workload", SearchOptions(resume=True, **options), folder=tmp_path)


def test_a_copied_folder_is_not_resumed(tmp_path):
    run_simulated(Machine(stop_after=3), tmp_path)
    found = find_search_folder(tmp_path)
    assert found is not None
    found.write_state(SearchState(target=Target(spec="toy.py:workload", folder="/elsewhere"), **STATE))
    with pytest.raises(UsageError, match="--resume: target was"):
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)


@pytest.mark.parametrize("what", ["target", "machine"])
def test_a_search_is_not_resumed_for_something_else(tmp_path, what):
    folder = run_simulated(Machine(stop_after=3), tmp_path).folder
    report = folder.read_probe()
    assert report is not None
    folder.write_probe(report.replace(software=read_software().replace(torch="1.0")) if what == "machine" else report)
    if what == "target":
        (tmp_path / "toy.py").write_text("workload = None")
    with pytest.raises(UsageError, match=f"--resume: the {what}.* has changed since the search began"):
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)


def test_an_unwritable_answer_is_the_machines_fault_not_a_traceback(tmp_path):
    profile = run_simulated(Machine(stop_after=3), tmp_path).profile
    assert isinstance(profile, Profile)
    with pytest.raises(UsageError, match="there is no folder"):
        run_search("toy.py:workload", SearchOptions(out="no/such/best.json"), folder=tmp_path)
