"""A training as it runs: what is shown of its reports, as a block or as a line every now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console
from rich.text import Text

from autotune.cli.view.console import view_console
from autotune.cli.view.live import HEARTBEAT_SECONDS, BlockView, LineView, can_redraw, has_plain_signs, refreshed
from autotune.cli.view.training_block import Figures, Trend, label, list_block_lines
from autotune.cli.view.training_words import (
    describe_evaluation,
    describe_line,
    describe_position,
    describe_short_line,
)
from autotune.format import format_duration
from autotune.records.config import list_settings
from autotune.records.run import RunPlan, StepDown
from autotune.sentences.settings import name_setting
from autotune.train.report import Report

_LINE_SECONDS = 15.0
_OFTEN_SECONDS = 120.0
"""So long a pipe gets a line every `_LINE_SECONDS`, then one each `HEARTBEAT_SECONDS`."""

_WIDEST = 120


class TrainingView:
    """Where a training stands, for whoever looks at it.

    Attributes:
        view: that it is written to.
        verbose: all is told.

    Args:
        console: to write to.
        is_live: it is a terminal on which a block can be drawn anew; else lines are written.
        verbose: a line for each report, and the settings in full.
    """

    def __init__(self, console: Console, *, is_live: bool, verbose: bool = False) -> None:
        self.verbose = verbose
        self._is_live = is_live
        self._began = self._reported = time.monotonic()
        self._spoke: float | None = None
        self._promised: float | None = None
        self._report: Report | None = None
        self._is_new = False
        self._told_metrics: Mapping[str, float | None] = {}
        self._trend = Trend()
        self._is_plain = has_plain_signs(console)
        self.view = BlockView(console, self._draw) if is_live else LineView(console, self._pulse)

    def promise(self, samples_per_second: float | None) -> None:
        """Remember what the search measured, to hold the throughput against."""
        self._promised = samples_per_second

    def plan(self, text: str, plan: RunPlan | None = None) -> None:
        """Say once what is going to be done, and where all is to be told, with which settings.

        Args:
            text: to say.
            plan: of the run; None before there is one.
        """
        self.view.say(text)
        if plan is None:
            return
        self.promise(plan.promised_samples_per_second)
        for name, value in list_settings(plan.current_config) if self.verbose else ():
            self.view.say(f"  {name_setting(name)} = {value}")

    def show(self, report: Report) -> None:
        """Keep where the training stands; in a pipe, tell it if that was not done just now."""
        before, self._report = self._report, report
        self._reported, self._is_new = time.monotonic(), True
        if before is None or report.step > before.step:
            self._trend.add(report.loss)
        is_evaluated = before is not None and report.metrics != before.metrics
        is_young = time.monotonic() - self._began < _OFTEN_SECONDS
        self._tell(_LINE_SECONDS if is_evaluated or is_young else HEARTBEAT_SECONDS)

    def warn(self, text: str) -> None:
        """Tell a warning."""
        self.view.say(f"warning: {text}", style="yellow")

    def step_down(self, step_down: StepDown) -> None:
        """Tell that the training went on with safer settings."""
        self.view.say(f"step down: {step_down.sentence}", style="bold yellow")

    def close(self) -> None:
        """Write what is still to be said; on a terminal, take the block down."""
        self.view.close()

    def _pulse(self) -> None:
        self._tell(HEARTBEAT_SECONDS)

    def _tell(self, pause_seconds: float) -> None:
        """Say where the training stands, unless a block shows it or it was said within so many seconds."""
        now, report = time.monotonic(), self._report
        # The first report is told at once.
        spoke = self._spoke if self._spoke is not None else self._began if report is None else -math.inf
        if self._is_live or now - spoke < (0.0 if self.verbose and self._is_new else pause_seconds):
            return
        self._spoke = now
        if report is None:
            self.view.say(f"... still setting up, {format_duration(now - self._began)} so far")
        elif self._is_new:
            self._is_new = False
            promised = self._promised
            if self.verbose:
                self.view.say_later(lambda: describe_line(report, promised, datetime.now()))
                return
            self.view.say_later(lambda: describe_short_line(report, promised))
            if report.metrics and report.metrics != self._told_metrics:
                self._told_metrics = dict(report.metrics)
                self.view.say_later(lambda: f"  {describe_evaluation(report)}")
        else:
            waited = format_duration(now - self._reported)
            self.view.say(f"... still {report.phase}: {describe_position(report)}; {waited} since the last report")

    def _draw(self, width: int) -> Sequence[Text]:
        since = time.monotonic() - self._reported
        if self._report is None:
            return [label("setting up", style="bold").append(format_duration(since))]
        figures = Figures(self._report, self._promised, self._trend, since_seconds=since)
        lines = list_block_lines(figures, min(_WIDEST, width), is_plain=self._is_plain)
        for line in lines:
            line.truncate(min(_WIDEST, width), overflow="ellipsis")
        return lines


@contextmanager
def training_view(*, verbose: bool = False) -> Iterator[TrainingView]:
    """Yield the view that fits stderr; a block is taken down at the end."""
    console = view_console()
    training = TrainingView(console, is_live=can_redraw(console), verbose=verbose)
    with refreshed(training.view):
        yield training
