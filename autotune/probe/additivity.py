"""Is the gradient of a batch that of its parts? Found by computing both with the workload's own loss.

    samples of a batch as one ── g      in unequal parts ── g'      in reverse order ── g''
    error = |g' - g| / |g|      what rounding alone does = |g'' - g| / |g|

BatchNorm, losses over pairs within a batch and means over tokens without their counts all show up here.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import torch

from autotune.drift.compare.additivity import LARGEST_LIMIT, REORDERING_FACTOR, SMALLEST_LIMIT, relative_error
from autotune.drift.record.step_records import StepRecords
from autotune.drift.record.trace_file import GradientTrace
from autotune.engine.determinism import without_dropout
from autotune.engine.gradients import StepRecorder, name_parameters
from autotune.engine.loop import Training
from autotune.engine.windows import GivenWindows, Window
from autotune.records.config import TrainConfig
from autotune.records.facts import Additivity
from autotune.targets.workload import LoadedWorkload

WINDOWS = 3
"""Effective batches, of a training whose steps are not slow."""
_PLAIN = {"precision": "fp32", "compile_mode": "off", "matmul_precision": "highest", "activation_checkpointing": "off"}
"""What rounds least."""


def measure_additivity(
    loaded: LoadedWorkload,
    baseline: TrainConfig,
    device: torch.device,
    *,
    seed: int,
    random_sources: tuple[str, ...],
    windows: int = WINDOWS,
) -> Additivity | None:
    """Return how far the gradient of a batch is from that of its parts.

    None for batches of one sample, for an iterable dataset, and where no optimizer step is seen.

    Args:
        loaded: the workload.
        baseline: its settings; computed in fp32, uncompiled and without dropout.
        device: where.
        seed: of the weights and the order.
        random_sources: generators its samples draw from.
        windows: effective batches to compute.

    Raises:
        TargetError: a part of the workload returns something of the wrong type.
    """
    config = baseline.replace(**_PLAIN)
    training = Training(loaded, config, device=device, seed=seed, random_sources=random_sources)
    if config.effective_batch_size < 2 or training.windows.sampler is None:
        return None
    batches = _fetch(training, config.effective_batch_size, windows)
    size = config.micro_batch_size
    # Parts of different sizes: a mean of their means is then another figure than the mean of all.
    shortest = min(size, *(len(batch) for batch in batches)) if batches else size
    part = max(1, shortest // 2 - (shortest > 4)) if shortest > 1 else 2
    collate = training.windows.loader.collate_fn

    def capture(samples: list[list[Any]], length: int) -> GradientTrace:
        fresh = Training(loaded, config, device=device, seed=seed, random_sources=random_sources)
        return _capture(fresh, [_window(batch, length, collate) for batch in samples])

    with without_dropout():
        whole, parts = capture(batches, size), capture(batches, part)
        reverse = capture([batch[::-1] for batch in batches], size)
    if not whole.points or not parts.points:
        return None
    gradients = whole.points[0].gradients
    reordering = relative_error(reverse.points[0].gradients, gradients, whole.layers)
    if LARGEST_LIMIT < reordering < math.inf:
        return None  # the step draws random numbers: what a split does cannot be told apart from them
    return Additivity(
        error=min(1e6, relative_error(parts.points[0].gradients, gradients, whole.layers)),
        reordering=min(1e6, reordering),
        limit=min(LARGEST_LIMIT, max(SMALLEST_LIMIT, REORDERING_FACTOR * reordering)),
        parts=-(-config.effective_batch_size // part),
    )


def _fetch(training: Training, effective_batch_size: int, windows: int) -> list[list[Any]]:
    """Return the samples of the first effective batches, each with its key where it has one."""
    sampler, dataset = training.windows.sampler, training.windows.loader.dataset
    assert sampler is not None
    keys = [key for batch in islice(sampler, windows * training.windows.accumulation) for key in batch]
    samples = [dataset[key] for key in keys]
    return [samples[first : first + effective_batch_size] for first in range(0, len(samples), effective_batch_size)]


def _window(samples: list[Any], length: int, collate: Any) -> Window:
    parts = [samples[first : first + length] for first in range(0, len(samples), length)]
    return Window(batches=[collate(part) for part in parts], counts=[len(part) for part in parts], ends_epoch=False)


def _capture(training: Training, windows: list[Window]) -> GradientTrace:
    recorder = StepRecorder(lambda: name_parameters(training.model))
    training.optimizer.register_step_pre_hook(lambda one, _args, _kwargs: recorder.before(one))
    training.optimizer.register_step_post_hook(lambda one, _args, _kwargs: recorder.after(one))
    training.windows = GivenWindows(windows)
    points = StepRecords(recorder)
    points.begin_point()
    for _ in windows:
        points.add(training.step().samples)
    return points.assemble()
