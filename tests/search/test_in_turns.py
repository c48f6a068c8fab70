"""Launches in turns with the user's settings: what they are held against, when they are made, and what fails so."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_check, make_data, make_gpu, make_measurement, make_result, make_spec
from simulated import BASELINE, LAUNCH_SECONDS, Machine, Search, make_problem, open_search, run_simulated

from autotune.isolation.runner import KILL_SECONDS
from autotune.measure.confidence import NO_PILOT
from autotune.records.config import TrainConfig
from autotune.records.measurement import Interference, Measurement
from autotune.records.trial import Cause, TrialResult, TrialSpec, TrialStatus
from autotune.search.finals.plan import PairNoise, count_samples, list_pair_noises, plan_finals, price_pair
from autotune.search.finals.risk import RiskPurse
from autotune.search.finals.stage import confirm, make_pair_launch
from autotune.search.launch.budget import Budget
from autotune.search.launch.starter import SearchContext, TrialStarter
from autotune.search.launch.turns import (
    explores_in_turns,
    fit_together,
    is_blamed_on_turns,
    leave_out_excused,
    memory_beside,
)
from autotune.search.policy import USUAL_POLICY
from autotune.search.progress import SearchProgress, SearchReporter

BF16 = BASELINE.replace(precision="bf16")
WANDERING: dict[str, Any] = {"noise": 0.01, "wander": 0.10}
IN_TURNS = WANDERING | {"takes_turns": True}


def open_pairs(machine: Machine, **changes: Any) -> Search:
    search = open_search(machine, run_in_turns=machine.run_in_turns, **changes)
    search.log.add_launch(search.starter.launch(BASELINE, "measure", 60.0))
    return search


def launch(search: Search, config: TrainConfig) -> None:
    result = search.starter.launch_beside(config, 60.0, ends_with_stage=False, rival=None)
    search.log.add_launch(result)


def test_what_the_machine_did_is_in_neither_speed_nor_noise() -> None:
    search = open_pairs(Machine(**WANDERING))
    for _ in range(10):
        launch(search, BF16)
    ranking = search.log.ranking
    entry = ranking.find(BF16)
    assert entry is not None
    assert entry.speed == pytest.approx(math.log(1.5), abs=0.02)
    assert statistics.stdev(entry.speeds) < 0.03
    assert entry.valid_launches == 10
    assert ranking.noise[0] < 0.03 < 0.06 < ranking.machine_noise[0]
    assert search.log.schedule.find_due() != BASELINE


def disturb(measured: Measurement, *, slowdown: float = 1.0, taken: float = 0.0) -> Measurement:
    """Return a measurement beside which others took a share of the CPUs, and which was so many times as slow."""
    seen = Interference(foreign_cpu_fraction=taken)
    blocks = tuple(one.replace(seconds=one.seconds * slowdown, interference=seen) for one in measured.blocks)
    return measured.replace(blocks=blocks)


@pytest.mark.parametrize(("taken", "beside", "speedup"), [(0.5, 0.0, 1.5), (0.5, 0.45, 15.0), (0.1, 0.0, 15.0)])
def test_a_reference_that_others_disturbed_makes_nothing_fast(taken: float, beside: float, speedup: float) -> None:
    search = open_pairs(Machine(noise=0.0))
    result = search.starter.launch_beside(BF16, 60.0, ends_with_stage=False, rival=None)
    assert result.measurement is not None
    assert result.reference is not None
    slow = disturb(result.reference, slowdown=10.0, taken=taken)
    search.log.add_launch(result.replace(reference=slow, measurement=disturb(result.measurement, taken=beside)))
    entry = search.log.ranking.find(BF16)
    assert entry is not None
    assert entry.speed == pytest.approx(math.log(speedup), abs=0.02)


def test_a_launch_in_turns_keeps_both_timings_and_has_the_time_of_both() -> None:
    search = open_pairs(Machine())
    result = search.starter.launch_beside(BF16, 60.0, ends_with_stage=False, rival=None)
    assert result.spec.config == BF16
    assert result.spec.purpose == "measure"
    assert result.reference is not None
    assert result.elapsed_seconds == pytest.approx(2 * LAUNCH_SECONDS)
    assert search.starter.number == 4


@pytest.mark.parametrize("shapes", [9, None])
def test_batches_that_may_differ_are_the_same_ones_on_both_sides(shapes: int | None) -> None:
    machine = Machine(facts={"data": make_data(batch_shapes=shapes)})
    search = open_pairs(machine)
    launch(search, BF16)
    search.starter.launch_in_turns(BASELINE, BF16, 60.0, ends_with_stage=False, measure_samples=100)
    explored, proven = machine.specs[-4:-2], machine.specs[-2:]
    steps = max(one.result.measurement.warmup_steps for one in search.log.judged if one.result.measurement)
    assert [one.limits.least_warmup_steps for one in proven] == [steps, steps]
    assert explored[0].limits.measure_samples == explored[1].limits.measure_samples is not None


def test_batches_that_are_alike_need_not_be_the_same_ones() -> None:
    machine = Machine()
    search = open_pairs(machine)
    launch(search, BF16)
    assert {one.limits.least_warmup_steps for one in machine.specs} == {0}
    assert {one.limits.measure_samples for one in machine.specs} == {None}


def test_a_pair_in_turns_is_one_launch_and_not_two() -> None:
    search = open_pairs(Machine())
    one, other = (search.log.prices.pair_seconds(config) for config in (None, BF16))
    assert one == other == pytest.approx(2 * LAUNCH_SECONDS)
    launch(search, BF16)  # both at a time: it has taken that long
    unseen = BASELINE.replace(optimizer_implementation="fused")
    for config in (None, BF16, unseen):
        assert search.log.prices.pair_seconds(config) == pytest.approx(2 * LAUNCH_SECONDS)
    search.log.add_launch(search.starter.launch(unseen, "measure", 60.0))  # turns have been given up
    assert search.log.prices.pair_seconds(None) == pytest.approx(2 * LAUNCH_SECONDS)
    assert search.log.prices.pair_seconds(unseen) == pytest.approx(2 * LAUNCH_SECONDS)


def test_a_pair_of_the_finals_is_priced_by_all_the_samples_that_it_measures() -> None:
    search = open_pairs(Machine(noise=0.0))
    assert price_pair(search.log, BF16) == search.log.prices.pair_seconds(BF16)  # nothing is known of it yet
    result = search.starter.launch_beside(BF16, 60.0, ends_with_stage=False, rival=None)
    assert result.measurement is not None
    assert result.reference is not None
    full = count_samples(search.log)
    early, beside = (
        one.replace(blocks=one.blocks[: len(one.blocks) // 2]) for one in (result.measurement, result.reference)
    )
    search.log.add_launch(result.replace(measurement=early, reference=beside))
    missing = sum(full / one.samples_per_second - one.seconds for one in (early, beside))
    assert missing > 0.0
    assert price_pair(search.log, BF16) == pytest.approx(search.log.prices.pair_seconds(BF16) + missing)


def test_alone_without_turns_nothing_has_changed() -> None:
    machine = Machine(**WANDERING)
    search = open_search(machine)
    assert not search.log.takes_turns
    assert not explores_in_turns(search.log, BF16, 1e6)
    with pytest.raises(ValueError, match="cannot be run in turns"):
        search.starter.launch_beside(BF16, 60.0, ends_with_stage=False, rival=None)


@pytest.mark.parametrize(
    ("changes", "budget", "expected"),
    [
        (WANDERING, 1e4, True),
        ({"noise": 0.01}, 1e4, False),
        (WANDERING, 10 * LAUNCH_SECONDS, False),  # too few would fit
        (WANDERING, 40 * LAUNCH_SECONDS, True),
        ({"noise": 0.01, "wander": 0.03}, 40 * LAUNCH_SECONDS, False),  # and where it wanders less, so would more
    ],
)
def test_the_search_explores_in_turns_where_the_machine_wanders_and_there_is_time(
    changes: dict[str, float], budget: float, expected: bool
) -> None:
    search = open_pairs(Machine(**changes))
    for _ in range(8):
        launch(search, BF16)
    assert explores_in_turns(search.log, BF16, budget) is expected
    assert not explores_in_turns(search.log, BASELINE, budget)


def test_two_that_do_not_fit_into_memory_take_no_turns() -> None:
    search = open_pairs(Machine(), memory_limit_bytes=900 * 2**20)
    assert search.log.takes_turns
    assert fit_together(search.log, BASELINE)
    assert not fit_together(search.log, BASELINE, BASELINE)
    assert not fit_together(search.log, BF16)  # what it takes is not known
    assert not explores_in_turns(search.log, BF16, 1e6)


def test_on_a_gpu_both_are_to_fit_into_its_memory_with_their_contexts() -> None:
    search = open_pairs(Machine())
    own = search.log.judged[0].result
    assert own.measurement is not None
    held = own.measurement.peak_memory.replace(device_bytes=20 * 2**30)
    search.log.add_launch(own.replace(measurement=own.measurement.replace(peak_memory=held)))
    limits = search.log.problem.limits
    for room, fits in ((80, True), (50, False)):  # two times 21 GiB, in four fifths of it
        bytes_of_device = room * 2**30
        vars(search.log.problem)["limits"] = dataclasses.replace(limits, device_memory_bytes=bytes_of_device)
        assert fit_together(search.log, BASELINE, BASELINE) is fits
        assert memory_beside(search.log, BASELINE).device_bytes == bytes_of_device - 21 * 2**30


def test_a_trial_may_hold_what_is_free_on_the_gpu_that_it_trains_on() -> None:
    problem = open_search(Machine()).log.problem
    report = problem.report
    hardware = report.hardware.replace(gpus=(make_gpu(memory_free_bytes=3 * 2**30), make_gpu()))
    for free, expected in ((79 * 2**30, 79), (None, 3)):  # an older file does not tell
        target = report.target.replace(device="cuda", device_bytes=free)
        seen = dataclasses.replace(problem, report=report.replace(hardware=hardware, target=target)).limits
        assert seen.device_memory_bytes == pytest.approx(0.95 * expected * 2**30, rel=1e-6)


def test_finals_in_turns_prove_a_gain_that_the_machine_would_hide() -> None:
    def gains(config: TrainConfig) -> float:
        return 1.06 if config == BF16 else 1.0

    outcomes = []
    for takes_turns in (False, True):
        search = open_pairs(Machine(gains, **WANDERING), budget=10_000.0)
        for _ in range(6):
            launch(search, BF16)
        search.log.takes_turns = takes_turns
        purse = RiskPurse()
        plan = plan_finals(search.log, search.budget, [BF16], look=purse, seconds=20 * LAUNCH_SECONDS)
        search.log.add_checks(BF16, (make_check(),))
        outcomes.append(confirm(search.log, search.starter, plan))
    alone, in_turns = outcomes
    assert alone.winner is None
    assert in_turns.winner is not None
    assert in_turns.winner.gain == pytest.approx(math.log(1.06), abs=0.02)


def test_before_any_launch_in_turns_a_pair_is_as_noisy_as_launches_alone_or_nothing_is_known_of_it() -> None:
    search = open_pairs(Machine(**WANDERING))
    for _ in range(6):
        search.log.add_launch(search.starter.launch(BF16, "measure", 60.0))
    safe, guessed = list_pair_noises(search.log, BF16)
    assert guessed.degrees == 0.0 < safe.degrees
    assert guessed.pilot == safe.pilot
    assert safe.pilot.is_doubtful
    assert guessed.sd == pytest.approx(0.5 * safe.sd)
    assert guessed.share_of(0.6) == 0.3
    search.log.takes_turns = False
    (alone,) = list_pair_noises(search.log, BF16)
    assert alone == PairNoise(safe.sd, dataclasses.replace(safe.pilot, is_doubtful=False))
    assert alone.share_of(0.6) == 0.6


@pytest.mark.parametrize(("gain", "is_known"), [(1.6, True), (1.04, False)])
def test_a_gain_that_is_large_against_the_noise_of_launches_alone_is_proven_by_what_is_known_of_it(
    gain: float, is_known: bool
) -> None:
    search = open_pairs(Machine(lambda config: gain if config == BF16 else 1.0, **WANDERING))
    for _ in range(6):
        search.log.add_launch(search.starter.launch(BF16, "measure", 60.0))
    safe, guessed = list_pair_noises(search.log, BF16)
    plan = plan_finals(search.log, search.budget, [BF16])
    expected = safe if is_known else guessed
    assert (plan.pair_sd, plan.pilot) == (expected.sd, expected.pilot)


def test_what_fails_in_turns_is_run_alone_and_no_turns_are_taken_any_more() -> None:
    machine = Machine()
    beside: list[int] = []

    def fail_beside(first: TrialSpec, second: TrialSpec):  # type: ignore[no-untyped-def]
        beside.append(first.number)
        ours, theirs = machine.run_in_turns(first, second)
        return ours, theirs.replace(status=TrialStatus.CRASHED, cause="user-error", error="locked", measurement=None)

    search = open_search(machine, run_in_turns=fail_beside)
    for config in (BASELINE, BF16):
        search.log.add_launch(search.starter.launch(config, "measure", 60.0))
    apart: list[bool] = []
    launch_pair = make_pair_launch(search.log, search.starter, 320, lambda: apart.append(True))
    assert launch_pair is not None
    pairs = [launch_pair(BF16, BASELINE) for _ in range(2)]
    assert len(beside) == len(apart) == 1
    assert not search.log.takes_turns
    for pair in pairs:
        assert pair is not None
        assert [one.spec.config for one in pair] == [BF16, BASELINE]
        assert all(one.measurement is not None for one in pair)


def test_where_pairs_are_no_longer_in_turns_their_noise_is_not_known_beforehand() -> None:
    machine = Machine(**WANDERING)

    def fail_in_finals(first: TrialSpec, second: TrialSpec) -> tuple[TrialResult, TrialResult]:
        ours, theirs = machine.run_in_turns(first, second)
        if first.purpose == "reference":
            return ours, theirs
        return ours, theirs.replace(status=TrialStatus.CRASHED, cause="user-error", error="locked", measurement=None)

    search = open_search(machine, budget=10_000.0, run_in_turns=fail_in_finals)
    search.log.add_launch(search.starter.launch(BASELINE, "measure", 60.0))
    for _ in range(6):
        launch(search, BF16)
    purse = RiskPurse()
    plan = plan_finals(search.log, search.budget, [BF16], look=purse)
    assert plan.pilot.degrees > 0
    search.log.add_checks(BF16, (make_check(),))
    outcome = confirm(search.log, search.starter, plan)
    assert not search.log.takes_turns
    assert outcome.candidates[0].pilot == NO_PILOT


def test_a_pair_that_does_not_fit_together_has_the_noise_of_launches_alone() -> None:
    search = open_pairs(Machine(**WANDERING))
    for _ in range(6):
        launch(search, BF16)
    (together,) = list_pair_noises(search.log, BF16)
    large = BF16.replace(num_threads=1)  # nothing is known of what it holds
    (alone,) = list_pair_noises(search.log, large)
    assert together.sd < 0.03 < 0.06 < alone.sd


class Narrow(Machine):
    """Two trials at a time are too much for its memory where one of them is compiled."""

    def run_in_turns(self, first: TrialSpec, second: TrialSpec) -> tuple[TrialResult, TrialResult]:
        ours, theirs = super().run_in_turns(first, second)
        if second.config is None or second.config.compile_mode == "off":
            return ours, theirs
        gone = {"status": TrialStatus.OUT_OF_MEMORY, "cause": "oom-host", "error": "no memory", "measurement": None}
        return ours, theirs.replace(**gone)


@pytest.mark.parametrize(
    ("error", "is_blamed"),
    [
        ("FileExistsError: [Errno 17] File exists: '/tmp/runs/20261129-165613'", True),
        ("OSError: [Errno 98] Address already in use", True),
        ("ValueError: no", False),
    ],
)
def test_what_two_want_at_a_time_is_no_fault_of_the_settings(error: str, is_blamed: bool) -> None:
    search = open_pairs(Machine())
    launch(search, BF16)
    result = search.starter.launch_beside(BF16, 60.0, ends_with_stage=False, rival=None)
    crashed = result.replace(status=TrialStatus.CRASHED, cause="user-error", measurement=None, error=error)
    assert is_blamed_on_turns(search.log, crashed) == is_blamed


@pytest.mark.parametrize("cause", ["shm", "limits"])
def test_what_two_share_is_run_alone(cause: Cause) -> None:
    search = open_pairs(Machine())
    launch(search, BF16)
    result = search.starter.launch_beside(BF16, 60.0, ends_with_stage=False, rival=None)
    assert is_blamed_on_turns(
        search.log, result.replace(status=TrialStatus.CRASHED, cause=cause, measurement=None, error="no room")
    )


def test_what_failed_in_turns_and_was_run_again_alone_is_left_out_by_a_search_that_goes_on() -> None:
    def make(number: int, purpose: Any, config: TrainConfig, status: TrialStatus) -> TrialResult:
        measurement = make_measurement() if status is TrialStatus.COMPLETED else None
        spec = make_spec(config).replace(number=number, purpose=purpose)
        return make_result(spec, status=status, measurement=measurement)

    failed, worked = TrialStatus.CRASHED, TrialStatus.COMPLETED
    trials = [
        make(1, "reference", BASELINE, worked),
        make(2, "measure", BF16, failed),
        make(3, "measure", BF16, worked),
        make(4, "reference", BASELINE, worked),
        make(5, "measure", BF16, failed),
        make(6, "measure", BASELINE, worked),
        make(7, "measure", BF16, failed),
    ]
    assert [one.spec.number for one in leave_out_excused(trials)] == [1, 3, 4, 5, 6, 7]


def test_a_launch_during_which_the_machine_slept_has_no_price_and_no_blame() -> None:
    search = open_pairs(Machine())
    before = search.log.prices.launch_seconds(BF16)
    cut = search.starter.launch(BF16, "measure", 60.0).replace(
        status=TrialStatus.INTERRUPTED, measurement=None, elapsed_seconds=900.0
    )
    search.log.add_interrupted(cut.replace(cause="disturbed"))
    assert search.log.prices.launch_seconds(BF16) == before
    assert search.log.prices.overdue() == []
    search.log.add_interrupted(cut)
    assert search.log.prices.launch_seconds(BF16) > before


def test_a_pair_of_the_finals_during_which_the_machine_slept_is_run_again() -> None:
    machine = Machine()
    slept: list[int] = []

    def sleep_once(first: TrialSpec, second: TrialSpec) -> tuple[TrialResult, TrialResult]:
        ours, theirs = machine.run_in_turns(first, second)
        slept.append(first.number)
        if len(slept) > 1:
            return ours, theirs
        return ours, theirs.replace(status=TrialStatus.INTERRUPTED, cause="disturbed", error="slept", measurement=None)

    search = open_search(machine, run_in_turns=sleep_once)
    for config in (BASELINE, BF16):
        search.log.add_launch(search.starter.launch(config, "measure", 60.0))
    launch_pair = make_pair_launch(search.log, search.starter, 320)
    assert launch_pair is not None
    assert launch_pair(BF16, BASELINE) is not None
    assert len(slept) == 2


@pytest.mark.slow
def test_what_lacks_memory_beside_your_settings_is_run_alone_and_others_go_on_in_turns(tmp_path: Path) -> None:
    run = run_simulated(Narrow(**IN_TURNS), tmp_path, budget=600.0)
    judged = run.log.judged
    alone = [place for place, one in enumerate(judged) if one.config.compile_mode != "off"]
    assert alone
    for place in alone:
        assert judged[place].result.measurement is not None
        assert judged[place].reference is None
    # Until a pair of the finals lacks it as well: then none is run in turns any more.
    assert sum(one.reference is not None for one in judged[alone[0] :]) > 2


def test_a_script_of_several_processes_takes_no_turns() -> None:
    machine = Machine()
    report = make_problem(machine).report
    several = report.replace(target=report.target.replace(launched_processes=2))
    assert not open_search(machine, run_in_turns=machine.run_in_turns, report=several).log.takes_turns


def test_a_search_on_a_wandering_machine_explores_and_proves_in_turns(tmp_path: Path) -> None:
    run = run_simulated(Machine(**IN_TURNS), tmp_path, budget=600.0)
    purposes = Counter(one.purpose for one in run.machine.specs)
    assert run.profile.verdict == "improved"
    assert run.profile.config.precision == "bf16"
    assert purposes["reference"] > 10
    assert purposes["measure"] <= purposes["reference"] + 4  # those before the machine was seen to wander
    assert run.profile.evidence.noise is not None
    assert run.profile.evidence.noise.launch_sd > 0.05


def test_a_resumed_search_knows_both_timings_of_its_earlier_launches(tmp_path: Path) -> None:
    run = run_simulated(Machine(**IN_TURNS, stop_after=60), tmp_path, budget=600.0)
    again = run_simulated(Machine(**IN_TURNS, stop_after=1), tmp_path, budget=600.0, folder=run.folder)
    before = [(one.key, one.reference) for one in run.log.judged]
    assert sum(reference is not None for _, reference in before) > 5
    assert [(one.key, one.reference) for one in again.log.judged] == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_where_nothing_is_faster_turns_claim_nothing(tmp_path: Path, seed: int) -> None:
    run = run_simulated(Machine(lambda _config: 1.0, **IN_TURNS, seed=seed), tmp_path, budget=400.0)
    assert run.profile.verdict != "improved"


def test_what_is_told_of_a_pair_is_held_against_its_own_baseline() -> None:
    told: list[TrialResult] = []

    class Listener(SearchReporter):
        def trial_finished(self, progress: SearchProgress, result: TrialResult) -> None:
            told.append(result)

    machine = Machine()
    context = SearchContext(
        Budget(60.0, 0.0, machine.clock), machine, Listener(), machine.should_stop, run_in_turns=machine.run_in_turns
    )
    log = open_search(machine).log
    starter = TrialStarter(log, context, number=1)
    pair = starter.launch_in_turns(BASELINE, BF16, 30.0, ends_with_stage=False, measure_samples=640)
    assert [one.reference for one in told] == [None, pair[0].measurement]
    assert [one.reference for one in pair] == [None, None]


def test_a_launch_in_turns_has_the_patience_of_two(tmp_path: Path) -> None:
    machine = Machine(**IN_TURNS)
    run_simulated(machine, tmp_path, budget=300.0)
    given = [one.limits for one in machine.specs if one.purpose == "reference"]
    patience = 2 * USUAL_POLICY.patience * LAUNCH_SECONDS - KILL_SECONDS
    assert given
    assert all(one.time_limit_seconds >= patience or one.ends_with_stage for one in given)
