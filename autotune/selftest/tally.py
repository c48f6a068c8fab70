"""Count outcomes: claims, claims beyond the truth, coverage. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from autotune.records.profile import Profile
from autotune.records.selftest import Outcome, Tally

_CONFIDENCE = 0.95
_PROOF = 0.99
_HALVINGS = 60


def read_outcome(profile: Profile, *, truth: float, noise: str) -> Outcome:
    """Return what a search said beside what is true."""
    evidence = profile.evidence
    confirmation, seen = evidence.confirmation, evidence.noise
    interval = confirmation.interval if confirmation else None
    return Outcome(
        truth=truth,
        noise=noise,
        verdict=profile.verdict,
        pairs=evidence.pairs,
        low=profile.speedup.low if profile.speedup else None,
        estimate=profile.speedup.estimate if profile.speedup else None,
        interval_low=interval.low if interval else None,
        interval_high=interval.high if interval else None,
        launches=seen.launches if seen else 0,
        raced=seen.raced if seen else 0,
        measured_fraction=evidence.measured_fraction,
        elapsed_seconds=profile.one_off.search_seconds,
    )


def count_outcomes(outcomes: Sequence[Outcome]) -> tuple[Tally, ...]:
    """Return a tally for each truth and machine, in the order they came."""
    groups: dict[tuple[float, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.truth, outcome.noise), []).append(outcome)
    return tuple(_count(truth, noise, group) for (truth, noise), group in groups.items())


def _count(truth: float, noise: str, group: Sequence[Outcome]) -> Tally:
    overclaims = sum(one.claimed and one.low is not None and one.low > truth for one in group)
    shares = [one.measured_fraction for one in group if one.measured_fraction is not None]
    return Tally(
        truth=truth,
        noise=noise,
        runs=len(group),
        claims=sum(one.claimed for one in group),
        overclaims=overclaims,
        with_finals=sum(one.covered is not None for one in group),
        covered=sum(one.covered is True for one in group),
        launches=sum(one.launches for one in group),
        raced=sum(one.raced for one in group),
        measured_fraction=fmean(shares) if shares else None,
        worst_false_rate=upper_rate(overclaims, len(group)),
    )


def upper_rate(events: int, trials: int) -> float:
    """Return the one-sided upper 95 % limit of a rate after some events in some trials.

    Clopper & Pearson, Biometrika 1934: the rate at which so few events have the probability 5 %; with none it is
    1 - 0.05^(1/trials), about 3 / trials.

    Raises:
        ValueError: no trial, or more events than trials.
    """
    if not 0 <= events <= trials or trials < 1:
        raise ValueError(f"{events} events in {trials} trials: there must be at least as many trials, and one")
    if events == trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _at_most(events, trials, middle) > 1 - _CONFIDENCE else (low, middle)
    return high


def exceeds_rate(events: int, trials: int, rate: float) -> bool:
    """Return whether so many events in some trials prove at 99 % that they happen more often than a rate.

    A binomial test.
    """
    return events > 0 and 1.0 - _at_most(events - 1, trials, rate) < 1.0 - _PROOF


def _at_most(events: int, trials: int, rate: float) -> float:
    """Return the binomial probability of at most so many events."""
    if rate <= 0.0 or rate >= 1.0:
        return 1.0 if rate <= 0.0 else 0.0
    terms = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        for k in range(events + 1)
    )  # fmt: skip
    return math.fsum(math.exp(term) for term in terms)
