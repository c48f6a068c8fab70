"""What launches will take, from the ones seen so far. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.launch.compilation import predict_again, predict_compilation
from autotune.search.scores.objective import Judged
from autotune.space import needs_compilation

LEAST_MEASURED_STEPS = 3
"""Of a training whose steps are long."""

_CLOSING = 0.3
"""Seconds from the last block of a launch to its result."""
_RERUN = 1.5
"""Of what a launch took until the end of its time cut it: what it is priced at from then on."""


@dataclass(frozen=True)
class Prices:
    """Predicts how long timing launches take.

    Attributes:
        report: of the probe.
        seen: the search's launches so far, in order.
        interrupted: launches that the end of their time or the user cut; they are not among `seen`.
        startup_seconds: of a process until its first step.
        measure_seconds: that one launch measures.
    """

    report: ProbeReport
    seen: Sequence[Judged]
    interrupted: Sequence[TrialResult]
    startup_seconds: float
    measure_seconds: float

    def launch_seconds(self, config: TrainConfig) -> float:
        """Return how long a launch of a config will take: more than the time in which it was cut before."""
        cut = [one.elapsed_seconds for one in self.interrupted if one.spec.config == config]
        return max(self.usual_seconds(config), _RERUN * max(cut, default=0.0))

    def usual_seconds(self, config: TrainConfig) -> float:
        """Return the same by the launches that came to their end."""
        own = self._completed.get(config.model_dump_json())
        if own:
            return predict_again(own) if needs_compilation(config) else max(one.elapsed_seconds for one in own)
        return self._plain_seconds + self.compile_seconds(config)

    def compile_seconds(self, config: TrainConfig) -> float:
        """Return how long a first compilation will take; 0 where nothing is compiled."""
        return predict_compilation(config, self.report.target, [one.result for one in self.seen])

    def overdue(self) -> list[TrialResult]:
        """Return launches that were cut only after twice what the baseline's take: they count as timed out."""
        usual = 2 * self.usual_seconds(self.report.target.baseline)
        return [
            one.replace(status=TrialStatus.TIMED_OUT)
            for one in self.interrupted
            if one.spec.config is not None and one.elapsed_seconds > usual + self.compile_seconds(one.spec.config)
        ]

    @cached_property
    def _completed(self) -> dict[str, list[TrialResult]]:
        """The launches that came to their end, by their settings."""
        found: dict[str, list[TrialResult]] = {}
        for one in self.seen:
            if one.result.status is TrialStatus.COMPLETED:
                found.setdefault(one.key, []).append(one.result)
        return found

    @cached_property
    def _plain_seconds(self) -> float:
        """What a launch takes that compiles nothing."""
        completed = [one for one in self.seen if one.result.status is TrialStatus.COMPLETED]
        plain = [one.result.elapsed_seconds for one in completed if not needs_compilation(one.config)]
        return statistics.median(plain) if plain else self._guess_seconds()

    def _guess_seconds(self) -> float:
        measurement = self.report.measurement
        # However long a step is, a few of them are measured.
        measured = max(self.measure_seconds, LEAST_MEASURED_STEPS * measurement.seconds_per_step)
        return self.startup_seconds + measurement.warmup_seconds + measured + _CLOSING
