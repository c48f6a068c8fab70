"""Is the target's own metric as good under a candidate as under the baseline? Curves in, `QualityCheck` out.

    relative: (candidate - baseline) / |baseline| per seed; the baseline must not be 0
    absolute: candidate - baseline per seed, in the metric's own unit

The sign is turned for a metric to maximize, so that positive is worse. A negative margin is an improvement that is
required: the same rule, with the bound on the other side of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.drift.compare.paired_seeds import (
    Comparison,
    Finding,
    cut,
    drift_interval,
    find_too_few_seeds,
    judge,
    pair_by_seed,
    relative_drift,
    report_finding,
)
from autotune.records.quality import Margin, QualityCheck
from autotune.records.trial import LossCurve

_LARGEST_DIFFERENCE = 1e150  # far beyond any margin, and its square is still finite


def check_metric(
    candidate: Sequence[LossCurve],
    baseline: Sequence[LossCurve],
    *,
    name: str,
    direction: Literal["minimize", "maximize"],
    margin: Margin,
) -> QualityCheck:
    """Compare one of the target's own metrics, paired by seed.

    Args:
        candidate: one curve per seed.
        baseline: one curve per seed; seeds without a partner are left out.
        name: what the target calls the metric.
        direction: which way it is better.
        margin: largest worsening allowed, relative or in the metric's own unit; negative for an improvement required.

    Returns:
        As `check_losses`; inferior when the candidate has no finite metric where the baseline has one.

    Raises:
        ValueError: a seed occurs twice in one arm.
    """
    comparison = Comparison("metric", name, margin, pair_by_seed(candidate, baseline))
    finding = _find_unusable_metric(comparison) or find_too_few_seeds(comparison.pairs)
    if finding is not None:
        return report_finding(comparison, finding)
    sign = 1.0 if direction == "minimize" else -1.0
    drifts = [sign * _drift(ours, theirs, margin) for ours, theirs in _read_metrics(comparison)]
    return judge(comparison, drift_interval(drifts))


def _find_unusable_metric(comparison: Comparison) -> Finding | None:
    name, broken = comparison.metric, None
    for ours, theirs in comparison.pairs:
        our_metric, their_metric = ours.metrics.get(name), theirs.metrics.get(name)
        if their_metric is None:
            broken = f"the baseline has no finite {name} for seed {ours.seed}"
        elif our_metric is None:
            return "inferior", f"there is no finite {name} for seed {ours.seed}; the baseline has {their_metric:.4g}"
        elif their_metric == 0.0 and comparison.margin.unit == "relative":
            broken = f"the baseline's {name} is 0 for seed {ours.seed}: no relative worsening exists"
    return None if broken is None else ("inconclusive", broken)


def _read_metrics(comparison: Comparison) -> list[tuple[float, float]]:
    name = comparison.metric
    pairs = [(ours.metrics.get(name), theirs.metrics.get(name)) for ours, theirs in comparison.pairs]
    return [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def _drift(ours: float, theirs: float, margin: Margin) -> float:
    if margin.unit == "relative":
        return relative_drift([(ours, theirs)])
    return cut(ours - theirs, largest=_LARGEST_DIFFERENCE)
