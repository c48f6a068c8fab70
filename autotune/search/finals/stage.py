"""The finals of a search: running the rounds that are planned in the time there is.

    look 1: rounds that prove the gain      look 2, where it stays open: the reserve, three times as many in all

A search may hold finals again and again: each look takes its share of the risk beforehand (`purse`), the pairs of
earlier looks at the same candidate count. Candidates are tested in a fixed sequence: what was spent on one that is
proven is free for the next.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from autotune.measure.confidence import NO_PILOT
from autotune.records.config import TrainConfig
from autotune.records.finals import LookTaken
from autotune.records.quality import is_passed
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.finals.claim import find_claim
from autotune.search.finals.finalist import Finalist, FinalsOutcome
from autotune.search.finals.plan import plan_finals, price_pair
from autotune.search.finals.risk import SHARE_OF_A_LOOK, Pair, RiskPurse, pilot_of
from autotune.search.finals.rounds import (
    Cost,
    FinalsPlan,
    Launch,
    LaunchPair,
    Terms,
    count_pairs,
    is_open,
    pick_best,
    run_finals,
)
from autotune.search.launch.length import find_warmup_steps
from autotune.search.launch.starter import TrialStarter
from autotune.search.launch.turns import fit_together
from autotune.search.log import SearchLog
from autotune.search.scores.ranking import compile_cost, find_compile_seconds, list_alike


def make_launch(log: SearchLog, starter: TrialStarter, samples: int, candidate: TrainConfig | None = None) -> Launch:
    """Return what runs one launch of the finals; it returns None where there is no time for one, or it was cut.

    Args:
        log: of the search, for what launches take.
        starter: starts them.
        samples: that each of them measures.
        candidate: that the user's settings are launched beside: both warm up alike; None for others as well.
    """
    policy = log.problem.policy

    def launch(config: TrainConfig) -> TrialResult | None:
        expected = log.prices.launch_seconds(config)
        remaining = starter.budget.remaining_seconds
        if starter.should_stop() or remaining < expected:
            return None
        full = policy.finals_patience * expected + policy.finals_patience_seconds
        result = starter.launch(
            config,
            "final",
            min(remaining, full),
            ends_with_stage=remaining < full,
            least_warmup_steps=find_warmup_steps(log, candidate or config),
            measure_samples=samples,
        )
        if result.cause == "disturbed":  # the machine slept: as if it had not been
            return launch(config)
        return None if result.status is TrialStatus.INTERRUPTED else result

    return launch


def make_pair_launch(
    log: SearchLog, starter: TrialStarter, samples: int, on_apart: Callable[[], None] = lambda: None
) -> LaunchPair | None:
    """Return what runs the two launches of a pair in turns; None where that cannot be.

    Where one of them fails so, both are run again one after the other. If they work then, no pair is run in turns any
    more: what fails beside another process need not fail alone.

    Args:
        log: of the search, for what launches take.
        starter: starts them.
        samples: that each of them measures.
        on_apart: told that pairs are not in turns any more.
    """
    policy = log.problem.policy
    took: list[float] = []

    def launch_pair(first: TrainConfig, second: TrainConfig) -> tuple[TrialResult, TrialResult] | None:
        candidate = second if first == log.problem.baseline else first
        launch = make_launch(log, starter, samples, candidate)
        if not (log.takes_turns and fit_together(log, first, second)):
            return _launch_both(launch, first, second)
        expected = statistics.median(took) if took else price_pair(log, candidate)
        remaining = starter.budget.remaining_seconds
        if starter.should_stop() or remaining < expected:
            return None
        full = policy.finals_patience * expected + policy.finals_patience_seconds
        pair = starter.launch_in_turns(
            first, second, min(remaining, full), ends_with_stage=remaining < full, measure_samples=samples
        )
        if any(one.cause == "disturbed" for one in pair):
            return launch_pair(first, second)
        if any(one.status is TrialStatus.INTERRUPTED for one in pair):
            return None
        if all(one.measurement is not None for one in pair):
            took.append(max(one.elapsed_seconds for one in pair))
            return pair
        both = _launch_both(launch, first, second)
        if both is not None and all(one.measurement is not None for one in both):
            log.takes_turns = False
            on_apart()
        return both

    return launch_pair if log.takes_turns else None


def _launch_both(launch: Launch, first: TrainConfig, second: TrainConfig) -> tuple[TrialResult, TrialResult] | None:
    ours = launch(first)
    theirs = None if ours is None else launch(second)
    return None if ours is None or theirs is None else (ours, theirs)


def confirm(log: SearchLog, starter: TrialStarter, plan: FinalsPlan) -> FinalsOutcome:
    """Run the finals as planned; they end early when the time is up or the user stops.

    Args:
        log: of the search.
        starter: starts their launches.
        plan: fixed before.

    Returns:
        What all finals of this search have shown, earlier ones included.
    """
    _prove(log, starter, plan)
    return _break_tie(log, starter, plan, recall(log, plan.purse, plan.finalists[0]))


def _break_tie(log: SearchLog, starter: TrialStarter, plan: FinalsPlan, outcome: FinalsOutcome) -> FinalsOutcome:
    """Give a winner that is only the simpler of two as many pairs as the other: too few may be all that ties them."""
    winner = outcome.winner
    best = max(outcome.proven, key=lambda one: one.gain or 0.0, default=None)
    if winner is None or best is None or best is winner:
        return outcome
    following = plan_finals(log, starter.budget, [winner.config], look=plan.purse)
    done = [len(plan.purse.pairs_of(one.config)) for one in (best, winner)]
    rounds = min(done[0] - done[1], following.rounds + following.reserve)
    if rounds < 1:
        return outcome
    _prove(log, starter, dataclasses.replace(following, rounds=rounds, reserve=0))
    return recall(log, plan.purse, best.config)


def recall(log: SearchLog, look: RiskPurse, candidate: TrainConfig | None = None) -> FinalsOutcome:
    """Return what all finals of a search have shown so far, those of earlier sessions included.

    Args:
        log: of the search.
        look: its purse.
        candidate: listed also without a pair.
    """
    known = look.candidates
    settled = [_settle(log, look, one) for one in known + [candidate] * (candidate not in known) if one]
    finalists = [one for one, _ in settled]
    standing = [one for one in finalists if not one.futile and is_passed(log.checks_of(one.config))]
    winner = pick_best(standing, log.problem.baseline)
    shown = winner or FinalsOutcome(Finalist(log.problem.baseline), tuple(finalists), None).best
    base = next((base for one, base in settled if one is shown), Finalist(log.problem.baseline))
    return FinalsOutcome(
        base,
        tuple(finalists),
        winner,
        futile=shown is not None and shown.futile,
        risk_share=shown.share if shown else 1.0,
        next_share=look.share_for(shown.config) if shown else SHARE_OF_A_LOOK,
    )


def _settle(log: SearchLog, purse: RiskPurse, config: TrainConfig) -> tuple[Finalist, Finalist]:
    """Return what the looks at a candidate show by the latest that decides it, and its baseline.

    What one has proven holds at its own share: a later one that leaves it open takes nothing of it back, one that rules
    it out does.
    """
    looks = [
        _settle_look(log, config, look, pairs)
        for look, pairs in reversed(purse.looks_at(config))
        if look.rounds or look.failure  # else it never began
    ]
    if not looks:
        return Finalist(config, claim=find_claim(log.problem.objective)), Finalist(log.problem.baseline)
    return next((look for look in looks if look[0].failure or look[0].outcome != "unclear"), looks[0])


def _settle_look(
    log: SearchLog, config: TrainConfig, look: LookTaken, pairs: Sequence[Pair]
) -> tuple[Finalist, Finalist]:
    pilot, claim = pilot_of(look), find_claim(log.problem.objective)
    one = Finalist(config, pilot=pilot, failure=look.failure, futile=look.futile, claim=claim)
    base, cost = Finalist(log.problem.baseline), _cost_of(log)
    count_pairs(one, base, pairs)
    one.cost, base.cost = cost(one.config, one.results), cost(base.config, base.results)
    one.settle(base, look.share)
    return one, base


def _prove(log: SearchLog, starter: TrialStarter, plan: FinalsPlan) -> None:
    """Take the planned look at the first finalist, and the second one at the reserve where that leaves it open."""
    outcome = _take_look(log, starter, plan, plan.rounds, to_follow=plan.reserve)
    done = len(outcome.candidates[0].rates) == plan.kept + plan.rounds
    if plan.reserve and done and not outcome.futile and is_open(outcome.candidates):
        if plan.purse.has_forgotten(plan.pilot):
            plan = dataclasses.replace(plan, pilot=NO_PILOT)
        _take_look(log, starter, plan, plan.reserve, to_follow=0)


def _take_look(
    log: SearchLog, starter: TrialStarter, plan: FinalsPlan, rounds: int, *, to_follow: int
) -> FinalsOutcome:
    problem, purse, config = log.problem, plan.purse, plan.finalists[0]
    earlier, is_proven = purse.pairs_of(config), _settle(log, purse, config)[0].outcome == "proven"
    share = purse.begin(config, plan.pilot, is_proven=is_proven)

    outcome = run_finals(
        [config],
        log.problem.baseline,
        make_launch(log, starter, plan.samples, config),
        rounds=rounds,
        seed=problem.state.seed + len(earlier),
        terms=Terms(
            share,
            plan.pilot,
            None if is_proven else plan.pair_sd,
            to_follow,
            earlier,
            heard=purse.add,
            claim=find_claim(problem.objective),
        ),
        cost=_cost_of(log),
        launch_pair=make_pair_launch(log, starter, plan.samples, purse.forget_pilot),
    )
    failure, proven = outcome.candidates[0].failure, outcome.winner is not None
    if is_proven or (proven and purse.has_forgotten(plan.pilot)):
        proven = not failure and _settle(log, purse, config)[0].outcome == "proven"
    purse.end(proven=proven, futile=outcome.futile, failure=failure)
    return outcome


def _cost_of(log: SearchLog) -> Cost:
    def cost(config: TrainConfig, finals: Sequence[TrialResult]) -> float:
        # Faster samples, of which more are needed: what counts is the net figure, by the upper end.
        more, planned_samples = math.log(log.samples_ratio_of(config)), log.problem.charged_samples
        if planned_samples is None:
            return more
        key = config.key
        searched = [one.result for one in log.judged if one.key == key]
        longest = find_compile_seconds(list_alike(config, log.judged))
        return more + compile_cost([*searched, *finals], longest, planned_samples)

    return cost
