"""One search from start to answer. Trials are run by a callable that is handed in, so a recorded table can stand in.

probe (trial 0) ── explore ── loss check ── finals ─┬─ answer
                      ▲                             │
                      └── while what is left can ───┘
                          find and prove something

Exploring ends where what is left is needed to prove the leader, or for more pairs of what is proven, which come last;
nothing is kept back for what needs no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autotune.drift.gate.stage import GateStage
from autotune.format import count
from autotune.probe.run import probe_target
from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.profile import Profile, StopReason
from autotune.records.search import Recalled, Screens, SearchState
from autotune.records.trial import TrialLimits, TrialResult
from autotune.search.answer.findings import collect_findings
from autotune.search.answer.notes import describe_ending, describe_left_out, describe_untried
from autotune.search.answer.profile import build_profile
from autotune.search.explore.aim import find_aim
from autotune.search.explore.prior import make_prior
from autotune.search.explore.stage import Explorer, OpenStudy, Proposals
from autotune.search.explore.study import Study
from autotune.search.finals.plan import pairs_to_prove
from autotune.search.finals.prover import Prover
from autotune.search.finals.reserve import Reserve, require_memory, require_time
from autotune.search.finals.risk import KeepsFinals, open_purse
from autotune.search.launch.budget import Budget
from autotune.search.launch.starter import SearchContext, TrialStarter
from autotune.search.launch.together import (
    add_first_launch,
    find_first_launch,
    make_first_launch,
    require_shareable_batch,
)
from autotune.search.launch.turns import leave_out_excused
from autotune.search.log import SearchLog
from autotune.search.policy import USUAL_POLICY, SearchPolicy
from autotune.search.problem import make_problem
from autotune.search.share.alone import ALONE, Alone
from autotune.search.share.finals_turn import FinalsTurn
from autotune.search.store.history import Effects
from autotune.sentences.settings import describe_changes
from autotune.targets.drift_limits import require_metrics


class SearchStore(KeepsFinals, Protocol):
    """Where a search is kept, as far as its stages look at it: a `SearchFolder`."""

    @property
    def database(self) -> Path | None:
        """Of the study's copy; None for no copy."""
        ...

    def read_probe(self) -> ProbeReport | None:
        """Return the probe's report; None when there is none yet."""
        ...

    def write_probe(self, report: ProbeReport) -> None:
        """Save the probe's report."""
        ...

    def read_trials(self) -> list[TrialResult]:
        """Return every finished trial in order."""
        ...

    def count_interrupted(self) -> int:
        """Return how many timings of earlier sessions were cut."""
        ...

    def read_screens(self) -> Screens:
        """Return what the loss checks have shown in earlier sessions."""
        ...

    def write_screens(self, screens: Screens) -> None:
        """Save what the loss checks have shown so far."""
        ...

    def recall(self, report: ProbeReport) -> Recalled:
        """Return what the search begins with from earlier ones of the like."""
        ...

    def remember(self, log: SearchLog, profile: Profile, effects: Effects) -> None:
        """Keep what was read for later searches."""
        ...


@dataclass(frozen=True)
class SessionOutcome:
    """What a session of a search leaves.

    Attributes:
        profile: the answer.
        log: what was launched and found out.
    """

    profile: Profile
    log: SearchLog


@dataclass(frozen=True)
class _Probed:
    """What a search begins with.

    Attributes:
        report: of its probe.
        trial: behind it.
        is_new: it was run now.
        launch: of several processes the first launch of the user's own settings; None with one.
        is_new_launch: that was run now.
    """

    report: ProbeReport
    trial: TrialResult
    is_new: bool
    launch: TrialResult | None = None
    is_new_launch: bool = False

    @property
    def next_number(self) -> int:
        """Of a trial after it; the probe is trial 0."""
        return 1 if self.launch is None else self.launch.spec.number + 1


def run_session(
    folder: SearchStore,
    state: SearchState,
    context: SearchContext,
    save: Callable[[Profile], None],
    *,
    number: int,
    open_study: OpenStudy = Study,
    policy: SearchPolicy = USUAL_POLICY,
    fleet: Alone = ALONE,
) -> SessionOutcome:
    """Run every stage of a search and return its answer.

    Args:
        folder: where it is kept.
        state: what it was asked to do.
        context: what it runs in.
        save: called with each new answer, first when the baseline is measured.
        number: of its next trial.
        open_study: makes what proposes configs.
        policy: its thresholds.
        fleet: the other workers of the study, where it is shared.

    Raises:
        UsageError: the target cannot be found, lacks a metric that has a limit, or needs a larger budget.
        NothingFeasibleError: the user's own settings break the memory limit.
        TargetError: the training fails with its own settings.
    """
    known = leave_out_excused(folder.read_trials())
    probed = _begin(folder, state, context, known, number=number, policy=policy)
    log = _open_log(folder, state, context, probed, policy)
    starter = TrialStarter(log, context, number=max(probed.next_number, number))
    gate = GateStage(log, starter, known, keep=folder.write_screens)
    prover = open_prover(folder, log, starter, gate, known)
    if not any(one.spec.purpose == "measure" for one in known):
        require_time(prover.reserve, probed.trial)
    answer = partial(_answer, log, context.budget, save, fleet)
    _take_up(log, known, probed)
    gate.restore(folder.read_screens())
    prover.recall_finals()  # what their candidates were shown to learn counts
    answer("running")
    starter.enter("search", _describe_start(log))
    study = _open_study(open_study, folder, log, context, gate.price_answer, fleet)
    log.add_notes(*(note for one in state.presets for note in describe_left_out(one, log.problem.space)))
    stop_reason = _explore_and_prove(log, starter, study, FinalsTurn(prover, fleet), answer, gate)
    if context.should_stop():
        stop_reason = "interrupted"
    else:  # one that is resumed goes on with them
        gate.close()
        log.add_notes(*describe_untried(log, gate.foretell_seconds, budget_seconds=context.budget.seconds))
    elsewhere = fleet.end_search(held_finals=log.finals is not None)
    log.add_notes(*describe_ending(log, is_stopped=context.should_stop(), elsewhere=elsewhere))
    profile = answer(stop_reason)
    fleet.leave(profile)
    study.save(_summarise(profile))
    folder.remember(log, profile, study.list_effects())
    return SessionOutcome(profile, log)


def _describe_start(log: SearchLog) -> str:
    """Return what there is to try, and how many launches are known from before."""
    known = f", {count(len(log.judged), 'launch', 'launches')} known" if log.judged else ""
    return f"{count(len(log.problem.space.choices), 'setting')} to vary{known}"


def _summarise(profile: Profile) -> dict[str, Any]:
    """Return an answer in a few attributes, as Optuna's tools show them."""
    speedup, memory = profile.speedup, profile.memory_ratio
    return {
        "objective": profile.objective.value,
        "verdict": profile.verdict,
        "settings": describe_changes(profile.config, profile.baseline_config),
        "speedup": None if speedup is None else [speedup.low, speedup.estimate, speedup.high],
        "memory_ratio": None if memory is None else [memory.low, memory.estimate, memory.high],
        "pairs": profile.evidence.pairs,
    }


def _open_study(
    open_study: OpenStudy,
    folder: SearchStore,
    log: SearchLog,
    context: SearchContext,
    price: Callable[[TrainConfig], float],
    fleet: Alone,
) -> Proposals:
    problem = log.problem
    fleet.join(problem, context.reporter.told)
    recalled = folder.recall(problem.report)
    if recalled.sentence:
        context.reporter.told(recalled.sentence)
    aim = find_aim(log, make_prior(problem.report, recalled.effects))
    proposals: Proposals = fleet.open_study(open_study)(
        folder.database,
        problem.space,
        seed=problem.state.seed,
        known=[(judged, log.ranking.score_of(judged)) for judged in log.judged],
        told=context.reporter.told,
        prior=aim.prior,
        price=price,
        floor=aim.floor,
    )
    log.add_estimates(proposals.list_estimates())
    return proposals


def _take_up(log: SearchLog, known: Sequence[TrialResult], probed: _Probed) -> None:
    """Add what was launched already, in earlier sessions or beside the probe."""
    for result in known:
        if result.spec.purpose == "measure":
            log.add_earlier_launch(result)
    if probed.launch is not None and probed.is_new_launch:
        log.add_trial(probed.launch)
        log.add_launch(probed.launch)


def _explore_and_prove(
    log: SearchLog,
    starter: TrialStarter,
    study: Proposals,
    turn: FinalsTurn,
    answer: Callable[[StopReason], Profile],
    gate: GateStage,
) -> StopReason:
    """Explore and prove by turns until neither finds anything more to do; return why exploring ended."""
    explorer = _open_explorer(log, starter, study, turn, gate)

    def prove() -> None:
        answer("running")
        turn.prove(explorer.measure)
        answer("running")

    stop_reason: StopReason = "running"
    leader = log.ranking.leader if log.judged else None
    if leader is not None and leader.score > log.problem.policy.least_gain and not gate.has_looked_at(leader.config):
        turn.look_at(leader.config)  # an earlier session was stopped before or while it did
    if log.finals is not None:  # of an earlier session: what it left open comes first
        prove()
    while not starter.should_stop():
        before = (starter.number, len(log.attempted))
        stop_reason = explorer.run()
        prove()
        if (starter.number, len(log.attempted)) == before:
            break
    if not starter.should_stop() and not turn.claim_more():
        prove()
    return stop_reason


def _open_explorer(
    log: SearchLog, starter: TrialStarter, study: Proposals, turn: FinalsTurn, gate: GateStage
) -> Explorer:
    return Explorer(
        log,
        starter,
        study,
        look_at=turn.look_at,
        kept_seconds=turn.kept_seconds,
        is_proof_due=turn.is_due,
        proof_seconds=gate.foretell_seconds,
        average_proof_seconds=gate.average_seconds,
        list_open=gate.list_open,
        fleet=turn.fleet,
    )


def _answer(
    log: SearchLog, budget: Budget, save: Callable[[Profile], None], fleet: Alone, stop_reason: StopReason
) -> Profile:
    """Return the answer as it stands, saved."""
    findings = collect_findings(log, elapsed_seconds=budget.elapsed_seconds, stop_reason=stop_reason)
    today = datetime.now(UTC).date().isoformat()
    profile = fleet.sign(build_profile(findings, log.ranking, budget_seconds=budget.seconds).replace(date=today))
    save(profile)
    return profile


def _begin(
    folder: SearchStore,
    state: SearchState,
    context: SearchContext,
    known: Sequence[TrialResult],
    *,
    number: int,
    policy: SearchPolicy,
) -> _Probed:
    """Return what the search begins with."""
    probed = _probe(folder, state, context, known, number=number, policy=policy)
    if state.world_size == 1:
        return probed
    return _launch_together(folder, state, context, known, probed, number=max(1, number), policy=policy)


def _probe(
    folder: SearchStore,
    state: SearchState,
    context: SearchContext,
    known: Sequence[TrialResult],
    *,
    number: int,
    policy: SearchPolicy,
) -> _Probed:
    """Return the probe of the search; run it where it was not done yet."""
    report = folder.read_probe()
    probed = next((result for result in known if result.facts is not None), None)
    if report is not None and probed is not None:
        return _Probed(report, probed, is_new=False)
    progress = context.describe_progress("probe", trials=number, log=None)
    context.reporter.stage_started(progress, "measures the machine, the training and your settings")
    context.reporter.trial_started(progress, None)
    report, probed = probe_target(
        state.target,
        context.run_trial,
        limits=_limit_probe(state, context, policy),
        seed=state.seed,
        asked=state,
        find_log=context.find_log,
    )
    folder.write_probe(report)
    return _Probed(report, probed, is_new=True)


def _limit_probe(state: SearchState, context: SearchContext, policy: SearchPolicy) -> TrialLimits:
    seconds = policy.probe_share * context.budget.seconds
    return TrialLimits(
        time_limit_seconds=seconds,
        warmup_cap_seconds=min(policy.probe_warmup_seconds, seconds / 4),
        measure_seconds=state.measure_seconds,
    )


def _launch_together(
    folder: SearchStore,
    state: SearchState,
    context: SearchContext,
    known: Sequence[TrialResult],
    probed: _Probed,
    *,
    number: int,
    policy: SearchPolicy,
) -> _Probed:
    """Return what a search of several processes begins with: their probe, and the user's own settings launched.

    Raises:
        UsageError: they would learn something else than one process, or the budget is too small.
        TargetError: the training fails.
        MachineError: a limit of this machine's stops it.
    """
    target = probed.report.target
    require_shareable_batch(target)
    launch = find_first_launch(known, target)
    is_new = launch is None
    if launch is None:
        progress = context.describe_progress("probe", trials=number, log=None)
        context.reporter.trial_started(progress, target.baseline)
        spec = make_first_launch(state, target, _limit_probe(state, context, policy), number=number)
        launch = context.run_trial(spec)
        context.reporter.trial_finished(progress, launch)
    report, trial = add_first_launch(probed.report, probed.trial, launch, context.find_log)
    folder.write_probe(report)
    return _Probed(report, trial, probed.is_new, launch, is_new)


def _open_log(
    folder: SearchStore, state: SearchState, context: SearchContext, probed: _Probed, policy: SearchPolicy
) -> SearchLog:
    """Return the log of a search past its probe, still without a launch.

    Raises:
        UsageError: the target lacks a metric that has a limit, or the length that a planned run is given in.
        NothingFeasibleError: the user's own settings break the memory limit.
    """
    report = probed.report
    require_metrics(state.max_drift, report.target.metrics)
    problem = make_problem(state, report, probed.trial, policy)
    measured_seconds = report.measurement.seconds if probed.is_new and probed.launch is None else 0.0
    log = SearchLog(problem, measured_seconds=measured_seconds, interrupted_before=folder.count_interrupted())
    context.reporter.probed(report)
    log.add_written(probed.trial)
    require_memory(report, problem.limits)
    return log


def open_prover(
    folder: SearchStore, log: SearchLog, starter: TrialStarter, gate: GateStage, known: Sequence[TrialResult]
) -> Prover:
    """Return what proves the leaders of a search.

    Args:
        folder: keeps what its finals have shown.
        log: of the search.
        starter: of its trials.
        gate: shows that a config learns the same.
        known: trials of earlier sessions.
    """
    purse = open_purse(folder, log.problem.report, known)

    def count_pairs(config: TrainConfig) -> int:
        return pairs_to_prove(log, config, purse) - len(purse.pairs_of(config))

    reserve = Reserve(log, starter.budget, gate.needed_seconds, gate.expect_seconds, count_pairs)
    return Prover(log, starter, gate, purse, reserve)
