"""How a command is ended: by a signal that it heeds, by an alarm, and past its deadline by a watchdog.

The watchdog is the last guard over a search that hangs itself. Trials that hang are ended by the search long before;
what was found so far is on disk at any moment, so nothing is written here, and the trial's processes are ended by their
keeper.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import typer

from autotune.train.recovery.child import report_signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GRACE_SECONDS = 10.0
"""A command may take this much longer, or a hundredth of its time if that is more."""

_LOOK_SECONDS = 0.25
_SHOW_CURSOR = b"\x1b[?25h"


class StopFlag:
    """Set by the first signal; a second Ctrl-C ends the process at once.

    Other signals that come again do not: a job's scheduler announces the end of its time, and then asks for it, while
    the first is still being heeded.

    Attributes:
        signal_number: the signal that came; None before one has.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._raised: type[BaseException] | None = None
        self._numbers: tuple[int, ...] = ()
        self._users: dict[int, Any] = {}

    def hold(self, *numbers: int) -> None:
        """Take signals, now and whenever the user's code is found to have taken them; its handlers are called too."""
        self._numbers = numbers
        self._take_back()
        self._users.clear()

    @contextmanager
    def raising(self, kind: type[BaseException]) -> Iterator[None]:
        """Have the first signal raise something inside, or on entry if it has come already."""
        if self.signal_number is not None:
            raise kind
        self._raised = kind
        try:
            yield
        finally:
            self._raised = None

    def __call__(self) -> bool:
        """Return whether the user asked to stop."""
        self._take_back()
        return self.signal_number is not None

    def exit_if_set(self) -> None:
        """Exit with 128 + the signal's number if one came."""
        if self.signal_number is not None:
            raise typer.Exit(128 + self.signal_number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        report_signal(number)
        if self.signal_number is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal_number = number
        user = self._users.get(number)
        if callable(user) and user is not signal.default_int_handler:
            with suppress(SystemExit, KeyboardInterrupt):  # it ends all the same, but not in the middle of a step
                user(number, _frame)
        if self._raised is not None:
            raise self._raised

    def _take_back(self) -> None:
        for number in self._numbers:
            found = signal.getsignal(number)
            if found != self._receive:
                self._users[number] = found
                signal.signal(number, self._receive)


@contextmanager
def stop_on_signals(*more: int, signals: Sequence[int] = STOP_SIGNALS) -> Iterator[StopFlag]:
    """Catch some signals, SIGINT, SIGTERM and SIGHUP as a rule, and any further ones, and restore what was there.

    A hang-up that is ignored already stays so: that is what `nohup` asks for.
    """
    flag = StopFlag()
    numbers = [number for number in (*signals, *more) if not _is_ignored_hangup(number)]
    before = {number: signal.getsignal(number) for number in numbers}
    flag.hold(*numbers)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored_hangup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def ended_by_alarm(seconds: float | None, kind: type[BaseException]) -> Iterator[None]:
    """Have something raised inside after so many seconds; an alarm of the user's own is left alone instead."""
    is_taken = signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN)
    if seconds is None or is_taken or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise kind

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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
