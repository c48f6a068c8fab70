"""What all commands share: the result on stdout, all talk on stderr, errors as one to three lines, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.text import Text

from autotune.errors import AutotuneError, TargetError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def result_console() -> Console:
    """Return the console for results; plain and unwrapped in a pipe."""
    return Console(highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def talk_console() -> Console:
    """Return the console for everything else."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=not sys.stderr.isatty())


def say(text: str, *, style: str = "") -> None:
    """Print one line of talk; what users and files put into it is never read as markup."""
    talk_console().print(Text(printable(text), style=style))


def warn(text: str) -> None:
    """Print a warning."""
    say(f"warning: {text}", style="yellow")


def printable(text: str) -> str:
    """Return text without control characters other than line ends."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def print_json(text: str) -> None:
    """Print JSON on stdout, past any styling."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def print_error_json(code: int, kind: str, message: str, hint: str) -> None:
    """Print an error on stdout as JSON."""
    fields = {"code": code, "kind": kind, "message": message, "hint": hint}
    print_json(json.dumps({"error": fields}, indent=2))


def user_traceback(error: BaseException) -> str:
    """Return the traceback of what the user's code raised, without this package's own frames."""
    own = str(Path(__file__).parents[1])
    text = traceback.TracebackException.from_exception(error)
    text.stack = traceback.StackSummary.from_list([f for f in text.stack if not f.filename.startswith(own)])
    return "".join(text.format()).rstrip()


@contextmanager
def reported_errors(*, as_json: bool) -> Iterator[None]:
    """Turn an AutotuneError into its message and exit code; AUTOTUNE_DEBUG=1 shows the traceback instead."""
    try:
        yield
    except AutotuneError as error:
        if os.environ.get("AUTOTUNE_DEBUG") == "1":
            raise
        if as_json:
            print_error_json(error.exit_code, type(error).__name__, error.message, error.hint)
        else:
            if isinstance(error, TargetError) and error.__cause__ is not None:
                say(user_traceback(error.__cause__))
            say(f"error: {error.message}", style="red")
            if error.hint:
                say(f"  {error.hint}")
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        # The reader has gone (`| head`): point stdout at nothing, so that closing it raises no second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


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
        return self.signal_number is not None

    def exit_if_set(self) -> None:
        """Exit with 128 + the signal's number if one came."""
        if self.signal_number is not None:
            raise typer.Exit(128 + self.signal_number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_number is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal_number = number
        if self._raised is not None:
            raise self._raised


@contextmanager
def stop_on_signals(*more: int) -> Iterator[StopFlag]:
    """Catch SIGINT, SIGTERM, SIGHUP and any further signals, and restore what was there.

    A hang-up that is ignored already stays so: that is what `nohup` asks for.
    """
    flag = StopFlag()
    numbers = [number for number in (*STOP_SIGNALS, *more) if not _is_ignored_hangup(number)]
    before = {number: signal.signal(number, flag._receive) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored_hangup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
