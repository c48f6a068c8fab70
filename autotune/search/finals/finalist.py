"""One candidate of the finals: its pairs, what they show, and how many it takes. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autotune.measure.confidence import NO_PILOT, Pilot, hodges_lehmann, paired_ratio
from autotune.measure.sample_size import minimum_detectable_speedup, pairs_needed
from autotune.records.config import TrainConfig
from autotune.records.measurement import Interval
from autotune.records.trial import TrialResult
from autotune.search.finals.claim import CLAIM_RISK, FALSE_RISK, FASTER, THRESHOLD, Bar, Claim

LEAST_ROUNDS = 3
"""Fewer pairs are no proof of anything: their interval is not known, they are only kept."""
MOST_ROUNDS = 60


@dataclass(frozen=True)
class Figure:
    """What the pairs of a candidate say of its speed, or of its memory.

    Attributes:
        logs: log ratio of each pair, above 0 where the candidate is the better one.
        bars: that the ratio has to clear.
        pilot: what was known of its noise before.
    """

    logs: Sequence[float]
    bars: tuple[Bar, ...]
    pilot: Pilot = NO_PILOT

    def interval_at(self, level: float) -> Interval:
        """Return the two-sided interval of the ratio at a confidence level; needs two pairs."""
        ratios = [math.exp(one) for one in self.logs]
        return paired_ratio(ratios, [1.0] * len(ratios), confidence_level=level, pilot=self.pilot)

    def low_at(self, risk: float) -> float:
        """Return the one-sided lower end of the ratio at a risk; needs two pairs."""
        return self.interval_at(1 - 2 * risk).low

    def is_shown(self, share: float) -> bool:
        """Return whether it clears its bars at a share of the risks, and that not by a few outliers.

        Where the median of the pairwise means disagrees with the mean, a few of them decide.
        """
        if any(self.low_at(share * bar.risk) <= bar.ratio for bar in self.bars):
            return False
        usual = self.interval_at(0.95)
        return usual.low <= math.exp(hodges_lehmann(self.logs)) <= usual.high

    def is_ruled_out(self) -> bool:
        """Return whether the pairs show that it does not clear the first bar."""
        return self.interval_at(0.90).high < self.bars[0].ratio


@dataclass
class Finalist:
    """One candidate in the finals.

    Attributes:
        config: the settings.
        rates: samples per second, one per finished round.
        results: the launches behind them.
        places: position within its round, from 0.
        cost: what compiling takes off the log throughput of the planned run.
        ratio: its speed over the baseline's, of which the low end is claimed; None while it is not known, with fewer
            pairs than could prove anything.
        log_ratios: the same of each pair.
        log_savings: the baseline's peak memory over its own, of each pair.
        share: of the risk of a false claim, what these pairs have.
        failure: why it is out; empty while it is in.
        futile: more rounds could hardly prove anything of it.
        pilot: what the search knew of the noise of a pair.
        claim: what has to be shown of it.
    """

    config: TrainConfig
    rates: list[float] = field(default_factory=list)
    results: list[TrialResult] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cost: float = 0.0
    ratio: Interval | None = None
    log_ratios: list[float] = field(default_factory=list)
    log_savings: list[float] = field(default_factory=list)
    share: float = 1.0
    failure: str = ""
    futile: bool = False
    pilot: Pilot = NO_PILOT
    claim: Claim = FASTER

    @property
    def speed(self) -> Figure:
        """What its pairs say of its speed."""
        return Figure(self.log_ratios, self.claim.speed, self.pilot)

    @property
    def saving(self) -> Figure:
        """What its pairs say of its memory."""
        return Figure(self.log_savings, self.claim.saving)

    @property
    def figures(self) -> list[Figure]:
        """Those that something has to be shown of, the one that the search made best at the end."""
        return [self.speed, *([self.saving] if self.claim.saving else [])]

    @property
    def headline(self) -> Figure:
        """The figure that the search made best."""
        return self.figures[-1]

    @property
    def gain(self) -> float | None:
        """Mean of the headline's logs, however few they are; None without a pair."""
        return statistics.fmean(self.headline.logs) if self.headline.logs else None

    @property
    def memory_ratio(self) -> Interval | None:
        """Its peak memory over the baseline's, of which the high end is claimed; None where that is not known."""
        if self.ratio is None or not self.claim.saving:
            return None
        saved = self.saving.interval_at(self.ratio.confidence_level)
        return saved.replace(estimate=1 / saved.estimate, low=1 / saved.high, high=1 / saved.low)

    @property
    def pair_sd(self) -> float:
        """Standard deviation of a pair's log ratio, what the search knew of it counted in; needs two pairs."""
        return (NO_PILOT if self.pilot.is_doubtful else self.pilot).pool(self.log_ratios)[0]

    @property
    def outcome(self) -> Literal["proven", "no gain", "unclear"]:
        """What the pairs show: what is to be claimed, that it does not hold, or neither."""
        if self.failure or self.ratio is None:
            return "unclear"
        if all(figure.is_shown(self.share) for figure in self.figures):
            return "proven"
        return "no gain" if any(figure.is_ruled_out() for figure in self.figures) else "unclear"

    def settle(self, base: Finalist, share: float) -> None:
        """Work out what the pairs so far show, at a share of the risks."""
        rates = zip(self.rates, base.rates, strict=False)
        self.log_ratios = [math.log(ours / theirs) - self.cost + base.cost for ours, theirs in rates]
        self.log_savings = [math.log(theirs / ours) for ours, theirs in zip(self.peaks, base.peaks, strict=False)]
        self.share = share
        if len(self.log_ratios) >= LEAST_ROUNDS:
            self.ratio = self.speed.interval_at(1 - 2 * share * CLAIM_RISK)

    @property
    def peaks(self) -> Iterator[int]:
        """Peak memory of each of its launches, in bytes."""
        return (one.measurement.peak_memory.used_bytes for one in self.results if one.measurement is not None)

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
        winner: the proven best, the simpler one where two cannot be told apart; None when none is proven.
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
        """The candidates that are proven to be better."""
        return tuple(one for one in self.candidates if one.outcome == "proven")

    def failure_of(self, config: TrainConfig) -> str:
        """Return why a candidate is out; empty while it is in, or where it took no part."""
        return next((one.failure for one in self.candidates if one.config == config), "")

    @property
    def best(self) -> Finalist | None:
        """The candidate with the largest gain, proven or not; None when none was measured."""
        measured = [one for one in self.candidates if one.log_ratios and not one.failure]
        return max(measured, key=lambda one: one.gain or 0.0, default=None)


def rounds_needed(
    pair_sd: float,
    log_speedup: float,
    *,
    fewest: int,
    most: int,
    risk_share: float = 1.0,
    pilot_degrees: float = 0.0,
    bars: Sequence[Bar] = FASTER.speed,
) -> int:
    """Return how many rounds prove a gain with a probability of 80 %.

    Args:
        pair_sd: standard deviation of the log ratio of one pair, from other data.
        log_speedup: the gain.
        fewest: rounds run in any case, at least two.
        most: what the budget allows; it wins over `fewest`.
        risk_share: of the risks, what these rounds have.
        pilot_degrees: degrees of freedom of the noise that are known before.
        bars: that it has to clear.

    Raises:
        ValueError: fewer than two rounds, or a negative standard deviation.
    """
    return max(
        pairs_needed(
            pair_sd,
            log_speedup,
            most=most,
            fewest=fewest,
            threshold=math.log(bar.ratio),
            confidence=1 - risk_share * bar.risk,
            pilot_degrees=pilot_degrees,
        )
        for bar in bars
    )


def smallest_provable(pair_sd: float, pairs: int, *, risk_share: float = 1.0, pilot: Pilot = NO_PILOT) -> float:
    """Return the speed-up that some pairs prove with a probability of 80 %, as a ratio.

    Args:
        pair_sd: standard deviation of the log ratio of one pair.
        pairs: how many.
        risk_share: of both risks, what these pairs have.
        pilot: what of the noise is known before.

    Raises:
        ValueError: fewer than two pairs, or a negative standard deviation.
    """
    share, degrees = (risk_share / 2, 0.0) if pilot.is_doubtful else (risk_share, pilot.degrees)
    useful, sure = (
        minimum_detectable_speedup(pair_sd, pairs, confidence=1 - share * risk, pilot_degrees=degrees)
        for risk in (CLAIM_RISK, FALSE_RISK)
    )
    return max(THRESHOLD * useful, sure)
