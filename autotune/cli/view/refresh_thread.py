"""Something done every second beside what runs, so that no process that is forked meanwhile inherits a held lock.

Loader workers are forked from a process in which this thread may be writing. A worker that inherited a stream or a
console in the middle of that would wait for ever at its first `print`: so a fork waits until the writing is over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_LONGEST_WAIT_SECONDS = 2.0


class DrawingLock:
    """Held while something is written to the terminal, by one thread at a time, and never across a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_held_for_fork = False
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _before_fork(self) -> None:
        # A terminal that is stopped (Ctrl-S) may hold it for hours.
        self._is_held_for_fork = self._lock.acquire(timeout=_LONGEST_WAIT_SECONDS)

    def _after_fork(self) -> None:
        if self._is_held_for_fork:
            self._is_held_for_fork = False
            self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._is_held_for_fork = False


DRAWING = DrawingLock()
"""The one of this process."""


class RefreshThread:
    """Calls something every few seconds, and when it is woken, on a thread of its own until the context ends."""

    def __init__(self, act: Callable[[], None], *, seconds: float) -> None:
        self._act = act
        self._seconds = seconds
        self._is_stopped = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune-refresh", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopped = True
        self.wake()
        self._thread.join(_LONGEST_WAIT_SECONDS)

    def wake(self) -> None:
        """Have it called now."""
        self._woken.set()

    def _run(self) -> None:
        while not self._is_stopped:
            self._woken.wait(self._seconds)
            self._woken.clear()
            if not self._is_stopped:
                self._act()
