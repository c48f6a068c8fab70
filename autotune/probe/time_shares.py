"""How long the parts of a probe may take: a short search wants a short probe, and no part may hang it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LOADER_SECONDS = 1.5
"""To see what a loader does alone."""

MEMORY_SECONDS = 8.0
"""To follow a step's memory in every mode."""

MEMORY_GRACE = 1.5
"""A look at the memory that has not ended after this many times its time is given up."""

SLOW_STEP_SECONDS = 5.0
"""A training with longer steps is neither profiled nor given twice the samples: that alone would take a minute."""

_FULL_SECONDS = 120.0
"""A probe that may take this long gives every part its full time."""

_LAST_FRACTION = 0.6
"""Of a probe's time; what is not begun by then is left out."""


class OutOfTimeError(BaseException):
    """A part of a probe took too long; no `except Exception` of the user's catches it."""


class TimeShares:
    """The time of one probe.

    Args:
        started: `time.monotonic()` when its process was started.
        limit_seconds: when it is killed.
    """

    def __init__(self, started: float, limit_seconds: float) -> None:
        self._started, self._limit = started, limit_seconds

    def grant(self, seconds: float) -> float:
        """Return how long a part may take that takes so many seconds at its best; 0 when it is to be left out."""
        if time.monotonic() - self._started > _LAST_FRACTION * self._limit:
            return 0.0
        return seconds * min(1.0, self._limit / _FULL_SECONDS)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what runs inside after a while; outside of the main thread there is no limit.

    Raises:
        OutOfTimeError: the time is up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, give_up)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody's own alarm, which may be due by now
            signal.setitimer(signal.ITIMER_REAL, left, interval)
