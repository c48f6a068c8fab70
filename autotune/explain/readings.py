"""All launches that say something of an answer's changes, wherever they were made, and what they say together. Pure.

launches   rounds made for the explanation: the answer and the answer without each change, each in a fresh process
finals     pairs of the answer's proof: all changes against none
search     launches made for another reason; each is held against the level of the baseline at its time
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.measure.confidence import Pilot, finite_exp, paired_ratio, pooled_sd
from autotune.measure.student_t import student_t_quantile
from autotune.records.config import TrainConfig
from autotune.records.explanation import StepShare
from autotune.records.measurement import Interval, PeakMemory
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.finals.plan import find_pilot
from autotune.search.finals.risk import Pair
from autotune.search.log import SearchLog

CONFIDENCE = 0.95
LEAST_PAIRS = 3
"""Fewer have no interval worth the name."""
LEAST_LAUNCHES = 2
"""Of either settings, where they were not paired."""

_NO_FAILURE = frozenset({TrialStatus.INTERRUPTED, TrialStatus.TIMED_OUT, TrialStatus.TOO_SLOW})
"""Ends of a launch that does not show that its settings cannot be run: it may have had little time to compile in."""


@dataclass(frozen=True)
class Readings:
    """The launches of one search, its finals and its explanation.

    Attributes:
        log: of the search, its launches taken up.
        config: the settings that are explained.
        pairs: of the finals of these settings.
        pilot: what was known of the noise of a pair before them.
        finals: every launch of the finals.
        launched: every launch of the explanation.
        rounds: of these, by their numbers.
    """

    log: SearchLog
    config: TrainConfig
    pairs: Sequence[Pair]
    pilot: Pilot
    finals: Sequence[TrialResult]
    launched: Sequence[TrialResult]
    rounds: Sequence[Sequence[int]]

    @cached_property
    def together(self) -> Interval | None:
        """All changes over none, from the finals; None with fewer pairs than an interval takes."""
        return self._pair_up(self.finals_ratios, self.pilot)

    @cached_property
    def finals_ratios(self) -> tuple[float, ...]:
        """Log ratio of the throughputs of each pair of the finals."""
        return tuple(_log_ratio(pair.candidate, pair.baseline) for pair in self.pairs)

    def launched_ratios(self, without: TrainConfig) -> tuple[float, ...]:
        """Return the log ratio of the throughputs in each round, of the settings over some others."""
        found = []
        for numbers in self.rounds:
            arms = {one.spec.config: one for one in self._timed if one.spec.number in numbers}
            if self.config in arms and without in arms:
                found.append(_log_ratio(arms[self.config], arms[without]))
        return tuple(found)

    def compare_launched(self, without: TrainConfig) -> Interval | None:
        """Return the settings over some others by the rounds of the explanation; None where they are too few."""
        pilot = find_pilot(self.log.ranking_of_all, self.log.problem.policy, alone=True)
        return self._pair_up(self.launched_ratios(without), pilot)

    def compare_searched(self, without: TrainConfig) -> tuple[Interval | None, tuple[int, int]]:
        """Return the settings over some others by what the search launched anyway, and the launches of either.

        Of the settings those of the finals count where they were explored in too few: what the machine was like then,
        the others have not seen (a user's own settings ran at 0.87 of their later speed, and all others at 1.0).
        """
        ours, theirs = self._scores(self.config), self._scores(without)
        ours = ours if len(ours) >= LEAST_LAUNCHES else self.finals_ratios
        counts = len(ours), len(theirs)
        if min(counts) < LEAST_LAUNCHES:
            return None, counts
        pilot = self._search_pilot
        # A score rests on a level of many launches and scatters less than a pair: its noise is not taken for smaller.
        sd, degrees = pooled_sd([ours, theirs], prior_sd=pilot.sd, prior_degrees=pilot.degrees)
        mean = statistics.fmean(ours) - statistics.fmean(theirs)
        half = student_t_quantile((1 + CONFIDENCE) / 2, degrees) * sd * math.sqrt(sum(1 / count for count in counts))
        method = f"Student t on the difference of {counts[0]} and {counts[1]} launches"
        ends = (finite_exp(mean + side * half) for side in (-1, 1))
        low, high = ends
        return Interval(
            estimate=finite_exp(mean), low=low, high=high, confidence_level=CONFIDENCE, method=method
        ), counts

    def read_alone(self, config: TrainConfig) -> tuple[float | None, int]:
        """Return some settings over the baseline as the search read them, and by how many launches."""
        scores = self._scores(config)
        return (finite_exp(statistics.fmean(scores)), len(scores)) if scores else (None, 0)

    def find_memory(self, config: TrainConfig) -> int | None:
        """Return the largest peak over all launches of some settings, in bytes; None without one."""
        peaks = PeakMemory.largest(one.measurement.peak_memory for one in self._all if _is_timed(one, config))  # type: ignore[union-attr]
        return None if peaks is None else peaks.used_bytes

    def find_failure(self, config: TrainConfig) -> str:
        """Return how settings failed that were never timed; empty for others, and where their time was up."""
        own = [one for one in self._all if one.spec.config == config and one.status not in _NO_FAILURE]
        if not own or any(one.measurement is not None for one in own):
            return ""
        return ": ".join(part for part in (own[-1].status.value.replace("_", " "), own[-1].error) if part)

    def describe_step(self, config: TrainConfig) -> StepShare | None:
        """Return a step of some settings: of the finals, where there were any."""
        finals = [one.measurement for one in self.finals if _is_timed(one, config)]
        found = [one for one in finals or [one.measurement for one in self._all if _is_timed(one, config)] if one]
        if not found:
            return None
        return StepShare(
            seconds=statistics.fmean(one.seconds_per_step for one in found),
            data_wait_fraction=statistics.fmean(one.data_wait_fraction for one in found),
            launches=len(found),
        )

    def _pair_up(self, ratios: Sequence[float], pilot: Pilot) -> Interval | None:
        if len(ratios) < LEAST_PAIRS:
            return None
        factors = [finite_exp(ratio) for ratio in ratios]
        return paired_ratio(factors, [1.0] * len(factors), confidence_level=CONFIDENCE, pilot=pilot)

    def _scores(self, config: TrainConfig) -> tuple[float, ...]:
        entry = self.log.ranking_of_all.find(config)
        return () if entry is None else tuple(entry.valid_speeds)

    @cached_property
    def _search_pilot(self) -> Pilot:
        return find_pilot(self.log.ranking_of_all, self.log.problem.policy)

    @cached_property
    def _timed(self) -> list[TrialResult]:
        return [one for one in self.launched if one.measurement is not None]

    @cached_property
    def _all(self) -> list[TrialResult]:
        return [*(one.result for one in self.log.judged), *self.finals, *self.launched]


def _is_timed(result: TrialResult, config: TrainConfig) -> bool:
    return result.measurement is not None and result.spec.config == config


def _log_ratio(ours: TrialResult, theirs: TrialResult) -> float:
    assert ours.measurement is not None
    assert theirs.measurement is not None
    return math.log(ours.measurement.samples_per_second / theirs.measurement.samples_per_second)
