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


class Cold(Resting):
    """The same, after which a step finds its caches empty."""

    def go_on(self) -> None:
        self._script.delay(5 * SHORT)


def measure(steps: Sequence[float], limits: TrialLimits, *, in_turns: bool) -> Measurement:
    script = Scripted(steps)
    if in_turns:
        script.timing.progress = Resting(script)
    return script.measure(limits=limits)


@pytest.mark.parametrize("first", [0, 1, 8, 15])
@pytest.mark.parametrize("limits", [LIMITS.replace(measure_seconds=2.0), TURNS], ids=["so long", "so many samples"])
def test_turns_are_whole_bursts_wherever_a_launch_begins(first: int, limits: TrialLimits) -> None:
    measured = measure([*PLAYED[first:], *PLAYED * 4000], limits, in_turns=True)
    assert measured.samples_per_second == 16 * 10 / sum(PLAYED)
    assert all(block.optimizer_steps % 16 == 0 for block in measured.blocks)


def test_what_the_first_step_after_a_rest_is_too_long_is_taken_off() -> None:
    script = Scripted(PLAYED * 4000)
    script.timing.progress = Cold(script)
    measured = script.measure(limits=TURNS)
    assert script.clock.seconds > 1000.0 + measured.seconds + 5 * SHORT * len(measured.blocks)
    assert measured.samples_per_second == 16 * 10 / sum(PLAYED)


def test_long_steps_that_stop_coming_do_not_hold_a_turn_up() -> None:
    measured = measure([*PLAYED * 20, *[SHORT] * 100_000], TURNS, in_turns=True)
    assert max(block.seconds for block in measured.blocks) <= 1.0 + SHORT


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
    steps = [2.0**-5 if rng.random() < 0.05 else SHORT for _ in range(400_000)]
    rates = []
    for _ in range(20):
        start = rng.randrange(len(steps) - 20_000)
        measured = measure(steps[start : start + 20_000], LIMITS.replace(measure_seconds=8.0), in_turns=True)
        rates.append(measured.seconds / measured.samples)
    assert sum(rates) / len(rates) == pytest.approx(sum(steps) / len(steps) / 10, rel=0.03)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [SHORT, LONG] * 2,
        [SHORT] * 100,
        [SHORT, 2 * SHORT, 3 * SHORT] * 30,
        [*[SHORT] * 330, LONG] * 3,  # a twelfth of the time
        [LONG] * 3 + [SHORT] * 100,  # at the beginning alone
        [SHORT] * 50 + [LONG] * 3 + [SHORT] * 50,  # a stall
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
