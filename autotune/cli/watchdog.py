"""The last guard over a command with a deadline: it ends one that hangs itself, past its deadline or a signal.

Trials that hang are ended by the search long before. What was found so far is on disk at any moment, so nothing is
written here; the trial's processes are ended by their keeper.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune.cli.terminal import StopFlag

GRACE_SECONDS = 10.0
"""A command may take this much longer, or a hundredth of its time if that is more."""

_LOOK_SECONDS = 0.25
_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def ended_in_time(
    seconds: float, stop: StopFlag, *, grace_seconds: float = GRACE_SECONDS, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """End this process if what is done inside takes much longer than it may, or does not heed a signal.

    Args:
        seconds: that it may take.
        stop: tells which signal came.
        grace_seconds: from then on until the end.
        end: ends the process with an exit status.
    """
    done = threading.Event()
    until, grace = time.monotonic() + seconds, max(grace_seconds, seconds / 100)

    def watch() -> None:
        looks = 0  # counted, not timed: while the process is stopped, it cannot end either
        while not done.wait(_LOOK_SECONDS):
            looks = looks + 1 if time.monotonic() >= until or stop.signal_number is not None else 0
            if looks * _LOOK_SECONDS >= grace:
                _say_why(seconds, stop.signal_number)
                end(1 if stop.signal_number is None else 128 + stop.signal_number)
                return

    thread = threading.Thread(target=watch, name="autotune-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say_why(seconds: float, signal_number: int | None) -> None:
    what = f"within {seconds:g} s" if signal_number is None else f"after signal {signal_number}"
    line = f"error: the search did not end {what}: an internal error, please report it; go on with --resume\n"
    try:
        # Past Python's streams, whose locks may be what everything waits for.
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + line.encode())
    except OSError:
        return
