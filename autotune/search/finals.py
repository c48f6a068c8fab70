"""Paired confirmation: candidates and baseline measured again, interleaved, each launch in a fresh process.

    round 1: base A B     round 2: B A base     round 3: A base B     ...     orders drawn beforehand, balanced

The number of rounds is fixed before the first one, and so is a reserve, run where they leave it open. A candidate is
claimed faster only if the one-sided 99 % lower end of the t interval of its paired log ratios clears +1 % and the
99.9 % one clears 0; several candidates, and the two looks where there is a reserve, split the risks between them
(Bonferroni). Finals end early when nothing can be proven any more, never because something seems to be. The headline
comes from these launches alone: the best of many search trials was lucky.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autotune.measure.confidence import (
    conditional_power,
    hodges_lehmann,
    mean_interval,
    minimum_detectable_speedup,
    paired_ratio,
    pairs_needed,
    standard_deviation,
)
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.measurement import Interval
from autotune.records.trial import TrialResult

THRESHOLD = 1.01
"""A gain of less than this is not claimed."""

LEAST_ROUNDS = 4
MOST_ROUNDS = 60
CLAIM_RISK = 0.01
"""One-sided: the lower end at this risk has to clear the threshold, over all candidates of one search."""

FALSE_RISK = 0.001
"""One-sided: the lower end at this risk has to show a gain at all. On a machine whose noise is large against the
threshold the first rule alone would claim something in nearly 1 % of searches in which nothing is faster."""

SHARE_OF_A_LOOK = 0.5
"""Of the risks, where there are two looks."""

_LEAST_LOOK = 3
_FUTILE = 0.10

Launch = Callable[[TrainConfig], TrialResult | None]
"""Runs one config in a fresh process; None when the time is up or the user stopped."""


@dataclass
class Finalist:
    """One candidate in the finals.

    Attributes:
        config: the settings.
        rates: samples per second, one per finished round.
        results: the launches behind them.
        places: position within its round, from 0.
        cost: what compiling takes off the log throughput of the planned run.
        ratio: speed-up over the baseline, to be claimed by its low end; None before two rounds are done.
        log_ratios: of each pair.
        sure: its low end at the risk of a false claim.
        failure: why it is out; empty while it is in.
    """

    config: TrainConfig
    rates: list[float] = field(default_factory=list)
    results: list[TrialResult] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cost: float = 0.0
    ratio: Interval | None = None
    log_ratios: list[float] = field(default_factory=list)
    sure: float = 0.0
    failure: str = ""

    def interval_at(self, level: float) -> Interval:
        """Return the two-sided interval of the speed-up at a confidence level; needs two pairs."""
        ratios = [math.exp(ratio) for ratio in self.log_ratios]
        return paired_ratio(ratios, [1.0] * len(ratios), confidence_level=level)

    @property
    def outcome(self) -> Literal["faster", "no gain", "unclear"]:
        """What the pairs show: the low end clears the threshold, the high end stays below it, or neither."""
        if self.failure or self.ratio is None:
            return "unclear"
        if self.ratio.low > THRESHOLD and self.sure > 1.0:
            usual = self.interval_at(0.95)
            # Where the median of the pairwise means disagrees with the mean, a few outliers decide.
            return "faster" if usual.low <= math.exp(hodges_lehmann(self.log_ratios)) <= usual.high else "unclear"
        return "no gain" if self.interval_at(0.90).high < THRESHOLD else "unclear"


@dataclass(frozen=True)
class FinalsOutcome:
    """What the finals showed.

    Attributes:
        baseline: the baseline as a finalist.
        candidates: in the order given.
        winner: the proven fastest, the simpler one where two cannot be told apart; None when none is proven.
        futile: ended early, because more rounds could hardly have proven anything.
        risk_share: of both risks, what one candidate had at one look.
    """

    baseline: Finalist
    candidates: tuple[Finalist, ...]
    winner: Finalist | None
    futile: bool = False
    risk_share: float = 1.0

    @property
    def best(self) -> Finalist | None:
        """The candidate with the highest estimate, proven or not; None when none was measured."""
        measured = [one for one in self.candidates if one.ratio is not None and not one.failure]
        return max(measured, key=lambda one: one.ratio.estimate if one.ratio else 0.0, default=None)


def run_finals(
    candidates: Sequence[TrainConfig],
    baseline: TrainConfig,
    launch: Launch,
    *,
    rounds: int,
    seed: int,
    reserve: int = 0,
    pair_sd: float | None = None,
    cost: Callable[[TrainConfig, Sequence[TrialResult]], float] = lambda _config, _results: 0.0,
) -> FinalsOutcome:
    """Measure baseline and candidates in interleaved rounds and pick the winner.

    A round counts only when every arm still in it was measured. A candidate that fails once is out.

    Args:
        candidates: to be compared.
        baseline: with this.
        launch: runs one arm.
        rounds: fixed beforehand.
        seed: of the orders.
        reserve: further rounds, fixed beforehand too, run where the first ones leave it open; each look then has half
            of the risks.
        pair_sd: standard deviation of a pair's log ratio as the search saw it; None for no look at half-time.
        cost: what compiling takes off the log throughput of the run that is planned.
    """
    base = Finalist(baseline)
    finalists = [Finalist(config) for config in candidates]
    most, share = rounds + reserve, (SHARE_OF_A_LOOK if reserve else 1.0) / max(1, len(finalists))

    def settle() -> None:
        base.cost = cost(base.config, base.results)
        for one in finalists:
            one.cost = cost(one.config, one.results)
            if not one.failure:
                _settle(one, base, share)

    def is_futile() -> bool:
        risk = share * CLAIM_RISK
        return pair_sd is not None and all(one.failure or _is_futile(one, most, pair_sd, risk) for one in finalists)

    futile = False
    for number, order in enumerate(_draw_orders(1 + len(finalists), most, random.Random(seed))):
        if number in (rounds // 2, rounds):
            settle()
            futile = number >= _LEAST_LOOK and is_futile()
            if futile or (number == rounds and not _is_open(finalists)):
                break
        arms = [(base, *finalists)[position] for position in order]
        if not _run_round(base, [arm for arm in arms if not arm.failure], launch):
            break
        if base.failure or all(one.failure for one in finalists):
            break
    settle()
    return FinalsOutcome(base, tuple(finalists), None if futile else _pick_winner(finalists, baseline), futile, share)


def rounds_needed(pair_sd: float, log_speedup: float, *, fewest: int, most: int, risk_share: float = 1.0) -> int:
    """Return how many rounds prove a gain with a probability of 80 %.

    Args:
        pair_sd: standard deviation of the log ratio of one pair, from other data.
        log_speedup: the gain.
        fewest: rounds run in any case, at least two.
        most: what the budget allows; it wins over `fewest`.
        risk_share: of both risks, what these rounds have.

    Raises:
        ValueError: fewer than two rounds, or a negative standard deviation.
    """
    needs = (
        pairs_needed(pair_sd, log_speedup, most=most, fewest=fewest, threshold=threshold, confidence=1 - risk)
        for risk, threshold in ((risk_share * CLAIM_RISK, math.log(THRESHOLD)), (risk_share * FALSE_RISK, 0.0))
    )
    return max(needs)


def smallest_provable(pair_sd: float, pairs: int, *, risk_share: float = 1.0) -> float:
    """Return the speed-up that some pairs prove with a probability of 80 %, as a ratio.

    Args:
        pair_sd: standard deviation of the log ratio of one pair.
        pairs: how many.
        risk_share: of both risks, what these pairs have.

    Raises:
        ValueError: fewer than two pairs, or a negative standard deviation.
    """
    useful = THRESHOLD * minimum_detectable_speedup(pair_sd, pairs, confidence=1 - risk_share * CLAIM_RISK)
    return max(useful, minimum_detectable_speedup(pair_sd, pairs, confidence=1 - risk_share * FALSE_RISK))


def _log_ratios(one: Finalist, base: Finalist) -> list[float]:
    return [math.log(ours / theirs) - one.cost + base.cost for ours, theirs in zip(one.rates, base.rates, strict=False)]


def _settle(one: Finalist, base: Finalist, share: float) -> None:
    """Work out what the pairs so far show."""
    if len(one.rates) >= 2:
        one.log_ratios = _log_ratios(one, base)
        one.ratio = one.interval_at(1 - 2 * share * CLAIM_RISK)
        one.sure = one.interval_at(1 - 2 * share * FALSE_RISK).low


def _is_open(finalists: Sequence[Finalist]) -> bool:
    """Return whether nothing is proven that more rounds might prove."""
    outcomes = {one.outcome for one in finalists if not one.failure}
    return "faster" not in outcomes and "unclear" in outcomes


def _is_futile(one: Finalist, rounds: int, pair_sd: float, risk: float) -> bool:
    logs, threshold = one.log_ratios, math.log(THRESHOLD)
    seen = mean_interval(logs, confidence_level=1 - 2 * risk, method="look")
    if seen.low > threshold:
        return False
    # The search's figure may be a guess still; the smaller one is the more hopeful.
    sd = min(pair_sd, standard_deviation(logs))
    return conditional_power(logs, rounds, sd=sd, threshold=threshold, confidence=1 - risk) < _FUTILE


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
    for place, (arm, result) in enumerate(results):
        if result.measurement is not None:
            arm.rates.append(result.measurement.samples_per_second)
            arm.results.append(result)
            arm.places.append(place)
    return True


def _pick_winner(finalists: Sequence[Finalist], baseline: TrainConfig) -> Finalist | None:
    proven = [one for one in finalists if one.outcome == "faster"]
    if not proven:
        return None
    best = max(proven, key=lambda one: one.ratio.estimate if one.ratio else 0.0)
    ties = [one for one in proven if one is best or _are_tied(one, best)]
    return min(ties, key=lambda one: (len(changed_fields(one.config, baseline)), one is not best))


def _are_tied(one: Finalist, best: Finalist) -> bool:
    pairs = min(len(one.rates), len(best.rates))
    ahead = [ours - theirs for ours, theirs in zip(best.log_ratios[:pairs], one.log_ratios[:pairs], strict=True)]
    return mean_interval(ahead, confidence_level=0.95, method="paired").low <= 0.0
