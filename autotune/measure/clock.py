"""Clocks: wall time with the device synchronised, and the time of single steps without waiting for it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Protocol

import torch


class Clock(Protocol):
    """Reads time; a fake one makes a measurement exact in a test."""

    def now(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""
        ...

    def mark(self) -> None:
        """Note the end of a step without waiting for the device."""
        ...

    def take_intervals(self) -> list[float]:
        """Return the seconds between the marks since the last call, and start anew; the device must be synchronised."""
        ...


class HostClock:
    """For a CPU: everything has happened when a call returns."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def now(self) -> float:
        """Return seconds of the monotonic performance counter."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: a CPU does its work before a call returns."""

    def mark(self) -> None:
        """Note the time."""
        self._marks.append(time.perf_counter())

    def take_intervals(self) -> list[float]:
        """Return the seconds between the marks, and start anew."""
        marks, self._marks = self._marks, []
        return [late - early for early, late in pairwise(marks)]


class CudaClock:
    """For a GPU: steps are timed by events in the stream, read after the device has caught up."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def now(self) -> float:
        """Return seconds of the monotonic performance counter."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.cuda.synchronize()

    def mark(self) -> None:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def take_intervals(self) -> list[float]:
        """Return the seconds between the events, and start anew."""
        events, self._events = self._events, []
        return [early.elapsed_time(late) / 1000.0 for early, late in pairwise(events)]


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
