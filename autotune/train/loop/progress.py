"""How fast a training goes and when it will be done: the clock between two checks, and the `Report` of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.records.run import RunPlan
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


@dataclass(frozen=True)
class Standing:
    """What a report needs that the watch does not know.

    Attributes:
        progress: of the run.
        epoch: the current one.
        total_steps: of the plan; None while they cannot be counted.
        steps_per_epoch: None while they cannot be counted.
        loss: of the last step.
        learning_rate: of the first parameter group.
        metrics: of the last evaluation.
        guard: the drift guard's words.
    """

    progress: Progress
    epoch: int
    total_steps: int | None
    steps_per_epoch: int | None
    loss: float
    learning_rate: float
    metrics: dict[str, float | None]
    guard: str


class Watch:
    """Times the steps of one session.

    Args:
        meters: count what is timed.
        plan: of the run.
        device: it runs on.
        report: called with each report.
        began: `time.monotonic()` at the session's start.
        flops_utilization: model FLOPs utilization per sample a second; None when it is not known.
        evaluates: the workload can be evaluated, at each epoch's end.
        policy: the training's thresholds.
    """

    def __init__(
        self,
        meters: Meters,
        plan: RunPlan,
        device: torch.device,
        *,
        report: Callable[[Report], None],
        began: float,
        flops_utilization: float | None,
        evaluates: bool,
        policy: TrainPolicy = TRAIN_POLICY,
    ) -> None:
        self._policy = policy
        self._meters, self._plan, self._device, self._report = meters, plan, device, report
        self._began, self._flops_utilization, self._evaluates = began, flops_utilization, evaluates
        self._memory_limit = read_memory_limit(device)
        self._step_seconds: float | None = None
        self._reported = -math.inf
        self.start(Progress())

    def start(self, progress: Progress) -> None:
        """Begin to time steps from here."""
        self._progress, self._waited = progress, 0.0
        self._since = time.perf_counter()

    def note_wait(self, seconds: float) -> None:
        """Count time spent waiting for the loader."""
        self._waited += seconds

    def measure(self, progress: Progress) -> Pace:
        """Return the pace since the start, which is now again."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
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

    def report(self, pace: Pace, standing: Standing, *, phase: str = "training", at_once: bool = False) -> None:
        """Report where the training stands, unless that was just done."""
        now = time.monotonic()
        if not at_once and now - self._reported < self._policy.report_seconds:
            return
        self._reported = now
        meters, plan, where = self._meters, self._plan, standing
        used = self._flops_utilization
        self._report(
            Report(
                step=where.progress.step,
                samples=where.progress.samples,
                epoch=where.epoch,
                epochs=plan.epochs,
                total_steps=where.total_steps,
                loss=where.loss,
                learning_rate=where.learning_rate,
                samples_per_second=pace.samples_per_second,
                data_wait_fraction=pace.data_wait_fraction,
                mfu=None if used is None else used * pace.samples_per_second,
                memory_bytes=meters.note_memory(self._device),
                memory_limit_bytes=self._memory_limit,
                skipped_steps=meters.skipped_steps,
                allocator_retries=meters.allocator_retries,
                elapsed_seconds=now - self._began,
                remaining_seconds=self._estimate_remaining(where),
                knows_evaluation=meters.evaluations > 0 or not self._evaluates,
                metrics=where.metrics,
                best=meters.best,
                step_downs=plan.step_downs,
                guard=where.guard,
                phase=phase,
            )
        )

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step, smoothed; 0 before the first check."""
        return self._step_seconds or 0.0

    def _estimate_remaining(self, where: Standing) -> float | None:
        """Return the seconds to the end: steps, an evaluation for each epoch, and the checkpoint before it."""
        if where.total_steps is None or self._step_seconds is None:
            return None
        meters, left = self._meters, max(0, where.total_steps - where.progress.step)
        epochs = 1.0
        if where.steps_per_epoch:
            epochs = math.ceil(where.total_steps / where.steps_per_epoch) - where.progress.step // where.steps_per_epoch
        pause = meters.mean_evaluation_seconds * self._evaluates + meters.mean_checkpoint_seconds
        return left * self._step_seconds + max(0.0, epochs) * pause
