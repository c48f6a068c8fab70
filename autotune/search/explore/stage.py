"""The exploring stage: propose or launch again, run, judge, until its time is up or nothing is left to find out.

Every launch is priced first and has to fit what is left once proving the leader is paid for. One that is cut by the end
of its time says so and is priced higher from then on; the stage goes on with what still fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import TrainConfig
from autotune.records.profile import StopReason
from autotune.records.trial import LossCurve, TrialResult, TrialStatus
from autotune.search.explore.strategy import Situation, Suggest
from autotune.search.explore.study import Proposal
from autotune.search.launch.launcher import Launcher
from autotune.search.scores.objective import Judged, score_trial
from autotune.search.scores.ranking import measure_effects
from autotune.space import needs_compilation

LEAST_GAIN = math.log(1.005)
"""A candidate that was not even this much faster in the search is not taken any further."""

_LEAST_TRIAL_SECONDS = 10.0
_PATIENCE = 3.0
"""A trial gets this many times the seconds it is expected to take."""
_MOST_PATIENCE = 0.25
"""Of the budget: for one that compiles, however long that is expected to take."""

_AT_BOUND = (0.95, 1.10)
"""Of the probe's bound: nothing that matters is left to find, unless the bound is itself refuted."""


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


class Tried(Sequence[TrainConfig]):
    """The configs that need not be proposed: they ran, are refused, suspected or hopeless, or do not fit the time.

    Args:
        launcher: knows all that.
        seconds: left for a launch.

    Attributes:
        too_dear: something was left out for its price alone.
    """

    def __init__(self, launcher: Launcher, seconds: float = math.inf) -> None:
        self._configs = {one.key: one.config for one in launcher.judged}
        self._launcher, self._seconds = launcher, seconds
        self._suspects = launcher.suspects()
        self.too_dear = False

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, TrainConfig):
            return False
        if config.key in self._configs:
            return True
        launcher = self._launcher
        if launcher.is_refused(config) or self._suspects.is_blocked(config) or launcher.is_hopeless(config):
            return True
        if launcher.predict_seconds(config) <= self._seconds:
            return False
        self.too_dear = True
        return True

    def __len__(self) -> int:
        return len(self._configs)

    def __getitem__(self, place: Any) -> Any:
        return [*self._configs.values()][place]


@dataclass(frozen=True)
class Explorer:
    """What the exploring stage works with.

    Attributes:
        launcher: starts the trials.
        study: proposes, once the plan is used up.
        suggest: the plan.
        situation: what the plan is made from; incumbent, tried and effects are filled in.
        baseline: the baseline's losses, which a trial's are screened against.
        look_at: called with each new best config, which the loss check may refuse.
        kept_seconds: returns what is kept back for proving the leader.
        is_proof_due: returns whether something leads that was not in the finals yet: then it is proven before the
            search goes beyond the plan, while there is time to come back.
    """

    launcher: Launcher
    study: Proposals
    suggest: Suggest
    situation: Situation
    baseline: LossCurve
    look_at: Callable[[TrainConfig], None] = lambda _config: None
    kept_seconds: Callable[[], float] = lambda: 0.0
    is_proof_due: Callable[[], bool] = lambda: False

    def run(self) -> StopReason:
        """Run trials into `launcher.judged` and return why it ended."""
        while True:
            proposal = self._propose()
            if not isinstance(proposal, Proposal):
                return proposal
            result = self._run(proposal)
            if result.status is TrialStatus.INTERRUPTED:
                self.study.abandon(proposal)
                self.launcher.interrupted.append(result)
                continue
            self._take(proposal, result)

    def measure(self, config: TrainConfig) -> bool:
        """Launch a config where the time allows it and return whether that was timed."""
        if self.launcher.predict_seconds(config) > self._seconds_left() - KILL_SECONDS:
            return False
        proposal = self.study.open(config)
        result = self._run(proposal)
        if result.status is TrialStatus.INTERRUPTED:
            self.study.abandon(proposal)
            return False
        self._take(proposal, result)
        return result.measurement is not None

    def _take(self, proposal: Proposal, result: TrialResult) -> None:
        launcher = self.launcher
        judged = Judged(result, score_trial(result, self.baseline, launcher.limits()))
        launcher.judged.append(judged)
        self.study.close(proposal, judged, launcher.ranking().score_of(judged))
        if judged.score.status is TrialStatus.DRIFTED:
            launcher.refuse_own_values(judged.config)
        best = launcher.ranking().simplest_of_best
        if best is not None and best.config == judged.config and best.score > LEAST_GAIN:
            self.look_at(best.config)

    def _propose(self) -> Proposal | StopReason:
        launcher, left = self.launcher, self._seconds_left() - KILL_SECONDS
        if launcher.should_stop():
            return "interrupted"
        if self._is_at_bound():
            return "bound"
        schedule = launcher.schedule()
        again = schedule.find_due()
        if again is not None and launcher.predict_seconds(again) <= left:
            return self.study.open(again)
        if left < launcher.least_seconds():
            return "budget"
        tried = Tried(launcher, left)
        config = self.suggest(self._look(tried))
        if config is None and self.is_proof_due():
            return "budget"
        proposal = self.study.open(config) if config is not None else self.study.propose(tried)
        if proposal is not None:
            return proposal
        again = schedule.find_due(exhausted=True)
        if again is None:
            return "budget" if tried.too_dear else "exhausted"
        return "budget" if left < launcher.predict_seconds(again) else self.study.open(again)

    def _look(self, tried: Tried) -> Situation:
        ranking = self.launcher.ranking()
        best = ranking.simplest_of_best
        incumbent = best.config if best else self.launcher.baseline
        effects = measure_effects(ranking.entries, self.launcher.baseline)
        return dataclasses.replace(self.situation, incumbent=incumbent, tried=tried, effects=effects)

    def _run(self, proposal: Proposal) -> TrialResult:
        launcher = self.launcher
        full = max(_LEAST_TRIAL_SECONDS, _PATIENCE * launcher.predict_seconds(proposal.config))
        if needs_compilation(proposal.config):
            full = max(launcher.predict_seconds(proposal.config), min(full, _MOST_PATIENCE * launcher.budget.seconds))
        left = self._seconds_left()
        rival = launcher.schedule().make_rival(proposal.config)
        return launcher.launch(proposal.config, "measure", min(left, full), ends_with_stage=left < full, rival=rival)

    def _is_at_bound(self) -> bool:
        bound, incumbent = self.launcher.known_report.verdict.speedup_ceiling, self.launcher.ranking().incumbent
        if bound is None or incumbent is None or incumbent.score <= LEAST_GAIN:
            return False
        return _AT_BOUND[0] * bound <= math.exp(incumbent.score) <= _AT_BOUND[1] * bound

    def _seconds_left(self) -> float:
        return self.launcher.budget.remaining_seconds - self.kept_seconds()
