"""How much more time would settle what the finals left open. Pure."""

from __future__ import annotations

import math

from autotune.search.finals.claim import THRESHOLD
from autotune.search.finals.finalist import MOST_ROUNDS, Finalist, rounds_needed
from autotune.search.finals.risk import LEAST_SHARE, SHARE_OF_A_LOOK

_PROOF_SHARE = 0.33
"""Of a budget: what a search is taken to have for its pairs."""
LONGER = 1.5
"""Times the budget that was not enough: another search with much the same would be another throw of the dice."""


def seconds_to_settle(one: Finalist, speedup: float, *, share: float, pair_seconds: float) -> float | None:
    """Return how much more time would prove a speed-up with a probability of 80 %, its pairs so far counted.

    None where that takes more rounds than finals ever have: the machine is too noisy for it.

    Args:
        one: with at least two pairs.
        speedup: to prove, as a ratio.
        share: of the risk that another look would have.
        pair_seconds: time of one pair.
    """
    done = len(one.log_ratios)
    most = done + MOST_ROUNDS + 1
    total = rounds_needed(
        one.pair_sd,
        math.log(speedup),
        fewest=done + 1,
        most=most,
        risk_share=max(LEAST_SHARE, share / 2 if one.pilot.is_doubtful else share),
        pilot_degrees=0.0 if one.pilot.is_doubtful else one.pilot.degrees,
        bars=one.claim.speed,
    )
    return None if total == most else (total - done) * pair_seconds


def budget_for(log_speedup: float, *, pair_sd: float, pair_seconds: float, budget_seconds: float) -> float | None:
    """Return the longer budget whose finals would prove a speed-up with a probability of 80 %, in seconds.

    None where that takes more rounds than finals ever have: the machine is too noisy for it.

    Args:
        log_speedup: the gain to prove; must exceed the threshold of a claim.
        pair_sd: standard deviation of a pair's log ratio.
        pair_seconds: time of one pair.
        budget_seconds: of this search.

    Raises:
        ValueError: the gain does not exceed the threshold.
    """
    if log_speedup <= math.log(THRESHOLD):
        raise ValueError(f"log_speedup is {log_speedup}: no budget proves what is not above {THRESHOLD}")
    pairs = rounds_needed(pair_sd, log_speedup, most=MOST_ROUNDS + 1, fewest=2, risk_share=SHARE_OF_A_LOOK)
    return None if pairs > MOST_ROUNDS else max(LONGER * budget_seconds, pairs * pair_seconds / _PROOF_SHARE)
