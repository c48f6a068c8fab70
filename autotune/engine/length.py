"""How long a training is, in optimizer steps."""

from __future__ import annotations

import math

from autotune.engine.loop import Training
from autotune.records.run import RunPlan


def count_epoch_steps(training: Training) -> int | None:
    """Return the optimizer steps of one epoch; None for an iterable dataset."""
    batches = training.batches_per_epoch
    return None if batches is None else math.ceil(batches / training.config.gradient_accumulation_steps)


def count_steps(plan: RunPlan, training: Training) -> int | None:
    """Return the optimizer steps of a whole plan; None for epochs of an iterable dataset."""
    if plan.steps is not None:
        return plan.steps
    per_epoch = count_epoch_steps(training)
    return None if per_epoch is None or plan.epochs is None else plan.epochs * per_epoch
