"""A search as it runs: one live block on a terminal, plain lines and a heartbeat a minute in a pipe."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from autotune.cli.terminal import printable, say, talk_console
from autotune.cli.words import describe_changes, describe_result
from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult
from autotune.search.progress import SearchReporter, Standing
from autotune.search.run import SearchOptions
from autotune.units import format_duration, format_rate

HEARTBEAT_SECONDS = 60.0
_LINES = 8


class LineReporter(SearchReporter):
    """One line a trial, one a minute while nothing ends."""

    def __init__(self, budget_seconds: float) -> None:
        self._budget_seconds = budget_seconds
        self._began = time.monotonic()
        self._spoke = self._began
        self._report: ProbeReport | None = None

    def stage_started(self, standing: Standing, note: str) -> None:
        """Name the stage and the time left."""
        self._say(f"{standing.stage}: {note} ({format_duration(standing.seconds_left)} left)")

    def told(self, sentence: str) -> None:
        """Pass it on."""
        self._say(sentence)

    def probed(self, report: ProbeReport) -> None:
        """Tell the baseline and the verdict."""
        self._report = report
        self._say(f"your settings: {format_rate(report.measurement.samples_per_second)}; {report.verdict.sentence}")

    def trial_finished(self, standing: Standing, result: TrialResult) -> None:
        """Tell how a trial ended."""
        self._say(self._describe(standing, result))

    def polled(self) -> None:
        """Give a sign of life."""
        if time.monotonic() - self._spoke >= HEARTBEAT_SECONDS:
            left = self._budget_seconds - (time.monotonic() - self._began)
            self._say(f"... still at work, {format_duration(max(0.0, left))} left")

    def _describe(self, standing: Standing, result: TrialResult) -> str:
        config = result.spec.config
        changes = describe_changes(config, self._report.target.baseline) if config and self._report else ""
        outcome = describe_result(result, standing.baseline_samples_per_second)
        return f"{result.spec.purpose} {result.spec.number}: {changes}: {outcome}"

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        say(text)


class LiveReporter(LineReporter):
    """A block that is redrawn: time, best so far, the running trial, the last results."""

    def __init__(self, budget_seconds: float, live: Live) -> None:
        super().__init__(budget_seconds)
        self._live = live
        self._standing: Standing | None = None
        self._running = "the probe"
        self._recent: deque[str] = deque(maxlen=_LINES)

    def stage_started(self, standing: Standing, note: str) -> None:
        """Name the stage."""
        self._standing = standing
        self._recent.append(f"{standing.stage}: {note}")
        self._draw()

    def probed(self, report: ProbeReport) -> None:
        """Tell the baseline."""
        super().probed(report)

    def trial_started(self, standing: Standing, config: TrainConfig | None) -> None:
        """Show the running trial."""
        self._standing = standing
        known = config is not None and self._report is not None
        self._running = describe_changes(config, self._report.target.baseline) if known else "the probe"  # type: ignore[arg-type, union-attr]
        self._draw()

    def trial_finished(self, standing: Standing, result: TrialResult) -> None:
        """Show how a trial ended."""
        self._standing = standing
        self._recent.append(self._describe(standing, result))
        self._draw()

    def polled(self) -> None:
        """Redraw."""
        self._draw()

    def _say(self, text: str) -> None:
        self._recent.append(text)
        self._draw()

    def _draw(self) -> None:
        elapsed = time.monotonic() - self._began
        left = max(0.0, self._budget_seconds - elapsed)
        standing = self._standing
        best = "-"
        if standing is not None and standing.best_ratio is not None and standing.best is not None and self._report:
            changes = describe_changes(standing.best, self._report.target.baseline)
            best = f"{standing.best_ratio:.2f}x unconfirmed ({changes})"
        stage = standing.stage if standing else "start"
        lines = [*self._recent, f"now:  {self._running}", f"best: {best}"]
        self._live.update(
            Group(
                *(Text(printable(line), no_wrap=True, overflow="ellipsis") for line in lines),
                Text(f"{stage}, {format_duration(left)} left", style="bold"),
                ProgressBar(total=self._budget_seconds, completed=min(elapsed, self._budget_seconds)),
            )
        )


@contextmanager
def make_reporter(options: SearchOptions) -> Iterator[SearchReporter]:
    """Return the reporter that fits stderr; a terminal's live block is taken down at the end."""
    if not sys.stderr.isatty():
        yield LineReporter(options.budget_seconds)
        return
    with Live(console=talk_console(), refresh_per_second=8, transient=True) as live:
        yield LiveReporter(options.budget_seconds, live)
