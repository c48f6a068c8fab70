"""Whose turn it is to prove: one worker of a study holds the finals, the others go on exploring for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import TrainConfig
from autotune.search.finals.prover import Prover
from autotune.search.share.alone import Alone


@dataclass(frozen=True)
class FinalsTurn:
    """What proves the leaders of a search, where it is this worker's turn.

    Attributes:
        prover: of the search.
        fleet: the other workers.
    """

    prover: Prover
    fleet: Alone

    def look_at(self, config: TrainConfig) -> None:
        """Have the loss check look at a new leader."""
        self.prover.look_at(config)

    def kept_seconds(self) -> float:
        """Return what is kept back for the finals while exploring; nothing where others hold them."""
        return 0.0 if self.fleet.has_finals_elsewhere else self.prover.kept_seconds()

    def is_due(self) -> bool:
        """Return whether a leader is to be proven now, or one that others have found to be launched here for that."""
        if self.fleet.has_finals_elsewhere:
            return False
        log, explored = self.prover.log, self.fleet.explored
        if self.prover.is_due(explored_elsewhere=explored):
            return True
        is_enough = explored and len(log.judged) + explored >= log.problem.policy.least_explored
        return bool(is_enough and self._list_leads())

    def prove(self, measure: Callable[[TrainConfig], bool]) -> None:
        """Check the leader's loss and hold its finals, as far as there is time, where nobody else does.

        Args:
            measure: launches a config once more where the time allows it; returns whether that was timed.
        """
        if self.fleet.take_finals():
            for lead in self._list_leads():
                if lead in self._list_leads():  # the one before may have raised the bar
                    measure(lead)
            self.prover.prove(measure)

    def claim_more(self) -> bool:
        """Give what is proven here more pairs in the time that is left; return whether it still is."""
        return not self.fleet.take_finals() or self.prover.claim_more()

    def _list_leads(self) -> list[TrainConfig]:
        """Return what others have found that may be launched here, and fits the time."""
        log, budget = self.prover.log, self.prover.starter.budget
        suspects = log.find_suspects(count_overdue=False, elsewhere=self.fleet.list_ended())
        left = budget.remaining_seconds - KILL_SECONDS
        return [
            one
            for one in self.fleet.list_leads()
            if not log.is_refused(one) and not suspects.is_blocked(one) and log.prices.launch_seconds(one) <= left
        ]
