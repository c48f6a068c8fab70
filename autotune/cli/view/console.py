"""Consoles whose failures are their own: nothing ends because its terminal or its reader has gone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

from autotune.cli.view.refresh_thread import DRAWING

_is_quiet = False


def be_quiet(wanted: bool) -> None:
    """Have nothing said from now on but answers and errors; or all of it again."""
    global _is_quiet
    _is_quiet = wanted


class RaisingConsole(Console):
    """A console that raises when nobody reads it any more; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Raise what happened, for `attempt`, or for a command that prints a result, to deal with.

        Raises:
            BrokenPipeError: always; it is called while one is handled.
        """
        raise


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; one that is missing or closed is none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def result_console() -> Console:
    """Return the console for results; plain and unwrapped in a pipe, whose reader may go: a BrokenPipeError."""
    return RaisingConsole(highlight=False, emoji=False, soft_wrap=not is_terminal(sys.stdout))


def talk_console(*, is_error: bool = False) -> Console:
    """Return the console for everything else, on stderr as it is when something is said.

    Args:
        is_error: what is said is an error, which is said to those who want quiet too.
    """
    return RaisingConsole(
        stderr=True,
        highlight=False,
        emoji=False,
        soft_wrap=not is_terminal(sys.stderr),
        quiet=_is_quiet and not is_error,
    )


def view_console() -> RaisingConsole:
    """Return the console for talk beside what runs, on stderr as it is now: it stays there when stderr is exchanged."""
    return RaisingConsole(
        file=sys.stderr, highlight=False, emoji=False, soft_wrap=not is_terminal(sys.stderr), quiet=_is_quiet
    )


def attempt(console: Console, act: Callable[[], object]) -> None:
    """Write something; what cannot be written is forgotten, and where nobody is left to read, nothing is tried again.

    Args:
        console: that is written to.
        act: writes.
    """
    with DRAWING:
        try:
            act()
        except Exception as error:
            # rich keeps what it could not write, and would try it again with everything that comes.
            console.quiet = True
            console.control()
            console.quiet = _is_final(error)


def _is_final(error: Exception) -> bool:
    is_closed = isinstance(error, ValueError) and "closed file" in str(error)
    return is_closed or (isinstance(error, OSError) and not isinstance(error, BlockingIOError))
