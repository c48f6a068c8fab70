"""One candidate of the finals: its pairs, what they show, and how many it takes. Pure.

A candidate is claimed faster only if the one-sided 99 % lower end of the t interval of its paired log ratios clears
+1 % and the 99.9 % one clears 0, each at its share of the risk.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Literal

from autotune.measure.confidence import NO_PILOT, Pilot, hodges_lehmann, paired_ratio
from autotune.measure.sample_size import minimum_detectable_speedup, pairs_needed
from autotune.records.config import TrainConfig
from autotune.records.measurement import Interval
from autotune.records.trial import TrialResult

THRESHOLD = 1.01
"""A gain of less than this is not claimed."""

LEAST_ROUNDS = 3
"""Fewer pairs are no proof of anything: their interval is not known, they are only kept."""
MOST_ROUNDS = 60
CLAIM_RISK = 0.01
"""One-sided: the lower end at this risk has to clear the threshold, over all looks of one search."""

FALSE_RISK = 0.001
"""One-sided: the lower end at this risk has to show a gain at all. On a machine whose noise is large against the
threshold the first rule alone would claim something in nearly 1 % of searches in which nothing is faster."""


@dataclass
class Finalist:
    """One candidate in the finals.

    Attributes:
        config: the settings.
        rates: samples per second, one per finished round.
        results: the launches behind them.
        places: position within its round, from 0.
        cost: what compiling takes off the log throughput of the planned run.
        ratio: speed-up over the baseline, to be claimed by its low end; None while it is not known, with fewer pairs
            than could prove anything.
        log_ratios: of each pair.
        sure: its low end at the risk of a false claim.
        failure: why it is out; empty while it is in.
        pilot: what the search knew of the noise of a pair.
    """

    config: TrainConfig
    rates: list[float] = field(default_factory=list)
    results: list[TrialResult] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cost: float = 0.0
    ratio: Interval | None = None
    log_ratios: list[float] = field(default_factory=list)
    sure: float = 0.0
    failure: str = ""
    pilot: Pilot = NO_PILOT

    @property
    def estimate(self) -> float | None:
        """Geometric mean of the pairs' ratios, however few they are; None without a pair."""
        return math.exp(statistics.fmean(self.log_ratios)) if self.log_ratios else None

    @property
    def pair_sd(self) -> float:
        """Standard deviation of a pair's log ratio, what the search knew of it counted in; needs two pairs."""
        return self.pilot.pool(self.log_ratios)[0]

    def interval_at(self, level: float) -> Interval:
        """Return the two-sided interval of the speed-up at a confidence level; needs two pairs."""
        ratios = [math.exp(ratio) for ratio in self.log_ratios]
        return paired_ratio(ratios, [1.0] * len(ratios), confidence_level=level, pilot=self.pilot)

    @property
    def outcome(self) -> Literal["faster", "no gain", "unclear"]:
        """What the pairs show: the low end clears the threshold, the high end stays below it, or neither."""
        if self.failure or self.ratio is None:
            return "unclear"
        if self.ratio.low > THRESHOLD and self.sure > 1.0:
            usual = self.interval_at(0.95)
            # Where the median of the pairwise means disagrees with the mean, a few outliers decide.
            return "faster" if usual.low <= math.exp(hodges_lehmann(self.log_ratios)) <= usual.high else "unclear"
        return "no gain" if self.interval_at(0.90).high < THRESHOLD else "unclear"

    def settle(self, base: Finalist, share: float) -> None:
        """Work out what the pairs so far show, at a share of both risks."""
        rates = zip(self.rates, base.rates, strict=False)
        self.log_ratios = [math.log(ours / theirs) - self.cost + base.cost for ours, theirs in rates]
        if len(self.log_ratios) >= LEAST_ROUNDS:
            self.ratio = self.interval_at(1 - 2 * share * CLAIM_RISK)
            self.sure = self.interval_at(1 - 2 * share * FALSE_RISK).low

    def take(self, result: TrialResult, place: int) -> None:
        """Count one timed launch at a place of its round."""
        if result.measurement is not None:
            self.rates.append(result.measurement.samples_per_second)
            self.results.append(result)
            self.places.append(place)


@dataclass(frozen=True)
class FinalsOutcome:
    """What the finals showed.

    Attributes:
        baseline: the baseline as a finalist.
        candidates: in the order given.
        winner: the proven fastest, the simpler one where two cannot be told apart; None when none is proven.
        futile: ended early, because more rounds could hardly have proven anything.
        risk_share: of both risks, what one candidate had at one look.
        next_share: of both risks, what another look would have.
    """

    baseline: Finalist
    candidates: tuple[Finalist, ...]
    winner: Finalist | None
    futile: bool = False
    risk_share: float = 1.0
    next_share: float = 1.0

    @property
    def results(self) -> tuple[TrialResult, ...]:
        """Every launch, the baseline's first."""
        return tuple(result for one in (self.baseline, *self.candidates) for result in one.results)

    @property
    def proven(self) -> tuple[Finalist, ...]:
        """The candidates that are proven to be faster."""
        return tuple(one for one in self.candidates if one.outcome == "faster")

    @property
    def best(self) -> Finalist | None:
        """The candidate with the highest estimate, proven or not; None when none was measured."""
        measured = [one for one in self.candidates if one.log_ratios and not one.failure]
        return max(measured, key=lambda one: one.estimate or 0.0, default=None)


def rounds_needed(
    pair_sd: float,
    log_speedup: float,
    *,
    fewest: int,
    most: int,
    risk_share: float = 1.0,
    pilot_degrees: float = 0.0,
) -> int:
    """Return how many rounds prove a gain with a probability of 80 %.

    Args:
        pair_sd: standard deviation of the log ratio of one pair, from other data.
        log_speedup: the gain.
        fewest: rounds run in any case, at least two.
        most: what the budget allows; it wins over `fewest`.
        risk_share: of both risks, what these rounds have.
        pilot_degrees: degrees of freedom of the noise that are known before.

    Raises:
        ValueError: fewer than two rounds, or a negative standard deviation.
    """

    def count(risk: float, threshold: float) -> int:
        return pairs_needed(
            pair_sd,
            log_speedup,
            most=most,
            fewest=fewest,
            threshold=threshold,
            confidence=1 - risk_share * risk,
            pilot_degrees=pilot_degrees,
        )

    return max(count(CLAIM_RISK, math.log(THRESHOLD)), count(FALSE_RISK, 0.0))


def smallest_provable(pair_sd: float, pairs: int, *, risk_share: float = 1.0, pilot_degrees: float = 0.0) -> float:
    """Return the speed-up that some pairs prove with a probability of 80 %, as a ratio.

    Args:
        pair_sd: standard deviation of the log ratio of one pair.
        pairs: how many.
        risk_share: of both risks, what these pairs have.
        pilot_degrees: degrees of freedom of the noise that are known before.

    Raises:
        ValueError: fewer than two pairs, or a negative standard deviation.
    """
    useful, sure = (
        minimum_detectable_speedup(pair_sd, pairs, confidence=1 - risk_share * risk, pilot_degrees=pilot_degrees)
        for risk in (CLAIM_RISK, FALSE_RISK)
    )
    return max(THRESHOLD * useful, sure)
