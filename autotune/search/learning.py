"""The training runs of the drift checks: how long they may be, and running them with every seed."""

from __future__ import annotations

import dataclasses
import math

from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.budget import DRIFT_SHARE, MOST_DRIFT_SHARE
from autotune.search.drift import GOOD_STEPS, SEEDS, USABLE_SHARE, DriftPlan, plan_drift
from autotune.search.launcher import Launcher, Look

LEAST_SECONDS = 2.0
"""Nothing is started with less time than that."""

PROCESS_SECONDS = 1.0
"""What a process costs beside its start-up: a view of the working folder, the end, the sweep."""

_SCREENS, _SCREEN_STEPS = 5, 60
"""Processes of a first look at a script's gradients and data, and what each of them costs in steps."""


class Learner:
    """Trains configs for the drift checks.

    Args:
        launcher: starts the trials.
        report: of the target.
        startup_seconds: until the first step of a process.
        known: trials of earlier sessions of this search.
    """

    def __init__(
        self, launcher: Launcher, report: ProbeReport, startup_seconds: float, known: list[TrialResult]
    ) -> None:
        self._launcher, self._report, self._known = launcher, report, known
        # Each seed of a script is a process of its own: it cannot be started twice in one.
        self._script = launcher.state.target.script
        self._process_seconds = 0.0
        self._start_seconds = SEEDS * (startup_seconds + PROCESS_SECONDS)

    def reserve_time(self) -> None:
        """Keep enough of the budget for the cheap tests of a script, and for its trainings where these are a must."""
        if self._script is None:
            return
        launcher = self._launcher
        step = self._report.measurement.seconds_per_step
        if launcher.state.allowed or any(knob.numerics == "semantic" for knob in self._script.knobs):
            needed = 2.1 * (self._start_seconds + SEEDS * GOOD_STEPS * step) / USABLE_SHARE
        else:
            needed = _SCREENS * (self._start_seconds / SEEDS + _SCREEN_STEPS * step)
        share = min(MOST_DRIFT_SHARE, max(DRIFT_SHARE, needed / launcher.budget.seconds))
        launcher.budget = dataclasses.replace(launcher.budget, drift_share=share)

    def plan(self, candidates: int) -> DriftPlan | None:
        """Return what the time left allows for some candidates; None when it allows nothing."""
        facts, seconds = self._report.target, self._launcher.budget.drift_remaining_seconds
        step = self._report.measurement.seconds_per_step
        if self._script is None:
            return plan_drift(seconds, facts, seconds_per_step=step, candidates=candidates)
        asked = self._script.quality_steps
        if self._script.quality_epochs is not None and facts.data.sample_count is not None:
            asked = self._script.quality_epochs * math.ceil(
                facts.data.sample_count / facts.baseline.effective_batch_size
            )
        return plan_drift(
            seconds,
            facts,
            seconds_per_step=step,
            candidates=candidates,
            start_seconds=self._start_seconds,
            asked_steps=asked,
            seed_seconds=self._start_seconds / SEEDS,
        )

    def learn(self, config: TrainConfig, plan: DriftPlan) -> TrialResult | None:
        """Train a config with every seed as planned; None when the time is up or the user stopped."""
        launcher = self._launcher
        seeds = tuple(launcher.state.seed + i for i in range(plan.seeds))
        results: list[TrialResult] = []
        processes = [seeds] if self._script is None else [(seed,) for seed in seeds]
        for number, some in enumerate(processes):
            seconds = launcher.budget.drift_remaining_seconds
            # The baseline's losses are of no use without a candidate's.
            left = len(processes) - number + (len(processes) if config == launcher.baseline else 0)
            if launcher.should_stop() or seconds < max(LEAST_SECONDS, left * self._process_seconds):
                return None
            look = Look(steps=self._steps_for(config, plan), evaluate=plan.evaluate, seeds=some)
            again = self._find_learned(config, look)
            result = again or launcher.launch(config, "quality", seconds, look=look)
            if result.status is TrialStatus.INTERRUPTED:
                return None
            results.append(result)
            self._process_seconds = result.elapsed_seconds if again is None else self._process_seconds
            if not result.curves:
                break
        return results[-1].replace(curves=tuple(curve for result in results for curve in result.curves))

    def _steps_for(self, config: TrainConfig, plan: DriftPlan) -> int:
        """Return the steps that take as many samples as the plan's do with the baseline's effective batch."""
        baseline = self._report.target.baseline.effective_batch_size
        return max(1, round(plan.steps * baseline / config.effective_batch_size))

    def _find_learned(self, config: TrainConfig, look: Look) -> TrialResult | None:
        """Return an earlier session's training of the same config by the same plan; None when there is none."""
        wanted = ("quality", config, look.steps, look.evaluate, look.seeds)
        for result in self._known:
            spec = result.spec
            if (spec.purpose, spec.config, spec.quality_steps, spec.evaluate, spec.seeds) == wanted:
                return result
        return None
