"""When a launch is hopeless in its first steps: the rules on given figures, and how seldom they hit an equal config."""

from __future__ import annotations

import math
import random

import pytest
from scripted_steps import LIMITS, PLAIN, STEP, Scripted

from autotune.measure.hopeless import Beat, EarlySteps, Phase, TooSlowError, find_overdue
from autotune.records.trial import Pace, Rival, TrialLimits

PACE = Pace(first_step_seconds=0.5, samples_per_second=80.0)
RIVAL = Rival(seconds_per_sample=0.0125, block_sd=0.02, margin=0.1)
RACED = LIMITS.replace(pace=PACE, rival=RIVAL)
NOW = 1000.0
PATIENCE = 3.0 + 4 * 0.5


def overdue(seconds: float, *, phase: Phase = Phase.STEPPING, steps: int = 0, limits: TrialLimits = RACED):  # type: ignore[no-untyped-def]
    return find_overdue(limits, Beat(phase, NOW - seconds, steps, 0.5 if steps else 0.0), NOW)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_step_may_take_three_seconds_and_four_first_steps_of_the_users_settings(steps: int) -> None:
    assert overdue(PATIENCE, steps=steps) is None
    hopeless = overdue(PATIENCE + 0.25, steps=steps)
    assert hopeless is not None
    assert hopeless.samples_per_second == 80.0 * 0.5 / 5.25
    which = ("first", "second", "third")[steps]
    assert hopeless.sentence == (
        f"its {which} step took more than 5.2s, where the first of your settings takes 0.5s: ended"
    )


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING, Phase.MEASURING])
def test_nothing_but_a_step_is_overdue(phase: Phase) -> None:
    assert overdue(1e6, phase=phase) is None


def test_steps_after_the_third_are_left_to_the_time_limit() -> None:
    assert overdue(1e6, steps=3) is None


@pytest.mark.parametrize("lacking", ["pace", "rival"])
def test_without_a_rival_or_a_pace_nothing_is_overdue(lacking: str) -> None:
    assert overdue(1e6, limits=RACED.replace(**{lacking: None})) is None


def test_where_launches_differ_much_a_step_may_take_longer() -> None:
    noisy = RACED.replace(rival=RIVAL.replace(margin=math.log(8.0)))
    assert overdue(8.99, limits=noisy) is None
    assert overdue(9.01, limits=noisy) is not None


def test_a_long_first_step_of_its_own_is_no_reason_to_end_the_second() -> None:
    beat = Beat(Phase.STEPPING, NOW - 12.0, 1, first_step_seconds=3.0)
    assert find_overdue(RACED, beat, NOW) is None
    assert find_overdue(RACED, Beat(Phase.STEPPING, NOW - 15.1, 1, first_step_seconds=3.0), NOW) is not None


@pytest.mark.parametrize("phase", [Phase.COMPILING, Phase.STEPPING])
def test_what_compiles_has_a_clock_of_its_own_and_no_bound(phase: Phase) -> None:
    compiles = RACED.replace(pace=PACE.replace(compile_seconds=120.0))
    assert overdue(120.0, phase=phase, limits=compiles) is None
    hopeless = overdue(121.0, phase=phase, limits=compiles)
    assert hopeless is not None
    assert (hopeless.samples_per_second, hopeless.sentence) == (None, "compiling was not done after 2m01s: ended")


def take(*seconds: float, compiled: tuple[int, ...] = (), samples: int = 10) -> EarlySteps:
    early = EarlySteps()
    for step, one in enumerate(seconds):
        early.take(one, samples, compiled=step in compiled)
    return early


def test_the_pair_is_the_first_two_steps_after_the_first_that_compile_nothing() -> None:
    assert (take(9.0, 1.0).first_seconds, take(9.0, 1.0).pair) == (9.0, (1.0,))
    assert take(9.0, 1.0, 2.0, 3.0).pair == (1.0, 2.0)
    assert take(9.0, 1.0, 8.0, 2.0, 3.0, compiled=(0, 2)).pair == (2.0, 3.0)


@pytest.mark.parametrize(
    ("pair", "samples", "bound"),
    [
        ((0.5, 0.5), 10, 20.0),  # four times the rival's eighth of a second
        ((0.5, 8.0), 10, 20.0),
        ((0.5, 0.125), 10, None),  # one of two may be slow
        ((0.34, 0.34), 10, None),  # 2.7 times as slow, within 2.5 and the margin
        ((0.35, 0.36), 10, 10 / 0.35),
        ((0.24, 0.24), 5, None),  # slow, and over before it costs anything
        ((1.0, 1.0), 20, 20.0),
        ((1.0, 1.0), 40, None),
    ],
)
def test_both_steps_have_to_be_far_slower_for_their_samples(
    pair: tuple[float, float], samples: int, bound: float | None
) -> None:
    hopeless = take(9.0, *pair, samples=samples).find_hopeless(PACE, RIVAL)
    assert (None if hopeless is None else hopeless.samples_per_second) == (
        None if bound is None else pytest.approx(bound)
    )


def test_what_the_users_own_second_steps_are_slower_is_allowed() -> None:
    early = take(9.0, 0.5, 0.5)
    assert early.find_hopeless(PACE.replace(warmup_ratio=2.0), RIVAL) is None
    hopeless = early.find_hopeless(PACE.replace(warmup_ratio=1.125), RIVAL)
    assert hopeless is not None
    assert hopeless.samples_per_second == 22.5
    assert early.find_hopeless(None, RIVAL) is early.find_hopeless(PACE, None) is None


def test_a_measurement_ends_after_the_third_of_hopeless_steps() -> None:
    script = Scripted([1.0])
    with pytest.raises(TooSlowError, match=r"took 1\.0s and 1\.0s, where the best so far takes 0\.12s: ended"):
        script.measure(limits=RACED)
    assert script.steps == 3


def test_two_steps_beside_others_who_took_the_cpus_end_nothing() -> None:
    with pytest.raises(TooSlowError):
        Scripted([1.0]).with_interference(taken=0.1).measure(limits=RACED)
    beside = Scripted([1.0]).with_interference(taken=0.5)
    assert beside.measure(limits=RACED).ended_by == "racing"  # its blocks tell, and what went on in them
    assert beside.events[:5] == ["step", "start", "step", "step", "read interference"]  # of these two steps alone


def test_the_third_step_is_taken_where_the_second_uses_the_warm_up_up() -> None:
    with pytest.raises(TooSlowError):
        Scripted([0.75]).measure(limits=RACED.replace(warmup_cap_seconds=0.5))
    equal = RACED.replace(warmup_cap_seconds=0.5, rival=RIVAL.replace(seconds_per_sample=0.075))
    assert Scripted([0.75]).measure(limits=equal).warmup_steps == 3


def test_the_first_block_ends_what_is_so_slow_that_two_steps_are_its_warm_up() -> None:
    measured = Scripted([8.0]).measure(limits=RACED)
    assert (measured.warmup_steps, len(measured.blocks), measured.ended_by) == (2, 1, "racing")


@pytest.mark.parametrize("changes", [{"pace": None}, {"rival": None}])
def test_a_measurement_without_pace_or_rival_is_never_ended_in_its_warm_up(changes: dict[str, None]) -> None:
    assert Scripted([1.0]).measure(limits=RACED.replace(**changes)).steady


def test_the_wait_for_data_is_not_held_against_a_launch() -> None:
    measured = Scripted([1.0], wait=0.875).measure(limits=RACED.replace(rival=RIVAL.replace(margin=9.0)))
    assert (measured.first_step_seconds, measured.warmup_step_seconds) == (STEP, (STEP, STEP))
    assert Scripted([1.0], wait=0.875).measure(limits=RACED).ended_by == "racing"  # the blocks then count it


def test_steps_that_compile_are_not_held_against_a_launch() -> None:
    script = Scripted([9.0, 6.0, STEP], compiled=lambda step: step < 2)
    measured = script.measure(PLAIN, RACED)
    assert (measured.first_step_seconds, measured.warmup_step_seconds) == (9.0, (STEP, STEP))
    assert measured.ended_by == "precision"


def test_a_machine_that_has_become_slower_takes_its_rival_along() -> None:
    slowed = RACED.replace(rival=RIVAL.replace(canary_seconds=1.0))
    with pytest.raises(TooSlowError):
        Scripted([0.5]).with_canary(1.0, 1.0).measure(limits=slowed)
    assert Scripted([0.5]).with_canary(4.0, 4.0).measure(limits=slowed).steady


@pytest.mark.parametrize(("launch_sd", "step_sd", "spikes"), [(0.02, 0.02, 0.05), (0.05, 0.1, 0.03), (0.15, 0.1, 0.0)])
def test_an_equal_config_is_ended_in_fewer_than_one_launch_in_two_hundred(
    launch_sd: float, step_sd: float, spikes: float
) -> None:
    rng, launches, cut = random.Random(1), 20_000, 0
    for _ in range(launches):
        offset = rng.gauss(0.0, math.sqrt(2) * launch_sd)
        steps = [offset + rng.gauss(0.0, step_sd) + (0.7 if rng.random() < spikes else 0.0) for _ in range(2)]
        early = take(9.0, *(math.exp(step) for step in steps), samples=80)
        rival = RIVAL.replace(margin=2.6 * math.sqrt(2) * launch_sd)
        cut += early.find_hopeless(PACE, rival) is not None
    assert cut < 0.005 * launches
