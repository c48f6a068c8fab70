"""Talk beside what runs: a line every now and then in a pipe, a block that is drawn anew on a terminal.

    search or training ── say ──▶ view, which keeps it
                                   └── every second, on a thread of its own ──▶ terminal

What runs never waits for the terminal, and nothing that happens to the terminal can end it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from autotune.cli.view.console import attempt, is_terminal
from autotune.cli.view.refresh_thread import RefreshThread
from autotune.cli.view.stdout_proxy import printed_above
from autotune.cli.view.terminal import printable

HEARTBEAT_SECONDS = 60.0
"""A pipe gets a sign of life so often while nothing happens."""

_REFRESH_SECONDS = 1.0


class LineView:
    """Lines in a pipe.

    Attributes:
        console: that is written to.
        wake: has `tick` called soon.

    Args:
        console: to write to.
        pulse: says what is due; called every second, before what was said is written.
    """

    def __init__(self, console: Console, pulse: Callable[[], None]) -> None:
        self.console = console
        self.wake: Callable[[], None] = lambda: None
        self._pulse = pulse
        self._unsaid: deque[Callable[[], Text]] = deque()

    def say(self, text: str, *, style: str = "") -> None:
        """Have a line written soon; what users and files put into it is never read as markup."""
        self.say_later(lambda: text, style=style)

    def say_later(self, describe: Callable[[], str], *, style: str = "") -> None:
        """Have a line written whose words are found only where it is written.

        So no figure can be so odd that putting it into words ends what it is a figure of.
        """
        self._unsaid.append(lambda: Text(printable(describe()), style=style))
        self.wake()

    def tick(self) -> None:
        """Write what is to be said."""
        self._pulse()
        while self._unsaid:
            make = self._unsaid.popleft()
            attempt(self.console, lambda: self.console.print(make()))  # noqa: B023 - it is called here

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Write inside, and what is left to be said at the end."""
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Write what is still to be said; on a terminal, take the block down."""
        self.tick()


class BlockView(LineView):
    """A block of a few lines on a terminal, which is drawn anew every second; what is said goes above it.

    Args:
        console: of the terminal.
        draw: returns the block's lines for a width in cells.
    """

    def __init__(self, console: Console, draw: Callable[[int], Sequence[RenderableType]]) -> None:
        super().__init__(console, lambda: None)
        self._draw = draw
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self.draw,
        )

    def tick(self) -> None:
        """Write what is to be said, and draw the block."""
        super().tick()
        attempt(self.console, self._live.refresh)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Show the block inside, what others print above it, and take it down after."""
        attempt(self.console, lambda: self._live.start(refresh=True))
        with super().opened(), printed_above(self.console):
            yield

    def close(self) -> None:
        """Write what is still to be said, and take the block down."""
        super().close()
        attempt(self.console, self._live.stop)

    def draw(self) -> Group:
        """Return the block as it is now."""
        width = max(1, self.console.width - 1)
        lines = self._draw(width)
        for line in lines:
            if isinstance(line, Text):
                line.truncate(width, overflow="ellipsis")
        return Group(*lines)


def can_redraw(console: Console) -> bool:
    """Return whether stderr is a terminal on which a block can be drawn anew."""
    return is_terminal(sys.stderr) and not console.is_dumb_terminal and not console.quiet


def has_plain_signs(console: Console) -> bool:
    """Return whether the terminal's encoding has no signs but ASCII's."""
    return not console.encoding.lower().startswith("utf")


@contextmanager
def refreshed(view: LineView) -> Iterator[None]:
    """Show a view inside, written to by a thread of its own; it is closed at the end."""
    with view.opened(), RefreshThread(view.tick, seconds=_REFRESH_SECONDS) as thread:
        view.wake = thread.wake
        yield
