"""A clock that stands still while a training validates, and a measurement whose training ends before it is done."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from autotune.measure.clock import PausableClock
from autotune.measure.throughput import Steps, TrainingEndedError, measure_throughput
from autotune.measure.timing import Timing
from autotune.records import Block, Measurement, PeakMemory, TrainConfig, TrialLimits

LIMITS = TrialLimits(time_limit_seconds=1000.0, warmup_cap_seconds=100.0, measure_seconds=100.0)
STEP = 0.125
"""Exact in binary, like every duration here."""
WARM = 11
"""Steps of the warm-up."""


class FakeClock:
    """Moves only when told, and knows what was asked of it.

    Attributes:
        seconds: it shows.
        asked: names of the methods called, in order.
    """

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.asked: list[str] = []
        self._marks: list[float] = []

    def now(self) -> float:
        self.asked.append("now")
        return self.seconds

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def mark(self) -> None:
        self._marks.append(self.seconds)

    def take_intervals(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [late - early for early, late in itertools.pairwise(marks)]


class FakeMeter:
    def sample(self) -> None:
        pass

    def reset_device(self) -> None:
        pass

    def read(self) -> PeakMemory:
        return PeakMemory(host_bytes=1)


@pytest.fixture
def inner() -> FakeClock:
    return FakeClock()


@pytest.fixture
def clock(inner: FakeClock) -> PausableClock:
    return PausableClock(inner)


def test_a_clock_that_never_stood_still_shows_the_time(clock: PausableClock, inner: FakeClock) -> None:
    inner.seconds += 3.0
    assert clock.now() == 1003.0
    assert clock.aside_seconds == 0.0


def test_time_aside_does_not_pass(clock: PausableClock, inner: FakeClock) -> None:
    inner.seconds += 1.0
    clock.pause()
    inner.seconds += 5.0
    assert clock.now() == 1001.0
    clock.resume()
    assert clock.now() == 1001.0
    inner.seconds += 2.0
    assert clock.now() == 1003.0
    assert clock.aside_seconds == 5.0


def test_standing_still_twice_is_standing_still(clock: PausableClock, inner: FakeClock) -> None:
    clock.resume()
    for _ in range(3):
        clock.pause()
        inner.seconds += 1.0
    clock.resume()
    inner.seconds += 10.0
    clock.resume()
    assert (clock.aside_seconds, clock.now()) == (3.0, 1010.0)
    clock.pause()
    inner.seconds += 0.5
    clock.resume()
    assert (clock.aside_seconds, clock.now()) == (3.5, 1010.0)


def test_the_device_is_waited_for_before_the_time_is_read(clock: PausableClock, inner: FakeClock) -> None:
    clock.pause()
    clock.resume()
    assert inner.asked == ["synchronize", "now"] * 2
    clock.resume()
    clock.now()
    clock.synchronize()
    assert inner.asked[4:] == ["now", "synchronize"]


def test_turning_to_what_it_does_already_costs_no_waiting(clock: PausableClock, inner: FakeClock) -> None:
    clock.pause()
    inner.asked.clear()
    clock.pause()
    assert inner.asked == []
    clock.resume()
    inner.asked.clear()
    clock.resume()
    assert inner.asked == []


def test_the_interval_in_which_it_stood_still_is_shorter_by_that(clock: PausableClock, inner: FakeClock) -> None:
    clock.mark()
    for aside in (0.0, 4.0, 0.0, 0.5):
        inner.seconds += STEP
        clock.pause()
        inner.seconds += aside
        clock.resume()
        clock.mark()
    assert clock.take_intervals() == [STEP] * 4
    assert clock.take_intervals() == []


def test_intervals_start_anew_after_each_taking(clock: PausableClock, inner: FakeClock) -> None:
    for _ in range(2):
        clock.mark()
        inner.seconds += 1.0
        clock.mark()
        assert clock.take_intervals() == [1.0]
        clock.pause()
        inner.seconds += 7.0
        clock.resume()


def test_no_interval_is_less_than_nothing(clock: PausableClock) -> None:
    # A GPU's own clock, read at events, need not agree with the host's to the last digit.
    clock.mark()
    clock.aside_seconds += 1.0
    clock.mark()
    assert clock.take_intervals() == [0.0]


class Training:
    """Steps of an eighth of a second, with a validation now and then, until they run out.

    Attributes:
        timing: of the measurement.
        clock: read by it.
    """

    def __init__(self, *, validates: Callable[[int], float] = lambda step: 0.0) -> None:
        self.inner = FakeClock()
        self.clock = PausableClock(self.inner)
        self.timing = Timing(clock=self.clock, compiled_graphs=lambda: 0)
        self._validates = validates
        self._taken = 0

    def start(self, limits: TrialLimits = LIMITS) -> Steps:
        return measure_throughput(self.timing, TrainConfig(), limits, FakeMeter())  # type: ignore[arg-type]

    def run(self, steps: Steps, most: int) -> Measurement | None:
        """Take steps; return the measurement if it wants no more, None if the training is over first."""
        next(steps)
        while self._taken < most:
            aside = self._validates(self._taken)
            if aside:
                self.clock.pause()
                self.inner.seconds += aside
            self.clock.resume()
            self.inner.seconds += STEP
            self.timing.losses.append(torch.tensor(1.0))
            self.timing.samples += 10
            self._taken += 1
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        return None


def end(steps: Steps) -> Measurement:
    with pytest.raises(StopIteration) as stop:
        steps.throw(TrainingEndedError())
    measurement: Measurement = stop.value.value
    return measurement


def test_validation_does_not_count() -> None:
    plain, other = Training(), Training(validates=lambda step: 30.0 if step % 5 == 3 else 0.0)
    expected, found = (one.run(one.start(), 1000) for one in (plain, other))
    assert expected is not None
    assert expected.warmup_aside_seconds == 0.0
    assert found == expected.replace(warmup_aside_seconds=30.0 * (WARM // 5))  # told of: launches take as much longer
    assert expected.samples_per_second == 80.0
    assert other.clock.aside_seconds == 30.0 * 5


def test_a_long_validation_does_not_use_the_measurements_time_up() -> None:
    limits = LIMITS.replace(measure_seconds=0.75)
    training = Training(validates=lambda step: 100.0 if step == WARM + 2 else 0.0)
    measured = training.run(training.start(limits), 1000)
    assert measured is not None
    assert [block.optimizer_steps for block in measured.blocks] == [2, 2, 2]


def test_a_training_that_ends_between_blocks_has_what_was_timed() -> None:
    training = Training()
    steps = training.start()
    assert training.run(steps, WARM + 2 * 3) is None
    measured = end(steps)
    assert measured.blocks == (Block(optimizer_steps=2, samples=20, seconds=0.25),) * 3
    assert measured.step_seconds == (STEP,) * 6
    assert measured.steady


def test_a_training_that_ends_in_a_block_has_a_shorter_one() -> None:
    training = Training()
    steps = training.start()
    assert training.run(steps, WARM + 2 + 1) is None
    measured = end(steps)
    assert measured.blocks == (
        Block(optimizer_steps=2, samples=20, seconds=0.25),
        Block(optimizer_steps=1, samples=10, seconds=0.125),
    )
    assert measured.step_seconds == (STEP,) * 3
    assert measured.samples_per_second == 80.0


def test_one_timed_step_is_a_measurement() -> None:
    training = Training()
    steps = training.start()
    assert training.run(steps, WARM + 1) is None
    assert end(steps).blocks == (Block(optimizer_steps=1, samples=10, seconds=0.125),)


def test_the_end_after_a_validation_is_no_part_of_the_block() -> None:
    training = Training()
    steps = training.start()
    assert training.run(steps, WARM + 1) is None
    training.clock.pause()
    training.inner.seconds += 60.0  # a last validation, a checkpoint
    assert end(steps).blocks == (Block(optimizer_steps=1, samples=10, seconds=0.125),)


@pytest.mark.parametrize("taken", [0, 1, 3, WARM])
def test_a_training_that_ends_before_a_step_was_timed_has_no_measurement(taken: int) -> None:
    training = Training()
    steps = training.start()
    assert training.run(steps, taken) is None
    with pytest.raises(TrainingEndedError):
        steps.throw(TrainingEndedError())


@pytest.mark.parametrize("taken", [4, WARM - 1])
def test_a_training_that_ends_in_its_warm_up_is_timed_by_what_there_is_and_marked(taken: int) -> None:
    training = Training()
    steps = training.start()
    assert training.run(steps, taken) is None
    measured = end(steps)
    assert measured.blocks == (Block(optimizer_steps=taken - 1, samples=10 * (taken - 1), seconds=0.125 * (taken - 1)),)
    assert (measured.steady, measured.unsettled, measured.ended_by) == (False, "the training ended before", "training")
    assert measured.step_seconds == (0.125,) * (taken - 1)
    assert (measured.warmup_steps, measured.warmup_seconds) == (1, 0.125)
