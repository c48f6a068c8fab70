"""How fast a training goes and when it will be done: the clock between two checks, and the `Report` of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.drift.guard.guard import DriftGuard
from autotune.engine.length import count_epoch_steps, count_steps
from autotune.engine.loop import Training
from autotune.records.run import RunPlan
from autotune.train.loop.evaluations import Evaluations
from autotune.train.loop.meters import Meters, read_memory_limit
from autotune.train.loop.state import Progress
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.report import Report


@dataclass(frozen=True)
class Pace:
    """How fast a training went between two checks.

    Attributes:
        samples_per_second: trained on.
        data_wait_fraction: share of the time spent waiting for the loader.
        step_seconds: of one optimizer step.
    """

    samples_per_second: float
    data_wait_fraction: float
    step_seconds: float


class Watch:
    """Times the steps of one session.

    Args:
        meters: count what is timed.
        plan: of the run.
        evaluations: of the training that is timed.
        guard: looks for drift; None when there is nothing to guard.
        report: called with each report.
        began: `time.monotonic()` at the session's start.
        flops_utilization: model FLOPs utilization per sample a second; None when it is not known.
        policy: the training's thresholds.
    """

    def __init__(
        self,
        meters: Meters,
        plan: RunPlan,
        evaluations: Evaluations,
        *,
        guard: DriftGuard | None,
        report: Callable[[Report], None],
        began: float,
        flops_utilization: float | None,
        policy: TrainPolicy = TRAIN_POLICY,
    ) -> None:
        self._meters, self._plan, self._report, self._policy = meters, plan, report, policy
        self._evaluations, self._guard = evaluations, guard
        self._began, self._flops_utilization = began, flops_utilization
        self._memory_limit = read_memory_limit(evaluations.training.device)
        self._step_seconds: float | None = None
        self._reported = -math.inf
        self.start(Progress())

    def start(self, progress: Progress) -> None:
        """Begin to time steps from here."""
        self._progress, self._waited = progress, 0.0
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._since

    def record_wait(self, seconds: float) -> None:
        """Count time spent waiting for the loader."""
        self._waited += seconds

    def measure(self, progress: Progress) -> Pace:
        """Return the pace since the start, which is now again."""
        seconds = max(self.seconds, 1e-9)
        samples, steps = progress.samples - self._progress.samples, progress.step - self._progress.step
        meters = self._meters
        meters.training_seconds += seconds
        meters.training_samples += samples
        meters.data_wait_seconds += self._waited
        pace = Pace(samples / seconds, min(1.0, self._waited / seconds), seconds / max(1, steps))
        known = self._step_seconds
        smoothing = self._policy.pace_smoothing
        self._step_seconds = pace.step_seconds if known is None else known + smoothing * (pace.step_seconds - known)
        self.start(progress)
        return pace

    def report(self, pace: Pace, progress: Progress, loss: float, *, at_once: bool = False) -> None:
        """Report where the training stands, unless that was just done.

        Args:
            pace: since the last check.
            progress: of the run.
            loss: of the last step.
            at_once: also if a report was just made.
        """
        now = time.monotonic()
        if not at_once and now - self._reported < self._policy.report_seconds:
            return
        self._reported = now
        meters, plan, training = self._meters, self._plan, self._evaluations.training
        used, total = self._flops_utilization, count_steps(plan, training)
        self._report(
            Report(
                step=progress.step,
                samples=progress.samples,
                epoch=training.windows.epoch,
                epochs=plan.epochs,
                total_steps=total,
                loss=loss,
                learning_rate=read_learning_rate(training),
                samples_per_second=pace.samples_per_second,
                data_wait_fraction=pace.data_wait_fraction,
                mfu=None if used is None else used * pace.samples_per_second,
                memory_bytes=meters.record_memory(training.device),
                memory_limit_bytes=self._memory_limit,
                skipped_steps=meters.skipped_steps,
                allocator_retries=meters.allocator_retries,
                elapsed_seconds=now - self._began,
                remaining_seconds=self._estimate_remaining(progress, total, count_epoch_steps(training)),
                knows_evaluation=meters.evaluations > 0 or not self._evaluates,
                metrics=self._evaluations.metrics,
                best=meters.best,
                step_downs=plan.step_downs,
                guard="" if self._guard is None else self._guard.words,
            )
        )

    @property
    def _evaluates(self) -> bool:
        return bool(self._evaluations.loaded.metrics)

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step, smoothed; 0 before the first check."""
        return self._step_seconds or 0.0

    def _estimate_remaining(self, progress: Progress, total: int | None, epoch_steps: int | None) -> float | None:
        """Return the seconds to the end: steps, an evaluation for each epoch, and the checkpoint before it.

        Args:
            progress: of the run.
            total: optimizer steps of the plan; None while they cannot be counted.
            epoch_steps: optimizer steps of an epoch; None while they cannot be counted.
        """
        if total is None or self._step_seconds is None:
            return None
        meters, epochs = self._meters, 1.0
        if epoch_steps:
            epochs = math.ceil(total / epoch_steps) - progress.step // epoch_steps
        pause = meters.mean_evaluation_seconds * self._evaluates + meters.mean_checkpoint_seconds
        return max(0, total - progress.step) * self._step_seconds + max(0.0, epochs) * pause


def read_learning_rate(training: Training) -> float:
    """Return the learning rate of the first parameter group; NaN for an optimizer that chooses it by itself."""
    rate = training.optimizer.param_groups[0].get("lr")
    return math.nan if rate is None else float(rate)
