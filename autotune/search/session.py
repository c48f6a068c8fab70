"""One search from start to answer. Trials are run by a callable that is handed in, so a recorded table can stand in.

probe (trial 0) ── explore ── loss check ── finals ─┬─ answer
                      ▲                             │
                      └── while what is left can ───┘
                          find and prove something

Exploring ends where what is left is needed to prove the leader; nothing is kept back for what needs no proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from autotune.drift.gate.stage import GateStage
from autotune.drift.gate.training_runs import TrainingRuns
from autotune.errors import UsageError
from autotune.isolation.runner import KILL_SECONDS
from autotune.knobs import Facts
from autotune.probe.run import drop_idle_knobs, probe_target
from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.profile import Profile
from autotune.records.search import PlannedRun
from autotune.records.trial import TrialLimits, TrialResult, TrialStatus
from autotune.search.answer.candidates import Candidates
from autotune.search.answer.notes import describe_config, describe_ending
from autotune.search.answer.profile import Findings, build_profile
from autotune.search.explore.prior import make_prior
from autotune.search.explore.stage import Explorer
from autotune.search.explore.strategy import Situation, Suggest, describe_left_out, suggest
from autotune.search.explore.study import Study
from autotune.search.finals.finalist import LEAST_ROUNDS
from autotune.search.finals.reserve import Reserve, require_memory, require_time
from autotune.search.finals.risk import RiskPurse, open_purse
from autotune.search.finals.stage import confirm, pairs_to_prove, plan_finals, recall
from autotune.search.launch.budget import PROBE_SHARE
from autotune.search.launch.launcher import Launcher
from autotune.search.place import OpenStudy, SearchStore
from autotune.search.scores.objective import Judged, score_trial
from autotune.sentences import count
from autotune.space import SearchSpace, build_space
from autotune.targets.drift_limits import require_metrics

PROBE_WARMUP_SECONDS = 30.0
_MOST_LEADERS = 6
"""Looked at for one that there is still time to prove."""


class Session:
    """The stages of one search, in order.

    Args:
        folder: where it is kept.
        launcher: starts its trials.
        save: called with each new answer, first when the baseline is measured.
        open_study: makes what proposes configs.
        suggest: the fixed plan that comes before them.
    """

    def __init__(
        self,
        folder: SearchStore,
        launcher: Launcher,
        save: Callable[[Profile], None],
        *,
        open_study: OpenStudy = Study,
        suggest: Suggest = suggest,
    ) -> None:
        self._folder, self._launcher, self._save = folder, launcher, save
        self._open_study, self._suggest = open_study, suggest
        self._known = folder.read_trials()
        self._findings: Findings
        self._learner: TrainingRuns
        self._drift: GateStage
        self._space: SearchSpace
        self._reserve: Reserve
        self._purse: RiskPurse
        self._settled: list[TrainConfig] = []
        self._attempted: set[str] = set()

    def run(self) -> Profile:
        """Run every stage and return the answer.

        Raises:
            UsageError: the target cannot be found, lacks a metric that has a limit, or needs a larger budget.
            NothingFeasibleError: the user's own settings break the memory limit.
            TargetError: the training fails with its own settings.
        """
        probed = self._probe()
        self._answer()
        explorer = self._prepare(probed)
        if self._findings.finals is not None:  # of an earlier session: what it left open comes first
            self._prove(explorer)
        while not self._launcher.should_stop():
            before = (self._launcher.number, len(self._attempted))
            self._findings.stop_reason = explorer.run()
            self._prove(explorer)
            if (self._launcher.number, len(self._attempted)) == before:
                break
        explorer.study.save()
        if not self._launcher.should_stop():  # one that is resumed goes on with them
            self._drift.close()
        if self._launcher.should_stop():
            self._findings.stop_reason = "interrupted"
        self._findings.notes += describe_ending(self._launcher, self._findings)
        return self._answer()

    def _prove(self, explorer: Explorer) -> None:
        """Check the leader's loss and hold its finals, as far as there is time."""
        self._answer()
        finalists = self._check_drift(explorer)
        if finalists:
            self._run_finals(finalists)
        self._answer()

    def _answer(self) -> Profile:
        launcher, findings = self._launcher, self._findings
        findings.elapsed_seconds = launcher.budget.elapsed_seconds
        findings.measured_seconds = launcher.measured_seconds
        findings.gate_seconds = launcher.gate_seconds
        findings.knobs = self._space.free_knobs
        findings.left_out = len(launcher.hopeless)
        findings.interrupted = self._interrupted_before + len(launcher.interrupted)
        findings.launch_seconds = launcher.predict_seconds(launcher.baseline)
        profile = build_profile(findings, launcher.ranking(), budget_seconds=launcher.budget.seconds)
        self._save(profile)
        return profile

    def _probe(self) -> TrialResult:
        launcher = self._launcher
        report = self._folder.read_probe()
        probed = next((result for result in self._known if result.facts is not None), None)
        if report is None or probed is None:
            launcher.enter("probe", "the machine, the target, and its own settings measured")
            launcher.reporter.trial_started(launcher.standing(), None)
            seconds = PROBE_SHARE * launcher.budget.seconds
            limits = TrialLimits(
                time_limit_seconds=seconds,
                warmup_cap_seconds=min(PROBE_WARMUP_SECONDS, seconds / 4),
                measure_seconds=launcher.state.measure_seconds,
            )
            report, probed = probe_target(
                launcher.state.target, launcher.run_trial, limits=limits, seed=launcher.state.seed
            )
            launcher.number = max(1, launcher.number)
            launcher.measured_seconds += report.measurement.seconds
            self._folder.write_probe(report)
        require_metrics(launcher.state.max_drift, report.target.metrics)
        launcher.report = report
        launcher.planned_samples = _find_planned_samples(launcher.state.planned_run, report)
        self._space = self._build_space(report)
        self._findings = Findings(report, judged=launcher.judged, planned_samples=launcher.planned_samples)
        self._findings.note_state(launcher.state)
        self._interrupted_before = self._folder.count_interrupted()
        launcher.reporter.probed(report)
        launcher.note_written(probed)
        require_memory(report, launcher.limits())
        launcher.startup_seconds = probed.startup_seconds
        self._learner = TrainingRuns(launcher, report, probed.startup_seconds, self._known)
        self._drift = GateStage(
            launcher, self._findings, self._learner, startup_seconds=probed.startup_seconds, known=self._known
        )
        self._reserve = Reserve(launcher, self._drift.needed_seconds, self._count_pairs)
        if not self._known:
            require_time(launcher, self._reserve, probed)
        return probed

    def _build_space(self, report: ProbeReport) -> SearchSpace:
        state = self._launcher.state
        facts = Facts(target=report.target, hardware=report.hardware, allowed=frozenset(state.allowed))
        space = build_space(facts, learning_rate_rule=state.learning_rate_rule)
        space = drop_idle_knobs(space, report.target, report.measurement, report.hardware)
        if state.only:
            space = space.restrict(state.only)
        for preset in state.presets:
            space = space.admit(preset.settings)
        return space

    def _prepare(self, probed: TrialResult) -> Explorer:
        launcher, curve = self._launcher, probed.curves[0]
        for result in self._known:
            if result.spec.purpose == "measure":
                judged = Judged(result, score_trial(result, curve, launcher.limits()))
                launcher.judged.append(judged)
                launcher.note_written(result)
                if judged.score.status is TrialStatus.DRIFTED:
                    launcher.refuse_own_values(judged.config)
        launcher.session_start = len(launcher.judged)
        self._recall_finals()
        launcher.enter("search", f"{len(self._space.choices)} knobs, {len(launcher.judged)} trials known")
        known = [(judged, launcher.ranking().score_of(judged)) for judged in launcher.judged]
        told, seed = launcher.reporter.told, launcher.state.seed
        study = self._open_study(
            self._folder.database,
            self._space,
            seed=seed,
            known=known,
            told=told,
            prior=make_prior(launcher.known_report),
            price=launcher.predict_seconds,
        )
        presets = launcher.state.presets
        self._findings.notes += [note for preset in presets for note in describe_left_out(preset, self._space)]
        situation = Situation(
            self._space,
            launcher.known_report,
            incumbent=launcher.baseline,
            presets=presets,
            price=launcher.predict_seconds,
            budget_seconds=launcher.budget.seconds,
        )
        return Explorer(
            launcher,
            study,
            self._suggest,
            situation,
            curve,
            look_at=self._look_at,
            kept_seconds=self._kept_seconds,
            is_proof_due=self._is_proof_due,
        )

    @property
    def _candidates(self) -> Candidates:
        """What may be worth proving, as everything stands now."""
        return Candidates(self._launcher.ranking(), self._launcher.baseline, self._findings, self._settled)

    def _leaders(self) -> list[TrainConfig]:
        """Return the leaders, but for those that there was no time to check, the one to prove first."""
        findings = self._findings
        open_ones = (
            one for one in self._candidates.ranked() if one.key not in self._attempted or findings.checks_of(one)
        )
        # The one to prove is the most promising of those that there is still time for.
        return sorted(itertools.islice(open_ones, _MOST_LEADERS), key=lambda one: not self._reserve.is_provable(one))

    def _is_proof_due(self) -> bool:
        leaders = [one for one in self._leaders()[:1] if one.key not in self._attempted]
        return any(self._reserve.is_provable(one) for one in leaders)

    def _count_pairs(self, config: TrainConfig) -> int:
        """Return how many more pairs are to prove what the search saw of a config."""
        return pairs_to_prove(self._launcher, config, self._purse) - len(self._purse.pairs_of(config))

    def _kept_seconds(self) -> float:
        """Return what is kept back while exploring: to prove the leader, or whatever may come to lead."""
        leaders, launcher = self._leaders(), self._launcher
        kept = self._reserve.seconds_for(leaders[0] if leaders else None)
        left = launcher.budget.remaining_seconds - kept - KILL_SECONDS
        # Nothing leads and nothing more would fit: time for a proof is of no use, a candidate to go on with is.
        return 0.0 if not leaders and left < launcher.least_seconds() else kept

    def _look_at(self, config: TrainConfig) -> None:
        """Let the loss check look at a new leader, as long as what remains could still prove it."""
        seconds = self._reserve.check_seconds(config)
        if seconds > 0:
            self._drift.look_at(config, seconds=seconds)

    def _check_drift(self, explorer: Explorer) -> list[TrainConfig]:
        """Return the candidates for the finals: faster in the search, and shown to learn as well."""
        launcher, findings = self._launcher, self._findings
        candidates = self._leaders()
        if candidates and self._candidates.is_doubtful(candidates[0]) and explorer.measure(launcher.baseline):
            candidates = self._leaders()
        if not candidates or launcher.should_stop():
            return []
        self._attempted.add(candidates[0].key)
        if not findings.checks_of(candidates[0]) and self._reserve.check_seconds(candidates[0]) > 0:
            fresh = [config for config in candidates if not findings.checks_of(config)]
            launcher.enter("drift", f"{count(len(fresh), 'candidate')} faster than your settings so far")
            self._drift.choose(fresh, seconds=self._reserve.check_seconds(fresh[0]))
        tested = [config for config, _ in findings.checks]
        return [config for config in [*candidates, *tested] if self._candidates.may_win(config)][:1]

    def _run_finals(self, finalists: list[TrainConfig]) -> None:
        launcher, findings = self._launcher, self._findings
        plan = plan_finals(launcher, finalists, look=self._purse)
        if plan.kept + plan.rounds < LEAST_ROUNDS or plan.rounds < 1:
            return
        rounds = f"{plan.rounds} to {plan.rounds + plan.reserve}" if plan.reserve else str(plan.rounds)
        launcher.enter("finals", f"{rounds} rounds of 2 fresh processes")
        findings.finals = confirm(launcher, plan)
        shown = findings.finals.winner or findings.finals.best
        if findings.plan is None or shown is None or shown.config in plan.finalists:
            findings.plan = plan
        ended = [one for one in findings.finals.candidates if one.failure or one.outcome == "no gain"]
        findings.notes += [
            f"{describe_config(one.config, launcher.baseline)} failed in the finals: {one.failure}"
            for one in ended
            if one.failure and one.config not in self._settled
        ]
        self._settled += [one.config for one in ended]
        if findings.finals.futile:
            self._settled += plan.finalists  # more pairs would hardly show anything: the time is another's

    def _recall_finals(self) -> None:
        """Take up what the finals of earlier sessions have shown: their pairs count, their risk is spent."""
        self._purse = open_purse(self._folder, self._launcher.known_report, self._known)
        known = [config for config in self._purse.candidates if self._purse.pairs_of(config)]
        if known and any(one.config == self._launcher.baseline for one in self._launcher.judged):
            self._findings.finals = recall(self._launcher, self._purse)
            self._findings.plan = plan_finals(self._launcher, known[:1], look=self._purse, seconds=0.0)


def _find_planned_samples(planned: PlannedRun | None, report: ProbeReport) -> float | None:
    """Return how many samples the planned training has; None when its length is not known.

    Raises:
        UsageError: it is given in epochs of a dataset without a length.
    """
    if planned is None:
        return None
    if planned.unit == "samples":
        return planned.amount
    if planned.unit == "seconds":
        return planned.amount * report.measurement.samples_per_second
    count = report.target.data.sample_count
    if count is None:
        raise UsageError(
            "--planned-run is in epochs, and this dataset has no length", hint="give it as a time or in samples"
        )
    return planned.amount * count
