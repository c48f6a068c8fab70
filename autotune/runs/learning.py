"""Let a training learn, for its losses and its metrics."""

from __future__ import annotations

from torch import Tensor

from autotune.measure.throughput import TrainingEndedError, finite_or_none
from autotune.records.trial import LossCurve
from autotune.runs.source import Run, StepSource


def learn(source: StepSource, steps: int, *, seed: int, evaluate: bool) -> Run[LossCurve]:
    """Return the losses of so many optimizer steps, fewer of a training that ends before, and its metrics.

    Args:
        source: of the steps.
        steps: to train.
        seed: that the training was started with.
        evaluate: find the target's metrics as well.

    Raises:
        TrainingEndedError: it took no step.
    """
    losses: list[Tensor] = []
    samples = skipped = 0
    counts_skipped = source.pin_loss_scale()
    for number in range(steps):
        scale = source.read_loss_scale() or 0.0
        try:
            step = yield
        except TrainingEndedError:
            if not losses:
                raise
            break
        losses.append(step.loss)
        samples += max(1, step.samples)
        # A scale that starts too high falls in the first steps of any training; one that still does leaves steps out.
        fell = counts_skipped and (source.read_loss_scale() or 0.0) < scale
        skipped += int(fell and number >= steps // 2)
    metrics = (yield from source.find_metrics()) if evaluate else {}
    return LossCurve(
        seed=seed,
        losses=tuple(finite_or_none(float(loss)) for loss in losses),
        samples=samples,
        skipped=skipped,
        metrics={name: finite_or_none(value) for name, value in metrics.items()},
    )
