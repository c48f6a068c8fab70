"""Paired confirmation: candidates and baseline measured again, interleaved, each launch in a fresh process.

    round 1: base A B     round 2: B A base     round 3: A base B     ...     orders drawn beforehand, balanced

Where one candidate is left, it and the baseline are timed in turns, block by block, if they can be: what the machine
does in that time, it does to both (`isolation/channel/turns.py`).

The number of rounds is fixed before the first one, not by what the pairs show. What the lower ends of the t intervals
of paired log ratios have to clear is in `claim`; several candidates in one look, and several looks, split the risks
between them (Bonferroni, `purse`). What the search saw of the noise of a speed counts beside the pairs' own
(`confidence.Pilot`), so that a large gain needs few of them. Finals end early
when nothing can be proven any more, never because something seems to be. The headline comes from these launches alone:
the best of many search trials was lucky.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from autotune.measure.confidence import NO_PILOT, Pilot, mean_interval, standard_deviation
from autotune.measure.sample_size import conditional_power
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.trial import TrialResult
from autotune.search.finals.claim import CLAIM_RISK, FASTER, Claim
from autotune.search.finals.finalist import Figure, Finalist, FinalsOutcome
from autotune.search.finals.risk import Pair, RiskPurse

_LEAST_LOOK = 3
_FUTILE = 0.10

Launch = Callable[[TrainConfig], TrialResult | None]
"""Runs one config in a fresh process; None when the time is up or the user stopped."""

LaunchPair = Callable[[TrainConfig, TrainConfig], tuple[TrialResult, TrialResult] | None]
"""Runs two in fresh processes, their blocks in turns; None likewise."""

Cost = Callable[[TrainConfig, Sequence[TrialResult]], float]
"""What compiling takes off the log throughput of the run that is planned."""


def free_of_cost(_config: TrainConfig, _results: Sequence[TrialResult]) -> float:
    """Return 0: the throughput alone counts."""
    return 0.0


@dataclass(frozen=True)
class FinalsPlan:
    """What is fixed before the first pair of a look.

    Attributes:
        finalists: who takes part, in sequence; what follows is of the first one.
        rounds: of this one and the baseline.
        pair_sd: standard deviation of the log ratio of a pair, as the search saw it.
        round_seconds: expected time of one round.
        samples: measured in each launch.
        reserve: further rounds, for where those planned leave it open.
        kept: pairs of earlier looks, which count too.
        pilot: what of the noise is known beforehand.
        purse: gives each look its share of the risk.
    """

    finalists: list[TrainConfig]
    rounds: int
    pair_sd: float
    round_seconds: float
    samples: int
    reserve: int = 0
    kept: int = 0
    pilot: Pilot = NO_PILOT
    purse: RiskPurse = field(default_factory=RiskPurse, compare=False)


@dataclass(frozen=True)
class Terms:
    """On what terms one look is taken, all of them fixed before its first pair.

    Attributes:
        share: of the risks, what it has.
        pilot: what the search knew of the noise of a pair.
        pair_sd: standard deviation of a pair's log ratio as the search saw it; None for no look at half-time.
        to_follow: further rounds that another look may have.
        earlier: pairs of earlier looks, which count too; of a lone candidate.
        heard: told each finished pair of a lone candidate.
        claim: what has to be shown.
    """

    share: float = 1.0
    pilot: Pilot = NO_PILOT
    pair_sd: float | None = None
    to_follow: int = 0
    earlier: Sequence[Pair] = ()
    heard: Callable[[Pair], None] = lambda _pair: None
    claim: Claim = FASTER


def run_finals(
    candidates: Sequence[TrainConfig],
    baseline: TrainConfig,
    launch: Launch,
    *,
    rounds: int,
    seed: int,
    terms: Terms | None = None,
    cost: Cost = free_of_cost,
    launch_pair: LaunchPair | None = None,
) -> FinalsOutcome:
    """Measure baseline and candidates in interleaved rounds and pick the winner: one look.

    A round counts only when every arm still in it was measured. A candidate that fails once is out.

    Args:
        candidates: to be compared.
        baseline: with this.
        launch: runs one arm.
        rounds: fixed beforehand.
        seed: of the orders.
        terms: of the look; None for one with the whole risk, of which nothing is known before.
        cost: what compiling takes off the log throughput of the run that is planned.
        launch_pair: runs both arms of a round, where there are two.

    Raises:
        ValueError: earlier pairs, and not one candidate.
    """
    terms = terms or Terms()
    finalists = [Finalist(config, pilot=terms.pilot, claim=terms.claim) for config in candidates]
    finals = _Finals(Finalist(baseline), finalists, terms, cost, launch, launch_pair)
    if terms.earlier:
        (only,) = finals.finalists
        count_pairs(only, finals.base, terms.earlier)
    for number, order in enumerate(_draw_orders(1 + len(candidates), rounds, random.Random(seed))):
        if number == rounds // 2 and finals.is_futile(rounds):
            return finals.end(futile=True)
        if not finals.run_round(order):
            return finals.end(futile=False)
    return finals.end(futile=terms.to_follow > 0 and finals.is_futile(rounds))


@dataclass(frozen=True)
class _Finals:
    """One look at work."""

    base: Finalist
    finalists: list[Finalist]
    terms: Terms
    cost: Cost
    launch: Launch
    launch_pair: LaunchPair | None

    @property
    def share(self) -> float:
        return self.terms.share / max(1, len(self.finalists))

    def run_round(self, order: Sequence[int]) -> bool:
        """Run a round; return False when there cannot be another one."""
        arms = [(self.base, *self.finalists)[position] for position in order]
        if not _run_round(self.base, [arm for arm in arms if not arm.failure], self.launch, self.launch_pair):
            return False
        if self.base.failure or all(one.failure for one in self.finalists):
            return False
        if len(self.finalists) == 1:
            self.terms.heard(Pair(self.finalists[0].results[-1], self.base.results[-1]))
        return True

    def settle(self) -> None:
        """Work out what the pairs so far show."""
        self.base.cost = self.cost(self.base.config, self.base.results)
        for one in self.finalists:
            one.cost = self.cost(one.config, one.results)
            if not one.failure:
                one.settle(self.base, self.share)

    def is_futile(self, rounds: int) -> bool:
        """Return whether all rounds planned, and those to follow, could hardly prove anything."""
        pair_sd, most = self.terms.pair_sd, len(self.terms.earlier) + rounds + self.terms.to_follow
        if pair_sd is None or len(self.base.rates) < _LEAST_LOOK:
            return False
        self.settle()
        return all(one.failure or _is_futile(one, most, pair_sd) for one in self.finalists)

    def end(self, *, futile: bool) -> FinalsOutcome:
        """Return the outcome."""
        self.settle()
        winner = None if futile else _pick_winner(self.finalists, self.base.config, _are_tied)
        return FinalsOutcome(self.base, tuple(self.finalists), winner, futile, self.share)


def count_pairs(candidate: Finalist, base: Finalist, pairs: Sequence[Pair]) -> None:
    """Count pairs that were measured before."""
    for pair in pairs:
        candidate.take(pair.candidate, 0 if pair.candidate_first else 1)
        base.take(pair.baseline, 1 if pair.candidate_first else 0)


def pick_best(finalists: Sequence[Finalist], baseline: TrainConfig) -> Finalist | None:
    """Return the best of those proven in looks of their own.

    Where some cannot be told apart from it, it is the simplest, of these the one of which most can be claimed.

    Args:
        finalists: settled, each by its own pairs.
        baseline: that they are compared with.
    """
    return _pick_winner(finalists, baseline, _overlap)


def is_open(finalists: Sequence[Finalist]) -> bool:
    """Return whether nothing is proven that more rounds might prove."""
    outcomes = {one.outcome for one in finalists if not one.failure}
    return "proven" not in outcomes and "unclear" in outcomes


def _is_futile(one: Finalist, rounds: int, pair_sd: float) -> bool:
    # The search's figure may be a guess still; the smaller one is the more hopeful.
    speed_sd = min(pair_sd, standard_deviation(one.log_ratios))
    sds = [speed_sd, standard_deviation(one.log_savings)]
    return any(_is_out_of_reach(figure, rounds, sd, one.share) for figure, sd in zip(one.figures, sds, strict=False))


def _is_out_of_reach(figure: Figure, rounds: int, sd: float, share: float) -> bool:
    """Return whether a figure has not cleared its first bar, and hardly would with all rounds."""
    bar = figure.bars[0]
    threshold, risk = math.log(bar.ratio), share * bar.risk
    seen = mean_interval(figure.logs, confidence_level=1 - 2 * risk, method="look", pilot=figure.pilot)
    if seen.low > threshold:
        return False
    degrees = figure.pilot.degrees
    power = conditional_power(
        figure.logs, rounds, sd=sd, threshold=threshold, confidence=1 - risk, pilot_degrees=degrees
    )
    return power < _FUTILE


def _draw_orders(arms: int, rounds: int, rng: random.Random) -> list[list[int]]:
    """Return an order for each round: a random one and its reverse, so that no arm is always first or last."""
    orders: list[list[int]] = []
    while len(orders) < rounds:
        order = rng.sample(range(arms), arms)
        orders += [order, order[::-1]]
    return orders[:rounds]


def _run_round(base: Finalist, arms: Sequence[Finalist], launch: Launch, launch_pair: LaunchPair | None = None) -> bool:
    """Measure every arm once; return False when the time is up, and then count none of the round."""
    results: list[tuple[Finalist, TrialResult]] = []
    failures: list[tuple[Finalist, str]] = []
    if launch_pair is not None and len(arms) == 2:
        pair = launch_pair(arms[0].config, arms[1].config)
        found: Iterable[TrialResult | None] = pair or (None,)
    else:
        found = (launch(arm.config) for arm in arms)
    for arm, result in zip(arms, found, strict=False):
        if result is None:
            return False
        if result.measurement is None:
            failures.append((arm, f"{result.status}: {result.error}"))
            if arm is base:
                base.failure = failures[-1][1]  # what made it fail may have been the candidate's reason too
                return False
            continue
        results.append((arm, result))
    for arm, failure in failures:
        arm.failure = failure
    for place, (arm, result) in enumerate(results):
        arm.take(result, place)
    return True


def _pick_winner(
    finalists: Sequence[Finalist], baseline: TrainConfig, are_tied: Callable[[Finalist, Finalist], bool]
) -> Finalist | None:
    proven = [one for one in finalists if one.outcome == "proven"]
    if not proven:
        return None
    best = max(proven, key=lambda one: one.gain or 0.0)
    ties = [one for one in proven if one is best or are_tied(one, best)]
    return min(ties, key=lambda one: (len(changed_fields(one.config, baseline)), -_least_claim(one)))


def _least_claim(one: Finalist) -> float:
    return one.headline.low_at(one.share * CLAIM_RISK)


def _are_tied(one: Finalist, best: Finalist) -> bool:
    ours, theirs = best.headline.logs, one.headline.logs
    pairs = min(len(ours), len(theirs))
    ahead = [mine - other for mine, other in zip(ours[:pairs], theirs[:pairs], strict=True)]
    return mean_interval(ahead, confidence_level=0.95, method="paired").low <= 0.0


def _overlap(one: Finalist, best: Finalist) -> bool:
    """Return whether two that were measured at different times cannot be told apart: their 68 % intervals overlap.

    Both are proven: to take the one with more changes for a faster one by mistake costs nothing but simplicity.
    """
    return one.headline.interval_at(0.68).high >= best.headline.interval_at(0.68).low
