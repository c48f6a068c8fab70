"""How long a training takes with an answer, and what is saved by that. Pure."""

from __future__ import annotations

import math

from autotune.format import format_duration
from autotune.records.objective import Objective
from autotune.records.profile import Profile

EXAMPLE_SECONDS = 10 * 3600.0
"""Of a training whose length was not told."""


def describe_saving(profile: Profile, baseline_rate: float, *, aside: float) -> str:
    """Return how long a training takes with the answer; empty where nothing is proven.

    Args:
        profile: the answer.
        baseline_rate: samples per second of the user's own settings.
        aside: share of a run that is no training step, and stays as it is.
    """
    whole = find_run_seconds(profile, baseline_rate, aside=aside)
    seconds = whole or EXAMPLE_SECONDS
    if not _saves(profile) or profile.speedup is None:
        return ""
    ends = [shorten_run(seconds, ratio, aside) for ratio in (profile.speedup.estimate, profile.speedup.low)]
    if not max(seconds, *ends) < math.inf:
        return ""
    point, most = map(format_duration, ends)
    saved = format_duration(save_seconds(profile, seconds, aside))
    run = f"Your run of {format_duration(seconds)}" if whole else f"A training of {format_duration(seconds)}"
    return f"{run} takes about {point}, at most {most}: at least {saved} less."


def describe_price(profile: Profile, baseline_rate: float, *, aside: float, price: float) -> str:
    """Return what the answer saves at a price per hour, and what the search has cost; arguments as above."""
    search = profile.one_off.search_seconds / 3600 * price
    if not _saves(profile):
        return f"At {price:,.2f} an hour the search has cost {search:,.2f}."
    whole = find_run_seconds(profile, baseline_rate, aside=aside)
    saved = save_seconds(profile, whole or EXAMPLE_SECONDS, aside) / 3600 * price
    run = "run" if whole else "such training"
    return f"At {price:,.2f} an hour: at least {saved:,.2f} less for each {run}; the search has cost {search:,.2f}."


def _saves(profile: Profile) -> bool:
    known = profile.speedup
    is_faster = profile.verdict == "improved" and profile.objective is not Objective.MEMORY
    return is_faster and known is not None and min(known.low, known.estimate) > 0.0


def find_run_seconds(profile: Profile, baseline_rate: float, *, aside: float) -> float | None:
    """Return how long the user's own run takes as it is; None where its length was not told.

    Args:
        profile: the answer.
        baseline_rate: samples per second of the user's own settings.
        aside: share of a run that is no training step.
    """
    samples, seconds = profile.one_off.planned_samples, profile.one_off.planned_seconds
    return samples / baseline_rate / (1.0 - aside) if seconds is None and samples is not None else seconds


def save_seconds(profile: Profile, seconds: float, aside: float) -> float:
    """Return how much less a run takes at least, by the lower end of the speed-up."""
    assert profile.speedup is not None
    return seconds - shorten_run(seconds, profile.speedup.low, aside)


def shorten_run(seconds: float, ratio: float, aside: float) -> float:
    """Return how long a run takes whose steps are faster by a ratio."""
    return seconds * (aside + (1 - aside) / ratio)
