"""What a search tells while it runs; the command line shows it, a library user may ignore it."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult


@dataclass(frozen=True)
class Standing:
    """Where a search stands.

    Attributes:
        stage: one of `probe`, `search`, `drift`, `finals`.
        trials: trials finished.
        seconds_left: until the deadline.
        baseline_samples_per_second: None before the baseline is measured.
        best_samples_per_second: of the best feasible trial, unconfirmed; None before one is measured.
        best: its settings.
    """

    stage: str
    trials: int
    seconds_left: float
    baseline_samples_per_second: float | None = None
    best_samples_per_second: float | None = None
    best: TrainConfig | None = None

    @property
    def best_ratio(self) -> float | None:
        """Unconfirmed speed-up of the best so far."""
        if self.baseline_samples_per_second is None or self.best_samples_per_second is None:
            return None
        return self.best_samples_per_second / self.baseline_samples_per_second


class SearchReporter:
    """Hears what happens; every method does nothing unless overridden."""

    def stage_started(self, standing: Standing, note: str) -> None:
        """A stage begins."""

    def probed(self, report: ProbeReport) -> None:
        """The probe is done."""

    def trial_started(self, standing: Standing, config: TrainConfig | None) -> None:
        """A trial begins; the config is None for the probe."""

    def trial_finished(self, standing: Standing, result: TrialResult) -> None:
        """A trial ended."""

    def polled(self) -> None:
        """A trial is running; called some times a second."""
