"""What an answer's changes are worth: on a simulated machine, where the truth is known."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from record_factory import make_profile
from simulated import (
    BASELINE,
    PEAK_MEMORY,
    Machine,
    Run,
    UnsavedStudy,
    bf16_wins,
    make_judged,
    open_search,
    run_simulated,
)

from autotune.explain.changes import list_changes, make_alone
from autotune.explain.derive import derive, is_settled
from autotune.explain.readings import LEAST_PAIRS, Readings
from autotune.explain.run import _read, explain, list_open, measure, run_explain
from autotune.measure.confidence import NO_PILOT
from autotune.records import Profile, TrainConfig, TrialResult, TrialSpec, TrialStatus
from autotune.records.explanation import Explanation
from autotune.search.finals.risk import Pair
from autotune.search.launch.budget import Budget
from autotune.search.progress import SearchReporter
from autotune.search.store.folder import SearchFolder, find_search_of
from autotune.sentences.explanation import describe_refused


def both_win(config: TrainConfig) -> float:
    """Return a speed that two changes make; together less than the product of both."""
    bf16, fused = config.precision == "bf16", config.optimizer_implementation == "fused"
    return (1.5 if bf16 else 1.0) * (1.3 if fused else 1.0) * (0.9 if bf16 and fused else 1.0)


def search(folder: Path, machine: Machine, budget: float = 400.0, only: tuple[str, ...] = ()) -> Run:
    run = run_simulated(machine, folder, budget=budget, only=only, open_study=UnsavedStudy)
    run.profile.save(run.folder.profile)
    return run


def launch(run: Run, budget: float, machine: Machine) -> Explanation:
    """Explain with launches of a machine; its files are written as a runner does."""
    place = run.folder

    def run_trial(spec: TrialSpec) -> TrialResult:
        result = machine(spec)
        folder = place.explanation.trials / f"{spec.number:04d}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(result.to_json())
        return result

    clock = Budget(budget, machine.now, machine.clock)
    readings = _read(place, run.profile)
    return measure(
        place, run.profile, readings, run_trial, clock, reporter=SearchReporter(), should_stop=machine.should_stop
    )


# ---- the changes


def test_what_means_nothing_without_another_goes_with_it() -> None:
    config = BASELINE.replace(num_workers=2, prefetch_factor=4, precision="bf16")
    changes = {one.names: one for one in list_changes(config, BASELINE, {})}
    assert {*changes} == {("num_workers", "prefetch_factor"), ("prefetch_factor",), ("precision",)}
    assert changes["num_workers", "prefetch_factor"].without == BASELINE.replace(precision="bf16")
    assert changes["prefetch_factor",].without == config.replace(prefetch_factor=BASELINE.prefetch_factor)
    assert {names: one.numerics for names, one in changes.items()} == {
        ("num_workers", "prefetch_factor"): "exact",
        ("prefetch_factor",): "exact",
        ("precision",): "rounding",
    }


def test_the_batch_is_one_change() -> None:
    config = BASELINE.replace(micro_batch_size=16, gradient_accumulation_steps=2)
    (change,) = list_changes(config, BASELINE, {})
    assert {*change.names} == {"micro_batch_size", "gradient_accumulation_steps"}
    assert change.without == BASELINE


def test_a_change_alone_is_the_baseline_with_it() -> None:
    config = BASELINE.replace(num_workers=2, prefetch_factor=4, precision="bf16")
    alone = {one.names[0]: make_alone(one, config, BASELINE) for one in list_changes(config, BASELINE, {})}
    assert alone["precision"] == BASELINE.replace(precision="bf16")
    assert alone["num_workers"] == BASELINE.replace(num_workers=2, prefetch_factor=4)
    assert alone["prefetch_factor"] == BASELINE  # means nothing alone


# ---- what is known without a launch


def test_a_single_change_is_worth_what_its_finals_showed(tmp_path: Path) -> None:
    run = search(tmp_path, Machine(speed=bf16_wins), only=("precision",))
    found = explain(run.folder)
    (change,) = found.changes
    confirmation = run.profile.evidence.confirmation
    assert confirmation is not None
    assert change.source == "finals"
    assert change.worth == found.together == confirmation.interval
    assert change.log_ratios == pytest.approx(confirmation.log_ratios)
    assert change.without == BASELINE
    assert change.numerics == "rounding"
    assert change.memory_bytes == 0
    assert is_settled(change)
    assert not run.folder.explanation.path.exists()  # nothing is written for what is only read


@pytest.mark.slow
def test_the_step_before_and_after_is_that_of_the_finals(tmp_path: Path) -> None:
    run = search(tmp_path, Machine(speed=bf16_wins, noise=0.0))
    found = explain(run.folder)
    assert found.before is not None
    assert found.after is not None
    assert found.before.seconds / found.after.seconds == pytest.approx(1.5)
    assert found.before.launches == found.after.launches == run.profile.evidence.pairs


def test_what_was_tried_is_told_with_how_it_ended(tmp_path: Path) -> None:
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config.num_workers else TrialStatus.COMPLETED

    run = search(tmp_path, Machine(speed=bf16_wins, fate=fate, noise=0.0))
    found = explain(run.folder)
    tried = {(one.knob, one.value): one for one in found.tried}
    assert all(one.knob != "precision" for one in found.tried)
    crashed = [one for (knob, _), one in tried.items() if knob == "num_workers"]
    assert crashed
    assert all(one.failed == {"crashed": one.launches} and one.best is None for one in crashed)
    assert tried["optimizer_implementation", "fused"].best is not None


@pytest.mark.parametrize(
    ("status", "told"), [(TrialStatus.CRASHED, "crashed"), (TrialStatus.TIMED_OUT, ""), (TrialStatus.TOO_SLOW, "")]
)
def test_settings_whose_time_was_up_are_not_taken_for_ones_that_do_not_run(status: TrialStatus, told: str) -> None:
    log = open_search(Machine()).log
    config = BASELINE.replace(compile_mode="default")
    ended = make_judged(config, 0.0).result.replace(status=status, measurement=None)
    readings = Readings(log, BASELINE, (), NO_PILOT, (), [ended], ())
    assert readings.find_failure(config) == told


@pytest.mark.slow
def test_what_the_loss_check_refused_is_told_with_what_it_would_have_gained(tmp_path: Path) -> None:
    run = search(tmp_path, Machine(speed=both_win, noise=0.0))
    readings = _read(run.folder, run.profile)
    assert derive(run.profile, readings).refused == ()
    readings.log.refuse(frozenset({"optimizer_implementation=fused", "precision=bf16"}))
    readings.log.refuse(frozenset({"user_knobs.width=3"}))
    both, none = derive(run.profile, readings).refused
    assert both.changes == ("optimizer_implementation=fused", "precision=bf16")
    assert both.best == pytest.approx(1.5 * 1.3 * 0.9, rel=0.02)
    assert describe_refused(both).startswith("optimizer=fused precision=bf16 together: at best 1.7")
    assert describe_refused(none) == "width=3: not timed, and not shown to learn the same"


@pytest.mark.slow
def test_nothing_is_explained_where_the_settings_stay(tmp_path: Path) -> None:
    run = search(tmp_path, Machine(speed=lambda _config: 1.0), budget=200.0)
    found = explain(run.folder, run.profile.replace(candidate_config=None, candidate=None))
    assert found.changes == ()
    assert found.config == BASELINE
    assert found.after is None


@pytest.mark.slow
def test_the_search_of_an_answer_is_found_by_what_it_says(tmp_path: Path) -> None:
    run = search(tmp_path, Machine())
    assert find_search_of(Profile.load(run.folder.profile), tmp_path) == run.folder
    assert find_search_of(run.profile.replace(verdict="keep"), tmp_path) is None


# ---- launches on demand


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    machine, only = Machine(speed=both_win, noise=0.02), ("precision", "optimizer_implementation")
    run = search(tmp_path_factory.mktemp("searched"), machine, budget=600.0, only=only)
    assert run.profile.config == BASELINE.replace(precision="bf16", optimizer_implementation="fused")
    # As if the search had launched neither of the two without the other: nothing is known of them then.
    for file in run.folder.trials.glob("*/result.json"):
        config = TrialResult.model_validate_json(file.read_text()).spec.config
        if config is not None and (config.precision == "bf16") != (config.optimizer_implementation == "fused"):
            file.unlink()
    return run


@pytest.fixture
def two_changes(searched: Run, tmp_path: Path) -> Run:
    path = tmp_path / ".autotune" / searched.folder.path.name
    shutil.copytree(searched.folder.path, path)
    return replace(searched, folder=SearchFolder(path))


def test_each_change_is_measured_against_the_answer_without_it(two_changes: Run) -> None:
    assert [one.worth for one in explain(two_changes.folder).changes] == [None, None]
    found = launch(two_changes, 600.0, Machine(speed=both_win, noise=0.02, seed=5))
    truth = {"precision": 1.5 * 0.9, "optimizer_implementation": 1.3 * 0.9}
    assert [one.names[0] for one in found.changes] == [*truth]  # worth most first
    for change in found.changes:
        assert change.source == "launches"
        assert change.worth is not None
        assert change.worth.low < truth[change.names[0]] < change.worth.high
        assert len(change.log_ratios) >= LEAST_PAIRS
        assert change.worth.estimate == pytest.approx(math.exp(sum(change.log_ratios) / len(change.log_ratios)))
    assert found.note == ""
    assert found.spent_seconds == pytest.approx(3.0 * sum(map(len, found.rounds)))


def test_it_is_kept_and_read_again_to_the_same(two_changes: Run) -> None:
    found = launch(two_changes, 600.0, Machine(speed=both_win, noise=0.02, seed=5))
    assert two_changes.folder.read_explanation() == found
    assert explain(two_changes.folder) == found
    assert two_changes.folder.read_trials() == [  # the search's own are as they were
        one for one in two_changes.folder.read_all_trials() if one.status is not TrialStatus.INTERRUPTED
    ]


@pytest.mark.parametrize("budget", [10.0, 31.0, 45.0, 100.0])
def test_the_launches_stay_within_their_budget(two_changes: Run, budget: float) -> None:
    machine = Machine(speed=both_win, noise=0.3, seed=5)
    found = launch(two_changes, budget, machine)
    assert machine.now <= budget
    assert found.note.endswith("would tell more")
    assert any(one.worth is not None for one in found.changes) == (budget > 30.0)


def test_it_goes_on_where_it_was(two_changes: Run) -> None:
    first = launch(two_changes, 30.0, Machine(speed=both_win, noise=0.02, seed=5))
    again = launch(two_changes, 600.0, Machine(speed=both_win, noise=0.02, seed=6))
    assert again.rounds[: len(first.rounds)] == first.rounds
    assert list_open(_read(two_changes.folder, two_changes.profile)) == []
    assert len({number for numbers in again.rounds for number in numbers}) == sum(map(len, again.rounds))


def test_a_stop_keeps_the_rounds_that_were_finished(two_changes: Run) -> None:
    found = launch(two_changes, 600.0, Machine(speed=both_win, seed=5, stop_after=4))
    assert len(found.rounds) == 1
    assert found.note.startswith("stopped")
    assert two_changes.folder.read_explanation() == found


def test_a_change_without_which_nothing_runs_is_needed(two_changes: Run) -> None:
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.COMPLETED if config.precision == "bf16" else TrialStatus.OUT_OF_MEMORY

    found = launch(two_changes, 600.0, Machine(speed=both_win, seed=5, fate=fate))
    needed, other = found.changes
    assert needed.names == ("precision",)
    assert needed.failure == "out of memory: planted"
    assert needed.worth is None
    assert other.worth is not None


def test_the_rounds_of_another_answer_are_none_of_this(two_changes: Run) -> None:
    launch(two_changes, 600.0, Machine(speed=both_win, noise=0.02, seed=5))
    other = two_changes.profile.replace(config=BASELINE.replace(precision="bf16"))
    assert derive(other, _read(two_changes.folder, other)).rounds == ()


def test_memory_is_told_by_what_the_launches_held(two_changes: Run) -> None:
    class Hungry(Machine):
        def __call__(self, spec: TrialSpec) -> TrialResult:
            result = super().__call__(spec)
            more = 64 * 2**20 if spec.config is not None and spec.config.optimizer_implementation == "for-loop" else 0
            peak = PEAK_MEMORY.replace(host_bytes=PEAK_MEMORY.host_bytes + more)
            measured = result.measurement
            return result if measured is None else result.replace(measurement=measured.replace(peak_memory=peak))

    found = launch(two_changes, 600.0, Hungry(speed=both_win, noise=0.02, seed=5))
    assert {one.names[0]: one.memory_bytes for one in found.changes} == {
        "precision": 0,
        "optimizer_implementation": -64 * 2**20,
    }


def test_nothing_is_launched_of_a_search_that_may_be_somebody_elses(two_changes: Run) -> None:
    found = run_explain(two_changes.folder, 600.0)
    assert found.rounds == ()
    assert found.note.startswith("nothing was launched: nothing in your cache folder tells")


def test_readings_of_the_search_are_used_where_there_are_enough() -> None:
    config = BASELINE.replace(precision="bf16", num_workers=2)
    without = {"precision": BASELINE.replace(num_workers=2), "num_workers": BASELINE.replace(precision="bf16")}
    search = open_search(Machine())
    for luck in (0.0, 0.01, -0.01):
        rates = {BASELINE: 0.0, config: 0.5, without["precision"]: 0.1, without["num_workers"]: 0.3}
        search.log.add_judged(*(make_judged(one, value + luck) for one, value in rates.items()))
    readings = Readings(search.log, config, pairs=(), pilot=NO_PILOT, finals=(), launched=(), rounds=())
    found = derive(make_profile(config=config, baseline_config=BASELINE), readings)
    assert [one.names for one in found.changes] == [("precision",), ("num_workers",)]
    for change, truth in zip(found.changes, (0.4, 0.2), strict=True):
        assert (change.source, change.launches) == ("search", (3, 3))
        assert change.worth is not None
        assert change.worth.estimate == pytest.approx(math.exp(truth), rel=0.01)
        assert 1.0 < change.worth.low < math.exp(truth) < change.worth.high
        assert change.alone_launches == 3
        assert is_settled(change)
    assert found.changes[0].alone == pytest.approx(math.exp(0.3), rel=0.01)
    assert found.together is None


@pytest.mark.parametrize(("explored", "estimate", "launches"), [(2, 1.0, (2, 2)), (1, math.exp(-0.1), (3, 2))])
def test_what_the_own_settings_have_become_since_is_no_change_of_the_answer(
    explored: int, estimate: float, launches: tuple[int, int]
) -> None:
    config, without = BASELINE.replace(precision="bf16", num_workers=2), BASELINE.replace(precision="bf16")
    search = open_search(Machine())
    for number in range(2):
        search.log.add_judged(make_judged(BASELINE, 0.0), make_judged(without, 0.5))
        search.log.add_judged(*[make_judged(config, 0.5)] * (number < explored))
    pair = Pair(make_judged(config, 0.4).result, make_judged(BASELINE, 0.0).result)
    readings = Readings(search.log, config, pairs=(pair,) * 3, pilot=NO_PILOT, finals=(), launched=(), rounds=())
    found = derive(make_profile(config=config, baseline_config=BASELINE), readings)
    change = next(one for one in found.changes if one.names == ("num_workers",))
    assert change.launches == launches
    assert change.worth is not None
    assert change.worth.estimate == pytest.approx(estimate, rel=0.01)


def test_one_launch_of_the_search_is_no_reading() -> None:
    config = BASELINE.replace(precision="bf16", num_workers=2)
    search = open_search(Machine())
    search.log.add_judged(*(make_judged(one, 0.1) for one in (BASELINE, config, BASELINE.replace(num_workers=2))))
    readings = Readings(search.log, config, pairs=(), pilot=NO_PILOT, finals=(), launched=(), rounds=())
    found = derive(make_profile(config=config, baseline_config=BASELINE), readings)
    assert {(one.source, one.worth) for one in found.changes} == {("none", None)}
    assert not any(is_settled(one) for one in found.changes)
