"""One search from start to answer. Trials are run by a callable that is handed in, so a recorded table can stand in.

probe (trial 0) ── explore ── drift checks ── finals ── answer
                   each stage stops when the next one needs its reserved time, or when the user asks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from autotune.errors import NothingFeasibleError, UsageError
from autotune.knobs import Facts
from autotune.probe.run import describe_written, drop_idle_knobs, probe_target
from autotune.records.config import TrainConfig, changed_fields, get_knob
from autotune.records.probe import ProbeReport
from autotune.records.profile import Profile
from autotune.records.trial import TrialLimits, TrialResult, TrialStatus
from autotune.search.answer import Findings, build_profile
from autotune.search.budget import CLOSING_SECONDS, PROBE_SHARE
from autotune.search.confirm import confirm, plan_finals
from autotune.search.drift import LEAST_STEPS, SEEDS
from autotune.search.drift_stage import DriftStage
from autotune.search.explore import LEAST_GAIN, Proposals, explore
from autotune.search.finals import LEAST_ROUNDS
from autotune.search.launcher import Launcher
from autotune.search.learning import PROCESS_SECONDS, Learner
from autotune.search.objective import Judged, score_trial
from autotune.search.planned import find_planned_samples
from autotune.search.strategy import SuggestFrom, describe_left_out, suggest
from autotune.search.study import Study
from autotune.sentences import count
from autotune.space import SearchSpace, build_space
from autotune.targets.drift_limits import require_metrics
from autotune.units import format_bytes, format_duration, format_percent

PROBE_WARMUP_SECONDS = 30.0


class Place(Protocol):
    """Where a search is kept, as far as its stages look at it: a `SearchFolder`."""

    @property
    def database(self) -> Path:
        """Of the study."""
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


class OpenStudy(Protocol):
    """Makes what proposes configs, from a database, the space and what is known already."""

    def __call__(
        self, path: Path, space: SearchSpace, *, seed: int, known: Sequence[tuple[Judged, float | None]]
    ) -> Proposals:
        """Return it."""
        ...


class Session:
    """The stages of one search, in order.

    Args:
        folder: where it is kept.
        launcher: starts its trials.
        save: called with each new answer, first when the baseline is measured.
        open_study: makes what proposes configs.
        suggest_from: the fixed plan that comes before them.
    """

    def __init__(
        self,
        folder: Place,
        launcher: Launcher,
        save: Callable[[Profile], None],
        *,
        open_study: OpenStudy = Study,
        suggest_from: SuggestFrom = suggest,
    ) -> None:
        self._folder, self._launcher, self._save = folder, launcher, save
        self._open_study, self._suggest_from = open_study, suggest_from
        self._known = folder.read_trials()
        self._findings: Findings
        self._learner: Learner
        self._drift: DriftStage
        self._space: SearchSpace

    def run(self) -> Profile:
        """Run every stage and return the answer.

        Raises:
            UsageError: the target cannot be found, lacks a metric that has a limit, or needs a larger budget.
            NothingFeasibleError: the user's own settings break the memory limit.
            TargetError: the training fails with its own settings.
        """
        probed = self._probe()
        self._answer()
        self._explore(probed)
        finalists = self._check_drift()
        if not self._launcher.should_stop():  # one that is resumed goes on with them
            self._drift.close()
        if finalists:
            self._run_finals(finalists)
        if self._launcher.should_stop():
            self._findings.stop_reason = "interrupted"
        self._findings.notes += describe_written(self._launcher.written, self._launcher.written_elsewhere)
        return self._answer()

    def _answer(self) -> Profile:
        launcher, findings = self._launcher, self._findings
        findings.elapsed_seconds = launcher.budget.elapsed_seconds
        findings.measured_seconds = launcher.measured_seconds
        findings.gate_seconds = launcher.gate_seconds
        findings.knobs = self._space.free_knobs
        findings.left_out = len(launcher.hopeless)
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
        launcher.planned_samples = find_planned_samples(launcher.state.planned_run, report)
        self._baseline_key = report.target.baseline.model_dump_json()
        self._space = self._build_space(report)
        samples, limit = launcher.planned_samples, launcher.state.max_drift.loss
        self._findings = Findings(report, judged=launcher.judged, planned_samples=samples, loss_limit=limit)
        self._findings.interrupted = self._folder.count_interrupted()
        launcher.reporter.probed(report)
        launcher.note_written(probed)
        self._require_memory()
        self._require_time(probed)
        self._learner = Learner(launcher, report, probed.startup_seconds, self._known)
        self._learner.reserve_time()
        self._drift = DriftStage(
            launcher, self._findings, self._learner, startup_seconds=probed.startup_seconds, known=self._known
        )
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

    def _require_memory(self) -> None:
        peak, limits = self._findings.report.measurement.peak_memory, self._launcher.limits()
        pairs = ((peak.device_bytes, limits.device_memory_bytes), (peak.host_bytes, limits.host_memory_bytes))
        for used, limit in pairs:
            if used is not None and limit is not None and used > limit:
                raise NothingFeasibleError(
                    f"your own settings use {format_bytes(used)}, more than the {format_bytes(limit)} allowed",
                    hint="raise --memory-limit, or give the baseline a smaller micro batch and more accumulation",
                )

    def _require_time(self, probed: TrialResult) -> None:
        launcher = self._launcher
        launch = launcher.predict_seconds(self._space.baseline)
        step = self._findings.report.measurement.seconds_per_step
        needed = (2 * LEAST_ROUNDS + 2) * launch + 2 * SEEDS * LEAST_STEPS * step
        if launcher.state.target.script is not None:
            needed += 2 * SEEDS * (probed.startup_seconds + PROCESS_SECONDS)
        if needed > launcher.budget.remaining_seconds:
            least = 1.2 * (needed + probed.elapsed_seconds + CLOSING_SECONDS)
            asked = format_duration(launcher.budget.seconds)
            raise UsageError(
                f"--budget {asked} is too small for this target: one launch takes {launch:.1f} s",
                hint=f"give at least {format_duration(least)}, and several times that to find much",
            )

    def _explore(self, probed: TrialResult) -> None:
        launcher, curve = self._launcher, probed.curves[0]
        for result in self._known:
            if result.spec.purpose == "measure":
                judged = Judged(result, score_trial(result, curve, launcher.limits()))
                launcher.judged.append(judged)
                launcher.note_written(result)
                if judged.score.status is TrialStatus.DRIFTED:
                    launcher.refuse_own_values(judged.config)
        launcher.session_start = len(launcher.judged)
        launcher.enter("search", f"{len(self._space.choices)} knobs, {len(launcher.judged)} trials known")
        known = [(judged, launcher.ranking().score_of(judged)) for judged in launcher.judged]
        study = self._open_study(self._folder.database, self._space, seed=launcher.state.seed, known=known)
        presets = launcher.state.presets
        self._findings.notes += [note for preset in presets for note in describe_left_out(preset, self._space)]
        plan = partial(self._suggest_from, self._space, launcher.known_report, presets=presets)
        look_at = self._drift.look_at
        self._findings.stop_reason = explore(launcher, study, plan, curve, look_at=look_at)
        if launcher.hopeless:
            left_out = count(len(launcher.hopeless), "config")
            self._findings.notes.append(
                f"{left_out} left out: by what the probe measured they would not fit into memory or /dev/shm"
            )
        self._answer()

    def _check_drift(self) -> list[TrainConfig]:
        """Return the candidates for the finals: faster in the search, and shown to learn as well."""
        launcher, findings = self._launcher, self._findings
        candidates = self._rank_candidates()
        self._note_screened_out()
        if not candidates or launcher.should_stop():
            findings.notes += ["stopped early"] if candidates else []
            return []
        launcher.enter("drift", f"{count(len(candidates), 'candidate')} faster than your settings so far")
        passed = self._drift.choose(candidates)
        if not findings.checks:
            findings.notes.append("there was no time for the drift checks, so nothing is claimed")
        elif not passed:
            findings.notes.append("no faster candidate was shown to learn as well as your settings")
        return passed

    def _rank_candidates(self) -> list[TrainConfig]:
        """Return the configs that beat the baseline in the search, the most promising first.

        First the simplest of those the noise cannot tell from the fastest, then the fastest, so that the finals can
        choose between simple and fast.
        """
        ranking = self._launcher.ranking()
        faster = [one for one in ranking.entries if one.score > LEAST_GAIN and one.key != self._baseline_key]
        ranked = [one.config for one in faster]
        simplest = ranking.simplest_of_best()
        if simplest is not None and simplest.config in ranked:
            ranked = [simplest.config, *(config for config in ranked if config != simplest.config)]
        return ranked

    def _note_screened_out(self) -> None:
        """Tell of what would have been the fastest, and learned something else within a few steps."""
        ranking, limits = self._launcher.ranking(), self._launcher.limits()
        drifted = [one for one in self._launcher.judged if one.score.status is TrialStatus.DRIFTED]
        fastest = max(drifted, key=lambda one: ranking.score_of(one) or -math.inf, default=None)
        score = None if fastest is None else ranking.score_of(fastest)
        if fastest is None or score is None or score <= max(LEAST_GAIN, *(one.score for one in ranking.entries)):
            return
        worse = format_percent(fastest.score.constraints["drift"] + limits.screen_drift)
        self._findings.notes.append(
            f"{self._describe_config(fastest.config)} ran at {math.exp(score):.2f}x and was left out: "
            f"its training loss is worse by {worse} within its first steps"
        )

    def _run_finals(self, finalists: list[TrainConfig]) -> None:
        launcher = self._launcher
        plan = plan_finals(launcher, finalists)
        if plan.rounds < 2:
            self._findings.notes.append("there was no time for the finals, so nothing is claimed")
            return
        rounds = f"{plan.rounds} to {plan.rounds + plan.reserve}" if plan.reserve else str(plan.rounds)
        launcher.enter("finals", f"{rounds} rounds of {1 + len(plan.finalists)} fresh processes")
        self._findings.plan = plan
        self._findings.finals = finals = confirm(launcher, plan)
        self._findings.notes += [
            f"{self._describe_config(one.config)} failed in the finals: {one.failure}"
            for one in finals.candidates
            if one.failure
        ]

    def _describe_config(self, config: TrainConfig) -> str:
        names = changed_fields(config, self._space.baseline)
        return ", ".join(f"{name}={get_knob(config, name)}" for name in names)
