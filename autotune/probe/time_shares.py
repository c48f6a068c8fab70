"""How long the parts of a probe may take: a short search wants a short probe, and no part may hang it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class ProbePolicy:
    """What a probe takes its time for. All are judgement: a probe of a healthy training ends within a minute.

    Attributes:
        limit_seconds: longest a probe may take.
        measure_seconds: to time the training's own settings.
        machine_seconds: to measure the machine's limits.
        switch_seconds: to try settings for some steps of the running training.
        loader_seconds: to see what a loader does alone.
        memory_seconds: to follow a step's memory in every mode.
        memory_grace: a look at the memory is given up after this many times its seconds, and two steps.
        disk_seconds: to read from the data's disk.
        least_all_reduce_seconds: a probe that measures the machine in less has no time for an all-reduce.
        pause_seconds: to go on to the end of a script's epoch, and as long again for what it does before the next one.
        evaluation_seconds: an evaluation that takes longer is left out of the loss checks.
        slow_step_seconds: a training with longer steps is neither profiled nor given twice the samples, which alone
            would take a minute.
        room_for_twice: share of the memory a probe may use that may be in use before it tries twice the samples.
        full_seconds: a probe that may take this long gives every part its full time, a shorter one in proportion.
        last_fraction: of a probe's time; what is not begun by then is left out.
    """

    limit_seconds: float = 300.0
    measure_seconds: float = 4.0
    machine_seconds: float = 12.0
    switch_seconds: float = 6.0
    loader_seconds: float = 1.5
    memory_seconds: float = 8.0
    memory_grace: float = 1.5
    disk_seconds: float = 1.0
    least_all_reduce_seconds: float = 6.0
    pause_seconds: float = 10.0
    evaluation_seconds: float = 20.0
    slow_step_seconds: float = 5.0
    room_for_twice: float = 0.4
    full_seconds: float = 120.0
    last_fraction: float = 0.6


class OutOfTimeError(BaseException):
    """A part of a probe took too long; no `except Exception` of the user's catches it."""


class TimeShares:
    """The time of one probe.

    Args:
        started: `time.monotonic()` when its process was started.
        limit_seconds: when it is killed.
        policy: what its parts may take at their best.

    Attributes:
        policy: what its parts may take at their best.
    """

    def __init__(self, started: float, limit_seconds: float, policy: ProbePolicy | None = None) -> None:
        self.policy = policy or ProbePolicy()
        self._started, self._limit = started, limit_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Since its process was started."""
        return time.monotonic() - self._started

    def grant(self, seconds: float) -> float:
        """Return how long a part may take that takes so many seconds at its best; 0 when it is to be left out."""
        if self.elapsed_seconds > self.policy.last_fraction * self._limit:
            return 0.0
        return seconds * min(1.0, self._limit / self.policy.full_seconds)

    def grant_pause(self) -> float:
        """Return how long a script may take to its epoch's end, and again for its pause: parts to come keep theirs."""
        left = self.policy.last_fraction * self._limit - self.elapsed_seconds
        return max(0.0, min(self.grant(self.policy.pause_seconds), left / 3))


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
