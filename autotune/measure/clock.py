"""Clocks: wall time with the device synchronised, and the time of single steps without waiting for it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Protocol

import torch

from autotune.engine.device import synchronize


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
    """For a GPU: steps are timed by events in the stream, read after the device has caught up.

    Args:
        device: the GPU; None for the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def now(self) -> float:
        """Return seconds of the monotonic performance counter."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the device."""
        synchronize(self._device)

    def mark(self) -> None:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def take_intervals(self) -> list[float]:
        """Return the seconds between the events, and start anew."""
        events, self._events = self._events, []
        return [early.elapsed_time(late) / 1000.0 for early, late in pairwise(events)]


class PausableClock:
    """A clock that stands still while a training does something else, such as validating.

    Attributes:
        aside_seconds: how long it has stood still.
    """

    def __init__(self, inner: Clock) -> None:
        self.aside_seconds = 0.0
        self._inner = inner
        self._since: float | None = None
        self._aside_at_marks: list[float] = []

    def pause(self) -> None:
        """Stand still; nothing when it does already."""
        if self._since is None:
            self._inner.synchronize()
            self._since = self._inner.now()

    def resume(self) -> None:
        """Go on; nothing when it does already."""
        if self._since is not None:
            self._inner.synchronize()
            self.aside_seconds += self._inner.now() - self._since
            self._since = None

    def now(self) -> float:
        """Return seconds without those spent aside."""
        return (self._inner.now() if self._since is None else self._since) - self.aside_seconds

    def synchronize(self) -> None:
        """Wait for the device."""
        self._inner.synchronize()

    def mark(self) -> None:
        """Note the end of a step."""
        self._inner.mark()
        self._aside_at_marks.append(self.aside_seconds)

    def take_intervals(self) -> list[float]:
        """Return the seconds between the marks without those spent aside, and start anew."""
        marks, self._aside_at_marks = self._aside_at_marks, []
        pairs = zip(self._inner.take_intervals(), pairwise(marks), strict=True)
        return [max(0.0, seconds - (late - early)) for seconds, (early, late) in pairs]


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
