"""Timing of something short that can be run again and again. A callable in, seconds out.

    | run | run run ... run | run run ... run |     synchronised at each bar
     first     repetition        repetition         the fastest repetition counts

Everything that disturbs a repetition makes it longer: the fastest one is nearest to what the device can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from autotune.engine.device import synchronize

LEAST_REPETITIONS = 3
"""Made also when no time is left."""

# One timed repetition is at least this long, so that reading the clock (tens of nanoseconds) or waiting for a GPU (tens
# of microseconds) does not count. On a busy machine the shorter one has the better chance to go undisturbed.
_REPETITION_SECONDS = {"cpu": 0.0002, "cuda": 0.005}
# A whole period in which the kernel shares out a CPU quota (cgroups: 100 ms), so that each repetition has its part of
# being held; and so long that waiting for a GPU after each leaves it no time to cool down.
_SUSTAINED_REPETITION_SECONDS = 0.1


def best_seconds(run: Callable[[], object], device: torch.device, share_seconds: float) -> float:
    """Return the time of one run in the fastest repetition; a repetition makes enough runs to be timed well.

    Args:
        run: called without arguments; it may leave work queued on the device.
        device: waited for after each repetition.
        share_seconds: wall time to spend, about; at least a few repetitions are made.
    """
    until = perf_counter() + share_seconds
    first = time_repetition(run, device, 1)
    runs = max(1, math.ceil(_REPETITION_SECONDS[device.type] / max(first, 1e-9)))
    best, repetitions = first, 1
    while repetitions < LEAST_REPETITIONS or perf_counter() < until:
        best = min(best, time_repetition(run, device, runs) / runs)
        repetitions += 1
    return best


def sustained_seconds(run: Callable[[], object], device: torch.device, window_seconds: float) -> float:
    """Return the time of one run in the median repetition of the last half of a window with nothing else to do.

    Args:
        run: as for `best_seconds`.
        device: waited for after each repetition.
        window_seconds: wall time to spend, about; the chip heats up in its first half.
    """
    began = perf_counter()
    runs = max(1, math.ceil(_SUSTAINED_REPETITION_SECONDS / max(time_repetition(run, device, 1), 1e-9)))
    late: list[float] = []
    while not late or perf_counter() - began < window_seconds:
        is_late = perf_counter() - began >= window_seconds / 2
        seconds = time_repetition(run, device, runs)
        if is_late:
            late.append(seconds / runs)
    return median(late)


def time_repetition(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the seconds from an idle device, through a number of runs, to an idle device."""
    synchronize(device)
    start = perf_counter()
    for _ in range(runs):
        run()
    synchronize(device)
    return perf_counter() - start
