"""Steps that take given times by a clock that only moves when told: whatever is measured is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch

from autotune.engine.loop import Mark, StepOutcome
from autotune.measure.throughput import TrainingEndedError, measure_throughput
from autotune.measure.timing import Timing
from autotune.records import Measurement, PeakMemory, TrainConfig, TrialLimits
from autotune.records.measurement import Interference

PLAIN = TrainConfig(micro_batch_size=10)
LIMITS = TrialLimits(time_limit_seconds=1000.0, warmup_cap_seconds=100.0, measure_seconds=100.0)
STEP = 0.125
"""Exact in binary, like every duration here."""
WARM = 11
"""Even steps of 50 ms or more that a warm-up takes: the first, and two windows of five."""
LONG_WARM = 7
"""Even steps of 0.3 s or more: the first, and two windows of three."""


class FakeClock:
    def __init__(self, synchronize_seconds: float = 0.0) -> None:
        self.seconds = 1000.0
        self.synchronized = 0
        self._synchronize_seconds = synchronize_seconds
        self._marks: list[float] = []

    def now(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        self.synchronized += 1
        self.seconds += self._synchronize_seconds

    def mark(self) -> None:
        self._marks.append(self.seconds)

    def take_intervals(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [late - early for early, late in itertools.pairwise(marks)]


class Scripted:
    """A training of given step times, the last one again and again; compilations and losses by the step's number.

    Attributes:
        events: what was asked of the meter, the canary and the interference reader, among the steps, in order.
        asked_at: when, in seconds since the start, one for each event.
        steps: taken.
    """

    def __init__(
        self,
        durations: Iterable[float],
        *,
        wait: float = 0.0,
        compiled: Callable[[int], int] = lambda step: 0,
        loss: Callable[[int], float] = lambda step: 1.0,
        clock: FakeClock | None = None,
        samples: Callable[[int], int] = lambda step: 10,
    ) -> None:
        self.clock = clock or FakeClock()
        self.sample_seconds = 0.0
        self.events: list[str] = []
        self.asked_at: list[float] = []
        self.steps = 0
        self.graphs = 0
        self.compile_seconds = 0.0
        self.timing = Timing(
            clock=self.clock, compiled_graphs=lambda: self.graphs, compile_seconds=lambda: self.compile_seconds
        )
        self._durations = list(durations)
        self._delay = 0.0
        self._wait = wait
        self._compiled = compiled
        self._loss = loss
        self._samples = samples

    def delay(self, seconds: float) -> None:
        """Let the next step take so much longer."""
        self._delay = seconds

    def set_wait(self, seconds: float) -> None:
        """Let the next steps wait so long for their batch."""
        self._wait = seconds

    def note(self, event: str) -> None:
        self.events.append(event)
        self.asked_at.append(self.clock.seconds - 1000.0)

    def step(self, mark: Mark) -> StepOutcome:
        self.note("step")
        duration = self._durations[min(self.steps, len(self._durations) - 1)] + self._delay
        self._delay = 0.0
        self.clock.seconds += self._wait
        mark("data")
        self.clock.seconds += (duration - self._wait) / 2
        mark("copy")
        mark("data-like")
        self.clock.seconds += (duration - self._wait) / 2
        loss = torch.tensor(self._loss(self.steps))
        self.graphs += self._compiled(self.steps)
        self.compile_seconds += max(0.0, duration - STEP) * bool(self._compiled(self.steps))
        samples = self._samples(self.steps)
        self.steps += 1
        return StepOutcome(samples=samples, loss=loss, ends_epoch=False)

    def watch(self, read: Callable[[int], Mapping[str, float | None]], *, load_seconds: float = 0.0) -> Scripted:
        """Let figures be watched, by the steps taken, and the device need a time under load."""
        self.timing.watched = lambda: read(self.steps)
        self.timing.load_seconds = load_seconds
        return self

    def with_canary(self, *seconds: float) -> Scripted:
        """Let the canary take these times, one a call, four seconds by the clock each."""
        left = list(seconds)

        def sing() -> float:
            self.note("canary")
            self.clock.seconds += 4.0
            return left.pop(0)

        self.timing.canary = sing
        return self

    def with_interference(self, taken: float | None = None) -> Scripted:
        """Let interference be read: as many faults as it was read before, half a second by the clock each call.

        Args:
            taken: share of the CPUs that others use.
        """
        self.timing.interference = FakeInterference(self, taken)
        return self

    def measure(self, config: TrainConfig = PLAIN, limits: TrialLimits = LIMITS) -> Measurement:
        steps = self._measure(config, limits)
        try:
            while True:
                next(steps)
                self.timing.take_step(self.step)
        except StopIteration as end:
            measurement: Measurement = end.value
            return measurement

    def measure_until(self, last: int, limits: TrialLimits = LIMITS) -> Measurement:
        """Measure a training that ends after so many steps."""
        steps = self._measure(PLAIN, limits)
        next(steps)
        try:
            for _ in range(last):
                self.timing.take_step(self.step)
                next(steps)
            steps.throw(TrainingEndedError())
        except StopIteration as end:
            measurement: Measurement = end.value
            return measurement
        raise AssertionError("the measurement went on after the training's end")

    def _measure(self, config: TrainConfig, limits: TrialLimits):  # type: ignore[no-untyped-def]
        return measure_throughput(self.timing, config, limits, FakeMeter(self))  # type: ignore[arg-type]


class FakeMeter:
    def __init__(self, script: Scripted) -> None:
        self._script = script

    def sample(self) -> None:
        self._script.note("sample")
        self._script.clock.seconds += self._script.sample_seconds

    def reset_device(self) -> None:
        self._script.note("reset")

    def read(self) -> PeakMemory:
        self._script.note("read memory")
        return PeakMemory(host_bytes=123)


class FakeInterference:
    def __init__(self, script: Scripted, taken: float | None) -> None:
        self._script, self._taken = script, taken
        self._reads = 0

    def start(self) -> None:
        self._script.note("start")
        self._script.clock.seconds += 0.5

    def read(self) -> Interference:
        self._script.note("read interference")
        self._script.clock.seconds += 0.5
        self._reads += 1
        return Interference(major_faults=self._reads - 1, foreign_cpu_fraction=self._taken)
