"""Intervals and sample sizes: numbers in, numbers out, no torch and no clock.

    r_k = log(candidate_k / baseline_k), one fresh pair of processes each
    speed-up = exp(mean(r) ± t(d0 + K-1) · s / sqrt(K)), claimed when the lower end passes the threshold
    s²       = (d0 · s0² + (K-1) · sd(r)²) / (d0 + K-1), s0 and d0 from other data of the same noise; d0 = 0 without any

Steps of one process share that process's luck, so an interval over steps is far too narrow: only pairs count there.
The moderated variance is that of Smyth (Statistical Applications in Genetics and Molecular Biology 2004).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.measure.student_t import student_t_quantile
from autotune.records.measurement import Interval

_OTHER_NOISE = 2.0
_OUTLIER_CONFIDENCE = 0.999
_OUTLIER_SHARE = 0.25
_LARGEST_LOG = 700.0  # exp of it is still finite, and so fits a record


@dataclass(frozen=True)
class Pilot:
    """What is known of a noise before the values of which it is the noise: a variance with degrees of freedom.

    Attributes:
        sd: standard deviation of one value, from other data.
        degrees: of freedom that it counts for; 0 when nothing is known.
        is_doubtful: the values may have another noise, most likely a smaller one.
    """

    sd: float = 0.0
    degrees: float = 0.0
    is_doubtful: bool = False

    def pool(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the standard deviation of values, this one's included, and its degrees of freedom.

        Values that scatter more than twice as much have another noise, of which nothing was known before.

        Raises:
            ValueError: a value is not finite, or there is no degree of freedom at all.
        """
        if len(values) > 1 and standard_deviation(values) > _OTHER_NOISE * self.sd:
            return standard_deviation(values), len(values) - 1.0
        return pooled_sd([values], prior_sd=self.sd, prior_degrees=self.degrees)


NO_PILOT = Pilot()


def sum_of_squares(values: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean; 0 for fewer than two values."""
    # Correctly rounded sums are exact enough here; the fractions of `statistics` cost ten times as much.
    mean = math.fsum(values) / max(1, len(values))
    return math.fsum((value - mean) ** 2 for value in values)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, sqrt(sum of squares / (n - 1)), of at least two values."""
    return math.sqrt(sum_of_squares(values) / (len(values) - 1))


def mean_interval(
    values: Sequence[float], *, confidence_level: float, method: str, pilot: Pilot = NO_PILOT
) -> Interval:
    """Return the two-sided Student t interval of the mean of independent values: mean ± t · sd / sqrt(n).

    At a confidence level of 0.98 each end alone holds with 0.99. The method is what the record says of it, the pilot
    what is known of the noise beforehand. Where that is doubtful, it is the interval with the pilot or the one without
    it, whichever has the higher lower end, each at half of the risk (Bonferroni).

    Raises:
        ValueError: fewer than two values, or a value is not finite.
    """
    refuse_non_finite("an interval", values, fewest=2)
    if pilot.is_doubtful:
        halved, plain = (1.0 + confidence_level) / 2.0, replace(pilot, is_doubtful=False)
        both = [mean_interval(values, confidence_level=halved, method=method, pilot=one) for one in (plain, NO_PILOT)]
        return max(both, key=lambda one: one.low).replace(confidence_level=confidence_level)
    mean = statistics.fmean(values)
    sd, degrees = pilot.pool(values)
    half_width = student_t_quantile((1.0 + confidence_level) / 2.0, degrees) * sd / math.sqrt(len(values))
    return Interval(
        estimate=mean, low=mean - half_width, high=mean + half_width, confidence_level=confidence_level, method=method
    )


def paired_ratio(
    candidate: Sequence[float], baseline: Sequence[float], *, confidence_level: float = 0.98, pilot: Pilot = NO_PILOT
) -> Interval:
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
    known = f", {pilot.degrees:.1f} degrees of freedom known before" if pilot.degrees else ""
    known += ", or without them, each at half of the risk" if pilot.is_doubtful else ""
    method = f"Student t on {len(log_ratios)} paired log ratios{known}"
    logs = mean_interval(log_ratios, confidence_level=confidence_level, method=method, pilot=pilot)
    return logs.replace(estimate=finite_exp(logs.estimate), low=finite_exp(logs.low), high=finite_exp(logs.high))


def effective_count(values: Sequence[float]) -> float:
    """Return how many independent values say as much about the mean: n (1 - r) / (1 + r), within [1, n].

    r is the lag-1 autocorrelation; the formula is that of an AR(1) series (Bayley & Hammersley, JRSS Supplement 1946).
    A negative r counts as 0, and so does that of a constant series.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    refuse_non_finite("an effective count", values, fewest=1)
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
    refuse_non_finite("a centre", values, fewest=1)
    return statistics.median(0.5 * one + 0.5 * other for at, one in enumerate(values) for other in values[at:])


def pooled_sd(groups: Iterable[Sequence[float]], *, prior_sd: float, prior_degrees: float) -> tuple[float, float]:
    """Return the standard deviation within groups, with a prior, and its degrees of freedom (the prior's included).

    sqrt((prior_degrees · prior_sd² + sum of squared deviations from the group means) / all degrees): the prior counts
    as that many degrees already seen. Groups of fewer than two values add nothing.

    Raises:
        ValueError: a negative prior, a value that is not finite, or neither prior nor group has a degree of freedom.
    """
    refuse_negative(prior_sd=prior_sd, prior_degrees=prior_degrees)
    squares, degrees = prior_degrees * prior_sd * prior_sd, prior_degrees
    for group in groups:
        refuse_non_finite("a pooled sd", group)
        if len(group) >= 2:
            squares += sum_of_squares(group)
            degrees += len(group) - 1
    if degrees == 0.0:
        raise ValueError("a pooled sd needs a prior or a group of at least 2 values")
    return math.sqrt(squares / degrees), degrees


def quiet_sd(groups: Iterable[Sequence[float]], *, prior_sd: float, prior_degrees: float) -> tuple[float, float]:
    """Return what `pooled_sd` does, of that part of the groups in which nothing is out of all proportion.

    Each group is taken apart into as many independent contrasts as it has degrees of freedom (Helmert). The largest is
    left out while all others have a chance of 1 in 500 to explain it, a quarter of them at most or one: one launch
    beside a stall would else be most of the noise of all.

    Raises:
        ValueError: as of `pooled_sd`.
    """
    sizes = sorted(abs(one) for group in groups for one in _contrast(group))

    def pool(count: int) -> tuple[float, float]:
        squares = prior_degrees * prior_sd * prior_sd + math.fsum(one * one for one in sizes[:count])
        return math.sqrt(squares / (prior_degrees + count)), prior_degrees + count

    kept, least = len(sizes), len(sizes) - max(1, int(_OUTLIER_SHARE * len(sizes)))
    while kept > max(0, least) and prior_degrees + kept > 1:
        sd, degrees = pool(kept - 1)
        if sizes[kept - 1] <= student_t_quantile(_OUTLIER_CONFIDENCE, degrees) * sd:
            break
        kept -= 1
    return pool(kept) if sizes else pooled_sd([], prior_sd=prior_sd, prior_degrees=prior_degrees)


def _contrast(group: Sequence[float]) -> list[float]:
    """Return each value's distance from the mean of those before it, scaled to the noise of one value."""
    refuse_non_finite("a pooled sd", group)
    means = itertools.accumulate(group)
    return [
        (value - total / before) * math.sqrt(before / (before + 1))
        for before, (total, value) in enumerate(zip(means, group[1:], strict=False), start=1)
    ]


def spread_variance(values: Sequence[float], noise_variances: Sequence[float]) -> float:
    """Return the variance of the true values behind noisy ones: max(0, var(values) - mean(noise_variances)).

    The method of moments; 0 with fewer than two values.

    Raises:
        ValueError: lengths that differ, a negative noise variance, or a number that is not finite.
    """
    if len(values) != len(noise_variances):
        raise ValueError(f"{len(values)} values cannot go with {len(noise_variances)} noise variances")
    refuse_non_finite("a spread", values)
    for noise_variance in noise_variances:
        refuse_negative(noise_variance=noise_variance)
    if len(values) < 2:
        return 0.0
    return max(0.0, standard_deviation(values) ** 2 - statistics.fmean(noise_variances))


def shrink(value: float, *, towards: float, noise_variance: float, spread_variance: float) -> float:
    """Return the empirical-Bayes estimate: towards + B (value - towards), B = spread / (spread + noise).

    It takes the winner's curse off the best of many noisy values. Without noise the value itself is returned.

    Raises:
        ValueError: a negative variance, or a number that is not finite.
    """
    refuse_non_finite("shrinking", (value, towards))
    refuse_negative(noise_variance=noise_variance, spread_variance=spread_variance)
    trust = 1.0 if noise_variance == 0.0 else spread_variance / (spread_variance + noise_variance)
    return towards + trust * (value - towards)


def refuse_non_finite(who: str, values: Sequence[float], *, fewest: int = 0) -> None:
    """Make sure that there are enough values, all finite.

    Raises:
        ValueError: they are not.
    """
    if len(values) < fewest:
        raise ValueError(f"{who} needs at least {fewest} values, got {len(values)}")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{who} needs finite values")


def _refuse_non_positive(who: str, values: Sequence[float]) -> None:
    bad = [value for value in values if not 0.0 < value < math.inf]
    if bad:
        raise ValueError(f"{who} needs positive finite values, got {bad[0]}")


def refuse_negative(**values: float) -> None:
    """Make sure that named values are finite and not negative.

    Raises:
        ValueError: one is not.
    """
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}: it must be finite and must not be negative")


def finite_exp(value: float) -> float:
    """Return exp of a value, within what a record may hold."""
    return math.exp(max(-_LARGEST_LOG, min(_LARGEST_LOG, value)))
