"""Notice that this process did not run for a while: it was stopped, or the whole machine slept."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SECONDS = 5.0
"""A shorter gap may be a busy machine's."""


def read_clock() -> float:
    """Return seconds on a clock that goes on while the machine is suspended, which `time.monotonic()` does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SleepWatch:
    """Counts the time between looks that should come many times a second.

    Args:
        clock: in seconds.

    Attributes:
        seconds: that were slept so far.
    """

    def __init__(self, clock: Callable[[], float] = read_clock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._last = clock()

    def look(self) -> None:
        """Take notice of the time."""
        now = self._clock()
        if now - self._last >= LEAST_SECONDS:
            self.seconds += now - self._last
        self._last = now
