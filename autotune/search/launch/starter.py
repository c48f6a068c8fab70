"""Starts the trials of one search: numbers, limits and time, the same for every stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import TrainConfig
from autotune.records.objective import Objective
from autotune.records.trial import GradientPlan, Pace, Rival, TrialLimits, TrialResult, TrialSpec
from autotune.search.launch.budget import Budget
from autotune.search.launch.length import find_compared_samples, find_measured_seconds, find_warmup_steps
from autotune.search.launch.pace import make_pace
from autotune.search.launch.turns import memory_beside
from autotune.search.log import SearchLog
from autotune.search.progress import SearchProgress, SearchReporter

RunTrial = Callable[[TrialSpec], TrialResult]
RunInTurns = Callable[[TrialSpec, TrialSpec], tuple[TrialResult, TrialResult]]
Purpose = Literal["measure", "reference", "final", "quality", "fidelity", "tape"]

_LEAST_SECONDS = 0.5


@dataclass(frozen=True)
class SearchContext:
    """What a search runs in.

    Attributes:
        budget: the deadline.
        run_trial: runs one trial to its end.
        reporter: hears what happens.
        should_stop: True once the user asked to stop.
        find_log: returns where what a trial prints is, by its number; None where that is not kept.
        run_in_turns: runs two trials, their blocks in turns, and gives the second one the timing of a reference; None
            where that cannot be.
    """

    budget: Budget
    run_trial: RunTrial
    reporter: SearchReporter
    should_stop: Callable[[], bool]
    find_log: Callable[[int], Path | None] = lambda _number: None
    run_in_turns: RunInTurns | None = None

    def describe_progress(self, stage: str, *, trials: int, log: SearchLog | None) -> SearchProgress:
        """Return where the search stands.

        Args:
            stage: at work.
            trials: started so far.
            log: of the search; None before its probe is done.
        """
        best = log.best if log is not None else None
        return SearchProgress(
            stage=stage,
            trials=trials,
            seconds_left=max(0.0, self.budget.seconds - self.budget.elapsed_seconds),
            baseline_samples_per_second=log.baseline_rate if log is not None else None,
            best_ratio=math.exp(best.score) if best else None,
            objective=log.problem.objective if log is not None else Objective.THROUGHPUT,
            best=best.config if best else None,
        )


@dataclass(frozen=True)
class TrialTask:
    """What a trial that is not timed computes.

    Attributes:
        steps: optimizer steps of a quality or tape trial.
        evaluate: compute the target's metrics after them.
        seeds: to train with; empty for the search's own.
        fidelity: plan of a fidelity trial.
    """

    steps: int = 1
    evaluate: bool = False
    seeds: tuple[int, ...] = ()
    fidelity: GradientPlan | None = None


_TIMED = TrialTask()


class TrialStarter:
    """Starts one trial at a time.

    Args:
        log: of the search; every trial is added to it, its outcome is for the stages to add.
        context: what the search runs in.
        number: of the next trial.
    """

    def __init__(self, log: SearchLog, context: SearchContext, *, number: int) -> None:
        self._log, self._context, self._number = log, context, number
        self._stage = "probe"
        # Processes that train together wait for each other already.
        is_alone = max(log.problem.state.world_size, log.problem.report.target.launched_processes) == 1
        log.takes_turns = context.run_in_turns is not None and is_alone

    @property
    def budget(self) -> Budget:
        """The deadline."""
        return self._context.budget

    @property
    def number(self) -> int:
        """Of the next trial."""
        return self._number

    def should_stop(self) -> bool:
        """Return whether the user asked to stop."""
        return self._context.should_stop()

    def enter(self, stage: str, note: str) -> None:
        """Begin a stage."""
        self._stage = stage
        self._context.reporter.stage_started(self._describe_progress(), note)

    def launch(
        self,
        config: TrainConfig,
        purpose: Purpose,
        seconds: float,
        *,
        task: TrialTask = _TIMED,
        ends_with_stage: bool = True,
        rival: Rival | None = None,
        least_warmup_steps: int = 0,
        measure_samples: int | None = None,
    ) -> TrialResult:
        """Run one config for at most some seconds and return its result.

        Args:
            config: the settings.
            purpose: time it, train it for its losses with every seed, or write down its gradients or its data.
            seconds: until it is killed, the kill included.
            task: of a trial that is not timed.
            ends_with_stage: the time is what was left; a trial that runs into it counts as interrupted.
            rival: end the timing early once it is clearly slower than this, in its first steps if it is hopeless.
            least_warmup_steps: it warms up over.
            measure_samples: time this many, whatever the precision.
        """
        limits = self._trial_limits(seconds, ends_with_stage=ends_with_stage).replace(
            least_warmup_steps=least_warmup_steps,
            measure_samples=measure_samples,
            rival=rival,
            pace=self._make_pace(config) if rival else None,
        )
        spec = self._make_spec(config, purpose, limits, task)
        self._context.reporter.trial_started(self._describe_progress(), config)
        return self._take(self._context.run_trial(spec))

    def launch_in_turns(
        self, first: TrainConfig, second: TrainConfig, seconds: float, *, ends_with_stage: bool, measure_samples: int
    ) -> tuple[TrialResult, TrialResult]:
        """Run a pair of the finals, their blocks in turns, and return both results.

        Args:
            first: warms up first.
            second: after it.
            seconds: until both are killed, the kill included.
            ends_with_stage: the time is what was left; a trial that runs into it counts as interrupted.
            measure_samples: that each of them times.

        Raises:
            ValueError: trials cannot be run in turns here.
        """
        if self._context.run_in_turns is None:
            raise ValueError("trials cannot be run in turns here")
        other = second if first == self._log.problem.baseline else first
        limits = self._trial_limits(seconds, ends_with_stage=ends_with_stage).replace(
            least_warmup_steps=find_warmup_steps(self._log, other), measure_samples=measure_samples
        )
        specs = [self._make_spec(config, "final", limits, _TIMED) for config in (first, second)]
        self._context.reporter.trial_started(self._describe_progress(), first)
        ours, theirs = self._context.run_in_turns(*specs)
        return self._take(ours, beside=theirs), self._take(theirs, beside=ours)

    def launch_beside(
        self, config: TrainConfig, seconds: float, *, ends_with_stage: bool, rival: Rival | None
    ) -> TrialResult:
        """Time a config in turns with the user's settings and return its result, which has both timings.

        Args:
            config: the settings.
            seconds: until both are killed, the kill included.
            ends_with_stage: the time is what was left; a trial that runs into it counts as interrupted.
            rival: as of `launch`.

        Raises:
            ValueError: trials cannot be run in turns here.
        """
        if self._context.run_in_turns is None:
            raise ValueError("trials cannot be run in turns here")
        baseline = self._log.problem.baseline
        limits = self._trial_limits(seconds, ends_with_stage=ends_with_stage).replace(
            least_warmup_steps=find_warmup_steps(self._log, config), measure_samples=find_compared_samples(self._log)
        )
        pace = self._make_pace(config) if rival else None
        first = self._make_spec(baseline, "reference", limits, _TIMED)
        room = memory_beside(self._log, baseline)
        beside = limits.replace(host_memory_limit_bytes=room.host_bytes, device_memory_limit_bytes=room.device_bytes)
        second = self._make_spec(config, "measure", beside.replace(rival=rival, pace=pace), _TIMED)
        self._context.reporter.trial_started(self._describe_progress(), config)
        reference, result = self._context.run_in_turns(first, second)
        self._log.add_trial(reference)
        return self._take(result)

    def _make_pace(self, config: TrainConfig) -> Pace | None:
        log = self._log
        expected = log.prices.compile_seconds(config)
        return make_pace(config, log.problem.report.target.baseline, log.judged, expected)

    def _take(self, result: TrialResult, *, beside: TrialResult | None = None) -> TrialResult:
        self._log.add_trial(result)
        told = result  # of a pair the gain is that of the pair, not over the level of the search
        if beside is not None and beside.spec.config == self._log.problem.baseline:
            told = result.replace(reference=beside.measurement)
        self._context.reporter.trial_finished(self._describe_progress(), told)
        return result

    def _make_spec(self, config: TrainConfig, purpose: Purpose, limits: TrialLimits, task: TrialTask) -> TrialSpec:
        state, target = self._log.problem.state, self._log.problem.report.target
        self._number += 1
        return TrialSpec(
            number=self._number - 1,
            purpose=purpose,
            target=state.target,
            config=config,
            device=target.device,
            world_size=state.world_size,
            seeds=task.seeds or (state.seed,),
            quality_steps=task.steps,
            fidelity=task.fidelity,
            evaluate=task.evaluate,
            random_sources=target.data.random_sources,
            baseline=None if state.target.script is None else target.baseline,
            training_loaders=target.training_loaders,
            limits=limits,
        )

    def _describe_progress(self) -> SearchProgress:
        return self._context.describe_progress(self._stage, trials=self._number, log=self._log)

    def _trial_limits(self, seconds: float, *, ends_with_stage: bool) -> TrialLimits:
        problem = self._log.problem
        return TrialLimits(
            time_limit_seconds=max(_LEAST_SECONDS, seconds - KILL_SECONDS),
            wait_seconds=0.0 if ends_with_stage else max(0.0, self.budget.remaining_seconds - seconds),
            ends_with_stage=ends_with_stage,
            warmup_cap_seconds=max(2.0, 2 * problem.state.measure_seconds),
            measure_seconds=find_measured_seconds(self._log),
            seconds_per_sample=problem.report.target.data.seconds_per_sample,
            host_memory_limit_bytes=problem.limits.host_memory_bytes,
            device_memory_limit_bytes=problem.limits.device_memory_bytes,
        )
