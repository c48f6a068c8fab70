"""The exploring stage: propose, run, judge, until its time is up or nothing new is left."""

from __future__ import annotations

from autotune.records.profile import StopReason
from autotune.records.trial import LossCurve, TrialResult, TrialStatus
from autotune.search.launcher import Launcher
from autotune.search.objective import Judged, score_trial, simplest_of_best
from autotune.search.strategy import suggest
from autotune.search.study import Proposal, Study
from autotune.space import SearchSpace

_LEAST_TRIAL_SECONDS = 20.0
_PATIENCE = 4.0
"""A trial gets this many times the seconds it is expected to take."""


def explore(launcher: Launcher, study: Study, space: SearchSpace, baseline: LossCurve) -> StopReason:
    """Run trials into `launcher.judged` and return why it ended."""
    while True:
        proposal = _propose(launcher, study, space)
        if not isinstance(proposal, Proposal):
            return proposal
        result = _run(launcher, proposal)
        if result.status is TrialStatus.INTERRUPTED:
            study.abandon(proposal)
            return "interrupted" if launcher.should_stop() else "budget"
        judged = Judged(result, score_trial(result, baseline, launcher.limits()))
        launcher.judged.append(judged)
        study.close(proposal, judged)


def _propose(launcher: Launcher, study: Study, space: SearchSpace) -> Proposal | StopReason:
    left = launcher.budget.search_remaining_seconds
    tried = [one.config for one in launcher.judged]
    if launcher.should_stop():
        return "interrupted"
    if left < launcher.predict_seconds(space.baseline):
        return "budget"
    if space.baseline not in tried:
        return study.open(space.baseline)
    best = simplest_of_best(launcher.judged, space.baseline, noise=launcher.noise())
    incumbent = best.config if best else space.baseline
    assert launcher.report is not None
    config = suggest(space, launcher.report, incumbent=incumbent, tried=tried, seconds_left=left)
    return study.open(config) if config is not None else study.propose(tried) or "exhausted"


def _run(launcher: Launcher, proposal: Proposal) -> TrialResult:
    full = max(_LEAST_TRIAL_SECONDS, _PATIENCE * launcher.predict_seconds(proposal.config))
    left = launcher.budget.search_remaining_seconds
    return launcher.launch(proposal.config, "measure", min(left, full), ends_with_stage=left < full)
