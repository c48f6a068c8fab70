"""Does a candidate learn as well as the baseline? Loss curves in, `QualityCheck` out.

    d_s = what seed s lost under the candidate, both arms with the same initial weights and the same data
    worsening = mean(d) with a one-sided 95 % Student t bound over the seeds, against a margin fixed beforehand

    0 ─────────── margin ───────────
      ├─ d ─┤         │                non-inferior: the upper bound is inside the margin
                 ├──── d ────┤         inconclusive: too few seeds or too much noise to say
                      │   ├─ d ─┤      inferior: the lower bound is beyond it

The burden of proof lies with the candidate: noise, a missing value or a missing seed is never a pass.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from autotune.measure.confidence import mean_interval
from autotune.records.measurement import Interval, QualityCheck
from autotune.records.trial import LossCurve
from autotune.units import format_percent

_CONFIDENCE_LEVEL = 0.90  # two-sided: each end holds one-sided at 95 %
_LARGEST_WORSENING = 1e12  # cut there: it decides the same, and a record holds no infinity
_BATCH_TOLERANCE = 0.05  # a smaller last batch moves the mean by less

_Pair = tuple[LossCurve, LossCurve]
_Finding = tuple[Literal["inferior", "inconclusive"], str]


class _Comparison(NamedTuple):
    test: Literal["exact-losses", "paired-losses", "metric"]
    metric: str
    margin: float
    pairs: tuple[_Pair, ...]


def check_losses(
    candidate: Sequence[LossCurve], baseline: Sequence[LossCurve], *, margin: float, exact: bool
) -> QualityCheck:
    """Compare training losses, paired by seed.

    The drift of a seed is the mean over the tail, the last half of the steps both arms ran, of
    log(candidate loss) - log(baseline loss); the worsening is exp(mean drift) - 1. Where a loss in a tail is not
    positive, it is instead the mean difference over the baseline's mean absolute loss, per seed.

    Args:
        candidate: one curve per seed.
        baseline: one curve per seed; seeds without a partner are left out.
        margin: largest relative worsening allowed, e.g. 0.005.
        exact: the candidate should not change the arithmetic: losses equal bit for bit settle it at once, and
            anything else is judged like every other candidate.

    Returns:
        non-inferior or inferior when a one-sided 95 % bound proves it, or inferior when the candidate's loss is not
        finite where the baseline's is; inconclusive otherwise, and when the arms cannot be compared.

    Raises:
        ValueError: a seed occurs twice in one arm, or the margin is negative.
    """
    pairs = _pair_by_seed(candidate, baseline)
    if exact and pairs and all(_repeats(ours, theirs) for ours, theirs in pairs):
        return _report_exact(_Comparison("exact-losses", "training loss", margin, pairs))
    comparison = _Comparison("paired-losses", "training loss", margin, pairs)
    finding = _find_unusable_losses(pairs) or _find_too_few_seeds(pairs)
    if finding is not None:
        return _report_finding(comparison, finding)
    windows = [_tail(ours, theirs) for ours, theirs in pairs]
    if all(_all_positive(window) for window in windows):
        interval = _drift_interval([_log_drift(window) for window in windows])
        return _judge(comparison, _exponentiated(interval))
    if any(_is_zero(window) for window in windows):
        return _report_finding(comparison, ("inconclusive", "the baseline's training loss is 0: no worsening exists"))
    return _judge(comparison, _drift_interval([_relative_drift(window) for window in windows]))


def check_metric(
    candidate: Sequence[LossCurve],
    baseline: Sequence[LossCurve],
    *,
    name: str,
    direction: Literal["minimize", "maximize"],
    margin: float,
) -> QualityCheck:
    """Compare the target's own metric, paired by seed.

    The worsening of a seed is (candidate - baseline) / |baseline|, with its sign turned for a metric to maximize.

    Args:
        candidate: one curve per seed.
        baseline: one curve per seed; seeds without a partner are left out.
        name: what the target calls the metric.
        direction: which way it is better.
        margin: largest relative worsening allowed, e.g. 0.005.

    Returns:
        As `check_losses`; inferior when the candidate has no finite metric where the baseline has one.

    Raises:
        ValueError: a seed occurs twice in one arm, or the margin is negative.
    """
    comparison = _Comparison("metric", name, margin, _pair_by_seed(candidate, baseline))
    finding = _find_unusable_metric(comparison) or _find_too_few_seeds(comparison.pairs)
    if finding is not None:
        return _report_finding(comparison, finding)
    sign = 1.0 if direction == "minimize" else -1.0
    drifts = [
        sign * _relative_drift([(ours.metric, theirs.metric)])
        for ours, theirs in comparison.pairs
        if ours.metric is not None and theirs.metric is not None
    ]
    return _judge(comparison, _drift_interval(drifts))


def has_learned(curves: Sequence[LossCurve], *, margin: float) -> bool:
    """Return whether training losses fell by more than a margin, so that a drift of that size could show in them.

    The fall of a seed is the mean of the first quarter of its losses minus the mean of their last half, over the
    former's size; a one-sided 95 % Student t bound over the seeds must lie beyond the margin. Labels that are noise, a
    loss that is always the same and a training that has converged long ago all fail: nothing they show is evidence.

    Args:
        curves: one per seed.
        margin: largest relative worsening allowed.
    """
    falls = []
    for curve in curves:
        losses = [loss for loss in curve.losses if loss is not None]
        if len(losses) < 2:
            return False
        early = statistics.fmean(losses[: max(1, len(losses) // 4)])
        late = statistics.fmean(losses[len(losses) // 2 :])
        falls.append(_cut((early - late) / abs(early)) if early else 0.0)
    return len(falls) >= 2 and _drift_interval(falls).low > margin


def screen_losses(candidate: LossCurve, baseline: LossCurve) -> float | None:
    """Return the relative worsening of one seed over the tail of its losses, a first look without any proof.

    Returns:
        The worsening as in `check_losses` (positive is worse). None when there is nothing to compare: no common step,
        another batch size, a baseline of 0, or a loss of either arm that is not finite. None is never a pass.
    """
    if _find_unusable_losses(((candidate, baseline),)) is not None:
        return None
    window = _tail(candidate, baseline)
    if _all_positive(window):
        return _worsening(_log_drift(window))
    return None if _is_zero(window) else _relative_drift(window)


def _pair_by_seed(candidate: Sequence[LossCurve], baseline: Sequence[LossCurve]) -> tuple[_Pair, ...]:
    ours, theirs = ({curve.seed: curve for curve in arm} for arm in (candidate, baseline))
    if len(ours) < len(candidate) or len(theirs) < len(baseline):
        raise ValueError("a seed occurs twice in one arm: curves are paired by their seed")
    return tuple((ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys()))


def _repeats(ours: LossCurve, theirs: LossCurve) -> bool:
    return bool(theirs.losses) and None not in theirs.losses and ours.losses == theirs.losses


def _find_unusable_losses(pairs: Sequence[_Pair]) -> _Finding | None:
    broken: _Finding | None = None
    for ours, theirs in pairs:
        steps = list(zip(ours.losses, theirs.losses, strict=False))
        for step, (our_loss, their_loss) in enumerate(steps, start=1):
            if our_loss is None and their_loss is not None:
                reason = f"at step {step} of seed {ours.seed} the loss is not finite, and the baseline's is"
                return "inferior", reason
            if their_loss is None and broken is None:
                reason = f"at step {step} of seed {ours.seed} the baseline's own loss is not finite"
                broken = ("inconclusive", reason)
        if not steps and broken is None:
            broken = ("inconclusive", f"seed {ours.seed} has no optimizer step in common with the baseline")
        if broken is None and not _same_batch(ours, theirs):
            reason = f"a step is {_samples_per_step(ours):.4g} samples, the baseline's {_samples_per_step(theirs):.4g}"
            broken = ("inconclusive", f"{reason}: their losses do not compare step by step")
    return broken


def _find_unusable_metric(comparison: _Comparison) -> _Finding | None:
    name, broken = comparison.metric, None
    for ours, theirs in comparison.pairs:
        if theirs.metric is None:
            broken = f"the baseline has no finite {name} for seed {ours.seed}"
        elif ours.metric is None:
            return "inferior", f"there is no finite {name} for seed {ours.seed}; the baseline has {theirs.metric:.4g}"
        elif theirs.metric == 0.0:
            broken = f"the baseline's {name} is 0 for seed {ours.seed}: no relative worsening exists"
    return None if broken is None else ("inconclusive", broken)


def _find_too_few_seeds(pairs: Sequence[_Pair]) -> _Finding | None:
    if len(pairs) >= 2:
        return None
    return "inconclusive", f"{len(pairs)} seed(s) in common with the baseline: at least 2 are needed"


def _same_batch(ours: LossCurve, theirs: LossCurve) -> bool:
    expected = _samples_per_step(theirs)
    return abs(_samples_per_step(ours) - expected) <= _BATCH_TOLERANCE * expected


def _samples_per_step(curve: LossCurve) -> float:
    return curve.samples / len(curve.losses)


def _tail(ours: LossCurve, theirs: LossCurve) -> list[tuple[float, float]]:
    steps = list(zip(ours.losses, theirs.losses, strict=False))
    return [(a, b) for a, b in steps[len(steps) // 2 :] if a is not None and b is not None]


def _all_positive(window: Sequence[tuple[float, float]]) -> bool:
    return all(ours > 0.0 and theirs > 0.0 for ours, theirs in window)


def _is_zero(window: Sequence[tuple[float, float]]) -> bool:
    return all(theirs == 0.0 for _, theirs in window)


def _log_drift(window: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(math.log(ours) - math.log(theirs) for ours, theirs in window)


def _relative_drift(window: Sequence[tuple[float, float]]) -> float:
    mean_absolute = sum(abs(theirs) / len(window) for _, theirs in window)
    scale = min(max(mean_absolute, sys.float_info.min), sys.float_info.max)  # rounding can leave this range
    return statistics.fmean(_cut((ours - theirs) / scale) for ours, theirs in window)


def _cut(worsening: float) -> float:
    return max(-_LARGEST_WORSENING, min(_LARGEST_WORSENING, worsening))


def _worsening(log_drift: float) -> float:
    return math.expm1(min(math.log(_LARGEST_WORSENING), log_drift))


def _drift_interval(drifts: Sequence[float]) -> Interval:
    method = f"Student t over {len(drifts)} paired seeds"
    return mean_interval(drifts, confidence_level=_CONFIDENCE_LEVEL, method=method)


def _exponentiated(logs: Interval) -> Interval:
    return logs.replace(
        estimate=_worsening(logs.estimate),
        low=_worsening(logs.low),
        high=_worsening(logs.high),
        method=f"{logs.method}, log ratio",
    )


def _judge(comparison: _Comparison, worsening: Interval) -> QualityCheck:
    estimate, seeds = format_percent(worsening.estimate), len(comparison.pairs)
    found = f"the relative worsening of {comparison.metric} is {estimate} over {seeds} seeds"
    bounds = f"above {format_percent(worsening.low)} and below {format_percent(worsening.high)}, at 95 % each"
    margin = f"the margin of {format_percent(comparison.margin)}"
    verdict: Literal["non-inferior", "inferior", "inconclusive"]
    if worsening.high < comparison.margin:
        verdict, conclusion = "non-inferior", f"inside {margin}"
    elif worsening.low > comparison.margin:
        verdict, conclusion = "inferior", f"beyond {margin}"
    else:
        verdict, conclusion = "inconclusive", f"too uncertain for {margin}"
    return _report(comparison, verdict, f"{found} ({bounds}): {conclusion}", worsening)


def _report_exact(comparison: _Comparison) -> QualityCheck:
    steps = sum(len(ours.losses) for ours, _ in comparison.pairs)
    reason = f"all {steps} losses of {len(comparison.pairs)} seed(s) equal the baseline's bit for bit"
    zero = Interval(estimate=0.0, low=0.0, high=0.0, confidence_level=_CONFIDENCE_LEVEL, method="equal bit for bit")
    return _report(comparison, "non-inferior", reason, zero)


def _report_finding(comparison: _Comparison, finding: _Finding) -> QualityCheck:
    verdict, reason = finding
    return _report(comparison, verdict, reason, None)


def _report(
    comparison: _Comparison,
    verdict: Literal["non-inferior", "inferior", "inconclusive"],
    reason: str,
    difference: Interval | None,
) -> QualityCheck:
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
