"""What the user's own code prints while a live block is drawn goes above the block, line by line, as it is."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from autotune.cli.view.console import attempt, is_terminal

_LONGEST_LINE = 16384
_RETURN = "\r"


class StdoutProxy(io.TextIOBase):
    """A terminal stream whose whole lines are printed above a block; a line that is overwritten counts as it ends."""

    def __init__(self, console: Console, stream: TextIO) -> None:
        self._console = console
        self._stream = stream
        self._pending = ""
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print the lines that this ends; the rest is kept until its end comes. A forked worker writes as it likes."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._pid:
            return self._stream.write(text)
        *lines, rest = (self._pending + text).split("\n")
        self._pending = f"{_as_it_ends(rest)[-_LONGEST_LINE:]}{_RETURN if rest.endswith(_RETURN) else ''}"
        if lines:
            self._print("\n".join(_as_it_ends(line) for line in lines))
        return len(text)

    def flush(self) -> None:
        """Flush the stream; an unfinished line waits for its end."""
        self._stream.flush()

    def finish(self) -> None:
        """Print what was never ended with a new line."""
        rest, self._pending = _as_it_ends(self._pending), ""
        if rest.strip():
            self._print(rest)

    def fileno(self) -> int:
        """Return the stream's own descriptor."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return that it can be written to."""
        return True

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's own."""
        return self._stream.encoding

    def _print(self, text: str) -> None:
        attempt(self._console, lambda: self._console.print(Text.from_ansi(text), soft_wrap=True))


def _as_it_ends(line: str) -> str:
    """Return what is left of a line that was drawn again and again, as a progress bar of the user's own does."""
    return line.rstrip(_RETURN).rpartition(_RETURN)[2]


@contextmanager
def printed_above(console: Console) -> Iterator[None]:
    """Print what is written to those of stdout and stderr that are terminals above the console's block.

    The console must have been given the true stream: one that looks up `sys.stderr` would write into itself.
    """
    before = sys.stdout, sys.stderr
    proxies = [StdoutProxy(console, stream) if is_terminal(stream) else None for stream in before]
    sys.stdout, sys.stderr = (
        cast(TextIO, proxy) if proxy is not None else stream for proxy, stream in zip(proxies, before, strict=True)
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for proxy in proxies:
            if proxy is not None:
                proxy.finish()
