"""Steps that come in bursts are timed in whole ones: where a launch begins does not move what it reads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from scripted_steps import LIMITS, Scripted

from autotune.measure.bursts import find_bursts
from autotune.records import Measurement, TrialLimits

SHORT = 2.0**-10
"""Exact in binary, like every duration here."""
LONG = 2.0**-5
PLAYED = [SHORT] * 15 + [LONG]
"""Reinforcement learning: 15 updates, and one after what was played in between."""
TURNS = LIMITS.replace(measure_seconds=2.0, measure_samples=6200)


class Resting:
    """The other one of a pair, whose turns take ten seconds by the clock."""

    def __init__(self, script: Scripted) -> None:
        self._script = script

    def enter(self, phase: object) -> None: ...

    def end_step(self, seconds: float) -> None: ...

    def halt(self) -> None: ...

    def go_on(self) -> None: ...

    def rest(self) -> float:
        self._script.clock.seconds += 10.0
        return 10.0


def measure(steps: Sequence[float], limits: TrialLimits, *, in_turns: bool) -> Measurement:
    script = Scripted(steps)
    if in_turns:
        script.timing.progress = Resting(script)
    return script.measure(limits=limits)


@pytest.mark.parametrize("first", range(16))
@pytest.mark.parametrize(
    ("limits", "in_turns"),
    [(LIMITS.replace(measure_seconds=1.0), False), (LIMITS.replace(measure_seconds=2.0), True), (TURNS, True)],
    ids=["alone", "in turns", "in turns, so many samples"],
)
def test_whole_bursts_are_timed_wherever_a_launch_begins(first: int, limits: TrialLimits, in_turns: bool) -> None:
    measured = measure([*PLAYED[first:], *PLAYED * 4000], limits, in_turns=in_turns)
    assert measured.samples_per_second == 16 * 10 / sum(PLAYED)
    assert all(block.optimizer_steps % 16 == 0 for block in measured.blocks)


@pytest.mark.parametrize("first", range(0, 320, 24))
@pytest.mark.parametrize("in_turns", [False, True])
def test_a_burst_that_the_warm_up_has_not_seen_the_end_of_begins_the_timing_anew(first: int, in_turns: bool) -> None:
    # As many updates as some libraries take after each 2,048 steps that are played.
    burst = [SHORT] * 319 + [0.5]
    measured = measure([*burst[first:], *burst * 200], LIMITS.replace(measure_seconds=3.0), in_turns=in_turns)
    assert measured.samples_per_second == 320 * 10 / sum(burst)


@pytest.mark.parametrize("in_turns", [False, True])
def test_what_happens_once_costs_little_time_and_stays_out(in_turns: bool) -> None:
    measured = measure([SHORT] * 700 + [0.5] + [SHORT] * 20000, LIMITS.replace(measure_seconds=2.0), in_turns=in_turns)
    assert measured.samples_per_second == pytest.approx(10 / SHORT)
    assert measured.seconds < 8.0


def test_a_training_that_ends_before_the_next_burst_keeps_what_was_timed() -> None:
    script = Scripted([SHORT] * 900 + [0.5] + [SHORT] * 2000)
    measured = script.measure_until(901)
    assert measured.ended_by == "training"
    assert sum(block.optimizer_steps for block in measured.blocks) > 100


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 10])
def test_what_is_not_timed_of_a_turn_is_a_step_of_each_kind(workers: int) -> None:
    # Too small a difference for bursts: batches of so many workers, the first of each round waited for.
    durations = [3 * SHORT] + [SHORT] * (workers - 1)
    rates = [
        measure([*durations[first:], *durations * 4000], TURNS, in_turns=True).samples_per_second
        for first in range(workers)
    ]
    assert rates == [pytest.approx(10 * workers / sum(durations), rel=0.005)] * workers


def test_long_steps_that_come_by_chance_are_not_favoured() -> None:
    rng = random.Random(0)
    steps = [2.0**-4 if rng.random() < 0.02 else SHORT for _ in range(400_000)]
    rates = []
    for _ in range(60):
        start = rng.randrange(len(steps) - 20_000)
        measured = measure(steps[start : start + 20_000], LIMITS.replace(measure_seconds=4.0), in_turns=False)
        rates.append(measured.seconds / measured.samples)
    assert sum(rates) / len(rates) == pytest.approx(sum(steps) / len(steps) / 10, rel=0.03)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [SHORT, LONG] * 3,
        [SHORT] * 100,
        [SHORT, 2 * SHORT, 3 * SHORT] * 30,
        [SHORT] * 1000 + [LONG],  # a thirtieth of the time
        [SHORT] * 200 + [LONG],  # a seventh of it, once
        [SHORT] * 20 + [8 * SHORT] * 2,  # half of it, but no more than an accident takes
    ],
)
def test_steps_that_are_alike_or_hardly_ever_long_are_no_bursts(steps: list[float]) -> None:
    assert find_bursts(steps) is None


def test_a_burst_is_as_long_as_long_steps_are_apart() -> None:
    bursts = find_bursts(PLAYED * 10)
    assert bursts is not None
    assert bursts.seconds == sum(PLAYED)
    assert bursts.step_seconds == sum(PLAYED) / 16
    assert bursts.long_seconds == LONG / 2


def test_a_step_that_is_slow_by_accident_does_not_end_a_burst() -> None:
    bursts = find_bursts([*PLAYED * 10, 5 * SHORT, *PLAYED * 10])
    assert bursts is not None
    assert bursts.long_seconds == LONG / 2
