"""The exploring stage: propose or launch again, run, judge, until its time is up or nothing is left to find out.

Every launch is priced first and has to fit what is left once proving the leader is paid for. One that is cut by the end
of its time says so and is priced higher from then on; the stage goes on with what still fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import TrainConfig
from autotune.records.profile import StopReason
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.explore.additive import Prior
from autotune.search.explore.strategy import Situation, Suggest
from autotune.search.explore.study import Proposal
from autotune.search.launch.forecast import Forecast
from autotune.search.launch.starter import TrialStarter
from autotune.search.launch.suspects import Suspects
from autotune.search.log import SearchLog
from autotune.search.policy import SearchPolicy
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import measure_effects
from autotune.space import SearchSpace, needs_compilation


class Proposals(Protocol):
    """Where configs come from, and who is told what became of them."""

    def open(self, config: TrainConfig) -> Proposal:
        """Return a proposal for a config that is chosen already."""
        ...

    def propose(self, tried: Sequence[TrainConfig]) -> Proposal | None:
        """Return something new; None when nothing is left."""
        ...

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Record how a proposal ended: its log speed-up, None when it was not timed."""
        ...

    def abandon(self, proposal: Proposal) -> None:
        """Take back a proposal that was not finished."""
        ...

    def save(self) -> None:
        """Keep everything that was told."""
        ...


class OpenStudy(Protocol):
    """Makes what proposes configs; arguments as of `Study`."""

    def __call__(
        self,
        path: Path,
        space: SearchSpace,
        *,
        seed: int,
        known: Sequence[tuple[Judged, float | None]],
        told: Callable[[str], None],
        prior: Prior,
        price: Callable[[TrainConfig], float],
    ) -> Proposals:
        """Return it."""
        ...


class Tried(Sequence[TrainConfig]):
    """The configs that need not be proposed: they ran, are refused, suspected or hopeless, or do not fit the time.

    Args:
        log: knows all that, and is told which ones are hopeless.
        suspects: values that have made launches fail.
        seconds: left for a launch.

    Attributes:
        too_dear: something was left out for its price alone.
    """

    def __init__(self, log: SearchLog, suspects: Suspects, seconds: float = math.inf) -> None:
        self._configs = {one.key: one.config for one in log.judged}
        self._log, self._suspects, self._seconds = log, suspects, seconds
        self._forecast = Forecast(log.problem.report, log.problem.limits)
        self.too_dear = False

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, TrainConfig):
            return False
        if config.key in self._configs:
            return True
        if self._log.is_refused(config) or self._suspects.is_blocked(config) or self._is_hopeless(config):
            return True
        if self._log.prices.launch_seconds(config) <= self._seconds:
            return False
        self.too_dear = True
        return True

    def _is_hopeless(self, config: TrainConfig) -> bool:
        is_hopeless = self._forecast.is_hopeless(config)
        if is_hopeless:
            self._log.add_hopeless(config)
        return is_hopeless

    def __len__(self) -> int:
        return len(self._configs)

    def __getitem__(self, place: Any) -> Any:
        return [*self._configs.values()][place]


@dataclass(frozen=True)
class Explorer:
    """What the exploring stage works with.

    Attributes:
        log: of the search.
        starter: starts the trials.
        study: proposes, once the plan is used up.
        suggest: the plan.
        look_at: called with each new best config, which the loss check may refuse.
        kept_seconds: returns what is kept back for proving the leader.
        is_proof_due: returns whether something leads that was not in the finals yet: then it is proven before the
            search goes beyond the plan, while there is time to come back.
    """

    log: SearchLog
    starter: TrialStarter
    study: Proposals
    suggest: Suggest
    look_at: Callable[[TrainConfig], None] = lambda _config: None
    kept_seconds: Callable[[], float] = lambda: 0.0
    is_proof_due: Callable[[], bool] = lambda: False

    def run(self) -> StopReason:
        """Run trials into the log and return why it ended."""
        while True:
            proposal = self._propose()
            if not isinstance(proposal, Proposal):
                return proposal
            result = self._run(proposal)
            if result.status is TrialStatus.INTERRUPTED:
                self.study.abandon(proposal)
                self.log.add_interrupted(result)
                continue
            self._take(proposal, result)

    def measure(self, config: TrainConfig) -> bool:
        """Launch a config where the time allows it and return whether that was timed."""
        if self._price(config) > self._seconds_left() - KILL_SECONDS:
            return False
        proposal = self.study.open(config)
        result = self._run(proposal)
        if result.status is TrialStatus.INTERRUPTED:
            self.study.abandon(proposal)
            return False
        self._take(proposal, result)
        return result.measurement is not None

    def _take(self, proposal: Proposal, result: TrialResult) -> None:
        judged = self.log.add_launch(result)
        self.study.close(proposal, judged, self.log.ranking.score_of(judged))
        best = self.log.ranking.simplest_of_best
        if best is not None and best.config == judged.config and best.score > self._policy.least_gain:
            self.look_at(best.config)

    def _propose(self) -> Proposal | StopReason:
        log, left = self.log, self._seconds_left() - KILL_SECONDS
        if self.starter.should_stop():
            return "interrupted"
        if self._is_at_bound():
            return "bound"
        again = log.schedule.find_due()
        if again is not None and self._price(again) <= left:
            return self.study.open(again)
        if left < log.prices.usual_seconds(log.problem.baseline):
            return "budget"
        tried = Tried(log, log.find_suspects(count_overdue=not self.starter.should_stop()), left)
        config = self.suggest(self._describe_situation(tried))
        if config is None and self.is_proof_due():
            return "budget"
        proposal = self.study.open(config) if config is not None else self.study.propose(tried)
        if proposal is not None:
            return proposal
        again = log.schedule.find_due(exhausted=True)
        if again is None:
            return "budget" if tried.too_dear else "exhausted"
        return "budget" if left < self._price(again) else self.study.open(again)

    def _describe_situation(self, tried: Tried) -> Situation:
        problem, ranking = self.log.problem, self.log.ranking
        best = ranking.simplest_of_best
        return Situation(
            problem.space,
            problem.report,
            incumbent=best.config if best else problem.baseline,
            tried=tried,
            presets=problem.state.presets,
            effects=measure_effects(ranking.entries, problem.baseline),
            price=self._price,
            budget_seconds=self.starter.budget.seconds,
        )

    def _run(self, proposal: Proposal) -> TrialResult:
        policy, price = self._policy, self._price(proposal.config)
        full = max(policy.least_trial_seconds, policy.patience * price)
        if needs_compilation(proposal.config):
            full = max(price, min(full, policy.most_compile_patience * self.starter.budget.seconds))
        left = self._seconds_left()
        rival = self.log.schedule.make_rival(proposal.config)
        return self.starter.launch(
            proposal.config, "measure", min(left, full), ends_with_stage=left < full, rival=rival
        )

    def _is_at_bound(self) -> bool:
        policy = self._policy
        bound, incumbent = self.log.problem.report.verdict.speedup_ceiling, self.log.ranking.incumbent
        if bound is None or incumbent is None or incumbent.score <= policy.least_gain:
            return False
        return policy.bound_reached * bound <= math.exp(incumbent.score) <= policy.bound_refuted * bound

    def _seconds_left(self) -> float:
        return self.starter.budget.remaining_seconds - self.kept_seconds()

    def _price(self, config: TrainConfig) -> float:
        return self.log.prices.launch_seconds(config)

    @property
    def _policy(self) -> SearchPolicy:
        return self.log.problem.policy
