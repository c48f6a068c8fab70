"""What comparisons of losses and of metrics share: pairs of seeds, an interval over them, the verdict on a margin."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from autotune.measure.confidence import mean_interval
from autotune.records.measurement import Interval
from autotune.records.quality import Margin, QualityCheck, QualityTest, QualityVerdict
from autotune.records.trial import LossCurve
from autotune.sentences.loss_check import format_drift, format_margin

CONFIDENCE_LEVEL = 0.90
"""Two-sided: each end holds one-sided at 95 %."""

LARGEST_WORSENING = 1e12
"""A relative worsening is cut there: it decides the same, and a record holds no infinity."""

Pair = tuple[LossCurve, LossCurve]
"""The candidate's curve and the baseline's, of one seed."""

Finding = tuple[Literal["inferior", "inconclusive"], str]
"""A verdict that needs no interval, and its reason."""


class Comparison(NamedTuple):
    """What is compared.

    Attributes:
        test: which check it is.
        metric: what it is a check of.
        margin: largest worsening allowed.
        pairs: one per seed.
    """

    test: QualityTest
    metric: str
    margin: Margin
    pairs: tuple[Pair, ...]


def pair_by_seed(candidate: Sequence[LossCurve], baseline: Sequence[LossCurve]) -> tuple[Pair, ...]:
    """Return the curves of the seeds that both arms have.

    Raises:
        ValueError: a seed occurs twice in one arm.
    """
    ours, theirs = ({curve.seed: curve for curve in arm} for arm in (candidate, baseline))
    if len(ours) < len(candidate) or len(theirs) < len(baseline):
        raise ValueError("a seed occurs twice in one arm: curves are paired by their seed")
    return tuple((ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys()))


def find_too_few_seeds(pairs: Sequence[Pair]) -> Finding | None:
    """Return that there are too few seeds for an interval; None when there are enough."""
    if len(pairs) >= 2:
        return None
    return "inconclusive", f"{len(pairs)} seed(s) in common with the baseline: at least 2 are needed"


def relative_drift(window: Sequence[tuple[float, float]]) -> float:
    """Return the mean of candidate - baseline over the mean size of the baseline's values."""
    return statistics.fmean(relative_drifts(window))


def relative_drifts(window: Sequence[tuple[float, float]]) -> list[float]:
    """Return candidate - baseline of each step, over the mean size of the baseline's values."""
    mean_absolute = sum(abs(theirs) / len(window) for _, theirs in window)
    scale = min(max(mean_absolute, sys.float_info.min), sys.float_info.max)  # rounding can leave this range
    return [cut((ours - theirs) / scale) for ours, theirs in window]


def cut(worsening: float, *, largest: float = LARGEST_WORSENING) -> float:
    """Return a worsening that a record can hold."""
    return max(-largest, min(largest, worsening))


def drift_interval(drifts: Sequence[float]) -> Interval:
    """Return the Student t interval of the mean drift of at least two seeds."""
    method = f"Student t over {len(drifts)} paired seeds"
    return mean_interval(drifts, confidence_level=CONFIDENCE_LEVEL, method=method)


def judge(comparison: Comparison, worsening: Interval) -> QualityCheck:
    """Return the check: a bound inside the margin passes, one beyond it fails, anything else proves nothing."""
    margin, seeds = comparison.margin, len(comparison.pairs)
    ends = (worsening.estimate, worsening.low, worsening.high)
    estimate, low, high = (format_drift(value, margin) for value in ends)
    found = f"the {margin.unit} worsening of {comparison.metric} is {estimate} over {seeds} seeds"
    bounds = f"above {low} and below {high}, at 95 % each"
    verdict: QualityVerdict
    if worsening.high < margin.amount:
        verdict, conclusion = "non-inferior", "inside"
    elif worsening.low > margin.amount:
        verdict, conclusion = "inferior", "beyond"
    else:
        verdict, conclusion = "inconclusive", "too uncertain for"
    reason = f"{found} ({bounds}): {conclusion} the margin of {format_margin(margin)}"
    return report(comparison, verdict, reason, worsening)


def report_finding(comparison: Comparison, finding: Finding) -> QualityCheck:
    """Return a check that was settled without an interval."""
    verdict, reason = finding
    return report(comparison, verdict, reason, None)


def report(comparison: Comparison, verdict: QualityVerdict, reason: str, difference: Interval | None) -> QualityCheck:
    """Return the check with what it covers."""
    return QualityCheck(
        test=comparison.test,
        metric=comparison.metric,
        difference=difference,
        margin=comparison.margin,
        verdict=verdict,
        seeds=len(comparison.pairs),
        samples=max(0, min((curve.samples for pair in comparison.pairs for curve in pair), default=0)),
        reason=reason,
    )
