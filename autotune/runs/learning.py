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
    samples = 0
    skipped = 0 if source.pin_loss_scale() else None  # None: not counted, which is not none
    for number in range(steps):
        scale = None if skipped is None else source.read_loss_scale()
        try:
            step = yield
        except TrainingEndedError:
            if not losses:
                raise
            break
        losses.append(step.loss)
        samples += max(1, step.samples)
        # A scale that starts too high falls in the first steps of any training; one that still does leaves steps out.
        if skipped is not None and scale is not None and number >= steps // 2:
            skipped += int((source.read_loss_scale() or 0.0) < scale)
    metrics = (yield from source.find_metrics()) if evaluate else {}
    return LossCurve(
        seed=seed,
        losses=tuple(finite_or_none(float(loss)) for loss in losses),
        samples=samples,
        skipped=skipped,
        metrics={name: finite_or_none(value) for name, value in metrics.items()},
    )
