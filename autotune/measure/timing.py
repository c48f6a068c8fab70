"""A measurement in progress: its clock, what has to settle before it, and what the steps left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from autotune.engine.compilation import compile_seconds, compiled_graph_count
from autotune.engine.device import on_accelerator, reserved_bytes
from autotune.engine.loop import Mark, StepOutcome
from autotune.measure.clock import Clock, PausableClock, clock_for
from autotune.measure.hopeless import Phase
from autotune.measure.speed_reference import time_reference
from autotune.records.measurement import Interference

_CUDA_LOAD_SECONDS = 2.0
"""A GPU's clock takes about this long to find its level under load."""


class DivergedError(Exception):
    """A loss was not finite.

    Attributes:
        step: the optimizer step, counted from 0.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss is not finite at optimizer step {step}")
        self.step = step


class InterferenceReader(Protocol):
    """Says what else goes on."""

    def start(self) -> None:
        """Begin an interval."""
        ...

    def read(self) -> Interference:
        """Return what happened since its beginning, and begin the next one."""
        ...


class Progress(Protocol):
    """Told what a measurement is at."""

    def enter(self, phase: Phase) -> None:
        """Hear what begins."""
        ...

    def end_step(self, seconds: float) -> None:
        """Hear how long a step took, without the wait for its batch."""
        ...

    def halt(self) -> None:
        """Stop what this process has started, where it takes turns with another one."""
        ...

    def rest(self) -> float:
        """Let the other one of a pair go on, and return after how many seconds; 0 where there is none."""
        ...

    def go_on(self) -> None:
        """Let what was stopped go on."""
        ...


@dataclass
class Timing:
    """A measurement in progress.

    Attributes:
        clock: reads time.
        compiled_graphs: how many graphs have been compiled so far.
        compile_seconds: what compiling has taken so far.
        watched: reads what has to stand still before anything is timed, by what it is.
        load_seconds: how long the device must work before its clock is trusted.
        interference: says what else goes on during a block; None to leave it out.
        canary: seconds of a fixed piece of work; None to leave it out.
        losses: loss of each step not read yet, on the device.
        samples: samples trained on.
        steps: taken.
        smaller_steps: those, counted from 0, that were of fewer samples than any before, and their wait for the loader.
        data_wait_seconds: time spent waiting for the loader.
        progress: told what the measurement is at; None where nobody asks.
        read_ranks: what each of several processes took by itself between the last two looks at the clock.
        phase: what a step is part of.
    """

    clock: Clock
    compiled_graphs: Callable[[], int]
    compile_seconds: Callable[[], float] = float
    watched: Callable[[], Mapping[str, float | None]] = dict
    load_seconds: float = 0.0
    interference: InterferenceReader | None = None
    canary: Callable[[], float] | None = None
    losses: list[Tensor] = field(default_factory=list)
    samples: int = 0
    steps: int = 0
    smaller_steps: list[tuple[int, float]] = field(default_factory=list)
    data_wait_seconds: float = 0.0
    progress: Progress | None = None
    read_ranks: Callable[[], tuple[float, ...]] = tuple
    phase: Phase = Phase.MEASURING
    _values: list[float] = field(default_factory=list)
    _fewest_samples: int | None = None
    _waited_seconds: float = 0.0

    def aside_seconds(self) -> float:
        """Return how long the clock has stood still for something else."""
        return self.clock.aside_seconds if isinstance(self.clock, PausableClock) else 0.0

    def take_step(self, step: Callable[[Mark], StepOutcome]) -> StepOutcome:
        """Take one step, note what it was and return it."""
        began = self.clock.now()

        def note(phase: str) -> None:
            if phase == "data":
                self.data_wait_seconds += self.clock.now() - began
                self.enter(self.phase)

        outcome = step(note)
        self.record_step(outcome.loss, outcome.samples)
        return outcome

    def record_step(self, loss: Tensor, samples: int, *, data_wait_seconds: float = 0.0) -> None:
        """Note a step that has been taken.

        Args:
            loss: scalar on the device.
            samples: trained on.
            data_wait_seconds: for its batches, where that is not noted already.
        """
        self.losses.append(loss)
        self.samples += samples
        self.data_wait_seconds += data_wait_seconds
        waited, self._waited_seconds = self.data_wait_seconds - self._waited_seconds, self.data_wait_seconds
        if self._fewest_samples is not None and samples < self._fewest_samples:
            self.smaller_steps.append((self.steps, waited))
        self._fewest_samples = min(samples, self._fewest_samples or samples)
        self.steps += 1

    def enter(self, phase: Phase) -> None:
        """Tell what begins."""
        if self.progress is not None:
            self.progress.enter(phase)

    def forget_waits(self) -> None:
        """Count the time spent waiting for the loader from here on."""
        self.data_wait_seconds = self._waited_seconds = 0.0

    def end_step(self, seconds: float) -> None:
        """Tell that a step of the warm-up took so long without the wait for its batch, which is now waited for."""
        self.phase = Phase.STEPPING
        if self.progress is not None:
            self.progress.end_step(seconds)

    def halt(self) -> None:
        """Stop loader workers at the end of a block, where a pair takes turns: they would get ahead."""
        if self.progress is not None:
            self.progress.halt()

    def rest(self) -> float:
        """Let the other one of a pair go on between two blocks, and return after how many seconds."""
        return 0.0 if self.progress is None else self.progress.rest()

    def go_on(self) -> None:
        """Let loader workers go on."""
        if self.progress is not None:
            self.progress.go_on()

    def read_losses(self) -> tuple[float, ...]:
        """Return all losses as numbers.

        Raises:
            DivergedError: one is not finite.
        """
        # Each loss is read once: a pause between blocks that grows would let the loader's workers get ahead.
        known = len(self._values)
        self._values += [float(loss) for loss in self.losses]
        self.losses.clear()
        for step, value in enumerate(self._values[known:], start=known):
            if not math.isfinite(value):
                raise DivergedError(step)
        return tuple(self._values)


def make_timing(
    device: torch.device,
    *,
    clock: Clock | None = None,
    read_scale: Callable[[], float | None] = lambda: None,
    interference: InterferenceReader | None = None,
    progress: Progress | None = None,
    read_ranks: Callable[[], tuple[float, ...]] = tuple,
) -> Timing:
    """Return the timing of a training on a device.

    Args:
        device: where it runs.
        clock: None for the device's own.
        read_scale: the loss scale now; None without one.
        interference: says what else goes on.
        progress: told what the measurement is at.
        read_ranks: what each of several processes took by itself, in seconds; nothing with one.
    """

    def read_watched() -> dict[str, float | None]:
        reserved = reserved_bytes(device) if on_accelerator(device) else None
        return {"the device's memory": reserved, "the loss scale": read_scale()}

    return Timing(
        clock=clock or clock_for(device),
        compiled_graphs=compiled_graph_count,
        compile_seconds=compile_seconds,
        watched=read_watched,
        load_seconds=_CUDA_LOAD_SECONDS if device.type == "cuda" else 0.0,
        interference=interference,
        progress=progress,
        read_ranks=read_ranks,
        canary=lambda: time_reference(device),
    )
