"""A workload's step taken apart: its phases, the same without its loader, a pass over twice the samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from autotune.engine.loop import Training
from autotune.engine.windows import ResidentWindows, Window
from autotune.measure.clock import Clock
from autotune.measure.warmup import SLOW_STEP_SECONDS
from autotune.records.facts import StepPhases

_PHASES = ("data", "copy", "forward", "backward", "optimizer")
_PHASES_SECONDS = 1.0
_MOST_STEPS = 20
_PASS_SECONDS = 0.3
_SLOWEST_PASS_SECONDS = 3.0


def time_phases(training: Training, clock: Clock) -> StepPhases:
    """Return the phases of a step.

    Each phase ends with a mark in the device's stream, read when all steps are over: nothing is waited for. On a GPU
    the wait for data is the time in which it had nothing to do because the host waited. The first step is a warm-up;
    of a slow training it is all there is.
    """
    names: list[str] = []

    def note(phase: str) -> None:
        names.append(phase)
        clock.mark()

    def take_steps(least: int, seconds: float) -> tuple[int, float]:
        names.clear()
        clock.synchronize()
        clock.take_intervals()
        began, steps = clock.now(), 0
        clock.mark()
        while steps < least or (clock.now() - began < seconds and steps < _MOST_STEPS):
            training.step(note)
            steps += 1
        clock.synchronize()
        return steps, clock.now() - began

    steps, seconds = take_steps(1, 0.0)
    if seconds < SLOW_STEP_SECONDS:
        steps, _ = take_steps(2, _PHASES_SECONDS)
    totals = dict.fromkeys(_PHASES, 0.0)
    for name, seconds in zip(names, clock.take_intervals(), strict=True):
        totals[name] += seconds
    return StepPhases(
        data_wait_seconds=totals["data"] / steps,
        copy_seconds=totals["copy"] / steps,
        forward_seconds=totals["forward"] / steps,
        backward_seconds=totals["backward"] / steps,
        optimizer_seconds=totals["optimizer"] / steps,
    )


@dataclass(frozen=True)
class ResidentSteps:
    """Steps on a batch that is on the device already.

    Attributes:
        seconds: of one step.
        enqueue_fraction: share of it in which the host handed the work over; 1 on a CPU, which does it at once.
    """

    seconds: float
    enqueue_fraction: float


def keep_resident(training: Training) -> None:
    """Let a training take its next batch again and again, on the device."""
    window = training.windows.next_window()
    training.windows = ResidentWindows(window, [training.place(batch) for batch in window.batches])


def time_resident_steps(training: Training, clock: Clock) -> ResidentSteps:
    """Return the time of a step without the loader and the copy; the training keeps the resident batch.

    The first step is a warm-up; of a slow training it is all there is.
    """
    keep_resident(training)
    first = _time_resident(training, clock, least=1, seconds=0.0)
    slow = first.seconds >= SLOW_STEP_SECONDS
    return first if slow else _time_resident(training, clock, least=2, seconds=_PHASES_SECONDS)


def _time_resident(training: Training, clock: Clock, *, least: int, seconds: float) -> ResidentSteps:
    steps, enqueued, whole = 0, 0.0, 0.0
    while steps < least or (whole < seconds and steps < _MOST_STEPS):
        clock.synchronize()
        began = clock.now()
        training.step()
        enqueued += clock.now() - began
        clock.synchronize()
        whole += clock.now() - began
        steps += 1
    return ResidentSteps(whole / steps, min(1.0, enqueued / whole) if whole > 0 else 1.0)


def measure_elasticity(
    training: Training,
    samples: Sequence[Any],
    micro_batch_size: int,
    clock: Clock,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
) -> float | None:
    """Return log2 of the time of a pass over twice the micro batch over that of one; None when it cannot be tried.

    1 means that time grows with the samples, 0 that they are free: the device has time to spare for more of them.

    Args:
        training: its data are replaced.
        samples: of the dataset; repeated where there are too few.
        micro_batch_size: of one pass.
        clock: of the device.
        collate: None for PyTorch's own.
    """
    if not samples:
        return None
    windows = []
    for size in (micro_batch_size, 2 * micro_batch_size):
        batch = (collate or default_collate)([samples[place % len(samples)] for place in range(size)])
        window = Window(batches=[batch], counts=[size], ends_epoch=False)
        windows.append(ResidentWindows(window, [training.place(batch)]))
    seconds: tuple[list[float], list[float]] = ([], [])
    warm = _time_pass(training, windows[1], clock)
    if warm >= SLOW_STEP_SECONDS:  # as good as any other pass that takes so long
        one = _time_pass(training, windows[0], clock)
        return math.log2(warm / one) if one > 0 else None
    while sum(map(sum, seconds)) < 2 * _PASS_SECONDS and len(seconds[1]) < _MOST_STEPS:
        for place in (0, 1):
            seconds[place].append(_time_pass(training, windows[place], clock))
        if seconds[1][-1] > _SLOWEST_PASS_SECONDS:
            break
    one, two = (statistics.median(times) for times in seconds)
    return math.log2(two / one) if one > 0 and two > 0 else None


def _time_pass(training: Training, windows: ResidentWindows, clock: Clock) -> float:
    """Return the seconds of forward and backward of one step."""
    names: list[str] = []

    def note(phase: str) -> None:
        names.append(phase)
        clock.mark()

    training.windows = windows
    clock.synchronize()
    clock.mark()
    training.step(note)
    clock.synchronize()
    times = zip(names, clock.take_intervals(), strict=True)
    return sum(seconds for name, seconds in times if name in ("forward", "backward"))
