from __future__ import annotations

import optuna
import pytest
from optuna.trial import TrialState
from simulated import BASELINE, Machine

from autotune.knobs import Facts
from autotune.probe.machine.hardware import read_hardware
from autotune.records import Target, TrainConfig, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.search.objective import KEYS, Judged, Limits, score_trial
from autotune.search.study import Study
from autotune.space import SearchSpace, build_space


@pytest.fixture
def space() -> SearchSpace:
    return build_space(Facts(target=Machine().find_facts(), hardware=read_hardware()))


def judge(config: TrainConfig, status: TrialStatus = TrialStatus.COMPLETED, number: int = 1) -> Judged:
    spec = TrialSpec(
        number=number,
        purpose="measure",
        target=Target(spec="toy.py:workload", folder="/"),
        config=config,
        limits=TrialLimits(time_limit_seconds=60),
    )
    machine = Machine(fate=lambda _config: status)
    result: TrialResult = machine(spec)
    baseline = Machine()(spec.replace(config=BASELINE)).curves[0]
    limits = Limits(host_memory_bytes=2**30, device_memory_bytes=None, max_drift=0.005)
    return Judged(result, score_trial(result, baseline, limits))


def load(path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="autotune", storage=f"sqlite:///{path}").trials


def test_a_trial_is_told_with_its_value_and_every_constraint(space, tmp_path):
    study = Study(tmp_path / "study.db", space, seed=0)
    judged = judge(BASELINE)
    study.close(study.open(BASELINE), judged, 0.25)
    (trial,) = load(tmp_path / "study.db")
    assert trial.state is TrialState.COMPLETE
    assert trial.value == 0.25
    assert trial.user_attrs["ended_by"] == "time"
    assert trial.constraints == judged.score.constraints
    assert set(trial.constraints) == set(KEYS)
    assert trial.user_attrs["status"] == "completed"


@pytest.mark.parametrize("status", [TrialStatus.OUT_OF_MEMORY, TrialStatus.CRASHED, TrialStatus.TIMED_OUT])
def test_a_failure_is_told_as_infeasible_without_a_number(space, tmp_path, status):
    study = Study(tmp_path / "study.db", space, seed=0)
    study.close(study.open(BASELINE), judge(BASELINE, status), None)
    (trial,) = load(tmp_path / "study.db")
    assert trial.state is TrialState.PRUNED
    assert trial.values is None
    assert trial.constraints["failure"] > 0


def test_proposals_are_new_and_inside_the_space(space, tmp_path):
    study = Study(tmp_path / "study.db", space, seed=0)
    tried: list[TrainConfig] = []
    for _ in range(25):
        proposal = study.propose(tried)
        assert proposal is not None
        assert proposal.config not in tried
        assert space.contains(proposal.config)
        tried.append(proposal.config)
        study.close(proposal, judge(proposal.config), 0.0)


def test_proposals_of_the_same_seed_and_history_are_the_same(space, tmp_path):
    configs = []
    for name in ("a.db", "b.db"):
        study = Study(tmp_path / name, space, seed=5)
        study.close(study.open(BASELINE), judge(BASELINE), 0.0)
        proposal = study.propose([BASELINE])
        assert proposal is not None
        configs.append(proposal.config)
    assert configs[0] == configs[1]


def test_an_abandoned_proposal_leaves_nothing_running(space, tmp_path):
    study = Study(tmp_path / "study.db", space, seed=0)
    study.abandon(study.open(BASELINE))
    assert [trial.state for trial in load(tmp_path / "study.db")] == [TrialState.FAIL]


@pytest.mark.parametrize("damage", ["missing", "garbage", "running", "foreign"])
@pytest.mark.fault(
    "30",
    injected="study.db missing, garbage, with a RUNNING trial, or another search's",
    outcome="rebuilt from the trials; no trial is left RUNNING",
)
def test_a_database_that_does_not_fit_is_rebuilt_from_the_trials(space, tmp_path, damage):
    path = tmp_path / "study.db"
    known = [(judge(BASELINE), 0.0), (judge(BASELINE.replace(precision="bf16"), number=2), 0.4)]
    study = Study(path, space, seed=0)
    for judged, value in known:
        study.close(study.open(judged.config), judged, value)
    if damage == "missing":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"\x00garbage" * 1000)
    elif damage == "running":
        study.open(BASELINE)
    else:
        study.close(study.open(BASELINE), *known[0])
    Study(path, space, seed=0, known=known)
    finished = [trial for trial in load(path) if trial.state is TrialState.COMPLETE]
    assert [trial.value for trial in finished] == [value for _, value in known]
    assert not [trial for trial in load(path) if trial.state is TrialState.RUNNING]


def test_a_rebuilt_database_has_failures_and_repeats_too(space, tmp_path):
    failed = judge(BASELINE.replace(precision="bf16"), TrialStatus.CRASHED, number=3)
    known = [(judge(BASELINE), 0.0), (judge(BASELINE, number=2), 0.02), (failed, None)]
    Study(tmp_path / "study.db", space, seed=0, known=known)
    trials = load(tmp_path / "study.db")
    assert [trial.state for trial in trials] == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]
    assert [trial.value for trial in trials[:2]] == [0.0, 0.02]
    assert [trial.user_attrs["number"] for trial in trials] == [1, 2, 3]


def test_a_database_that_fits_is_kept(space, tmp_path):
    path = tmp_path / "study.db"
    known = [(judge(BASELINE), 0.0)]
    study = Study(path, space, seed=0)
    study.close(study.open(BASELINE), *known[0])
    begun = load(path)[0].datetime_start
    Study(path, space, seed=0, known=known)
    assert load(path)[0].datetime_start == begun
