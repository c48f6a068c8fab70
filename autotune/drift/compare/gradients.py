"""Does a candidate compute the same gradients? Rows of the same windows at the same weights in, verdicts out.

    e_i = candidate_i - baseline_i, window by window, each column weighed by the elements it stands for
    noise = variance of e / the baseline's own variance from window to window     as if the batch were smaller
    bias  = |mean e| / |mean g|, the noise of sampling taken off both             as if the gradient were another one

    steering = |mean e| / the root of the baseline's variance                     as if a step's own luck were not zero

Near a minimum the mean gradient is next to nothing, and rounding the weights alone is 10 to 20 % of it. So a bias fails
only where it steers by as much: 4 % of a step's own spread weigh less than chance for 600 steps, 2 % for 2,500.

Bounds of 95 % inside the limits are non-inferior, differences shown to be beyond them inferior, and of anything else
only a training can tell. Noise, a missing value or a missing window is never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout, find_flaw, pair, sum_squares
from autotune.drift.compare.moments import (
    NO_VARIANCE,
    Ends,
    Moments,
    bias_ends,
    exceeds_bias,
    measure_moments,
    noise_ends,
    steering_ends,
)
from autotune.measure.student_t import student_t_quantile
from autotune.records.measurement import Interval
from autotune.records.quality import GradientEquivalence, Margin, QualityCheck, QualityVerdict

NOISE_PASSES, NOISE_FAILS = 0.01, 0.1
"""Non-inferior when the noise is shown to be at most the first, inferior when it is shown to be beyond the second."""
BIAS_PASSES, BIAS_FAILS = 0.02, 0.04
"""The same for the bias. The bias of a loss scaled by 1.05 is 5 %, give or take the rounding: it must fail."""
LAYER_BIAS_FAILS, LAYER_NOISE_FAILS = 0.25, 1.0
"""For one layer, shown at 99.9 % because hundreds are looked at."""
LAYER_BIAS_IN_DOUBT = 0.10
"""Estimated bias of a layer above which only a training can tell."""
SMALLEST_SHARE = 1e-4
"""Share of the squared gradient below which a layer does not matter; a bias before a norm has only rounding noise."""
AS_EXACT = 3.0
"""Times the baseline's own error against float64 that count as equally exact; `torch._dynamo.utils.same` has 2 to 3."""
_JUMP = 10.0
"""Times its error in the median window, beyond which a gradient of the baseline has jumped."""
_AS_OFTEN = 2
"""Times as many jumps as the baseline's that count as equally often: these are few, and come by chance."""
FEWEST_WINDOWS = 4
"""Windows without which there is no interval worth its name."""

UNTOLD = ": only a training can tell"
"""How the reason of what is left open ends."""

_CONFIDENCE, _LAYER_CONFIDENCE = 0.95, 0.999  # one-sided
_CONFIDENCE_LEVEL = 0.90  # two-sided: each end holds one-sided at 95 %
_LARGEST_RATIO = 1e12  # cut there: it decides the same, and a record holds no infinity
_SEVERITY = ("non-inferior", "inconclusive", "inferior")


class _Finding(NamedTuple):
    verdict: QualityVerdict
    reason: str


def compare(
    candidate: GradientRows,
    baseline: GradientRows,
    layers: RowLayout,
    *,
    subject: Literal["gradients", "updates"],
    point: str,
    reference: GradientRows | None = None,
    most_noise: float = NOISE_FAILS,
) -> GradientEquivalence:
    """Compare the same windows under two settings.

    Noise is var(e) / var(g). Bias is the root of (|mean e|² - var(e) / M) / |G|² with |G|² = |mean g|² - var(g) / M, at
    least 5 % of |mean g|² and of var(g) / M; a factor common to all windows counts as bias. Layers are looked at one by
    one as well.

    Args:
        candidate: windows without a partner are left out.
        baseline: the same.
        layers: what the columns are.
        subject: what the rows are.
        point: where the weights stood, for people.
        reference: the same windows in float64. A candidate that errs at most 3 x as much as the baseline, in all of
            them and once more without what jumps, passes in spite of noise and bias that are not shown to be too large,
            unless one layer is shown to be wrong.
        most_noise: beyond which it fails.

    Returns:
        inferior as well when the candidate is not finite where the baseline is; inconclusive when the baseline is not
        finite or zero, and for fewer than 4 windows. Rows that are equal bit for bit always pass.

    Raises:
        ValueError: an arm's rows do not have the layers' columns.
    """
    ours, theirs = pair(layers, candidate, baseline)
    result = GradientEquivalence(subject=subject, point=point, windows=len(theirs.keys), verdict="inconclusive")
    finding = _find_unusable(ours, theirs, layers)
    if finding is None and np.array_equal(ours.rows, theirs.rows):
        zero = _interval(Ends(*np.zeros(3)), "equal bit for bit")
        reason = f"all {result.windows} windows equal the baseline's bit for bit"
        return result.replace(noise=zero, bias=zero, verdict="non-inferior", reason=reason)
    if finding is None and result.windows < FEWEST_WINDOWS:
        reason = f"{result.windows} window(s) in common with the baseline: at least {FEWEST_WINDOWS} are needed"
        finding = _Finding("inconclusive", reason)
    if finding is not None:
        return result.replace(verdict=finding.verdict, reason=finding.reason)
    moments = measure_moments(ours.rows, theirs.rows, layers)
    if not moments.baseline.squares[:, 0].sum() > 0.0:
        return result.replace(reason=f"the baseline's {subject} are all zero")
    errors = None if reference is None else _errors_to_reference(ours, theirs, reference, layers)
    return _judge_moments(result, moments, errors, layers.names, most_noise=most_noise)


def judge(found: Sequence[GradientEquivalence], *, samples: int) -> QualityCheck:
    """Return one check over all comparisons: as bad as the worst of them, whose bias is the check's difference.

    Of those that pass the worst is one that is gone later, then the one with the largest bias.

    Args:
        found: may be empty, which is inconclusive.
        samples: trained on up to the last point compared.
    """
    worst = max(
        found,
        key=lambda one: (_SEVERITY.index(one.verdict), one.is_transient, one.bias.estimate if one.bias else 0.0),
        default=None,
    )
    only_updates = bool(found) and all(one.subject == "updates" for one in found)
    return QualityCheck(
        test="gradients",
        metric="updates" if only_updates else "gradients",
        difference=None if worst is None else worst.bias,
        margin=Margin(amount=BIAS_PASSES),
        verdict="inconclusive" if worst is None else worst.verdict,
        seeds=1,
        samples=samples,
        reason="no window was compared" if worst is None else f"{worst.subject}, {worst.point}: {worst.reason}",
        fidelity=tuple(found),
    )


def may_tell(left_open: Sequence[GradientEquivalence], *, windows: int) -> bool:
    """Return whether so many windows may settle what fewer have left open.

    Half widths shrink with the root of the windows and with Student's t. A noise of 3 % stays between its limits
    however many there are, for its estimate is hardly off. A bias may be the least that fewer windows have left
    possible: that of another width of arithmetic mostly is. What is in doubt for one layer alone may be settled.

    Args:
        left_open: inconclusive comparisons.
        windows: of the closer look.
    """
    return bool(left_open) and all(_may_settle(one, windows) for one in left_open)


def foresee(one: GradientEquivalence, *, windows: int) -> GradientEquivalence:
    """Return a comparison with the intervals that so many windows would have around its estimates; verdict as it was.

    Args:
        one: of at least 4 windows, where it has any figure.
        windows: of a closer look.
    """
    if one.bias is None:
        return one
    shrunk = _find_shrinkage(one.windows, windows)
    return one.replace(
        noise=one.noise and _narrow_noise(one.noise, shrunk),
        bias=_narrow(one.bias, shrunk),
        steering=one.steering and _narrow(one.steering, shrunk),
    )


def _may_settle(one: GradientEquivalence, windows: int) -> bool:
    if one.bias is None or one.windows < FEWEST_WINDOWS:
        return True
    seen = foresee(one, windows=windows)
    if seen.noise is not None and seen.noise.low > NOISE_FAILS:
        return True
    is_steering = seen.steering is None or seen.steering.low > BIAS_FAILS
    if seen.bias is not None and seen.bias.low > BIAS_FAILS and is_steering:
        return True
    hopeful = _narrow(one.bias, _find_shrinkage(one.windows, windows), around=one.bias.low)
    return hopeful.high <= BIAS_PASSES and (seen.noise is None or seen.noise.high <= NOISE_PASSES)


def _find_shrinkage(windows: int, more: int) -> float:
    """Return the half width of an interval of more windows, times that of so many."""
    then, now = (student_t_quantile(_CONFIDENCE, count - 1.0) for count in (more, windows))
    return then / now * math.sqrt(windows / more)


def _narrow(figure: Interval, shrunk: float, *, around: float | None = None) -> Interval:
    low, high = (shrunk * (end - figure.estimate) for end in (figure.low, figure.high))
    estimate = figure.estimate if around is None else around
    return figure.replace(estimate=estimate, low=estimate + low, high=estimate + high)


def _narrow_noise(figure: Interval, shrunk: float) -> Interval:
    """Return the interval narrowed where it was made, on the cube root: see `noise_ends`."""
    middle, low, high = (math.cbrt(end) for end in (figure.estimate, figure.low, figure.high))
    return figure.replace(low=(middle + shrunk * (low - middle)) ** 3, high=(middle + shrunk * (high - middle)) ** 3)


def _find_unusable(ours: GradientRows, theirs: GradientRows, layers: RowLayout) -> _Finding | None:
    if not len(theirs.keys):
        return _Finding("inconclusive", "no window in common with the baseline")
    flaw = find_flaw(ours, layers, beside=theirs)
    if flaw is not None:
        return _Finding("inferior", f"a value of {flaw} is not finite, and the baseline's is")
    flaw = find_flaw(theirs, layers)
    if flaw is not None:
        return _Finding("inconclusive", f"the baseline's own value of {flaw} is not finite")
    return None


def _errors_to_reference(
    candidate: GradientRows, baseline: GradientRows, reference: GradientRows, layers: RowLayout
) -> NDArray[np.float64] | None:
    """Squared errors, of the candidate and of the baseline, [2, layers, windows]; None without a usable window."""
    ours, theirs, exact = pair(layers, candidate, baseline, reference)
    if not len(exact.keys) or find_flaw(exact, layers) is not None:
        return None
    return np.stack([sum_squares(arm.rows, layers, minus=exact.rows) for arm in (ours, theirs)])


def _judge_moments(
    result: GradientEquivalence,
    moments: Moments,
    errors: NDArray[np.float64] | None,
    names: Sequence[str],
    *,
    most_noise: float,
) -> GradientEquivalence:
    total = moments.sum()
    method = f"jackknife over {result.windows} windows, Student t"
    bias = _interval(bias_ends(total, confidence=_CONFIDENCE), method)
    varies = bool(_has_variance(total))
    noise = _interval(noise_ends(total, confidence=_CONFIDENCE), method) if varies else None
    steering = _interval(steering_ends(total, confidence=_CONFIDENCE), method) if varies else None
    ratio = _reference_ratio(errors)
    worst, worst_bias, in_layer = _find_worst_layer(result.subject, moments, errors, names)
    in_bias = _judge_bias(bias, steering, is_beyond=bool(exceeds_bias(total, BIAS_FAILS, confidence=_CONFIDENCE)))
    finding = _combine(_judge_whole(result.subject, noise, in_bias, most_noise), in_layer, ratio)
    return result.replace(
        noise=noise,
        bias=bias,
        steering=steering,
        worst_layer=worst,
        worst_bias=worst_bias,
        reference_ratio=ratio,
        verdict=finding.verdict,
        reason=finding.reason,
    )


def _interval(ends: Ends, method: str) -> Interval:
    estimate, low, high = (float(end) for end in ends)
    return Interval(estimate=estimate, low=low, high=high, confidence_level=_CONFIDENCE_LEVEL, method=method)


def _has_variance(moments: Moments) -> NDArray[np.bool_]:
    baseline = moments.baseline
    return np.asarray(baseline.variance[..., 0] > NO_VARIANCE * baseline.mean_square[..., 0])


def _reference_ratio(errors: NDArray[np.float64] | None) -> float | None:
    """Return the larger of the ratios of all errors and of those without jumps; None where the baseline has none.

    Where the baseline's gradient jumps in a few windows, these are all there is to the first. They are left out of the
    second, as are twice as many of the candidate's worst: jumps excuse jumps, and nothing else.
    """
    if errors is None:
        return None
    windows = np.sort(errors.sum(axis=1), axis=1)
    jumps = int(np.sum(windows[1] > _JUMP**2 * np.median(windows[1])))
    count, sums = windows.shape[1], windows.sum(axis=1)
    calm = [windows[0, : max(0, count - _AS_OFTEN * jumps)].sum(), windows[1, : count - jumps].sum()]
    if not sums[1] > 0.0:
        return None
    ratios = [math.inf if not theirs > 0.0 else math.sqrt(ours / theirs) for ours, theirs in (sums, calm) if ours]
    return min(_LARGEST_RATIO, max(ratios, default=0.0))


def _find_worst_layer(
    subject: str, moments: Moments, errors: NDArray[np.float64] | None, names: Sequence[str]
) -> tuple[str, float | None, _Finding | None]:
    """Name and bias of the layer with the largest bias among those that matter, and what is to be said of it."""
    energy = moments.baseline.squares[:, 0]
    matters = energy > SMALLEST_SHARE * energy.sum()
    if errors is not None:
        ours, theirs = errors.sum(axis=2)
        matters &= ours > AS_EXACT**2 * theirs
    layers = np.flatnonzero(matters)
    if not len(layers):
        return "", None, None
    chosen = moments.take(layers)
    bias, noise = _layer_bias(chosen), noise_ends(chosen, confidence=_LAYER_CONFIDENCE)
    varies = _has_variance(chosen)
    # The Adam update of a gradient that is mere rounding noise is as large as any other, and noise in either arm.
    noisy = (noise.low > LAYER_NOISE_FAILS) & varies
    shown = exceeds_bias(chosen, LAYER_BIAS_FAILS, confidence=_LAYER_CONFIDENCE) | (noisy & (subject == "gradients"))
    doubtful = noisy | (bias > LAYER_BIAS_IN_DOUBT)
    at = max(range(len(layers)), key=lambda one: (shown[one], doubtful[one], bias[one]))
    name, size = names[layers[at]], float(bias[at])
    if not shown[at] and not doubtful[at]:
        return name, size, None
    found = f"the {subject.removesuffix('s')} of {name} has a bias of {_percent(size)}"
    if varies[at]:
        found += f" and differences of {_percent(noise.estimate[at])} of its own variance"
    return name, size, _Finding("inferior" if shown[at] else "inconclusive", found)


def _layer_bias(moments: Moments) -> NDArray[np.float64]:
    """Estimates; a mean that is smaller than the noise in it leaves only a wrong factor to be seen."""
    baseline, factor = moments.baseline, np.abs(moments.factor()[:, 0])
    resolved = baseline.true_mean_square[:, 0] > baseline.variance[:, 0] / baseline.counts[0]
    bias = np.sqrt(np.maximum(moments.squared_bias()[:, 0], 0.0))
    return np.where(resolved, np.maximum(bias, factor), factor)


def _judge_bias(bias: Interval, steering: Interval | None, *, is_beyond: bool) -> _Finding:
    found = _judge_figure(bias, (BIAS_PASSES, BIAS_FAILS))
    is_beyond = is_beyond or found.verdict == "inferior"
    is_steering = steering is None or steering.low > BIAS_FAILS
    if steering is None or not is_beyond or (is_steering and found.verdict == "inferior"):
        return found
    told = f"{found.reason}, {_percent(steering.estimate)} of one window's own spread"
    return _Finding("inferior" if is_steering else "inconclusive", told)


def _judge_whole(subject: str, noise: Interval | None, in_bias: _Finding, most_noise: float) -> _Finding:
    if noise is None:
        found = f"the baseline's {subject} do not vary from window to window, bias {in_bias.reason}"
        return _Finding(in_bias.verdict, found)
    own = f" of the {subject.removesuffix('s')}'s own variance"
    in_noise = _judge_figure(noise, (NOISE_PASSES, most_noise), of=own)
    verdict = max(in_noise.verdict, in_bias.verdict, key=_SEVERITY.index)
    return _Finding(verdict, f"differences are {in_noise.reason}, bias {in_bias.reason}")


def _judge_figure(figure: Interval, limits: tuple[float, float], *, of: str = "") -> _Finding:
    passes, fails = limits
    estimate, low, high = (_percent(end) for end in (figure.estimate, figure.low, figure.high))
    if figure.low > fails:
        return _Finding("inferior", f"{estimate}{of} (at least {low}, limit {_percent(fails)})")
    if figure.high <= passes:
        return _Finding("non-inferior", f"{estimate}{of} (at most {high}, limit {_percent(passes)})")
    return _Finding("inconclusive", f"{estimate}{of} (between {low} and {high}, limit {_percent(passes)})")


def _combine(whole: _Finding, in_layer: _Finding | None, ratio: float | None) -> _Finding:
    if in_layer is not None and in_layer.verdict == "inferior":
        return _Finding("inferior", f"{in_layer.reason}; {whole.reason}")
    if ratio is not None and ratio <= AS_EXACT:
        found = f"{ratio:.2g} x the baseline's own error against float64 (limit {AS_EXACT:.2g} x)"
        if whole.verdict == "inferior":
            return _Finding("inconclusive", f"{found}, and yet {whole.reason}{UNTOLD}")
        return _Finding("non-inferior", f"{found}, so as exact as it; {whole.reason}")
    reasons = [whole.reason] + ([] if in_layer is None else [in_layer.reason])
    if whole.verdict == "inferior" or (len(reasons) == 1 and whole.verdict == "non-inferior"):
        return whole
    return _Finding("inconclusive", "; ".join(reasons) + UNTOLD)


def _percent(share: float) -> str:
    percent = 100.0 * share
    if 0.0 < percent < 0.0001:
        return "0.0001 %"  # rounded up: a bound stays one
    return f"{percent:.2g} %" if percent < 99.5 else f"{percent:,.0f} %"
