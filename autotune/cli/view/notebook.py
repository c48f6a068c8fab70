"""A search below a notebook's cell: its lines and its block, drawn anew in the same place at most twice a second."""

from __future__ import annotations

import contextvars
import io
import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from autotune.cli.view.console import attempt
from autotune.cli.view.live import LineView

_LEAST_SECONDS = 0.5
_WIDTH = 100

Output = dict[str, str]
"""The same in several forms, by media type."""


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookView(LineView):
    """What is said, and a block below it, as one output of a cell.

    Args:
        draw: returns the block's lines for a width in cells.
        display: shows an output, and returns what replaces it by another one; None for IPython's.
    """

    def __init__(
        self,
        draw: Callable[[int], Sequence[RenderableType]],
        display: Callable[[Output], Callable[[Output], object]] | None = None,
    ) -> None:
        self._page = io.StringIO()
        super().__init__(_make_console(self._page, wraps=False), lambda: None)
        self._draw, self._display = draw, display or _display
        self._replace: Callable[[Output], object] | None = None
        self._shown, self._shown_at = "", 0.0
        # Below which cell an output goes, IPython reads from the context, which the thread that draws does not have.
        self._context = contextvars.copy_context()

    def tick(self) -> None:
        """Show what was said and the block, if the last time is half a second ago."""
        if time.monotonic() - self._shown_at >= _LEAST_SECONDS:
            super().tick()
            attempt(self.console, lambda: self._context.run(self._show, has_block=True))

    def close(self) -> None:
        """Show what was said, all of it, without the block."""
        super().tick()
        attempt(self.console, lambda: self._context.run(self._show, has_block=False))

    def _show(self, *, has_block: bool) -> None:
        text = self._page.getvalue() + (self._render_block() if has_block else "")
        if text == self._shown:
            return
        output = {
            "text/plain": text.rstrip("\n"),
            "text/html": f'<pre style="white-space:pre-wrap">{escape(text)}</pre>',
        }
        if self._replace is None:
            self._replace = self._display(output)
        else:
            self._replace(output)
        self._shown, self._shown_at = text, time.monotonic()

    def _render_block(self) -> str:
        page, lines = io.StringIO(), self._draw(_WIDTH)
        for line in lines:
            if isinstance(line, Text):
                line.truncate(_WIDTH, overflow="ellipsis")
        _make_console(page, wraps=True).print(Group(*lines))
        return page.getvalue()


def _make_console(page: io.StringIO, *, wraps: bool) -> Console:
    """Return a console that writes plain text; of itself rich would show each line as an output of its own."""
    return Console(
        file=page,
        width=_WIDTH,
        soft_wrap=not wraps,
        force_jupyter=False,
        force_terminal=False,
        highlight=False,
        emoji=False,
    )


def _display(output: Output) -> Callable[[Output], object]:
    from IPython import display

    show: Any = display.display
    handle = show(output, raw=True, display_id=True)
    return lambda other: handle.update(other, raw=True)
