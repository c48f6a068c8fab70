"""The exploring stage: propose or launch again, run, judge, until its time is up or nothing is left to find out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autotune.records.config import TrainConfig
from autotune.records.profile import StopReason
from autotune.records.trial import LossCurve, TrialResult, TrialStatus
from autotune.search.launcher import Launcher
from autotune.search.objective import Judged, score_trial
from autotune.search.study import Proposal

LEAST_GAIN = math.log(1.005)
"""A candidate that was not even this much faster in the search is not taken any further."""

_LEAST_TRIAL_SECONDS = 20.0
_PATIENCE = 4.0
"""A trial gets this many times the seconds it is expected to take."""


class Proposals(Protocol):
    """Where configs come from, and who is told what became of them."""

    def open(self, config: TrainConfig) -> Proposal:
        """Return a proposal for a config that is chosen already."""
        ...

    def propose(self, tried: Sequence[TrainConfig]) -> Proposal | None:
        """Return something new; None when nothing is left."""
        ...

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Hear how a proposal ended: its log speed-up, None when it was not timed."""
        ...

    def abandon(self, proposal: Proposal) -> None:
        """Take back a proposal that was not finished."""
        ...


Suggest = Callable[[TrainConfig, Sequence[TrainConfig], float], TrainConfig | None]
"""From the incumbent, what was tried and the seconds left to the next config of the fixed plan; None when used up."""


class Tried(Sequence[TrainConfig]):
    """The configs that need not be proposed: those that ran, that make a refused change, or that cannot run.

    Args:
        launcher: knows all three.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._configs = list({one.key: one.config for one in launcher.judged}.values())
        self._is_refused, self._is_hopeless = launcher.is_refused, launcher.is_hopeless

    def __contains__(self, config: object) -> bool:
        if config in self._configs:
            return True
        return isinstance(config, TrainConfig) and (self._is_refused(config) or self._is_hopeless(config))

    def __len__(self) -> int:
        return len(self._configs)

    def __getitem__(self, place: Any) -> Any:
        return self._configs[place]


def explore(
    launcher: Launcher,
    study: Proposals,
    suggest: Suggest,
    baseline: LossCurve,
    *,
    look_at: Callable[[TrainConfig], None] = lambda _config: None,
) -> StopReason:
    """Run trials into `launcher.judged` and return why it ended.

    Args:
        launcher: starts the trials.
        study: proposes, once the plan is used up.
        suggest: the plan.
        baseline: the baseline's losses, which a trial's are screened against.
        look_at: called with each new best config, which the drift gate may refuse.
    """
    while True:
        proposal = _propose(launcher, study, suggest)
        if not isinstance(proposal, Proposal):
            return proposal
        result = _run(launcher, proposal)
        if result.status is TrialStatus.INTERRUPTED:
            study.abandon(proposal)
            return "interrupted" if launcher.should_stop() else "budget"
        judged = Judged(result, score_trial(result, baseline, launcher.limits()))
        launcher.judged.append(judged)
        study.close(proposal, judged, launcher.ranking().score_of(judged))
        if judged.score.status is TrialStatus.DRIFTED:
            launcher.refuse_own_values(judged.config)
        best = next(iter(launcher.ranking().entries), None)
        if best is not None and best.config == judged.config and best.score > LEAST_GAIN:
            look_at(best.config)


def _propose(launcher: Launcher, study: Proposals, suggest: Suggest) -> Proposal | StopReason:
    left = _find_time(launcher)
    if launcher.should_stop():
        return "interrupted"
    ranking = launcher.ranking()
    schedule = launcher.schedule()
    again = schedule.find_due()
    if again is None or left < launcher.predict_seconds(again):
        best = ranking.simplest_of_best()
        tried = Tried(launcher)
        config = suggest(best.config if best else launcher.baseline, tried, left)
        if left < launcher.predict_seconds(config or launcher.baseline):
            return "budget"
        proposal = study.open(config) if config is not None else study.propose(tried)
        if proposal is not None:
            return proposal
        again = schedule.find_due(exhausted=True)
        if again is None:
            return "exhausted"
    return "budget" if left < launcher.predict_seconds(again) else study.open(again)


def _run(launcher: Launcher, proposal: Proposal) -> TrialResult:
    full = max(_LEAST_TRIAL_SECONDS, _PATIENCE * launcher.predict_seconds(proposal.config))
    left = _find_time(launcher)
    rival = launcher.schedule().make_rival(proposal.config)
    return launcher.launch(proposal.config, "measure", min(left, full), ends_with_stage=left < full, rival=rival)


def _find_time(launcher: Launcher) -> float:
    """Return the seconds left to search in; while nothing is faster, half of those for drift checks are lent."""
    budget, entries = launcher.budget, launcher.ranking().entries
    has_found = any(one.score > LEAST_GAIN and one.config != launcher.baseline for one in entries)
    return (
        budget.search_remaining_seconds
        if has_found
        else max(budget.search_remaining_seconds, 0.5 * budget.drift_remaining_seconds)
    )
