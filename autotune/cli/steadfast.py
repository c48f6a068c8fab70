"""A console whose failures are its own: no training ends because its terminal or its reader has gone."""

from __future__ import annotations

import sys
from collections.abc import Callable

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


def steadfast_console() -> SteadfastConsole:
    """Return a console on stderr as it is now, otherwise like `terminal.talk_console`."""
    return SteadfastConsole(file=sys.stderr, highlight=False, emoji=False, soft_wrap=not sys.stderr.isatty())


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
