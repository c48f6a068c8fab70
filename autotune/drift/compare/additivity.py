"""Is the gradient of a batch that of its parts? What a split into micro-batches must not change.

    error of a window = |candidate - baseline| / |baseline|, over all elements

Batch norm, a mean of the micro-batches' means where they differ in length, and any loss over a whole batch are not
additive. The order of summation alone moves a gradient too, and `reordering` says by how much.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout, find_flaw, pair, place_of, sum_squares
from autotune.records.measurement import Interval
from autotune.records.quality import Margin, QualityCheck, QualityVerdict

SMALLEST_LIMIT = 1e-4
"""Relative error that is allowed in any case: about 1000 roundings in float32."""
REORDERING_FACTOR = 3.0
"""Times the error of reordering alone that are allowed."""
LARGEST_LIMIT = 0.02
"""Limit above which nothing is shown any more."""

_CONFIDENCE_LEVEL = 0.90  # as everywhere; the ends are the estimate itself
_LARGEST_ERROR = 1e12  # cut there: it decides the same, and a record holds no infinity


def check_additivity(
    candidate: GradientRows, baseline: GradientRows, layers: RowLayout, *, reordering: float
) -> QualityCheck:
    """Compare the gradients of whole batches with those accumulated over their parts, window by window.

    Args:
        candidate: gradients of one split; windows without a partner are left out.
        baseline: of the other.
        layers: what the columns are.
        reordering: `relative_error` of two runs that differ in the order of summation only.

    Returns:
        non-inferior when the worst window's error is at most max(1e-4, 3 x reordering), and inferior beyond, or when
        the candidate is not finite where the baseline is. inconclusive without a common window, with a baseline that is
        not finite, and when reordering alone moves the gradient so much that the limit says nothing.

    Raises:
        ValueError: an arm's rows do not have the layers' columns.
    """
    ours, theirs = pair(layers, candidate, baseline)
    limit = min(_LARGEST_ERROR, max(SMALLEST_LIMIT, REORDERING_FACTOR * reordering))
    flaw = find_flaw(ours, layers, beside=theirs)
    if flaw is not None:
        return _report("inferior", f"the gradient of {flaw} is not finite, and the baseline's is", limit=limit)
    flaw = find_flaw(theirs, layers)
    if flaw is not None:
        return _report("inconclusive", f"the baseline's own gradient of {flaw} is not finite", limit=limit)
    if not len(theirs.keys):
        return _report("inconclusive", "no window in common with the baseline", limit=limit)
    return _judge(ours, theirs, layers, limit=limit)


def relative_error(candidate: GradientRows, baseline: GradientRows, layers: RowLayout) -> float:
    """Return |candidate - baseline| / |baseline| over all elements of all common windows.

    Infinite when a value is not finite, no window is common, or the baseline is zero where the candidate is not.

    Raises:
        ValueError: an arm's rows do not have the layers' columns.
    """
    differences, sizes = _sum_windows(candidate, baseline, layers)
    return _root_ratio(differences.sum(), sizes.sum())


def typical_error(candidate: GradientRows, baseline: GradientRows, layers: RowLayout) -> float:
    """Return the median over the common windows of |candidate - baseline| / |baseline|; infinite as `relative_error`.

    Gradients that jump where sums are in another order are far apart in a few windows, other gradients in all of them.

    Raises:
        ValueError: an arm's rows do not have the layers' columns.
    """
    differences, sizes = _sum_windows(candidate, baseline, layers)
    return float(np.median([_root_ratio(*squares) for squares in zip(differences, sizes, strict=True)]))


def _sum_windows(
    candidate: GradientRows, baseline: GradientRows, layers: RowLayout
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return squares of the differences and of the baseline, `[windows]`; one that is infinite where none is usable."""
    ours, theirs = pair(layers, candidate, baseline)
    if not len(theirs.keys) or find_flaw(ours, layers) is not None or find_flaw(theirs, layers) is not None:
        return np.array([math.inf]), np.ones(1)
    differences = sum_squares(ours.rows, layers, minus=theirs.rows).sum(axis=0)
    return differences, sum_squares(theirs.rows, layers).sum(axis=0)


def _judge(ours: GradientRows, theirs: GradientRows, layers: RowLayout, *, limit: float) -> QualityCheck:
    differences, sizes = _sum_windows(ours, theirs, layers)
    errors = [min(_LARGEST_ERROR, _root_ratio(*squares)) for squares in zip(differences, sizes, strict=True)]
    worst = int(np.argmax(errors))
    total = min(_LARGEST_ERROR, _root_ratio(differences.sum(), sizes.sum()))
    found = f"the gradient of a batch and of its parts differ by {total:.1e} of its size over {len(errors)} windows, "
    found += f"by {errors[worst]:.1e} in the worst, {place_of(int(theirs.keys[worst]))} (limit {limit:.1e})"
    method = f"largest over {len(errors)} windows"
    error = errors[worst]
    interval = Interval(estimate=error, low=error, high=error, confidence_level=_CONFIDENCE_LEVEL, method=method)
    if error > limit:
        return _report("inferior", found, limit=limit, difference=interval)
    if limit > LARGEST_LIMIT:
        reason = f"{found}: reordering alone moves it too much to tell"
        return _report("inconclusive", reason, limit=limit, difference=interval)
    return _report("non-inferior", found, limit=limit, difference=interval)


def _root_ratio(differences: float, sizes: float) -> float:
    if differences == 0.0:
        return 0.0
    return math.sqrt(differences / sizes) if sizes > 0.0 else math.inf


def _report(verdict: QualityVerdict, reason: str, *, limit: float, difference: Interval | None = None) -> QualityCheck:
    return QualityCheck(
        test="additivity",
        metric="gradient of a batch against its parts",
        difference=difference,
        margin=Margin(amount=limit),
        verdict=verdict,
        seeds=1,
        samples=0,
        reason=reason,
    )
