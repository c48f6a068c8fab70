"""The finals of a search: how many rounds, fixed from the noise and the gain it saw, and running them in its time.

    look 1: rounds that prove the gain      look 2, where it stays open: the reserve, three times as many in all

A search may hold finals again and again: each look takes its share of the risk beforehand (`purse`), the pairs of
earlier looks at the same candidate count. Candidates are tested in a fixed sequence, each with the whole share: the
next one only after the one before is proven, and only if the search saw it ahead of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.measure.confidence import NO_PILOT, Pilot
from autotune.records.config import TrainConfig
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.finals.finalist import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    THRESHOLD,
    Finalist,
    FinalsOutcome,
    rounds_needed,
)
from autotune.search.finals.risk import LEAST_SHARE, SHARE_OF_A_LOOK, RiskPurse
from autotune.search.finals.rounds import Cost, Terms, count_pairs, is_open, pick_best, run_finals
from autotune.search.launch.launcher import Launcher
from autotune.search.scores.baseline_level import PRIOR_DEGREES, PRIOR_SD
from autotune.search.scores.ranking import Ranking, compile_cost

_MOST_PILOT_DEGREES = 6.0
_PILOT_SHARE = 0.5
"""Of the degrees of freedom that the search has seen: its launches are not quite those of the finals."""

_LARGE_RESERVE = 3.0
"""Of the pairs planned: three times as many prove 0.6 of the gain that they are planned for."""
_LEAST_RESERVE = 0.5
"""Of the rounds planned: fewer are no second look, they are run at once."""

_FULL_PATIENCE = 4.0


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


def plan_finals(
    launcher: Launcher, candidates: list[TrainConfig], *, look: RiskPurse | None = None, seconds: float | None = None
) -> FinalsPlan:
    """Return the next look of the finals: the pairs that prove what the search saw, or all that fit.

    Args:
        launcher: of the search.
        candidates: in the order they are to be tested.
        look: the search's purse, which knows of earlier looks; None for a search with a single one.
        seconds: that it may take; None for all the time left.
    """
    purse, first = look or RiskPurse(), candidates[0]
    left = launcher.budget.remaining_seconds
    round_seconds = pair_seconds(launcher, first)
    most = min(MOST_ROUNDS, int((left if seconds is None else min(left, seconds)) / round_seconds))
    kept = len(purse.pairs_of(first))
    if purse.share_for(first) < LEAST_SHARE:
        most = 0
    total = pairs_to_prove(launcher, first, purse)
    rounds = min(most, total - kept)
    reserve = min(most, math.ceil(_LARGE_RESERVE * total) - kept) - rounds
    if reserve < _LEAST_RESERVE * rounds:
        rounds, reserve = rounds + reserve, 0
    ranking = launcher.ranking()
    own = [one.result.measurement for one in launcher.judged if one.config == launcher.baseline]
    # As much as the search found enough: time is better spent on more launches than on longer ones.
    samples = statistics.median_high([one.samples for one in own if one is not None])
    return FinalsPlan(
        finalists=list(candidates),
        rounds=rounds,
        pair_sd=math.sqrt(2) * ranking.noise[0],
        round_seconds=round_seconds,
        samples=samples,
        reserve=reserve,
        kept=kept,
        pilot=find_pilot(ranking),
        purse=purse,
    )


def pair_seconds(launcher: Launcher, candidate: TrainConfig) -> float:
    """Return the expected time of one pair."""
    return launcher.predict_seconds(launcher.baseline) + launcher.predict_seconds(candidate)


def pairs_to_prove(launcher: Launcher, candidate: TrainConfig, look: RiskPurse | None = None) -> int:
    """Return how many pairs, kept ones included, prove with 80 % what the search saw of a candidate.

    Never fewer than the smallest number that can claim anything, nor than half as many again as are kept. What the
    kept ones showed plays no part: the share of a look holds for a number that does not depend on it.

    Args:
        launcher: of the search.
        candidate: to be proven.
        look: the search's purse; None for a first look.
    """
    purse, ranking = look or RiskPurse(), launcher.ranking()
    entry = ranking.find(candidate)
    # Shrinking pulls a small gain up where most others are large; the smaller figure asks for more rounds.
    gain = max(min(entry.score, entry.shrunk) if entry else 0.0, math.log(THRESHOLD))
    kept = len(purse.pairs_of(candidate))
    return rounds_needed(
        math.sqrt(2) * ranking.noise[0],
        gain,
        fewest=kept + max(LEAST_ROUNDS, kept // 2),
        most=kept + MOST_ROUNDS,
        risk_share=max(LEAST_SHARE, purse.share_for(candidate)),
        pilot_degrees=find_pilot(ranking).degrees,
    )


def find_pilot(ranking: Ranking) -> Pilot:
    """Return what a search's repeats say of the noise of a pair; what it took for granted before is left out."""
    sd, degrees = ranking.noise
    seen = degrees - PRIOR_DEGREES
    if seen <= 0.0:
        return NO_PILOT
    variance = max(0.0, sd * sd * degrees - PRIOR_SD * PRIOR_SD * PRIOR_DEGREES) / seen
    return Pilot(math.sqrt(2 * variance), min(_MOST_PILOT_DEGREES, _PILOT_SHARE * seen))


def confirm(launcher: Launcher, plan: FinalsPlan) -> FinalsOutcome:
    """Run the finals as planned; they end early when the time is up or the user stops.

    Returns:
        What all finals of this search have shown, earlier ones included.
    """
    _prove(launcher, plan)
    outcome = recall(launcher, plan.purse, plan.finalists[0])
    for config in plan.finalists[1:]:
        if outcome.winner is None or not _is_ahead(launcher, config, outcome.winner):
            break
        following = plan_finals(launcher, [config], look=plan.purse)
        if following.rounds < LEAST_ROUNDS:
            break
        _prove(launcher, following)
        outcome = recall(launcher, plan.purse, plan.finalists[0])
    return outcome


def recall(launcher: Launcher, look: RiskPurse, candidate: TrainConfig | None = None) -> FinalsOutcome:
    """Return what all finals of a search have shown so far, those of earlier sessions included.

    Args:
        launcher: of the search.
        look: its purse.
        candidate: listed also without a pair.
    """
    known = look.candidates
    settled = [_settle(launcher, look, one) for one in known + [candidate] * (candidate not in known) if one]
    finalists = [one for one, _ in settled]
    futile = {one.config.key for one in finalists if _was_futile(look, one.config)}
    standing = [one for one in finalists if one.config.key not in futile]
    winner = pick_best(standing, launcher.baseline)
    shown = winner or FinalsOutcome(Finalist(launcher.baseline), tuple(finalists), None).best
    base = next((base for one, base in settled if one is shown), Finalist(launcher.baseline))
    last = look.last_look(shown.config) if shown else None
    return FinalsOutcome(
        base,
        tuple(finalists),
        winner,
        futile=bool(last and last.futile),
        risk_share=last.share if last else 1.0,
        next_share=look.share_for(shown.config) if shown else SHARE_OF_A_LOOK,
    )


def _settle(launcher: Launcher, look: RiskPurse, config: TrainConfig) -> tuple[Finalist, Finalist]:
    last = look.last_look(config)
    pilot = Pilot(last.pilot_sd, last.pilot_degrees) if last else NO_PILOT
    one, base = Finalist(config, pilot=pilot, failure=last.failure if last else ""), Finalist(launcher.baseline)
    count_pairs(one, base, look.pairs_of(config))
    cost = _cost_of(launcher)
    one.cost, base.cost = cost(one.config, one.results), cost(base.config, base.results)
    one.settle(base, last.share if last else SHARE_OF_A_LOOK)
    return one, base


def _was_futile(look: RiskPurse, config: TrainConfig) -> bool:
    last = look.last_look(config)
    return last is not None and last.futile


def _is_ahead(launcher: Launcher, config: TrainConfig, winner: Finalist) -> bool:
    """Return whether the search saw a config ahead of one that is proven: it has nothing to win otherwise."""
    ranking = launcher.ranking()
    entry, proven = ranking.find(config), ranking.find(winner.config)
    ahead = (entry.shrunk if entry else 0.0) - (proven.shrunk if proven else 0.0)
    return ahead > math.log(THRESHOLD)


def _prove(launcher: Launcher, plan: FinalsPlan) -> None:
    """Take the planned look at the first finalist, and the second one at the reserve where that leaves it open."""
    outcome = _take_look(launcher, plan, plan.rounds, to_follow=plan.reserve)
    done = len(outcome.candidates[0].rates) == plan.kept + plan.rounds
    if plan.reserve and done and not outcome.futile and is_open(outcome.candidates):
        _take_look(launcher, plan, plan.reserve, to_follow=0)


def _take_look(launcher: Launcher, plan: FinalsPlan, rounds: int, *, to_follow: int) -> FinalsOutcome:
    purse, config = plan.purse, plan.finalists[0]
    earlier = purse.pairs_of(config)
    share = purse.begin(config, plan.pilot)

    def launch(config: TrainConfig) -> TrialResult | None:
        expected = launcher.predict_seconds(config)
        remaining = launcher.budget.remaining_seconds
        if launcher.should_stop() or remaining < expected:
            return None
        full = _FULL_PATIENCE * expected + 10
        result = launcher.launch(
            config, "final", min(remaining, full), ends_with_stage=remaining < full, measure_samples=plan.samples
        )
        return None if result.status is TrialStatus.INTERRUPTED else result

    outcome = run_finals(
        [config],
        launcher.baseline,
        launch,
        rounds=rounds,
        seed=launcher.state.seed + len(earlier),
        terms=Terms(share, plan.pilot, plan.pair_sd, to_follow, earlier, heard=purse.add),
        cost=_cost_of(launcher),
    )
    purse.end(proven=outcome.winner is not None, futile=outcome.futile, failure=outcome.candidates[0].failure)
    return outcome


def _cost_of(launcher: Launcher) -> Cost:
    def cost(config: TrainConfig, finals: Sequence[TrialResult]) -> float:
        key = config.key
        # Faster samples, of which more are needed: what counts is the net figure, by the upper end.
        more = math.log(launcher.samples_ratios.get(key, 1.0))
        if launcher.planned_samples is None:
            return more
        searched = [one.result for one in launcher.judged if one.key == key]
        return more + compile_cost([*searched, *finals], launcher.planned_samples)

    return cost
