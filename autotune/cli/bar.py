"""A training as it runs: a progress bar on a terminal, a line every now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from autotune.cli.terminal import printable, say, talk_console, warn
from autotune.train.loop import Report
from autotune.units import format_rate

_LINE_SECONDS = 15.0


class LineView:
    """A training in a pipe: a line every now and then."""

    def __init__(self) -> None:
        self._spoke = 0.0

    def show(self, report: Report) -> None:
        """Tell where the training stands, unless that was just told."""
        if time.monotonic() - self._spoke >= _LINE_SECONDS:
            self._spoke = time.monotonic()
            total = "" if report.total_steps is None else f"/{report.total_steps}"
            say(f"step {report.progress.step}{total}: {_describe(report)}")

    def warn(self, text: str) -> None:
        """Tell a warning."""
        warn(text)


class BarView(LineView):
    """A training on a terminal: a progress bar, warnings above it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def show(self, report: Report) -> None:
        """Move the bar."""
        self._progress.update(
            self._task, description=_describe(report), completed=report.progress.step, total=report.total_steps
        )

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""
        self._progress.console.print(Text(printable(f"warning: {text}"), style="yellow"))


@contextmanager
def training_view() -> Iterator[LineView]:
    """Return the view that fits stderr; a bar is taken down at the end."""
    if not sys.stderr.isatty():
        yield LineView()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk_console(), transient=True) as progress:
        yield BarView(progress)


def _describe(report: Report) -> str:
    metrics = "".join(f", {name} {value:.4f}" for name, value in report.metrics.items() if value is not None)
    return f"epoch {report.epoch}, loss {report.loss:.4f}{metrics}, {format_rate(report.samples_per_second)}"
