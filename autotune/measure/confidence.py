"""Intervals and sample sizes: numbers in, numbers out, no torch and no clock.

    r_k = log(candidate_k / baseline_k), one fresh pair of processes each
    speed-up = exp(mean(r) ± t(K-1) · sd(r) / sqrt(K)), claimed when the lower end passes the threshold

Steps of one process share that process's luck, so an interval over steps is far too narrow: only pairs count there.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from autotune.measure.student_t import student_t_quantile
from autotune.records.measurement import Interval

_CLAIM_CONFIDENCE = 0.99
_POWER = 0.80
_CLAIM_THRESHOLD = math.log(1.01)
_LARGEST_LOG = 700.0  # exp of it is still finite, and so fits a record
_NORMAL = statistics.NormalDist()


def sum_of_squares(values: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean; 0 for fewer than two values."""
    # Correctly rounded sums are exact enough here; the fractions of `statistics` cost ten times as much.
    mean = math.fsum(values) / max(1, len(values))
    return math.fsum((value - mean) ** 2 for value in values)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, sqrt(sum of squares / (n - 1)), of at least two values."""
    return math.sqrt(sum_of_squares(values) / (len(values) - 1))


def mean_interval(values: Sequence[float], *, confidence_level: float, method: str) -> Interval:
    """Return the two-sided Student t interval of the mean of independent values: mean ± t · sd / sqrt(n).

    At a confidence level of 0.98 each end alone holds with 0.99. The method is what the record says of it.

    Raises:
        ValueError: fewer than two values, or a value is not finite.
    """
    _refuse_non_finite("an interval", values, fewest=2)
    mean = statistics.fmean(values)
    t = student_t_quantile((1.0 + confidence_level) / 2.0, len(values) - 1)
    half_width = t * standard_deviation(values) / math.sqrt(len(values))
    return Interval(
        estimate=mean, low=mean - half_width, high=mean + half_width, confidence_level=confidence_level, method=method
    )


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float], *, confidence_level: float = 0.98) -> Interval:
    """Return how many times the baseline the candidate is, from values measured in pairs.

    The Student t interval of the mean log ratio, exponentiated: the estimate is the geometric mean of the ratios.
    Pairing removes what both arms of a pair share, e.g. the machine's slow drift. The values are positive rates, one
    per pair; a two-sided 0.98 lets the lower end be claimed at one-sided 0.99.

    Raises:
        ValueError: fewer than two pairs, lengths that differ, or a value that is not positive and finite.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} candidate values cannot be paired with {len(baseline)} baseline values")
    if len(candidate) < 2:
        raise ValueError(f"a paired ratio needs at least 2 pairs, got {len(candidate)}")
    _refuse_non_positive("a ratio", (*candidate, *baseline))
    log_ratios = [math.log(ours) - math.log(theirs) for ours, theirs in zip(candidate, baseline, strict=True)]
    method = f"Student t on {len(log_ratios)} paired log ratios"
    logs = mean_interval(log_ratios, confidence_level=confidence_level, method=method)
    return logs.replace(estimate=_finite_exp(logs.estimate), low=_finite_exp(logs.low), high=_finite_exp(logs.high))


def minimum_detectable_speedup(
    sd_log_ratio: float, pairs: int, *, confidence: float = _CLAIM_CONFIDENCE, power: float = _POWER
) -> float:
    """Return the smallest speed-up that this many pairs would show, as a ratio over the threshold it must beat.

    exp((t_confidence + t_power) · sd / sqrt(pairs)), both quantiles at pairs - 1 degrees of freedom: a true speed-up
    of threshold x this value is claimed, one-sided, with the given power. sd is that of the log ratio of one pair.

    Raises:
        ValueError: fewer than two pairs, or a negative standard deviation.
    """
    if pairs < 2:
        raise ValueError(f"pairs is {pairs}: it must be at least 2")
    return _finite_exp(_detectable_log_effect(sd_log_ratio, pairs, confidence=confidence, power=power))


def pairs_needed(
    sd_log_ratio: float,
    log_effect: float,
    *,
    most: int,
    fewest: int = 6,
    threshold: float = _CLAIM_THRESHOLD,
    confidence: float = _CLAIM_CONFIDENCE,
) -> int:
    """Return how many pairs prove an effect: claimed one-sided at a confidence, found with a power of 80 %.

    The smallest K >= ((t_conf + t_.80) · sd / (effect - threshold))² at K - 1 degrees of freedom, bisected between
    `fewest` and `most`, which wins. sd is that of one pair's log ratio, from other data; all three are logarithms.

    Raises:
        ValueError: `fewest` or `most` is below 2, the standard deviation is negative, or a number is not finite.
    """
    if min(fewest, most) < 2:
        raise ValueError(f"fewest is {fewest} and most is {most}: both must be at least 2")
    _refuse_negative(sd_log_ratio=sd_log_ratio)
    _refuse_non_finite("an effect", (log_effect, threshold))
    detect = functools.partial(_detectable_log_effect, sd_log_ratio, confidence=confidence, power=_POWER)
    first = min(fewest, most)
    return first + bisect.bisect_left(range(first, most), threshold - log_effect, key=lambda pairs: -detect(pairs))


def conditional_power(
    log_ratios: Sequence[float], rounds: int, *, sd: float, threshold: float, confidence: float
) -> float:
    """Return the probability that `rounds` pairs in all end in a claim, if the mean seen so far is the truth.

    The mean of the pairs to come is normal around the mean seen with sd / sqrt(remaining); the claim is made when the
    mean of all exceeds threshold + t · sd / sqrt(rounds), t one-sided at `confidence` (Lan & Wittes, Biometrics 1988,
    under the current trend). sd is that of one pair. Stopping when the power is small raises no rate of false claims.

    Raises:
        ValueError: no pair, fewer rounds than pairs or than two, a negative sd, or a number that is not finite.
    """
    seen = len(log_ratios)
    if not 1 <= seen <= rounds or rounds < 2:
        raise ValueError(f"{seen} log ratios in {rounds} rounds: give at least 1, and at least 2 rounds and as many")
    _refuse_non_finite("conditional power", (*log_ratios, threshold))
    _refuse_negative(sd=sd)
    mean, remaining = statistics.fmean(log_ratios), rounds - seen
    critical = threshold + student_t_quantile(confidence, rounds - 1) * sd / math.sqrt(rounds)
    if remaining == 0 or sd == 0.0:
        return 1.0 if mean > critical else 0.0
    return _NORMAL.cdf((mean - critical) * rounds / (sd * math.sqrt(remaining)))


def effective_count(values: Sequence[float]) -> float:
    """Return how many independent values say as much about the mean: n (1 - r) / (1 + r), within [1, n].

    r is the lag-1 autocorrelation; the formula is that of an AR(1) series (Bayley & Hammersley, JRSS Supplement 1946).
    A negative r counts as 0, and so does that of a constant series.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    _refuse_non_finite("an effective count", values, fewest=1)
    count, mean = len(values), statistics.fmean(values)
    deviations = [value - mean for value in values]
    squares = math.fsum(deviation * deviation for deviation in deviations)
    if squares == 0.0 or min(values) == max(values):  # equal values can miss their own mean by a rounding
        return float(count)
    r = max(0.0, math.fsum(now * then for now, then in itertools.pairwise(deviations)) / squares)
    return max(1.0, count * (1.0 - r) / (1.0 + r))


def relative_half_width(values: Sequence[float]) -> float:
    """Return the precision that a trial's blocks reached: 1.96 sd / sqrt(effective_count) / mean.

    It says how well this process's own mean is known, and nothing of the next launch. Infinite below two values.

    Raises:
        ValueError: a value is not positive and finite.
    """
    _refuse_non_positive("a relative width", values)
    if len(values) < 2:
        return math.inf
    return 1.96 * standard_deviation(values) / math.sqrt(effective_count(values)) / statistics.fmean(values)


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of the Walsh averages (x_i + x_j) / 2, i <= j: a centre that a lone outlier hardly moves.

    Source: Hodges & Lehmann, Annals of Mathematical Statistics 1963.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    _refuse_non_finite("a centre", values, fewest=1)
    return statistics.median(0.5 * one + 0.5 * other for at, one in enumerate(values) for other in values[at:])


def pooled_sd(groups: Iterable[Sequence[float]], *, prior_sd: float, prior_degrees: float) -> tuple[float, float]:
    """Return the standard deviation within groups, with a prior, and its degrees of freedom (the prior's included).

    sqrt((prior_degrees · prior_sd² + sum of squared deviations from the group means) / all degrees): the prior counts
    as that many degrees already seen. Groups of fewer than two values add nothing.

    Raises:
        ValueError: a negative prior, a value that is not finite, or neither prior nor group has a degree of freedom.
    """
    _refuse_negative(prior_sd=prior_sd, prior_degrees=prior_degrees)
    squares, degrees = prior_degrees * prior_sd * prior_sd, prior_degrees
    for group in groups:
        _refuse_non_finite("a pooled sd", group)
        if len(group) >= 2:
            squares += sum_of_squares(group)
            degrees += len(group) - 1
    if degrees == 0.0:
        raise ValueError("a pooled sd needs a prior or a group of at least 2 values")
    return math.sqrt(squares / degrees), degrees


def spread_variance(values: Sequence[float], noise_variances: Sequence[float]) -> float:
    """Return the variance of the true values behind noisy ones: max(0, var(values) - mean(noise_variances)).

    The method of moments; 0 with fewer than two values.

    Raises:
        ValueError: lengths that differ, a negative noise variance, or a number that is not finite.
    """
    if len(values) != len(noise_variances):
        raise ValueError(f"{len(values)} values cannot go with {len(noise_variances)} noise variances")
    _refuse_non_finite("a spread", values)
    for noise_variance in noise_variances:
        _refuse_negative(noise_variance=noise_variance)
    if len(values) < 2:
        return 0.0
    return max(0.0, standard_deviation(values) ** 2 - statistics.fmean(noise_variances))


def shrink(value: float, *, towards: float, noise_variance: float, spread_variance: float) -> float:
    """Return the empirical-Bayes estimate: towards + B (value - towards), B = spread / (spread + noise).

    It takes the winner's curse off the best of many noisy values. Without noise the value itself is returned.

    Raises:
        ValueError: a negative variance, or a number that is not finite.
    """
    _refuse_non_finite("shrinking", (value, towards))
    _refuse_negative(noise_variance=noise_variance, spread_variance=spread_variance)
    trust = 1.0 if noise_variance == 0.0 else spread_variance / (spread_variance + noise_variance)
    return towards + trust * (value - towards)


def _detectable_log_effect(sd_log_ratio: float, pairs: int, *, confidence: float, power: float) -> float:
    _refuse_negative(sd_log_ratio=sd_log_ratio)
    quantiles = student_t_quantile(confidence, pairs - 1) + student_t_quantile(power, pairs - 1)
    return quantiles * sd_log_ratio / math.sqrt(pairs)


def _refuse_non_finite(who: str, values: Sequence[float], *, fewest: int = 0) -> None:
    if len(values) < fewest:
        raise ValueError(f"{who} needs at least {fewest} values, got {len(values)}")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{who} needs finite values")


def _refuse_non_positive(who: str, values: Sequence[float]) -> None:
    bad = [value for value in values if not 0.0 < value < math.inf]
    if bad:
        raise ValueError(f"{who} needs positive finite values, got {bad[0]}")


def _refuse_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}: it must be finite and must not be negative")


def _finite_exp(value: float) -> float:
    return math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, value)))
