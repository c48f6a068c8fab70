"""Student's t distribution from its own series, so that measuring needs no scipy.

    P(T > t) = I_x(n/2, 1/2) / 2,    x = n / (n + t²),    t >= 0, n degrees of freedom

I is the regularised incomplete beta function; Newton steps kept inside a bracket invert it for the quantile.
"""

from __future__ import annotations

import functools
import math

_SMALLEST_TAIL = 1e-100  # beyond it t² can overflow
_TINY = 1e-300
_MAX_ITERATIONS = 1000
_CACHED_QUANTILES = 4096


@functools.lru_cache(maxsize=_CACHED_QUANTILES)
def student_t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return t with P(T <= t) = probability for Student's t.

    The upper tail is P(T > t) = I_x(n/2, 1/2) / 2 at x = n / (n + t²), with n degrees of freedom and I the regularised
    incomplete beta function (Abramowitz & Stegun 26.5.27 and 26.7.1). It is inverted by Newton steps kept inside a
    bracket; the error is below 1e-8 up to 200 degrees of freedom and grows slowly beyond. Answers are kept, for the
    same few are asked for again and again.

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
