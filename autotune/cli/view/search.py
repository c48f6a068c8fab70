"""A search as it runs: what is shown of its stages and trials, as a block or a line each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from autotune.cli.view.console import view_console
from autotune.cli.view.live import HEARTBEAT_SECONDS, BlockView, LineView, can_redraw, refreshed
from autotune.cli.view.notebook import NotebookView, is_notebook
from autotune.cli.view.terminal import printable
from autotune.format import format_duration, format_rate
from autotune.records.config import TrainConfig
from autotune.records.layout import show_log
from autotune.records.objective import Objective
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.progress import SearchProgress, SearchReporter
from autotune.sentences.objective import describe_gain
from autotune.sentences.settings import describe_changes, name_setting
from autotune.sentences.trials import describe_result

_STAGES = {"drift": "loss check", "finals": "proof"}
_PURPOSES = {"measure": "", "tape": "loss check", "fidelity": "loss check", "quality": "loss check", "final": "proof"}
"""What users call a stage and the purpose of a trial, where that is not their name."""


class SearchView(SearchReporter):
    """Where a search stands: time, best so far, the running trial, the last results.

    Attributes:
        view: that it is written to.

    Args:
        console: to write to; None below a notebook's cell.
        budget_seconds: of the whole search.
        is_live: it is a terminal on which a block can be drawn anew; else lines are written.
        verbose: name every launch's log, and why values are ruled out.
    """

    def __init__(self, console: Console | None, budget_seconds: float, *, is_live: bool, verbose: bool = False) -> None:
        self._is_live, self._verbose = is_live, verbose
        self._folder: Path | None = None
        self._budget_seconds = budget_seconds
        self._began = self._spoke = time.monotonic()
        self._report: ProbeReport | None = None
        self._progress: SearchProgress | None = None
        self._is_unit_due = False
        self._own_in_proof: float | None = None
        self._running = "the probe"
        self._how_to_stop = "Ctrl-C keeps" if console is not None else "stopping the cell keeps"
        self.view: LineView
        if console is None:
            self.view = NotebookView(self._draw)
        else:
            self.view = BlockView(console, self._draw) if is_live else LineView(console, self._pulse)

    def opened(self, folder: Path) -> None:
        """Remember where the logs are."""
        self._folder = folder

    def stage_started(self, progress: SearchProgress, note: str) -> None:
        """Name the stage; a line has the time left, which a block shows anyway."""
        self._progress = progress
        left = "" if self._is_live else f" ({format_duration(progress.seconds_left)} left)"
        self._tell(f"{_STAGES.get(progress.stage, progress.stage)}: {note}{left}")

    def told(self, sentence: str) -> None:
        """Pass it on."""
        self._tell(sentence)

    def probed(self, report: ProbeReport) -> None:
        """Tell the verdict; the rate of the user's own settings is that of the launches to come, which are many."""
        self._report = report
        self._tell(report.verdict.sentence)
        for one in report.ruled_out if self._verbose else ():
            self._tell(f"  ruled out: {name_setting(one.knob)}={one.value}: {one.reason}")

    def trial_started(self, progress: SearchProgress, config: TrainConfig | None) -> None:
        """Show the running trial; after a launch of the user's own settings, what the speed-ups are of from here on."""
        self._progress = progress
        rate = progress.baseline_samples_per_second
        if self._is_unit_due and rate:
            self._tell(f"1x is {format_rate(rate)}: your settings, as they run now")
            self._is_unit_due = False
        self._running = self._name(config) or "the probe"
        self.view.wake()

    def trial_finished(self, progress: SearchProgress, result: TrialResult) -> None:
        """Tell how a trial ended."""
        self._progress = progress
        config, beside = result.spec.config, result.reference
        is_own = self._report is not None and config == self._report.target.baseline
        if is_own and result.spec.purpose == "final" and result.measurement is not None:
            self._own_in_proof = result.measurement.samples_per_second
        own = self._own_in_proof if result.spec.purpose == "final" else None  # a pair is compared with its own launch
        rate = beside.samples_per_second if beside is not None else own or progress.baseline_samples_per_second
        what = _PURPOSES.get(result.spec.purpose, result.spec.purpose)
        is_best = config is not None and config == progress.best and what == "" and not is_own
        best = ", best so far" if is_best else ""
        name = f": {self._name(config)}" if self._name(config) else ""
        self._is_unit_due |= is_own and what == ""  # what it has changed is known once it is judged
        head = f"{what} #{result.spec.number}".strip()
        told = describe_result(result, None if is_own else rate)  # no launch of it is faster than itself
        self._tell(f"{head} {told}{best}{name}{self._name_log(result)}")

    def _name_log(self, result: TrialResult) -> str:
        """Return where the log of a trial that failed is, and of any where all is to be told."""
        is_told = self._verbose or result.status not in (TrialStatus.COMPLETED, TrialStatus.TOO_SLOW)
        return f"; log {show_log(self._folder, result.spec.number)}" if is_told and self._folder is not None else ""

    def _name(self, config: TrainConfig | None) -> str:
        """Return what a config changes; empty for the probe, and before there is a baseline."""
        return describe_changes(config, self._report.target.baseline) if config and self._report else ""

    def _tell(self, text: str) -> None:
        self._spoke = time.monotonic()
        self.view.say(text)

    def _pulse(self) -> None:
        if time.monotonic() - self._spoke >= HEARTBEAT_SECONDS:
            self._tell(f"... still at work, {format_duration(self._seconds_left())} left")

    def _seconds_left(self) -> float:
        return max(0.0, self._budget_seconds - (time.monotonic() - self._began))

    def _draw(self, width: int) -> Sequence[RenderableType]:
        progress, left = self._progress, self._seconds_left()
        best = "-"
        if progress is not None and progress.best_ratio is not None and progress.best is not None and self._report:
            rate = progress.baseline_samples_per_second
            is_speed = progress.objective is not Objective.MEMORY
            unit = f" your {format_rate(rate)}," if rate and is_speed else ","
            gain = describe_gain(progress.objective, progress.best_ratio)
            is_own = progress.best == self._report.target.baseline
            named = self._name(progress.best)
            best = f"{named}, so far" if is_own else f"{gain}{unit} unconfirmed ({named})"
        stage = _STAGES.get(progress.stage, progress.stage) if progress else "start"
        return [
            *(Text(printable(line), no_wrap=True) for line in (f"now:  {self._running}", f"best: {best}")),
            Text(f"{stage}, {format_duration(left)} left; {self._how_to_stop} what is known", style="bold"),
            ProgressBar(total=self._budget_seconds, completed=self._budget_seconds - left, width=width),
        ]


@contextmanager
def search_view(budget_seconds: float, *, verbose: bool = False) -> Iterator[SearchView]:
    """Yield the reporter that fits the notebook or else stderr; a block is taken down at the end."""
    console = None if is_notebook() else view_console()
    search = SearchView(console, budget_seconds, is_live=console is None or can_redraw(console), verbose=verbose)
    with refreshed(search.view):
        yield search
