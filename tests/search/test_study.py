from __future__ import annotations

import dataclasses
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from record_factory import make_spec
from simulated import BASELINE, Machine

import autotune.search.explore.study
from autotune.knobs import Facts
from autotune.machine.hardware import read_hardware
from autotune.records import TrainConfig, TrialResult, TrialStatus
from autotune.records.config import get_knob
from autotune.search.explore.study import Study, StudyFile, make_distribution
from autotune.search.scores.objective import KEYS, Judged, Limits, score_trial
from autotune.space import SearchSpace, build_space


@pytest.fixture
def space() -> SearchSpace:
    return build_space(Facts(target=Machine().find_facts(), hardware=read_hardware()))


def judge(config: TrainConfig, status: TrialStatus = TrialStatus.COMPLETED, number: int = 1) -> Judged:
    spec = make_spec(config, number=number)
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


def test_what_breaks_a_constraint_draws_nothing_towards_it(space, tmp_path):
    study, judged = Study(tmp_path / "study.db", space, seed=0), judge(BASELINE)
    drifted = dataclasses.replace(
        judged, score=dataclasses.replace(judged.score, constraints=judged.score.constraints | {KEYS[0]: 0.1})
    )
    study.close(study.open(BASELINE), drifted, 0.5)
    (trial,) = load(tmp_path / "study.db")
    assert (trial.state, trial.values) == (TrialState.PRUNED, None)
    assert trial.constraints[KEYS[0]] == 0.1


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


def test_changes_that_are_closed_together_are_not_proposed(space, tmp_path):
    study = Study(tmp_path / "study.db", space, seed=0)
    split = frozenset({"micro_batch_size=16", "gradient_accumulation_steps=2"})  # one change: the other follows
    closed = [split, frozenset({"precision=bf16"}), frozenset({"nobody.knows=1"})]
    found = []
    for _ in range(25):
        proposal = study.propose(found, closed)
        assert proposal is not None
        found.append(proposal.config)
        study.close(proposal, judge(proposal.config), 0.0)
    assert {one.precision for one in found} == {"fp32"}
    assert {one.micro_batch_size for one in found} & {8, 32}
    assert 16 not in {one.micro_batch_size for one in found}


def test_a_config_without_a_change_is_one_of_the_space(space, tmp_path):
    study = Study(tmp_path / "study.db", space, seed=0)
    simpler = study.list_simpler(space.complete({"micro_batch_size": 16, "precision": "bf16"}))
    assert set(simpler) == {space.complete({"micro_batch_size": 16}), space.complete({"precision": "bf16"})}


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
    assert load(tmp_path / "study.db") == []


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


def propose(study: Study, count: int) -> list[TrainConfig]:
    """Return what a study proposes, each told as faster than the one before."""
    tried: list[TrainConfig] = []
    for number in range(count):
        proposal = study.propose(tried)
        assert proposal is not None
        tried.append(proposal.config)
        study.close(proposal, judge(proposal.config, number=number), 0.01 * number)
    return tried


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have another process hold a database exclusively."""
    program = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1])\n"
        "connection.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-S", "-c", program, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite3.connect(path, timeout=0.0).execute("SELECT * FROM trials")
        yield
        holder.communicate()


@contextmanager
def put_in_its_place(path: Path, put: Callable[[Path], object]) -> Iterator[None]:
    path.unlink()
    put(path)
    yield


DISTURBANCES = {
    "locked": locked,
    "deleted": lambda path: put_in_its_place(path, lambda _path: None),
    "garbage": lambda path: put_in_its_place(path, lambda path: path.write_bytes(b"\x00garbage" * 1000)),
    "link": lambda path: put_in_its_place(path, lambda path: path.symlink_to(path.with_name("victim"))),
}


@pytest.mark.fault("30", injected="study.db locked, deleted, overwritten, a link", outcome="replaced, search goes on")
@pytest.mark.parametrize("name", DISTURBANCES)
def test_whatever_becomes_of_the_database_the_search_goes_on_and_replaces_it(space, tmp_path, name):
    path, told = tmp_path / "study.db", []
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    study = Study(path, space, seed=3, told=told.append)
    first = propose(study, 4)
    with DISTURBANCES[name](path):
        more = study.propose(first)
        assert more is not None
        study.close(more, judge(more.config), 0.5)
    assert told == []
    assert len([trial for trial in load(path) if trial.state is TrialState.COMPLETE]) == 5
    assert not path.is_symlink()
    assert victim.read_text() == "theirs"
    # What is proposed depends on what was found, and on no file.
    assert [*first, more.config] == propose(Study(tmp_path / "other.db", space, seed=3), 5)


FULL = """
import sys
from pathlib import Path
import optuna
from autotune.search.explore.study import StudyFile
study, told = optuna.create_study(), []
file = StudyFile(Path("study.db"), told.append)
for value in range(3):
    study.add_trial(optuna.trial.create_trial(value=value))
    file.update(study.get_trials())
print(len(told), told[0])
print(sorted(path.name for path in Path().iterdir()))
"""


@pytest.mark.fault("F2", injected="study.db on a full tmpfs", outcome="told once, search goes on, no part left")
def test_a_full_disk_costs_the_database_and_nothing_else(tmp_path):
    mount = f"mount -t tmpfs -o size=64k full {tmp_path} && cd {tmp_path} && exec {sys.executable} -c '{FULL}'"
    try:
        done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    except OSError:
        pytest.skip("there is no unshare")
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip("mounting is not permitted")
    assert done.stdout == (
        "1 study.db could not be written (No space left on device): the search goes on without it, and a resumed one "
        "builds it anew\n[]\n"
    )


@pytest.mark.fault("F2", injected="study.db cannot be replaced", outcome="told once, proposals as without it")
def test_a_database_that_cannot_be_written_is_told_once_and_changes_no_proposal(space, tmp_path):
    path, told = tmp_path / "study.db", []
    study = Study(path, space, seed=3, told=told.append)
    path.unlink()
    path.mkdir()
    tried = propose(study, 6)
    assert [sentence.partition(":")[0] for sentence in told] == [f"{path} could not be written (Is a directory)"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["study.db"]
    assert propose(Study(tmp_path / "other.db", space, seed=3), 6) == tried


def test_a_study_file_has_what_the_study_has(space, tmp_path):
    path, told = tmp_path / "study.db", []
    study = optuna.create_study(direction="maximize")
    file = StudyFile(path, told.append)
    for number in range(3):
        trial = study.ask({"x": optuna.distributions.IntDistribution(0, 9)})
        trial.set_constraint("memory", 0.25 * number)
        study.tell(trial, number / 3)
        file.update(study.get_trials())
    assert told == []
    kept = [(one.number, one.params, one.value, one.constraints, one.datetime_start) for one in load(path)]
    assert kept == [
        (one.number, one.params, one.value, one.constraints, one.datetime_start) for one in study.get_trials()
    ]


def test_a_long_study_is_not_written_for_each_trial(space, tmp_path, monkeypatch):
    path, writes = tmp_path / "study.db", []
    plain = autotune.search.explore.study.write_bytes

    def count(*given, **options):
        writes.append(given)
        plain(*given, **options)

    monkeypatch.setattr("autotune.search.explore.study.write_bytes", count)
    study, judged = Study(path, space, seed=0), judge(BASELINE)
    for done in range(1, 81):
        study.close(study.open(BASELINE), judged, 0.0)
        assert done % 25 or done - len(load(path)) <= 0.02 * done
    assert len(writes) < 75
    study.save({})
    assert len(load(path)) == 80


def test_what_came_of_a_search_is_beside_its_trials(space, tmp_path):
    study = Study(tmp_path / "study.db", space, seed=0)
    study.close(study.open(BASELINE), judge(BASELINE), 0.0)
    cast = BASELINE.replace(precision="bf16")
    study.close(study.open(cast), judge(cast), 0.4)
    study.save({"verdict": "improved", "speedup": [1.3, 1.4, 1.5]})
    found = optuna.load_study(study_name="autotune", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert found.metric_names == ["log speed-up"]
    assert found.user_attrs["verdict"] == "improved"
    assert found.user_attrs["speedup"] == [1.3, 1.4, 1.5]
    effects = found.user_attrs["effects"]
    assert effects["precision=bf16"][0] > 0.2
    assert list(effects) == sorted(effects, key=lambda change: -effects[change][0])
    assert set(effects) == {
        f"{name}={value}"
        for name, values in space.choices.items()
        for value in values
        if value != get_knob(BASELINE, name)
    }


def test_optuna_dashboard_opens_it_as_it_is(space, tmp_path):
    dashboard = pytest.importorskip("optuna_dashboard")
    study = Study(tmp_path / "study.db", space, seed=0)
    study.close(study.open(BASELINE), judge(BASELINE), 0.0)
    study.save({"verdict": "keep"})
    application = dashboard.wsgi(RDBStorage(f"sqlite:///{tmp_path / 'study.db'}"))

    def ask(path: str, query: str = "") -> dict[str, Any]:
        request: dict[str, Any] = {}
        setup_testing_defaults(request)
        statuses: list[str] = []
        body = application(request | {"PATH_INFO": path, "QUERY_STRING": query}, lambda *told: statuses.append(told[0]))
        answer: dict[str, Any] = json.loads(b"".join(body))
        assert statuses == ["200 OK"]
        return answer

    (summary,) = ask("/api/studies")["study_summaries"]
    assert summary["study_name"] == "autotune"
    shown = ask(f"/api/studies/{summary['study_id']}", "after=0")
    assert [trial["state"] for trial in shown["trials"]] == ["Complete"]
    assert {one["key"]: one["value"] for one in shown["user_attrs"]}["verdict"] == "keep"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 1, 2), IntDistribution(0, 2)),
        ((8, 16, 24), IntDistribution(8, 24, step=8)),
        ((1, 2, 4), CategoricalDistribution((1, 2, 4))),
        ((2, 1, 0), CategoricalDistribution((2, 1, 0))),
        ((2, 4), CategoricalDistribution((2, 4))),
        ((False, True), CategoricalDistribution((False, True))),
        (("a", 1, 2), CategoricalDistribution(("a", 1, 2))),
    ],
)
def test_integers_at_one_distance_are_a_range(values, expected):
    assert make_distribution(values) == expected
