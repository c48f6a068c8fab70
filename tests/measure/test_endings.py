"""What ends a measurement: precision, time, samples, the race against a rival, the training's own end."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from scripted_steps import LIMITS, LONG_WARM, PLAIN, STEP, WARM, Scripted

from autotune.records import Block, Measurement, TrainConfig, TrialLimits
from autotune.records.trial import Rival

RIVAL = Rival(seconds_per_sample=STEP / 10, block_sd=0.02, margin=0.05)
"""Takes as long as even steps do."""
RACE = LIMITS.replace(rival=RIVAL)


@pytest.mark.parametrize(
    ("measure", "ended_by", "blocks"),
    [
        (lambda: Scripted([STEP]).measure(), "precision", 8),
        (lambda: Scripted([STEP]).measure(limits=LIMITS.replace(measure_seconds=1.0)), "time", 4),
        (lambda: Scripted([STEP]).measure(limits=LIMITS.replace(measure_samples=400)), "samples", 20),
        (lambda: Scripted([2 * STEP]).measure(limits=RACE), "racing", 1),
        (lambda: Scripted([STEP]).measure_until(WARM + 7), "training", 4),
    ],
    ids=["precision", "time", "samples", "racing", "training"],
)
def test_each_ending_says_what_it_was(measure: Callable[[], Measurement], ended_by: str, blocks: int) -> None:
    measured = measure()
    assert (measured.ended_by, len(measured.blocks)) == (ended_by, blocks)
    assert measured.steady


def test_uneven_steps_are_measured_until_the_time_is_up() -> None:
    measured = Scripted([0.25, 0.5] * 100).measure(limits=LIMITS.replace(measure_seconds=6.0, warmup_cap_seconds=4.0))
    assert (len(measured.blocks), measured.ended_by) == (16, "time")
    assert measured.seconds == 6.0
    assert measured.samples_per_second == 160 / 6


def test_precision_is_not_believed_before_eight_blocks() -> None:
    measured = Scripted([0.5]).measure()
    assert (len(measured.blocks), measured.ended_by) == (8, "precision")


def test_a_late_outlier_that_widens_the_interval_asks_for_more_blocks() -> None:
    measured = Scripted([0.25] * (WARM + 6) + [1.0] + [0.25]).measure()
    assert len(measured.blocks) > 20
    rates = [block.samples / block.seconds for block in measured.blocks]
    mean = sum(rates) / len(rates)
    deviation = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
    assert 1.96 * deviation / math.sqrt(len(rates)) <= 0.02 * mean


def test_blocks_that_follow_one_another_need_more_of_them() -> None:
    low, high = 0.5 - 2.0**-6, 0.5 + 2.0**-6
    settled = [0.5] * LONG_WARM
    in_turn = Scripted(settled + [low, high] * 200).measure()
    in_runs = Scripted(settled + ([low] * 4 + [high] * 4) * 50).measure()
    assert in_turn.ended_by == in_runs.ended_by == "precision"
    assert {block.seconds for block in in_turn.blocks} == {block.seconds for block in in_runs.blocks} == {low, high}
    assert len(in_runs.blocks) > 2 * len(in_turn.blocks)


@pytest.mark.parametrize(
    ("duration", "limit", "blocks"),
    [(20.0, 1.0, 1), (0.9375, 0.25, 1), (1.0, 1.0, 2), (0.75, 1.0, 3), (0.5, 1.0, 3), (0.25, 1.0, 4), (10.0, 9.0, 2)],
)
def test_the_time_for_measuring_is_kept_even_by_very_long_steps(duration: float, limit: float, blocks: int) -> None:
    measured = Scripted([duration]).measure(limits=LIMITS.replace(measure_seconds=limit))
    assert (len(measured.blocks), measured.ended_by) == (blocks, "time")


@pytest.mark.parametrize(("samples", "blocks"), [(1, 1), (20, 1), (21, 2), (160, 8), (400, 20), (1001, 51)])
def test_fixed_samples_are_measured_however_precise(samples: int, blocks: int) -> None:
    measured = Scripted([STEP]).measure(limits=LIMITS.replace(measure_samples=samples))
    assert (len(measured.blocks), measured.ended_by) == (blocks, "samples")


@pytest.mark.parametrize(
    ("duration", "samples", "blocks", "ended_by"),
    [
        (STEP, 10**6, 16, "time"),  # four times the second asked for
        (STEP, 320, 16, "samples"),  # both at once
        (0.75, 10**6, 6, "time"),
        (8.0, 10**6, 1, "time"),
        (8.0, 10, 1, "samples"),
    ],
)
def test_fixed_samples_have_four_times_the_patience(duration: float, samples: int, blocks: int, ended_by: str) -> None:
    limits = LIMITS.replace(measure_seconds=1.0, measure_samples=samples)
    measured = Scripted([duration]).measure(limits=limits)
    assert (len(measured.blocks), measured.ended_by) == (blocks, ended_by)


@pytest.mark.parametrize(("slowdown", "blocks"), [(4.0, 1), (2.0, 1), (1.5, 1), (1.25, 2), (1.125, 4)])
def test_a_clearly_slower_config_is_ended_after_few_blocks(slowdown: float, blocks: int) -> None:
    # The log of the slowdown less 0.05, block for block, against 0.02 · sqrt(2) times 6.53, 6.95, 7.36, 7.76.
    measured = Scripted([slowdown * STEP]).measure(limits=RACE)
    assert (measured.ended_by, len(measured.blocks)) == ("racing", blocks)


@pytest.mark.parametrize("slowdown", [0.25, 0.9375, 1.0, 1.03125, 1.0625])
def test_a_config_that_is_not_clearly_slower_is_not_ended(slowdown: float) -> None:
    assert Scripted([slowdown * STEP]).measure(limits=RACE).ended_by == "precision"


def test_two_blocks_half_as_slow_again_need_no_statistics() -> None:
    noisy = RACE.replace(rival=RIVAL.replace(block_sd=1.0))
    measured = Scripted([2 * STEP]).measure(limits=noisy)
    assert (measured.ended_by, len(measured.blocks)) == ("racing", 2)


@pytest.mark.parametrize(("slowdown", "ended_by"), [(4.0, "racing"), (1.0, "samples")])
def test_fixed_samples_are_raced_as_well(slowdown: float, ended_by: str) -> None:
    measured = Scripted([slowdown * STEP]).measure(limits=RACE.replace(measure_samples=100))
    assert measured.ended_by == ended_by


@pytest.mark.parametrize(
    ("config", "cap"), [(PLAIN.replace(num_workers=8, prefetch_factor=4), 4.0), (PLAIN, 1.0), (PLAIN, 0.5)]
)
def test_what_is_not_steady_is_not_raced(config: TrainConfig, cap: float) -> None:
    measured = Scripted([4 * STEP]).measure(config, RACE.replace(warmup_cap_seconds=cap))
    assert not measured.steady
    assert (measured.ended_by, len(measured.blocks)) == ("precision", 8)


@pytest.mark.parametrize(
    ("then", "now", "slowdown", "ended_by"),
    [
        (0.5, 0.5, 1.5, "racing"),
        (0.5, 0.75, 1.5, "precision"),  # the machine is slower by as much
        (0.5, 1.0, 1.5, "precision"),
        (0.5, 0.625, 2.0, "racing"),  # slower, but not by as much
        (0.5, 0.25, 1.0, "precision"),  # a faster machine asks for nothing
        (0.5, 0.25, 1.03125, "precision"),
        (0.5, 0.25, 1.5, "racing"),
        (None, 4.0, 1.5, "racing"),
    ],
)
def test_a_slower_machine_is_an_excuse(then: float | None, now: float, slowdown: float, ended_by: str) -> None:
    limits = LIMITS.replace(rival=RIVAL.replace(canary_seconds=then))
    # What the canary takes afterwards is not known during the race.
    script = Scripted([slowdown * STEP]).with_canary(now, 64.0)
    assert script.measure(limits=limits).ended_by == ended_by


def test_without_a_canary_of_its_own_a_config_has_no_excuse() -> None:
    limits = LIMITS.replace(rival=RIVAL.replace(canary_seconds=0.25))
    assert Scripted([1.5 * STEP]).measure(limits=limits).ended_by == "racing"


def test_a_compilation_is_no_reason_to_lose_the_race() -> None:
    at = {WARM + step: 4.0 for step in (0, 1, 2, 3)}  # as many as compiling is taken off, and one more
    script = Scripted([at.get(step, STEP) for step in range(WARM + 8)], compiled=lambda step: step in at)
    measured = script.measure(limits=RACE.replace(measure_seconds=10.0))
    assert [block.recompiled for block in measured.blocks][:5] == [False] * 3 + [True, False]
    assert measured.ended_by != "racing"


def test_racing_needs_a_rival() -> None:
    assert LIMITS.rival is None
    assert Scripted([16 * STEP]).measure().ended_by == "precision"


@pytest.mark.parametrize(("timed", "steps"), [(1, [1]), (2, [2]), (3, [2, 1]), (6, [2, 2, 2]), (15, [2] * 7 + [1])])
def test_a_training_that_ends_has_its_last_steps_in_a_shorter_block(timed: int, steps: list[int]) -> None:
    measured = Scripted([STEP]).measure_until(WARM + timed)
    assert measured.ended_by == "training"
    expected = [Block(optimizer_steps=count, samples=10 * count, seconds=count * STEP) for count in steps]
    assert list(measured.blocks) == expected
    assert measured.step_seconds == (STEP,) * timed


@pytest.mark.parametrize("limits", [RACE, LIMITS.replace(measure_samples=20), LIMITS.replace(measure_seconds=0.125)])
def test_a_training_that_ends_in_its_first_block_ended_by_itself(limits: TrialLimits) -> None:
    assert Scripted([STEP]).measure_until(WARM + 1, limits).ended_by == "training"


@pytest.mark.parametrize(
    ("duration", "limit", "steps", "blocks"),
    [(5.0, 2.0, 4, 2), (5.0, 12.0, 5, 3), (2.0, 2.0, 5, 2), (1.0, 2.0, 5, 2), (19.0, 2.0, 4, 2), (60.0, 2.0, 3, 1)],
)
def test_a_launch_of_slow_steps_takes_four_or_five_of_them(
    duration: float, limit: float, steps: int, blocks: int
) -> None:
    limits = LIMITS.replace(measure_seconds=limit, warmup_cap_seconds=2 * limit)
    script = Scripted([duration])
    measured = script.measure(limits=limits)
    assert (script.steps, len(measured.blocks), measured.ended_by) == (steps, blocks, "time")
    assert measured.steady
    assert {block.optimizer_steps for block in measured.blocks} == {1}


def test_slow_steps_are_timed_without_waiting_for_the_backlog_of_an_idle_loader() -> None:
    config = PLAIN.replace(num_workers=4, prefetch_factor=2)
    limits = LIMITS.replace(measure_seconds=2.0, warmup_cap_seconds=4.0)
    idle, busy = Scripted([5.0]), Scripted([5.0])
    assert idle.measure(config, limits.replace(seconds_per_sample=0.125)).steady
    assert busy.measure(config, limits.replace(seconds_per_sample=1.0)).unsettled == "what the loader had ready"
    assert idle.steps == busy.steps == 4
