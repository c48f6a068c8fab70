"""From the candidates of a search to its finalists: cheap tests on each, trainings on the first; what fails is dropped.

candidate ── screen ──▶ passed ── train ──▶ finalist
│ failed              │ failed
└── leave one change out, find the guilty one, refuse it ── the rest is the next candidate
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from autotune.measure.noise_scale import predicted_samples_ratio
from autotune.records.config import TrainConfig, changed_fields, get_knob
from autotune.records.quality import QualityCheck
from autotune.records.trial import FidelityPlan, TrialResult, TrialStatus
from autotune.search.answer import Findings, samples_ratio
from autotune.search.blame import Blame, find_guilty
from autotune.search.drift import CHEAP_TESTS, DriftGate, DriftPlan, is_passed
from autotune.search.explore import LEAST_GAIN
from autotune.search.fidelity_plans import PATIENCE, count_steps, plan_fidelity
from autotune.search.gate import Gate
from autotune.search.launcher import Launcher, Look, list_changes
from autotune.search.learning import LEAST_SECONDS, PROCESS_SECONDS, Learner
from autotune.search.strategy import COMPILE_SECONDS
from autotune.sentences import describe_refusal
from autotune.space import classify_changes, needs_compilation, numerics_of
from autotune.trial.captures import have_captures

MOST_FINALISTS = 2
MOST_TESTED = 6
"""Candidates looked at, those with a guilty change left out among them."""

_EARLY_SHARE = 0.6
"""Of the time kept for the gate: for the cheap tests while the search goes on."""
_SCREEN_SHARE = 0.7
"""Of what is left of it after the search; trainings have the rest."""
_CLOSER_SHARE = 0.3
"""Of what is left of it: for a closer look at one candidate."""
_PATIENCE, _LEAST_PATIENCE_SECONDS = 4.0, 20.0
_EARLY_CANDIDATES, _CANDIDATES = 2, 4


class DriftStage:
    """The drift gate at work in one search.

    Args:
        launcher: starts the trials, and is told what is refused.
        findings: is told every check.
        learner: trains for the paired comparisons.
        startup_seconds: until the first step of a process.
        known: trials of earlier sessions of this search.
    """

    def __init__(
        self,
        launcher: Launcher,
        findings: Findings,
        learner: Learner,
        *,
        startup_seconds: float,
        known: Sequence[TrialResult] = (),
    ) -> None:
        self._launcher, self._findings, self._learner = launcher, findings, learner
        self._facts = findings.report.target
        self._start_seconds = startup_seconds + PROCESS_SECONDS
        self._known = [one for one in known if one.spec.purpose in ("fidelity", "tape")]
        self._gate: Gate | None = None
        self._drift: DriftGate | None = None
        self._seen: set[str] = set()
        limits = launcher.state.max_drift
        # An improvement that is asked for shows in the metric alone.
        self._must_train = any(limits.of(name).amount < 0 for name in self._facts.metrics)

    def look_at(self, config: TrainConfig) -> None:
        """Screen a promising config while the search goes on, so that nothing is built on a change that drifts."""
        launcher = self._launcher
        changes = classify_changes(config, launcher.baseline, self._facts.numerics)
        new = {f"{name}={get_knob(config, name)}" for name, kind in changes.items() if kind == "rounding"}
        if new <= self._seen:
            return
        seconds = _EARLY_SHARE * launcher.budget.drift_share * launcher.budget.seconds
        began = launcher.budget.now()
        if self._gate is None:
            self._gate = self._open_gate(seconds, _EARLY_CANDIDATES)
            if self._gate is None:
                self._seen |= new
                return
        checks = self._gate.screen(config)
        if checks is not None:
            self._seen |= new
            if any(check.verdict == "inferior" for check in checks):
                self._refuse(config, checks)
        # However long it took, trainings and finalists keep their half.
        kept = 0.5 * launcher.budget.drift_share * launcher.budget.seconds
        launcher.lend_drift_time(min(kept, launcher.budget.now() - began))

    def choose(self, candidates: Sequence[TrainConfig]) -> list[TrainConfig]:
        """Return the finalists: shown to learn as well, the most promising first; every check goes to the findings."""
        launcher = self._launcher
        self._gate = self._gate or self._open_gate(_SCREEN_SHARE * launcher.budget.drift_remaining_seconds, _CANDIDATES)
        queue, passed, tested = list(candidates), list[TrainConfig](), 0
        while queue and len(passed) < MOST_FINALISTS and tested < MOST_TESTED:
            config = queue.pop(0)
            if launcher.is_refused(config) or config in passed or config == launcher.baseline:
                continue
            tested += 1
            checks = self._test(config, len(candidates))
            if checks is None:
                break
            self._findings.checks.append((config, checks))
            if is_passed(checks):
                # Where it needs more samples for the same loss, only the net speed-up may be claimed.
                launcher.samples_ratios[config.model_dump_json()] = samples_ratio(checks)
                passed.append(config)
                continue
            rest = self._refuse(config, checks)
            # Trainings that drift although the gradients are the same leave it open which change it was.
            self._must_train = self._must_train or all(check.test not in CHEAP_TESTS for check in _failed(checks))
            if rest is not None and self._promises(config, rest):
                queue = [rest, *(one for one in queue if one != rest)]
        return passed

    def _promises(self, config: TrainConfig, rest: TrainConfig) -> bool:
        """Return whether what is left of a refused config may still be faster, by what the search has measured."""
        baseline = self._launcher.baseline
        entries = self._launcher.ranking_of_all().entries
        scores = {entry.key: entry.score for entry in entries}
        left = scores.get(rest.model_dump_json())
        if left is not None:
            return left > LEAST_GAIN
        whole, kept = (list_changes(one, baseline, changed_fields(one, baseline)) for one in (config, rest))
        guilty = whole - kept
        without = [
            entry.score
            for entry in entries
            if guilty <= (made := list_changes(entry.config, baseline, changed_fields(entry.config, baseline)))
            and not kept <= made
        ]
        # Where the guilty change was as fast without the others, they add nothing.
        return scores.get(config.model_dump_json(), math.inf) - max(without, default=0.0) > LEAST_GAIN

    def close(self) -> None:
        """Delete the gradients and weights that the gate's trials wrote; what they showed is kept."""
        if self._gate is not None:
            self._gate.discard()

    def _test(self, config: TrainConfig, candidates: int) -> tuple[QualityCheck, ...] | None:
        """Return every check of a config; None when there was no time for those that it needs."""
        checks: tuple[QualityCheck, ...] | None = ()
        if self._gate is not None:
            checks = self._gate.screen(config)
        if checks is None:
            return None
        if any(check.verdict == "inferior" for check in checks):
            return checks
        numerics = numerics_of(config, self._launcher.baseline, self._facts.numerics)
        if numerics == "exact" and is_passed(checks) and not self._must_train:
            return checks
        compared = any(check.test == "gradients" for check in checks)
        needs_training = (
            self._must_train
            or numerics == "semantic"
            or config.precision == "fp16"
            or not is_passed(checks)
            or not (compared or numerics == "exact")
        )
        trained = self._train(config, candidates, shown=not needs_training)
        if trained is not None:
            return (*checks, *trained)
        if needs_training:
            return None
        self._findings.notes.append("there was no time to compare trainings: the gradients alone were compared")
        return checks

    def _train(self, config: TrainConfig, candidates: int, *, shown: bool) -> tuple[QualityCheck, ...] | None:
        """Return the checks of paired trainings; None when there was no time for them.

        Args:
            config: the settings.
            candidates: how many there are.
            shown: its gradients were shown to be the baseline's: then a training in which nothing is learned does not
                take that back.
        """
        if self._drift is None:
            plan = self._learner.plan(min(MOST_FINALISTS, candidates))
            if plan is None:
                return None
            self._announce(plan)
            self._drift = DriftGate(self._facts, self._launcher.state.max_drift, plan, self._learner.learn)
        entry = self._launcher.ranking().find(config)
        outlook = None if entry is None else math.exp(entry.score)
        predicted = self._predict_samples(config)
        checks = self._drift.check(config, speedup=outlook, predicted=predicted, shown=shown)
        self._findings.baseline_curves = self._drift.baseline_curves
        for name in sorted(self._drift.zeros):
            note = (
                f"{name} was not compared: under your own settings it is still 0 after {self._drift.plan.steps} steps"
            )
            self._findings.notes += [note] if note not in self._findings.notes else []
        return checks

    def _announce(self, plan: DriftPlan) -> None:
        self._launcher.enter("drift", f"{plan.seeds} seeds of {plan.steps} steps for the baseline and each candidate")
        metrics = ", ".join(self._facts.metrics)
        if metrics and not plan.evaluate:
            self._findings.notes.append(f"{metrics} was not compared: there was no time to evaluate")

    def _predict_samples(self, config: TrainConfig) -> float | None:
        baseline = self._launcher.baseline
        growth = config.effective_batch_size / baseline.effective_batch_size
        scale = self._gate.noise_scale() if self._gate is not None and growth != 1.0 else None
        if scale is None:
            return None
        return predicted_samples_ratio(scale, batch_size=baseline.effective_batch_size, factor=growth)

    def _refuse(self, config: TrainConfig, checks: tuple[QualityCheck, ...]) -> TrainConfig | None:
        """Refuse the guilty change of a config that failed; return what is left of it, None when that is nothing."""
        launcher = self._launcher
        if self._gate is None:
            blame = Blame(changed_fields(config, launcher.baseline), None)
        else:
            blame = find_guilty(self._gate, config, checks)
        refused = list_changes(config, launcher.baseline, blame.knobs)
        entry = launcher.ranking().find(config)
        launcher.refused.append(refused)
        self._findings.notes.append(describe_refusal(sorted(refused), checks, entry.score if entry else None))
        return blame.rest

    def _open_gate(self, seconds: float, candidates: int) -> Gate | None:
        launcher = self._launcher
        is_script = launcher.state.target.script is not None
        plan = plan_fidelity(
            seconds,
            seconds_per_step=self._findings.report.measurement.seconds_per_step,
            start_seconds=self._start_seconds,
            candidates=candidates,
            repeats_steps=is_script,
        )
        if plan is None:
            return None
        return Gate(self._facts, plan, self._run, knows_order=not is_script, affords=self._affords)

    def _patience(self, config: TrainConfig, plan: FidelityPlan | None) -> float:
        """Return how long a trial of the gate may take before it counts as hanging, in seconds."""
        held = 0 if plan is None else count_steps(plan, candidates=0, repeats_steps=True)
        step = self._findings.report.measurement.seconds_per_step
        compiling = COMPILE_SECONDS * needs_compilation(config)
        return _PATIENCE * (self._start_seconds + PATIENCE * held * step + compiling) + _LEAST_PATIENCE_SECONDS

    def _affords(self, plan: FidelityPlan) -> bool:
        """Return whether a closer look at one candidate leaves most of the gate's time for the others."""
        launcher = self._launcher
        is_script = launcher.state.target.script is not None
        steps = count_steps(plan, candidates=1, repeats_steps=is_script)
        step = self._findings.report.measurement.seconds_per_step
        kept = launcher.budget.drift_share * launcher.budget.seconds
        seconds = min(kept, launcher.budget.drift_remaining_seconds)
        return 2 * self._start_seconds + PATIENCE * steps * step <= _CLOSER_SHARE * seconds

    def _run(
        self, config: TrainConfig, purpose: Literal["fidelity", "tape"], *, plan: FidelityPlan | None, steps: int
    ) -> TrialResult | None:
        launcher = self._launcher
        for one in self._known:
            spec = one.spec
            asked = (spec.purpose, spec.config, spec.fidelity, spec.quality_steps)
            if asked == (purpose, config, plan, steps) and (purpose == "tape" or have_captures(one.captures)):
                return one
        seconds = launcher.budget.drift_remaining_seconds
        if seconds < LEAST_SECONDS or launcher.should_stop():
            return None
        full = self._patience(config, plan)
        look = Look(steps=steps, fidelity=plan)
        result = launcher.launch(config, purpose, min(seconds, full), look=look, ends_with_stage=seconds < full)
        return None if result.status is TrialStatus.INTERRUPTED else result


def _failed(checks: tuple[QualityCheck, ...]) -> list[QualityCheck]:
    return [check for check in checks if check.verdict == "inferior"]
