"""The training runs of the drift checks: how long they may be, and running them with every seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from autotune.drift.compare.losses import count_learning_steps
from autotune.drift.gate.loss_check import DriftPlan, least_drift_seconds, plan_drift
from autotune.drift.policy import LossCheckPolicy
from autotune.records.config import TrainConfig
from autotune.records.trial import LossCurve, TrialResult, TrialStatus
from autotune.search.launch.starter import TrialStarter, TrialTask
from autotune.search.log import SearchLog


class TrainingRuns:
    """Trains configs for the drift checks.

    Args:
        log: of the search.
        starter: starts the trials.
        known: trials of earlier sessions of this search.
    """

    def __init__(self, log: SearchLog, starter: TrialStarter, known: Sequence[TrialResult] = ()) -> None:
        problem = log.problem
        self._log, self._starter, self._known = log, starter, tuple(known)
        self._problem, self._report = problem, problem.report
        # Each seed of a script is a process of its own: it cannot be started twice in one.
        self._script = problem.state.target.script
        self._process_seconds = 0.0
        self._usual_policy = problem.policy.loss_check
        self._learning_steps: tuple[int, int | None] = (0, None)

    def least_seconds(self, plan: DriftPlan | None = None) -> float:
        """Return the least time in which a candidate can be compared with the baseline by trainings.

        Args:
            plan: by which the baseline was trained already; None when it was not.
        """
        step = self._log.seconds_per_step
        if plan is None:
            return least_drift_seconds(
                self._report.target,
                seconds_per_step=step,
                start_seconds=self._arm_start_seconds,
                asked_steps=self._asked_steps(),
                policy=self._policy,
            )
        evaluation = (self._report.target.evaluate_seconds or 0.0) if plan.evaluate else 0.0
        return self._arm_start_seconds + self._late_start / 2 + plan.seeds * (plan.steps * step + evaluation)

    def plan(self, candidates: int, seconds: float) -> DriftPlan | None:
        """Return what some seconds allow for the baseline and some candidates; None when they allow nothing."""
        return plan_drift(
            seconds,
            self._report.target,
            seconds_per_step=self._log.seconds_per_step,
            candidates=candidates,
            start_seconds=self._arm_start_seconds,
            asked_steps=self._asked_steps(),
            seed_seconds=0.0 if self._script is None else self._start_seconds / self._policy.seeds,
            policy=self._policy,
        )

    def plan_one_seed(self) -> tuple[DriftPlan, float]:
        """Return one seed of what is trained at least where there is time, and what it takes with the baseline's."""
        steps = self._asked_steps() or self._policy.good_steps
        start = self._arm_start_seconds if self._script is None else self._start_seconds / self._usual_policy.seeds
        plan = DriftPlan(steps=steps, evaluate=False, candidates=1, seeds=1)
        return plan, 2 * (start + steps * self._log.seconds_per_step)

    def tells(self, plan: DriftPlan) -> bool:
        """Return whether a plan is long enough to tell something of a config whose gradients have passed."""
        return plan.evaluate or plan.steps >= (self._asked_steps() or self._usual_policy.good_steps)

    def is_long(self, plan: DriftPlan) -> bool:
        """Return whether a training of a plan has the steps in which one that still learns would be seen to."""
        return plan.steps >= max(self._usual_policy.good_steps, self._find_learning_steps()[1] or 0)

    def recall_baseline(self) -> tuple[LossCurve, ...]:
        """Return the baseline's losses in most seeds of earlier sessions, and of these the longest, one for each."""
        trained: dict[int, dict[int, LossCurve]] = {}
        for one in self._known:
            if one.spec.purpose == "quality" and one.spec.config == self._problem.baseline and one.spec.quality_steps:
                trained.setdefault(one.spec.quality_steps, {}).update({curve.seed: curve for curve in one.curves})
        curves = max(sorted(trained.items()), key=lambda found: (len(found[1]), found[0]), default=(0, {}))[1]
        return tuple(curves[seed] for seed in sorted(curves))

    def learn(self, config: TrainConfig, plan: DriftPlan, *, left: Callable[[], float]) -> TrialResult | None:
        """Train a config with every seed as planned; None when the time is up or the user stopped.

        Args:
            config: the settings.
            plan: how much.
            left: the seconds that are left for it.
        """
        seeds = tuple(self._problem.state.seed + i for i in range(plan.seeds))
        results: list[TrialResult] = []
        processes = [seeds] if self._script is None else [(seed,) for seed in seeds]
        for number, some in enumerate(processes):
            task = TrialTask(steps=self._steps_for(config, plan), evaluate=plan.evaluate, seeds=some)
            known = self._find_learned(config, task)
            if known is not None:
                results.append(known)
                continue
            # The baseline's losses are of no use without a candidate's.
            to_come = len(processes) - number + (len(processes) if config == self._problem.baseline else 0)
            if self._starter.should_stop() or left() < max(self._policy.least_seconds, to_come * self._process_seconds):
                return None
            result = self._starter.launch(config, "quality", left(), task=task)
            if result.status is TrialStatus.INTERRUPTED:
                return None
            results.append(result)
            self._process_seconds = result.elapsed_seconds
            if not result.curves:
                break
            self._known = (*self._known, result)
        return results[-1].replace(curves=tuple(curve for result in results for curve in result.curves))

    @property
    def _policy(self) -> LossCheckPolicy:
        """How much is trained: no fewer steps than the baseline takes to be seen to learn, where a metric cannot tell.

        In fewer, nothing can be judged. Where no launch was long enough to show it, the usual number is a guess.
        """
        policy, facts = self._usual_policy, self._report.target
        seen, found = self._find_learning_steps()
        if seen < policy.least_steps or (facts.metrics and facts.evaluate_seconds is not None):
            return policy
        least = min(policy.most_steps, found or max(policy.good_steps, seen + 1))
        return dataclasses.replace(policy, least_steps=least, good_steps=max(least, policy.good_steps))

    def _find_learning_steps(self) -> tuple[int, int | None]:
        """Return the steps of the baseline's longest launch, and in how many of them it was seen to learn."""
        launched = (one.result.curves[:1] for one in self._log.judged if one.config == self._problem.baseline)
        curve = max(itertools.chain.from_iterable(launched), key=lambda one: len(one.losses), default=None)
        if curve is not None and self._learning_steps[0] != len(curve.losses):
            margin = self._problem.state.max_drift.loss.amount
            found = count_learning_steps(curve, margin=margin, least=self._usual_policy.least_steps)
            self._learning_steps = len(curve.losses), found
        return self._learning_steps

    @property
    def _start_seconds(self) -> float:
        """What an arm's processes spend before their first steps, where each seed has one."""
        policy = self._usual_policy
        return policy.seeds * (self._log.startup_seconds + policy.process_seconds)

    @property
    def _arm_start_seconds(self) -> float:
        """What an arm spends beside its steps: the mean of the baseline's and a candidate's."""
        return self._policy.start_seconds + self._late_start / 2 if self._script is None else self._start_seconds

    @property
    def _late_start(self) -> float:
        """What a candidate of a workload may take longer to start: another allocator asks for a process of its own."""
        starts = (one.result.startup_seconds for one in self._log.judged)
        return 0.0 if self._script is not None else max((one for one in starts if one is not None), default=0.0)

    def _asked_steps(self) -> int | None:
        """Return the steps per seed that the user asked for; None to choose by the time."""
        if self._script is None:
            return None
        facts = self._report.target
        if self._script.quality_epochs is None or facts.steps_per_epoch is None:
            return self._script.quality_steps
        return self._script.quality_epochs * math.ceil(facts.steps_per_epoch)

    def _steps_for(self, config: TrainConfig, plan: DriftPlan) -> int:
        """Return the steps that take as many samples as the plan's do with the baseline's effective batch."""
        baseline = self._report.target.baseline.effective_batch_size
        return max(1, round(plan.steps * baseline / config.effective_batch_size))

    def _find_learned(self, config: TrainConfig, task: TrialTask) -> TrialResult | None:
        """Return an earlier session's training of the same config by the same plan; None when there is none."""
        wanted = ("quality", config, task.steps, task.evaluate, task.seeds)
        for result in self._known:
            spec = result.spec
            if (spec.purpose, spec.config, spec.quality_steps, spec.evaluate, spec.seeds) == wanted:
                return result
        return None
