"""Intervals and sample sizes: numbers in, numbers out, no torch and no clock.

    r_k = log(candidate_k / baseline_k), one fresh pair of processes each
    speed-up = exp(mean(r) ± t(K-1) · sd(r) / sqrt(K)), claimed when the lower end passes the threshold

Steps of one process share that process's luck, so an interval over steps is far too narrow: only pairs count here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.records.measurement import Interval

_CLAIM_CONFIDENCE = 0.99
_POWER = 0.80
_CLAIM_THRESHOLD = math.log(1.01)
_LARGEST_LOG = 700.0  # exp of it is still finite, and so fits a record
_SMALLEST_TAIL = 1e-100  # beyond it t² can overflow
_TINY = 1e-300
_MAX_ITERATIONS = 1000


def student_t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return t with P(T <= t) = probability for Student's t.

    The upper tail is P(T > t) = I_x(n/2, 1/2) / 2 at x = n / (n + t²), with n degrees of freedom and I the regularised
    incomplete beta function (Abramowitz & Stegun 26.5.27 and 26.7.1). It is inverted by Newton steps kept inside a
    bracket; the error is below 1e-8 up to 200 degrees of freedom and grows slowly beyond.

    Raises:
        ValueError: the probability is not inside [1e-100, 1), or there is less than one degree of freedom.
    """
    if not _SMALLEST_TAIL <= probability < 1.0:
        raise ValueError(f"probability is {probability}: it must be at least {_SMALLEST_TAIL} and below 1")
    if not 1.0 <= degrees_of_freedom < math.inf:
        raise ValueError(f"degrees_of_freedom is {degrees_of_freedom}: it must be at least 1 and finite")
    if probability < 0.5:
        return -_invert_upper_tail(probability, degrees_of_freedom)
    return _invert_upper_tail(1.0 - probability, degrees_of_freedom)


def mean_interval(values: Sequence[float], *, confidence_level: float, method: str) -> Interval:
    """Return the two-sided Student t interval of a mean: mean ± t · sd / sqrt(n).

    Args:
        values: independent values, at least two.
        confidence_level: two-sided; at 0.98 each end alone holds with 0.99.
        method: what the record says about how it was computed.

    Raises:
        ValueError: fewer than two values, or a value is not finite.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("an interval needs finite values")
    mean = statistics.fmean(values)
    t = student_t_quantile((1.0 + confidence_level) / 2.0, len(values) - 1)
    half_width = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(
        estimate=mean,
        low=mean - half_width,
        high=mean + half_width,
        confidence_level=confidence_level,
        method=method,
    )


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float], *, confidence_level: float = 0.98) -> Interval:
    """Return how many times the baseline the candidate is, from values measured in pairs.

    The Student t interval of the mean log ratio, exponentiated: the estimate is the geometric mean of the ratios.
    Pairing removes what both arms of a pair share, e.g. the machine's slow drift.

    Args:
        candidate: positive values, e.g. samples per second, one per pair.
        baseline: the same pairs' values at the baseline.
        confidence_level: two-sided; 0.98 lets the lower end be claimed at one-sided 0.99.

    Raises:
        ValueError: fewer than two pairs, lengths that differ, or a value that is not positive and finite.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} candidate values cannot be paired with {len(baseline)} baseline values")
    if len(candidate) < 2:
        raise ValueError(f"a paired ratio needs at least 2 pairs, got {len(candidate)}")
    for value in (*candidate, *baseline):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"a ratio needs positive finite values, got {value}")
    log_ratios = [math.log(ours) - math.log(theirs) for ours, theirs in zip(candidate, baseline, strict=True)]
    method = f"Student t on {len(log_ratios)} paired log ratios"
    logs = mean_interval(log_ratios, confidence_level=confidence_level, method=method)
    return logs.replace(estimate=_finite_exp(logs.estimate), low=_finite_exp(logs.low), high=_finite_exp(logs.high))


def minimum_detectable_speedup(
    sd_log_ratio: float, pairs: int, *, confidence: float = _CLAIM_CONFIDENCE, power: float = _POWER
) -> float:
    """Return the smallest speed-up that this many pairs would show, as a ratio over the threshold it must beat.

    exp((t_confidence + t_power) · sd / sqrt(pairs)), both quantiles at pairs - 1 degrees of freedom: a true speed-up
    of threshold x this value is claimed with the given power.

    Args:
        sd_log_ratio: standard deviation of the log ratio of one pair.
        pairs: fresh-process pairs, at least two.
        confidence: one-sided confidence of a claim.
        power: probability that the claim is made.

    Raises:
        ValueError: fewer than two pairs, or a negative standard deviation.
    """
    if pairs < 2:
        raise ValueError(f"pairs is {pairs}: it must be at least 2")
    return _finite_exp(_detectable_log_effect(sd_log_ratio, pairs, confidence=confidence, power=power))


def pairs_needed(
    sd_log_ratio: float, log_effect: float, *, most: int, fewest: int = 6, threshold: float = _CLAIM_THRESHOLD
) -> int:
    """Return how many pairs prove an effect: claimed one-sided at 99 %, found with a power of 80 %.

    The smallest K with K >= ((t_.99 + t_.80) · sd / (effect - threshold))² at K - 1 degrees of freedom, which stand on
    both sides, so K is searched upwards and kept within `fewest` and `most`.

    Args:
        sd_log_ratio: standard deviation of the log ratio of one pair, from data other than the pairs to come.
        log_effect: log of the speed-up expected.
        most: what the budget allows; it wins over `fewest`.
        fewest: pairs run in any case, at least two.
        threshold: log ratio that a claim must exceed.

    Raises:
        ValueError: `fewest` or `most` is below 2, or the standard deviation is negative.
    """
    if min(fewest, most) < 2:
        raise ValueError(f"fewest is {fewest} and most is {most}: both must be at least 2")
    for pairs in range(fewest, most):
        detectable = _detectable_log_effect(sd_log_ratio, pairs, confidence=_CLAIM_CONFIDENCE, power=_POWER)
        if detectable <= log_effect - threshold:
            return pairs
    return most


def _invert_upper_tail(tail: float, degrees_of_freedom: float) -> float:
    if tail == 0.5:
        return 0.0
    low, high = 0.0, 1.0
    while _upper_tail(high, degrees_of_freedom) > tail:
        low, high = high, 2.0 * high
    t = 0.5 * (low + high)
    for _ in range(_MAX_ITERATIONS):
        excess = _upper_tail(t, degrees_of_freedom) - tail
        low, high = (t, high) if excess > 0.0 else (low, t)
        proposal = t + excess / _density(t, degrees_of_freedom)
        if not low < proposal < high:
            proposal = 0.5 * (low + high)
        if abs(proposal - t) <= 1e-15 * abs(proposal):
            return proposal
        t = proposal
    return t


def _upper_tail(t: float, degrees_of_freedom: float) -> float:
    square = t * t
    x = degrees_of_freedom / (degrees_of_freedom + square)
    complement = square / (degrees_of_freedom + square)
    return 0.5 * _regularised_beta(x, complement, 0.5 * degrees_of_freedom, 0.5)


def _density(t: float, degrees_of_freedom: float) -> float:
    half = 0.5 * degrees_of_freedom
    log_scale = math.lgamma(half + 0.5) - math.lgamma(half) - 0.5 * math.log(degrees_of_freedom * math.pi)
    return math.exp(log_scale - (half + 0.5) * math.log1p(t * t / degrees_of_freedom))


def _regularised_beta(x: float, complement: float, a: float, b: float) -> float:
    """I_x(a, b), with 1 - x handed in so that it keeps its digits near x = 1."""
    if x <= 0.0 or complement <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(complement)
    front = math.exp(log_front)
    if x < (a + 1.0) / (a + b + 2.0):  # where the fraction converges fast (Numerical Recipes, 3rd ed., 6.4)
        return front * _beta_fraction(x, a, b) / a
    return 1.0 - front * _beta_fraction(complement, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of Abramowitz & Stegun 26.5.8 by the modified Lentz method."""
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MAX_ITERATIONS):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for coefficient in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + coefficient * d)
            c = _away_from_zero(1.0 + coefficient / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _detectable_log_effect(sd_log_ratio: float, pairs: int, *, confidence: float, power: float) -> float:
    if sd_log_ratio < 0.0:
        raise ValueError(f"sd_log_ratio is {sd_log_ratio}: it must not be negative")
    quantiles = student_t_quantile(confidence, pairs - 1) + student_t_quantile(power, pairs - 1)
    return quantiles * sd_log_ratio / math.sqrt(pairs)


def _finite_exp(value: float) -> float:
    return math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, value)))
