"""Timing with a clock that only moves when a step says so: every number is exact."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable

import pytest
import torch

from autotune.engine.loop import Mark, StepOutcome
from autotune.measure.clock import Clock, CudaClock, HostClock, clock_for
from autotune.measure.throughput import DivergedError, Timing, backlog_steps, drive, measure_throughput
from autotune.records import Block, Measurement, PeakMemory, TrainConfig, TrialLimits

PLAIN = TrainConfig(micro_batch_size=10)
LIMITS = TrialLimits(time_limit_seconds=1000.0, warmup_cap_seconds=100.0, measure_seconds=100.0)
STEP = 0.125
"""Exact in binary, like every duration here."""


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 1000.0
        self.synchronized = 0
        self._marks: list[float] = []

    def now(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        self.synchronized += 1

    def mark(self) -> None:
        self._marks.append(self.seconds)

    def take_intervals(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [late - early for early, late in itertools.pairwise(marks)]


class FakeMeter:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls: list[tuple[str, float]] = []

    def sample(self) -> None:
        self.calls.append(("sample", self.clock.seconds - 1000.0))

    def reset_device(self) -> None:
        self.calls.append(("reset", self.clock.seconds - 1000.0))

    def read(self) -> PeakMemory:
        return PeakMemory(host_bytes=123)


class Scripted:
    """Steps that take given times, the last one again and again; compilations and losses by the step's number."""

    def __init__(
        self,
        durations: Iterable[float],
        *,
        wait: float = 0.0,
        compiled: Callable[[int], int] = lambda step: 0,
        loss: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        self.clock = FakeClock()
        self.meter = FakeMeter(self.clock)
        self.steps = 0
        self._durations = list(durations)
        self._wait = wait
        self._compiled = compiled
        self._loss = loss
        self.timing = Timing(clock=self.clock, compiled_graphs=lambda: self.graphs)
        self.graphs = 0

    def step(self, mark: Mark) -> StepOutcome:
        duration = self._durations[min(self.steps, len(self._durations) - 1)]
        self.clock.seconds += self._wait
        mark("data")
        self.clock.seconds += (duration - self._wait) / 2
        mark("copy")
        mark("data-like")
        self.clock.seconds += (duration - self._wait) / 2
        loss = torch.tensor(self._loss(self.steps))
        self.graphs += self._compiled(self.steps)
        self.steps += 1
        return StepOutcome(samples=10, loss=loss, ends_epoch=False)

    def measure(self, config: TrainConfig = PLAIN, limits: TrialLimits = LIMITS) -> Measurement:
        steps = measure_throughput(self.timing, config, limits, self.meter)  # type: ignore[arg-type]
        return drive(steps, self.timing, self.step)


def test_even_steps_are_timed_exactly() -> None:
    script = Scripted([STEP])
    measured = script.measure()
    assert measured == Measurement(
        blocks=(Block(optimizer_steps=2, samples=20, seconds=0.25),) * 8,
        step_seconds=(STEP,) * 16,
        data_wait_seconds=0.0,
        steady=True,
        warmup_steps=4,
        warmup_seconds=0.5,
        compile_seconds=0.0,
        peak_memory=PeakMemory(host_bytes=123),
    )
    assert measured.samples_per_second == 80.0
    assert script.steps == script.timing.samples // 10 == 20


@pytest.mark.parametrize(("duration", "steps"), [(2.0**-10, 256), (0.0625, 4), (0.1875, 2), (0.25, 1), (0.75, 1)])
def test_a_block_is_whole_steps_of_a_quarter_second_or_more(duration: float, steps: int) -> None:
    measured = Scripted([duration]).measure()
    assert {block.optimizer_steps for block in measured.blocks} == {steps}
    assert {block.seconds for block in measured.blocks} == {steps * duration}
    assert {block.samples for block in measured.blocks} == {steps * 10}


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (PLAIN, 0),
        (PLAIN.replace(prefetch_factor=8), 0),
        (PLAIN.replace(num_workers=1), 4),
        (PLAIN.replace(num_workers=2, prefetch_factor=4), 10),
        (PLAIN.replace(num_workers=2, prefetch_factor=4, gradient_accumulation_steps=4), 3),
        (PLAIN.replace(num_workers=16, prefetch_factor=4, gradient_accumulation_steps=3), 22),
    ],
)
def test_the_backlog_is_what_the_workers_had_ready(config: TrainConfig, steps: int) -> None:
    assert backlog_steps(config) == steps


def test_the_backlog_is_used_up_before_timing() -> None:
    script = Scripted([0.125] * 10 + [0.5])
    measured = script.measure(PLAIN.replace(num_workers=2, prefetch_factor=4))
    assert measured.warmup_steps == 10
    assert set(measured.step_seconds) == {0.5}
    assert measured.samples_per_second == 20.0


def test_warm_up_goes_on_until_the_steps_have_settled() -> None:
    durations = [4.0, *[1.0] * 6, *[STEP] * 100]
    measured = Scripted(durations).measure(PLAIN.replace(num_workers=4, prefetch_factor=2))
    # The backlog is used up after ten steps; then most of the four before the last four are slow until step 14.
    assert measured.steady
    assert measured.warmup_steps == 14
    assert set(measured.step_seconds) == {STEP}


def test_compilation_is_kept_apart_and_starts_the_warm_up_anew() -> None:
    script = Scripted([10.0, STEP, 5.0, STEP], compiled=lambda step: step in (0, 2))
    measured = script.measure(limits=LIMITS.replace(warmup_cap_seconds=1.0))
    assert measured.warmup_steps == 7
    assert measured.warmup_seconds == 15.0 + 5 * STEP
    assert measured.compile_seconds == 15.0 - 2 * STEP
    assert measured.steady
    assert set(measured.step_seconds) == {STEP}


def test_the_backlog_filled_during_a_compilation_is_used_up_too() -> None:
    script = Scripted([STEP] * 5 + [20.0] + [STEP] * 10 + [0.5], compiled=lambda step: step == 5)
    measured = script.measure(PLAIN.replace(num_workers=2, prefetch_factor=4))
    assert measured.warmup_steps == 6 + 10
    assert set(measured.step_seconds) == {0.5}


def test_a_slow_first_step_without_compilation_is_no_compile_time() -> None:
    measured = Scripted([10.0, STEP]).measure(limits=LIMITS.replace(warmup_cap_seconds=1.0))
    assert measured.compile_seconds == 0.0
    assert measured.warmup_seconds >= 10.0 + 3 * STEP
    assert measured.steady


def test_warm_up_ends_at_its_cap_and_says_that_it_was_not_steady() -> None:
    config = PLAIN.replace(num_workers=8, prefetch_factor=4)
    measured = Scripted([9.0, STEP]).measure(config, LIMITS.replace(warmup_cap_seconds=0.5))
    # The first step, which initialises kernels, does not count; four steps of 0.125 s do.
    assert measured.warmup_steps == 5
    assert not measured.steady
    assert len(measured.blocks) == 8


def test_unsettled_steps_at_the_cap_are_not_steady() -> None:
    durations = [0.125] * 6 + [0.5] * 4 + [2.0] * 50
    config = PLAIN.replace(num_workers=2, prefetch_factor=4)
    measured = Scripted(durations).measure(config, LIMITS.replace(warmup_cap_seconds=4.0))
    assert (measured.warmup_steps, measured.steady) == (11, False)


def test_uneven_steps_are_measured_until_the_time_is_up() -> None:
    durations = [0.25, 0.5] * 100
    measured = Scripted(durations).measure(limits=LIMITS.replace(measure_seconds=6.0))
    assert len(measured.blocks) == 16
    assert measured.seconds == 6.0
    assert measured.samples_per_second == 160 / 6


def test_precision_is_not_believed_before_eight_blocks() -> None:
    assert len(Scripted([0.5]).measure().blocks) == 8


def test_a_late_outlier_that_widens_the_interval_asks_for_more_blocks() -> None:
    measured = Scripted([0.25] * 10 + [1.0] + [0.25]).measure()
    assert len(measured.blocks) > 20
    rates = [block.samples / block.seconds for block in measured.blocks]
    mean = sum(rates) / len(rates)
    deviation = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
    assert 1.96 * deviation / math.sqrt(len(rates)) <= 0.02 * mean


@pytest.mark.parametrize(
    ("duration", "limit", "blocks"),
    [(10.0, 1.0, 1), (2.0, 1.0, 1), (1.0, 1.0, 2), (0.75, 1.0, 3), (0.5, 1.0, 3), (0.25, 1.0, 4), (10.0, 9.0, 2)],
)
def test_the_time_for_measuring_is_kept_even_by_very_long_steps(duration: float, limit: float, blocks: int) -> None:
    measured = Scripted([duration]).measure(limits=LIMITS.replace(measure_seconds=limit))
    assert len(measured.blocks) == blocks


def test_only_waiting_inside_the_blocks_counts_as_waiting() -> None:
    measured = Scripted([STEP], wait=0.03125).measure()
    assert measured.data_wait_seconds == 16 * 0.03125
    assert measured.data_wait_fraction == 0.25


def test_the_device_is_waited_for_at_the_ends_of_a_block_only() -> None:
    script = Scripted([0.0625])
    measured = script.measure()
    assert script.clock.synchronized == measured.warmup_steps + 2 * len(measured.blocks)


def test_memory_is_reset_after_the_warm_up_and_sampled_after_each_block() -> None:
    script = Scripted([STEP])
    script.measure()
    expected = [("reset", 0.5), ("sample", 0.5), *(("sample", 0.5 + 0.25 * i) for i in range(1, 9))]
    assert script.meter.calls == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bad", [0, 3, 4, 5, 9])
def test_a_loss_that_is_not_finite_is_reported_with_its_step(bad: int, value: float) -> None:
    script = Scripted([STEP], loss=lambda step: value if step >= bad else 1.0)
    with pytest.raises(DivergedError, match=f"not finite at optimizer step {bad}$") as caught:
        script.measure()
    assert caught.value.step == bad
    assert script.steps <= bad + 4  # not trained on for the rest of the trial


def test_losses_come_back_in_order_and_are_read_once() -> None:
    script = Scripted([STEP], loss=lambda step: float(step))
    script.measure()
    assert script.timing.read_losses() == tuple(float(step) for step in range(20))
    assert script.timing.losses == []
    script.timing.take_step(script.step)
    assert script.timing.read_losses() == tuple(float(step) for step in range(21))


def test_the_host_clock_gives_the_time_between_marks() -> None:
    clock = HostClock()
    began = clock.now()
    clock.mark()
    time.sleep(0.02)
    clock.mark()
    time.sleep(0.01)
    clock.mark()
    clock.synchronize()
    elapsed = clock.now() - began
    intervals = clock.take_intervals()
    assert len(intervals) == 2
    assert intervals[0] >= 0.02
    assert intervals[1] >= 0.01
    assert sum(intervals) <= elapsed
    assert clock.take_intervals() == []


@pytest.mark.parametrize(("device", "kind"), [("cpu", HostClock), ("cuda", CudaClock)])
def test_each_device_has_its_clock(device: str, kind: type[Clock]) -> None:
    assert type(clock_for(torch.device(device))) is kind
