"""Consoles whose failures are their own: nothing ends because its terminal or its reader has gone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

from autotune.cli.ticker import DRAWING


class SteadfastConsole(Console):
    """The console for talk beside a training; rich's own ends the process when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Raise what happened, for `attempt` to deal with.

        Raises:
            BrokenPipeError: always; it is called while one is handled.
        """
        raise


class TalkConsole(SteadfastConsole):
    """The console for talk elsewhere, which nobody has to deal with: it falls silent when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Forget what could not be written, and write nothing again."""
        self.quiet = True
        self.control()


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; one that is missing or closed is none."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def steadfast_console() -> SteadfastConsole:
    """Return a console on stderr as it is now, otherwise like `terminal.talk_console`."""
    return SteadfastConsole(file=sys.stderr, highlight=False, emoji=False, soft_wrap=not is_terminal(sys.stderr))


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
