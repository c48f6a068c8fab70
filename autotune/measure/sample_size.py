"""How many pairs prove an effect, and which effect some pairs prove: numbers in, numbers out, no torch and no clock.

Degrees of freedom that are known before the first pair (`confidence.Pilot`) count beside those of the pairs.
"""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections.abc import Sequence

from autotune.measure.confidence import finite_exp, refuse_negative, refuse_non_finite
from autotune.measure.student_t import student_t_quantile

_CLAIM_CONFIDENCE = 0.99
_POWER = 0.80
_CLAIM_THRESHOLD = math.log(1.01)
_NORMAL = statistics.NormalDist()


def minimum_detectable_speedup(
    sd_log_ratio: float, pairs: int, *, confidence: float = _CLAIM_CONFIDENCE, pilot_degrees: float = 0.0
) -> float:
    """Return the smallest speed-up that this many pairs would show, as a ratio over the threshold it must beat.

    exp((t_confidence + t_.80) · sd / sqrt(pairs)), both quantiles at pairs - 1 degrees of freedom and those known
    beforehand: a true speed-up of threshold x this value is claimed, one-sided, with a power of 80 %. sd is that of
    the log ratio of one pair.

    Raises:
        ValueError: fewer than two pairs, or a negative standard deviation.
    """
    if pairs < 2:
        raise ValueError(f"pairs is {pairs}: it must be at least 2")
    return finite_exp(_detectable_log_effect(sd_log_ratio, pairs, confidence=confidence, more=pilot_degrees))


def pairs_needed(
    sd_log_ratio: float,
    log_effect: float,
    *,
    most: int,
    fewest: int = 6,
    threshold: float = _CLAIM_THRESHOLD,
    confidence: float = _CLAIM_CONFIDENCE,
    pilot_degrees: float = 0.0,
) -> int:
    """Return how many pairs prove an effect: claimed one-sided at a confidence, found with a power of 80 %.

    The smallest K >= ((t_conf + t_.80) · sd / (effect - threshold))² at K - 1 degrees of freedom and those known
    beforehand, bisected between `fewest` and `most`, which wins. sd is that of one pair's log ratio, from other data;
    all three are logarithms.

    Raises:
        ValueError: `fewest` or `most` is below 2, the standard deviation is negative, or a number is not finite.
    """
    if min(fewest, most) < 2:
        raise ValueError(f"fewest is {fewest} and most is {most}: both must be at least 2")
    refuse_negative(sd_log_ratio=sd_log_ratio)
    refuse_non_finite("an effect", (log_effect, threshold))
    detect = functools.partial(_detectable_log_effect, sd_log_ratio, confidence=confidence, more=pilot_degrees)
    first = min(fewest, most)
    return first + bisect.bisect_left(range(first, most), threshold - log_effect, key=lambda pairs: -detect(pairs))


def conditional_power(
    log_ratios: Sequence[float],
    rounds: int,
    *,
    sd: float,
    threshold: float,
    confidence: float,
    pilot_degrees: float = 0.0,
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
    refuse_non_finite("conditional power", (*log_ratios, threshold))
    refuse_negative(sd=sd)
    mean, remaining = statistics.fmean(log_ratios), rounds - seen
    critical = threshold + student_t_quantile(confidence, rounds - 1 + pilot_degrees) * sd / math.sqrt(rounds)
    if remaining == 0 or sd == 0.0:
        return 1.0 if mean > critical else 0.0
    return _NORMAL.cdf((mean - critical) * rounds / (sd * math.sqrt(remaining)))


def _detectable_log_effect(sd_log_ratio: float, pairs: int, *, confidence: float, more: float) -> float:
    refuse_negative(sd_log_ratio=sd_log_ratio)
    quantiles = student_t_quantile(confidence, pairs - 1 + more) + student_t_quantile(_POWER, pairs - 1 + more)
    return quantiles * sd_log_ratio / math.sqrt(pairs)
