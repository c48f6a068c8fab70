"""A training as it runs: a live block on a terminal, a line every now and then in a pipe.

    training loop ── show(report) ──▶ view, which keeps it
                                       └── every second, on a thread of its own ──▶ terminal

The training never waits for the terminal, and nothing that happens to the terminal can end it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from autotune.cli.above_block import lines_above
from autotune.cli.steadfast import attempt, steadfast_console
from autotune.cli.terminal import printable
from autotune.cli.ticker import Ticker
from autotune.cli.training_block import Figures, Trend, label, list_block_lines
from autotune.cli.training_words import describe_line, describe_position
from autotune.records.run import StepDown
from autotune.train.report import Report
from autotune.units import format_duration

_LINE_SECONDS = 15.0
_HEARTBEAT_SECONDS = 60.0
_OFTEN_SECONDS = 120.0
"""So long a pipe gets a line every `_LINE_SECONDS`, then one each `_HEARTBEAT_SECONDS`."""

_DRAW_SECONDS = 1.0
_WIDEST = 120


class LineView:
    """A training in a pipe: a line every now and then, also while nothing is reported.

    Attributes:
        wake: has `tick` called soon.
    """

    def __init__(self, console: Console) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._console = console
        self._began = self._reported = time.monotonic()
        self._spoke: float | None = None
        self._promised: float | None = None
        self._report: Report | None = None
        self._is_new = False
        self._unsaid: deque[Callable[[], Text]] = deque()

    def promise(self, samples_per_second: float | None) -> None:
        """Remember what the search measured, to hold the throughput against."""
        self._promised = samples_per_second

    def plan(self, text: str) -> None:
        """Say once what is going to be done."""
        self._say(text)

    def show(self, report: Report) -> None:
        """Keep where the training stands, and tell it if that was not done just now."""
        is_evaluated = self._report is not None and report.metrics != self._report.metrics
        self._report, self._reported, self._is_new = report, time.monotonic(), True
        self._tell(_LINE_SECONDS if is_evaluated else self._pause_seconds())

    def warn(self, text: str) -> None:
        """Tell a warning."""
        self._say(f"warning: {text}", style="yellow")

    def step_down(self, step_down: StepDown) -> None:
        """Tell that the training went on with safer settings."""
        self._say(f"step down: {step_down.sentence}", style="bold yellow")

    def tick(self) -> None:
        """Write what is to be said, and give a sign of life where that was nothing for a minute."""
        self._tell(_HEARTBEAT_SECONDS)
        while self._unsaid:
            describe = self._unsaid.popleft()
            attempt(self._console, lambda: self._console.print(describe()))  # noqa: B023 - it is called here

    def close(self) -> None:
        """Write what is still to be said; on a terminal, take the block down."""
        self.tick()

    def _pause_seconds(self) -> float:
        is_young = time.monotonic() - self._began < _OFTEN_SECONDS
        return _LINE_SECONDS if is_young else _HEARTBEAT_SECONDS

    def _tell(self, pause_seconds: float) -> None:
        now, report = time.monotonic(), self._report
        # The first report is told at once.
        spoke = self._spoke if self._spoke is not None else self._began if report is None else -math.inf
        if now - spoke < pause_seconds:
            return
        self._spoke = now
        if report is None:
            self._say(f"... still setting up, {format_duration(now - self._began)} so far")
        elif self._is_new:
            self._is_new = False
            promised = self._promised
            # Put into words only where it is written: no figure can be so odd that it ends a training.
            self._unsaid.append(lambda: Text(printable(describe_line(report, promised, datetime.now()))))
            self.wake()
        else:
            waited = format_duration(now - self._reported)
            self._say(f"... still {report.phase}: {describe_position(report)}; {waited} since the last report")

    def _say(self, text: str, *, style: str = "") -> None:
        self._unsaid.append(lambda: Text(printable(text), style=style))
        self.wake()


class BlockView(LineView):
    """A training on a terminal: a block of a few lines that is drawn anew every second; what lasts goes above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._trend = Trend()
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self.draw,
        )

    def show(self, report: Report) -> None:
        """Keep where the training stands until it is drawn."""
        if self._report is None or report.step > self._report.step:
            self._trend.add(report.loss)
        self._report, self._reported = report, time.monotonic()

    def tick(self) -> None:
        """Write what is to be said, and draw the block."""
        super().tick()
        attempt(self._console, self._live.refresh)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Show the block inside, and take it down after."""
        attempt(self._console, lambda: self._live.start(refresh=True))
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Write what is still to be said, and take the block down."""
        super().close()
        attempt(self._console, self._live.stop)

    def draw(self) -> Group:
        """Return the block as it is now."""
        width = max(1, min(_WIDEST, self._console.width - 1))
        since = time.monotonic() - self._reported
        if self._report is None:
            lines = [label("setting up", style="bold").append(format_duration(since))]
        else:
            figures = Figures(self._report, self._promised, self._trend, since_seconds=since)
            is_plain = not self._console.encoding.lower().startswith("utf")
            lines = list_block_lines(figures, width, is_plain=is_plain)
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(*lines)

    def _tell(self, pause_seconds: float) -> None:
        """Say nothing: the block shows it."""


@contextmanager
def training_view() -> Iterator[LineView]:
    """Yield the view that fits stderr; a block is taken down at the end."""
    console = steadfast_console()
    with ExitStack() as stack:
        if sys.stderr.isatty() and not console.is_dumb_terminal:
            view: LineView = (block := BlockView(console))
            stack.enter_context(block.opened())
            stack.enter_context(lines_above(console))
        else:
            view = LineView(console)
        stack.callback(view.close)
        ticker = stack.enter_context(Ticker(view.tick, seconds=_DRAW_SECONDS))
        view.wake = ticker.wake
        yield view
