"""Time one config: samples per second over whole optimizer steps, loader, copies and optimizer included.

    start ── warm-up until steady ──┬── block ──┬── block ──┬── ... ── precise, or time is up
             (compilation apart)    sync        sync        sync

Steady means: enough steps; no new compiled graph; the loader's backlog of `num_workers x prefetch_factor` batches,
filled while nothing trained, is used up; and the last steps take as long as the ones before them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autotune.engine.compilation import compiled_graph_count
from autotune.engine.loop import Mark, StepOutcome, Training
from autotune.measure.clock import Clock, clock_for
from autotune.measure.memory import MemoryMeter
from autotune.records.config import TrainConfig
from autotune.records.measurement import Block, Measurement
from autotune.records.trial import LossCurve, TrialLimits

LEAST_WARMUP_STEPS = 4
LEAST_BLOCK_SECONDS = 0.25
LEAST_BLOCKS = 3
PRECISE_BLOCKS = 8
PRECISION = 0.02
STEADY_TOLERANCE = 0.05

_WINDOW = 4


class DivergedError(Exception):
    """A loss was not finite.

    Attributes:
        step: the optimizer step, counted from 0.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss is not finite at optimizer step {step}")
        self.step = step


class TrainingEndedError(Exception):
    """Thrown into a measurement whose training takes no further step."""


Steps = Generator[None, None, Measurement]
"""A measurement that asks for one optimizer step at each yield."""


@dataclass
class Timing:
    """A measurement in progress.

    Attributes:
        clock: reads time.
        compiled_graphs: how many graphs have been compiled so far.
        losses: loss of each step not read yet, on the device.
        samples: samples trained on.
        data_wait_seconds: time spent waiting for the loader.
    """

    clock: Clock
    compiled_graphs: Callable[[], int]
    losses: list[Tensor] = field(default_factory=list)
    samples: int = 0
    data_wait_seconds: float = 0.0
    _values: list[float] = field(default_factory=list)

    def take_step(self, step: Callable[[Mark], StepOutcome]) -> None:
        """Take one step and note what it was."""
        began = self.clock.now()

        def note(phase: str) -> None:
            if phase == "data":
                self.data_wait_seconds += self.clock.now() - began

        outcome = step(note)
        self.losses.append(outcome.loss)
        self.samples += outcome.samples

    def read_losses(self) -> tuple[float, ...]:
        """Return all losses as numbers.

        Raises:
            DivergedError: one is not finite.
        """
        # Each loss is read once: a pause between blocks that grows would let the loader's workers get ahead.
        self._values += [float(loss) for loss in self.losses]
        self.losses.clear()
        for step, value in enumerate(self._values):
            if not math.isfinite(value):
                raise DivergedError(step)
        return tuple(self._values)


@dataclass(frozen=True)
class _WarmUp:
    steps: int
    seconds: float
    compile_seconds: float
    step_seconds: float
    steady: bool


def time_training(
    training: Training, config: TrainConfig, limits: TrialLimits, device: torch.device, *, seed: int
) -> tuple[Measurement, LossCurve]:
    """Return the timing of a training and the losses it had on the way.

    Raises:
        DivergedError: a loss is not finite.
    """
    timing = Timing(clock=clock_for(device), compiled_graphs=compiled_graph_count)
    measurement = drive(measure_throughput(timing, config, limits, MemoryMeter(device)), timing, training.step)
    return measurement, LossCurve(seed=seed, losses=timing.read_losses(), samples=timing.samples)


def drive(steps: Steps, timing: Timing, step: Callable[[Mark], StepOutcome]) -> Measurement:
    """Take every step that a measurement asks for and return it."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            measurement: Measurement = end.value
            return measurement
        timing.take_step(step)


def measure_throughput(timing: Timing, config: TrainConfig, limits: TrialLimits, memory: MemoryMeter) -> Steps:
    """Warm up, then time blocks of whole optimizer steps; whoever iterates takes the steps.

    Raises:
        DivergedError: a loss is not finite.
        TrainingEndedError: it was thrown in, and not one step had been timed.
    """
    warm_up = yield from _warm_up(timing, backlog_steps(config), limits)
    memory.reset_device()
    memory.sample()
    timing.data_wait_seconds = 0.0
    steps_per_block = max(1, math.ceil(LEAST_BLOCK_SECONDS / max(warm_up.step_seconds, 1e-9)))
    blocks: list[Block] = []
    step_seconds: list[float] = []
    clock = timing.clock
    began = clock.now()
    ended = False
    while not ended and not _enough(blocks, clock.now() - began, limits.measure_seconds):
        block, intervals, ended = yield from _time_block(timing, steps_per_block)
        if block is not None:
            blocks.append(block)
            step_seconds += intervals
        memory.sample()
        timing.read_losses()
    if not blocks:
        raise TrainingEndedError
    return Measurement(
        blocks=tuple(blocks),
        step_seconds=tuple(step_seconds),
        data_wait_seconds=timing.data_wait_seconds,
        steady=warm_up.steady,
        warmup_steps=warm_up.steps,
        warmup_seconds=warm_up.seconds,
        compile_seconds=warm_up.compile_seconds,
        peak_memory=memory.read(),
    )


def finite_or_none(value: float) -> float | None:
    """Return a number as a record holds it: None for what is not finite."""
    return value if math.isfinite(value) else None


def backlog_steps(config: TrainConfig) -> int:
    """Return how many optimizer steps use up what the loader had ready before the first one."""
    if config.num_workers == 0:
        return 0
    return math.ceil((config.num_workers * config.prefetch_factor + 2) / config.gradient_accumulation_steps)


def _warm_up(timing: Timing, backlog: int, limits: TrialLimits) -> Generator[None, None, _WarmUp]:
    clock = timing.clock
    began = clock.now()
    durations: list[float] = []
    graphs = timing.compiled_graphs()
    compile_steps = 0
    quiet_steps = 0
    while True:
        before = clock.now()
        yield
        clock.synchronize()
        durations.append(clock.now() - before)
        quiet_steps += 1
        if timing.compiled_graphs() != graphs:
            graphs, quiet_steps = timing.compiled_graphs(), 0
            compile_steps = len(durations)
        steady = quiet_steps >= max(LEAST_WARMUP_STEPS, backlog) and _settled(durations[compile_steps:])
        # The first step also initialises kernels and the optimizer's state; only the rest counts against the cap.
        spent = sum(durations[max(1, compile_steps) :])
        if steady or (quiet_steps >= 1 and spent >= limits.warmup_cap_seconds):
            break
    timing.read_losses()
    typical = statistics.median(durations[-_WINDOW:])
    compiling = sum(durations[:compile_steps]) - compile_steps * typical
    return _WarmUp(
        steps=len(durations),
        seconds=clock.now() - began,
        compile_seconds=max(0.0, compiling),
        step_seconds=typical,
        steady=steady,
    )


def _settled(durations: list[float]) -> bool:
    """Return whether the last steps take as long as the ones before them, within 5 % or three times their scatter."""
    if len(durations) < LEAST_WARMUP_STEPS:
        return False
    late = durations[-_WINDOW:]
    early = durations[-2 * _WINDOW : -_WINDOW] or durations[1:]
    middle = statistics.median(late)
    scatter = statistics.median(abs(value - middle) for value in late)
    return abs(statistics.median(early) - middle) <= max(STEADY_TOLERANCE * middle, 3 * scatter)


def _time_block(timing: Timing, steps: int) -> Generator[None, None, tuple[Block | None, list[float], bool]]:
    """Return the block and the seconds of its steps, and whether the training ended in it; None for an empty one."""
    clock = timing.clock
    clock.synchronize()
    clock.take_intervals()
    taken, samples, ended = 0, timing.samples, False
    began = clock.now()
    clock.mark()
    while taken < steps and not ended:
        try:
            yield
        except TrainingEndedError:
            ended = True
        else:
            taken += 1
            clock.mark()
    clock.synchronize()
    seconds = clock.now() - began
    if taken == 0:
        return None, [], ended
    return (
        Block(optimizer_steps=taken, samples=timing.samples - samples, seconds=seconds),
        clock.take_intervals(),
        ended,
    )


def _enough(blocks: list[Block], elapsed: float, limit: float) -> bool:
    if len(blocks) < LEAST_BLOCKS:
        # One very long step is a measurement too; three would overrun the trial.
        return bool(blocks) and elapsed >= 2 * limit
    if elapsed >= limit:
        return True
    rates = [block.samples / block.seconds for block in blocks]
    mean = statistics.fmean(rates)
    half_width = 1.96 * statistics.stdev(rates) / math.sqrt(len(rates))
    return len(blocks) >= PRECISE_BLOCKS and half_width <= PRECISION * mean
