"""Paired confirmation: candidates and baseline measured again, interleaved, each launch in a fresh process.

    round 1: base A B     round 2: B A base     round 3: A base B     ...     orders drawn beforehand, balanced

The number of rounds is fixed before the first one. A candidate is claimed faster only if the lower end of the t
interval of its paired log ratios clears +1 %; with several candidates the level is split between them (Bonferroni).
The headline comes from these launches alone: what the search saw is biased by choosing the best of many.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.measure.confidence import paired_ratio
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.measurement import Interval
from autotune.records.trial import TrialResult

THRESHOLD = 1.01
"""A gain of less than this is not claimed."""

LEAST_ROUNDS = 4
MOST_ROUNDS = 12
CLAIM_RISK = 0.01
"""Probability of claiming a gain that is not there, over all candidates of one search."""

Launch = Callable[[TrainConfig], TrialResult | None]
"""Runs one config in a fresh process; None when the time is up or the user stopped."""


@dataclass
class Finalist:
    """One candidate in the finals.

    Attributes:
        config: the settings.
        rates: samples per second, one per finished round.
        results: the launches behind them.
        ratio: throughput over the baseline's; None before two rounds are done.
        failure: why it is out; empty while it is in.
    """

    config: TrainConfig
    rates: list[float] = field(default_factory=list)
    results: list[TrialResult] = field(default_factory=list)
    ratio: Interval | None = None
    failure: str = ""

    @property
    def is_faster(self) -> bool:
        """The interval clears the threshold."""
        return not self.failure and self.ratio is not None and self.ratio.low > THRESHOLD


@dataclass(frozen=True)
class FinalsOutcome:
    """What the finals showed.

    Attributes:
        baseline: the baseline as a finalist.
        candidates: in the order given.
        winner: the proven fastest, the simpler one where two cannot be told apart; None when none is proven.
    """

    baseline: Finalist
    candidates: tuple[Finalist, ...]
    winner: Finalist | None

    @property
    def best(self) -> Finalist | None:
        """The candidate with the highest estimate, proven or not; None when none was measured."""
        measured = [one for one in self.candidates if one.ratio is not None and not one.failure]
        return max(measured, key=lambda one: one.ratio.estimate if one.ratio else 0.0, default=None)


def run_finals(
    candidates: Sequence[TrainConfig], baseline: TrainConfig, launch: Launch, *, rounds: int, seed: int
) -> FinalsOutcome:
    """Measure baseline and candidates in interleaved rounds and pick the winner.

    A round counts only when every arm still in it was measured. A candidate that fails once is out.
    """
    base = Finalist(baseline)
    finalists = [Finalist(config) for config in candidates]
    rng = random.Random(seed)
    orders = _draw_orders(1 + len(finalists), rounds, rng)
    for order in orders:
        arms = [(base, *finalists)[position] for position in order]
        if not _run_round(base, [arm for arm in arms if not arm.failure], launch):
            break
        if base.failure or all(one.failure for one in finalists):
            break
    level = 1 - 2 * CLAIM_RISK / max(1, len(finalists))
    for one in finalists:
        if len(one.rates) >= 2 and not one.failure:
            one.ratio = paired_ratio(one.rates, base.rates[: len(one.rates)], confidence_level=level)
    return FinalsOutcome(base, tuple(finalists), _pick_winner(finalists, baseline))


def launch_noise(base: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Return the standard deviation of the relative difference of one pair; None with fewer than two pairs."""
    ratios = [b / a for a, b in zip(base, candidate, strict=False)]
    return statistics.stdev(ratios) / statistics.fmean(ratios) if len(ratios) >= 2 else None


def _draw_orders(arms: int, rounds: int, rng: random.Random) -> list[list[int]]:
    """Return an order for each round: a random one and its reverse, so that no arm is always first or last."""
    orders: list[list[int]] = []
    while len(orders) < rounds:
        order = rng.sample(range(arms), arms)
        orders += [order, order[::-1]]
    return orders[:rounds]


def _run_round(base: Finalist, arms: Sequence[Finalist], launch: Launch) -> bool:
    """Measure every arm once; return False when the time is up, and then count none of the round."""
    results: list[tuple[Finalist, TrialResult]] = []
    for arm in arms:
        result = launch(arm.config)
        if result is None:
            return False
        if result.measurement is None:
            arm.failure = f"{result.status}: {result.error}"
            if arm is base:
                return False
            continue
        results.append((arm, result))
    for arm, result in results:
        if result.measurement is not None:
            arm.rates.append(result.measurement.samples_per_second)
            arm.results.append(result)
    return True


def _pick_winner(finalists: Sequence[Finalist], baseline: TrainConfig) -> Finalist | None:
    proven = [one for one in finalists if one.is_faster]
    if not proven:
        return None
    best = max(proven, key=lambda one: one.ratio.estimate if one.ratio else 0.0)
    ties = [one for one in proven if one is best or _are_tied(one, best)]
    return min(ties, key=lambda one: (len(changed_fields(one.config, baseline)), one is not best))


def _are_tied(one: Finalist, best: Finalist) -> bool:
    pairs = min(len(one.rates), len(best.rates))
    return paired_ratio(best.rates[:pairs], one.rates[:pairs], confidence_level=0.95).low <= 1.0
