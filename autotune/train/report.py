"""What a training tells whoever looks at it: a `Report` at each log line, a `TrainingSummary` at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autotune.records.run import Best, RunPlan, StepDown, TrainingSummary
from autotune.records.training_process import TrainingProgress

Log = Callable[[Mapping[str, float | int | None]], None]
"""Is handed every line of metrics.jsonl: the seam for TensorBoard, Weights & Biases and the like."""


@dataclass(frozen=True)
class Report:
    """Where a training stands, at a log line.

    Attributes:
        step: optimizer steps taken.
        samples: trained on.
        epoch: the current one, counted from 0.
        epochs: planned; None when steps are counted.
        total_steps: planned; None while they cannot be counted.
        loss: of the last step.
        learning_rate: of the first parameter group.
        samples_per_second: since the last report.
        data_wait_fraction: of the time since the last report, spent waiting for the loader.
        mfu: model FLOPs utilization since the last report; None when it is not known.
        memory_bytes: reserved on the device, or resident on the host without one.
        memory_limit_bytes: what there is of it; None when not known.
        skipped_steps: that a loss scaler left out, so far.
        allocator_retries: of the device's allocator, so far.
        elapsed_seconds: of this session, set-up included.
        remaining_seconds: to the end of the plan, evaluations and checkpoints included; None while not known.
        knows_evaluation: an evaluation was timed, so `remaining_seconds` counts them.
        metrics: what `evaluate` returned last, None where not finite; empty before the first evaluation.
        best: the best evaluation so far.
        step_downs: so far, over all sessions.
        guard: what the drift guard has to say, a few words; empty when it is off.
        phase: `training`, `evaluating` or `saving`.
    """

    step: int
    samples: int
    epoch: int
    epochs: int | None
    total_steps: int | None
    loss: float
    learning_rate: float
    samples_per_second: float
    data_wait_fraction: float | None
    mfu: float | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    skipped_steps: int
    allocator_retries: int
    elapsed_seconds: float
    remaining_seconds: float | None
    knows_evaluation: bool
    metrics: Mapping[str, float | None]
    best: Best | None
    step_downs: tuple[StepDown, ...]
    guard: str
    phase: str = "training"


class StopNow(BaseException):
    """Raised by a signal's handler where nothing is lost by stopping at once: in an evaluation."""


def summarize(plan: RunPlan, progress: TrainingProgress, *, finished: bool, elapsed_seconds: float) -> TrainingSummary:
    """Return how a training ended, as far as its plan and what it counted tell; the rest is for the caller to add.

    Args:
        plan: of the run, steps down and all.
        progress: over all attempts or sessions.
        finished: it was trained to its end.
        elapsed_seconds: wall time of this session.
    """
    seconds, samples = progress.training_seconds, progress.training_samples
    return TrainingSummary(
        folder="",
        checkpoint="",
        finished=finished,
        target=plan.target,
        origin=plan.origin,
        config=plan.current_config,
        world_size=plan.world_size,
        steps=progress.steps,
        epochs=0,
        samples=progress.samples,
        loss=progress.loss,
        metrics={},
        samples_per_second=samples / seconds if samples and seconds > 0 else None,
        promised_samples_per_second=plan.promised_samples_per_second,
        promised_noise=plan.promised_noise,
        data_wait_fraction=min(1.0, max(0.0, progress.data_wait_seconds / seconds)) if seconds > 0 else None,
        peak_memory_bytes=progress.peak_memory_bytes or None,
        training_seconds=seconds,
        elapsed_seconds=elapsed_seconds,
        step_downs=plan.step_downs,
    )
