"""From whatever leads in a search to its proof: its loss is checked, its finals are held, as far as there is time.

What leads is looked at while the search explores, and so is what its proof will take: that much is kept back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.format import count
from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import TrainConfig
from autotune.records.objective import Objective
from autotune.search.finals.candidates import Candidates
from autotune.search.finals.finalist import LEAST_ROUNDS, FinalsOutcome
from autotune.search.finals.plan import plan_finals, plan_more
from autotune.search.finals.reserve import Reserve
from autotune.search.finals.risk import RiskPurse
from autotune.search.finals.rounds import FinalsPlan
from autotune.search.finals.stage import confirm, recall
from autotune.search.launch.starter import TrialStarter
from autotune.search.log import SearchLog
from autotune.sentences.settings import describe_changes


class LossCheck(Protocol):
    """What shows that a config learns the same: the drift gate. What it finds out goes into the log."""

    def find_early_part(self, config: TrainConfig) -> TrainConfig | None:
        """Return what of a promising config is screened while the search goes on; None for nothing."""
        ...

    def look_at(self, config: TrainConfig, *, seconds: float, most_seconds: float | None = None) -> None:
        """Screen that part in so many seconds; in the most there are where that is worth it."""
        ...

    def choose(
        self, candidates: Sequence[TrainConfig], *, seconds: float, is_provable: Callable[[TrainConfig], bool]
    ) -> list[TrainConfig]:
        """Check candidates until one has passed, the most promising first."""
        ...


@dataclass(frozen=True)
class Prover:
    """Proves the leaders of one search.

    Attributes:
        log: of the search.
        starter: starts the trials.
        loss_check: shows that a config learns the same.
        purse: gives each look of the finals its share of the risk.
        reserve: says what a proof takes.
    """

    log: SearchLog
    starter: TrialStarter
    loss_check: LossCheck
    purse: RiskPurse
    reserve: Reserve

    def recall_finals(self) -> None:
        """Take up what the finals of earlier sessions have shown: their pairs count, their risk is spent."""
        log = self.log
        known = [config for config in self.purse.candidates if self.purse.pairs_of(config)]
        if known and any(one.config == log.problem.baseline for one in log.judged):
            outcome = recall(log, self.purse)
            log.add_recalled_finals(
                plan_finals(log, self.starter.budget, known[:1], look=self.purse, seconds=0.0), outcome
            )

    def prove(self, measure: Callable[[TrainConfig], bool]) -> None:
        """Check the leader's loss and hold its finals, as far as there is time.

        Args:
            measure: launches a config once more where the time allows it; returns whether that was timed.
        """
        finalists = self._check_losses(measure)
        if finalists:
            self._hold_finals(finalists)

    def claim_more(self) -> bool:
        """Give what is proven more pairs in the time that is left: few of them claim little of its gain.

        Returns:
            Whether what was proven still is; also where there was nothing to do.
        """
        plan = self._plan_more()
        if plan is None:
            return True
        self.starter.enter("finals", f"{plan.rounds} more rounds, for a claim nearer to the gain")
        outcome = self._confirm(plan)
        open_pairs = len(self.purse.pairs_of(plan.finalists[0])) - plan.kept
        if outcome.winner is not None and open_pairs and len(outcome.winner.rates) == plan.kept:
            pairs = count(open_pairs, "more pair")
            self.log.add_notes(f"{pairs} left open what the first {plan.kept} had proven, whose claim it is")
        return outcome.winner is not None

    def is_due(self, *, explored_elsewhere: int = 0) -> bool:
        """Return whether a leader is to be proven now: it was not yet, enough was tried, and there is time.

        Args:
            explored_elsewhere: launches of other workers, where they share the study.
        """
        if len(self.log.judged) + explored_elsewhere < self.log.problem.policy.least_explored:
            return False
        leaders = [one for one in self._leaders()[:1] if one.key not in self.log.attempted]
        return any(self.reserve.is_provable(one) for one in leaders)

    def kept_seconds(self) -> float:
        """Return what is kept back while exploring: to prove what leads or may come to lead, or to claim more."""
        leaders, prices = self._leaders(), self.log.prices
        kept = max(self.reserve.seconds_for(leaders[0] if leaders else None), self._seconds_to_claim_more())
        left = self.starter.budget.remaining_seconds - kept - KILL_SECONDS
        if leaders or self._has_winner or left >= prices.usual_seconds(self.log.problem.baseline):
            return kept
        return 0.0  # time for a proof is of no use, a candidate to go on with is

    def look_at(self, config: TrainConfig) -> None:
        """Have the loss check look at a new leader, as long as what remains could still prove it."""
        part = self.loss_check.find_early_part(config)
        if part is None or Candidates(self.log).is_doubtful(config):
            return
        budget, policy = self.starter.budget, self.log.problem.policy
        needed = self.reserve.needed_seconds(part)
        if needed > policy.most_proof_share * budget.seconds:
            return  # there is not much that could be built on it
        most = self.reserve.check_seconds(config)
        seconds = min(most, max(needed, policy.look_share * budget.seconds - self.log.gate_seconds))
        if seconds > 0:
            self.loss_check.look_at(config, seconds=seconds, most_seconds=most)

    def _seconds_to_claim_more(self) -> float:
        plan = self._plan_more()
        if plan is None:
            return 0.0
        wanted, most = plan.rounds * plan.round_seconds, self.log.problem.policy.more_pairs_share
        return min(wanted, most * self.starter.budget.seconds)

    def _plan_more(self) -> FinalsPlan | None:
        winner = self.log.finals.winner if self.log.finals else None
        return plan_more(self.log, self.starter.budget, winner.config, self.purse) if winner else None

    @property
    def _has_winner(self) -> bool:
        return self.log.finals is not None and self.log.finals.winner is not None

    def _leaders(self) -> list[TrainConfig]:
        """Return the leaders, but for those that there was no time to check, the one to prove first."""
        log = self.log
        open_ones = (one for one in Candidates(log).ranked() if one.key not in log.attempted or log.checks_of(one))
        # The one to prove is the most promising of those that there is still time for.
        first = list(itertools.islice(open_ones, log.problem.policy.most_leaders))
        if not any(map(self.reserve.is_provable, first)):
            first += itertools.islice(filter(self.reserve.is_provable, open_ones), 1)
        begun = self._find_begun(first)
        return sorted(first, key=lambda one: (not self.reserve.is_provable(one), one is not begun))

    def _find_begun(self, leaders: Sequence[TrainConfig]) -> TrainConfig | None:
        """Return the first that has pairs already, unless the leader is so far ahead that these may be lost."""
        ranking, bar = self.log.ranking, self.log.problem.policy.worth_another
        entries = {one.key: ranking.find(one) for one in leaders}
        best = max((entry.score for entry in entries.values() if entry), default=0.0)
        near = (one for one in leaders if (entry := entries[one.key]) is not None and best - entry.score < bar)
        return next((one for one in near if self.purse.pairs_of(one)), None)

    def _check_losses(self, measure: Callable[[TrainConfig], bool]) -> list[TrainConfig]:
        """Return the candidates for the finals: faster in the search, and shown to learn as well."""
        log, candidates = self.log, self._leaders()
        if candidates and Candidates(log).is_doubtful(candidates[0]) and measure(log.problem.baseline):
            candidates = self._leaders()
        if not candidates or self.starter.should_stop():
            return []
        log.add_attempt(candidates[0])
        if not log.checks_of(candidates[0]) and self.reserve.check_seconds(candidates[0]) > 0:
            fresh = [config for config in candidates if not log.checks_of(config)]
            seconds = self.reserve.check_seconds(fresh[0])
            if any(self.reserve.needed_seconds(one) <= seconds for one in fresh):
                ahead = "better" if log.problem.objective is Objective.MEMORY else "faster"
                self.starter.enter("drift", f"{count(len(fresh), 'candidate')} {ahead} than your settings so far")
                self.loss_check.choose(fresh, seconds=seconds, is_provable=self.reserve.is_provable)
        tested = [config for config, _ in log.checks]
        return [config for config in [*candidates, *tested] if Candidates(log).may_win(config)][:1]

    def _hold_finals(self, finalists: list[TrainConfig]) -> None:
        log = self.log
        plan = plan_finals(log, self.starter.budget, finalists, look=self.purse)
        if plan.kept + plan.rounds < LEAST_ROUNDS or plan.rounds < 1:
            return
        rounds = f"{plan.rounds} to {plan.rounds + plan.reserve}" if plan.reserve else str(plan.rounds)
        if plan.rounds * plan.round_seconds > self.starter.budget.remaining_seconds:
            rounds = f"up to {rounds}"
        self.starter.enter("finals", f"{rounds} rounds of 2 fresh processes")
        self._confirm(plan)

    def _confirm(self, plan: FinalsPlan) -> FinalsOutcome:
        log = self.log
        outcome = confirm(log, self.starter, plan)
        log.add_notes(
            *(
                f"{describe_changes(one.config, log.problem.baseline)} failed in the proof: {one.failure}"
                for one in outcome.candidates
                if one.failure and one.config not in log.settled
            )
        )
        log.add_finals(plan, outcome)
        return outcome
