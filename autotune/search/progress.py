"""What a search tells while it runs; the command line shows it, a library user may ignore it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.records.config import TrainConfig
from autotune.records.objective import Objective
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult


@dataclass(frozen=True)
class SearchProgress:
    """Where a search stands.

    Attributes:
        stage: one of `probe`, `search`, `drift`, `finals`.
        trials: trials finished.
        seconds_left: until the deadline.
        baseline_samples_per_second: at this time; None before the baseline is measured.
        best_ratio: unconfirmed gain of the best feasible config, as a factor: its speed-up, or the baseline's peak
            memory over its own; None before one is measured.
        best: its settings.
        objective: what is made best.
    """

    stage: str
    trials: int
    seconds_left: float
    baseline_samples_per_second: float | None = None
    best_ratio: float | None = None
    best: TrainConfig | None = None
    objective: Objective = Objective.THROUGHPUT


class SearchReporter:
    """Hears what happens; every method does nothing unless overridden."""

    def opened(self, folder: Path) -> None:
        """The search has a folder."""

    def stage_started(self, progress: SearchProgress, note: str) -> None:
        """A stage begins."""

    def told(self, sentence: str) -> None:
        """Something that the user should know at once."""

    def probed(self, report: ProbeReport) -> None:
        """The probe is done."""

    def trial_started(self, progress: SearchProgress, config: TrainConfig | None) -> None:
        """A trial begins; the config is None for the probe."""

    def trial_finished(self, progress: SearchProgress, result: TrialResult) -> None:
        """A trial ended."""

    def polled(self) -> None:
        """A trial is running; called some times a second."""
