"""A workload's memory: its step on shapes alone or for real, held against a larger real step.

a step's shapes at two sizes ── where a training does not run on shapes alone, its real steps at two sizes
a real step, larger than the user's own: the first multiple that time and memory permit
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, default_collate

from autotune.engine.loop import Training
from autotune.engine.windows import ResidentWindows, Window
from autotune.measure.memory import measure_outside_bytes, measure_peak
from autotune.probe.memory.lines import Calibration, attempt
from autotune.probe.memory.look import Tracer
from autotune.probe.memory.shapes import (
    TRACED,
    ShapeModel,
    StepBytes,
    count_traced,
    list_tensors,
    list_weights,
    state_tensors,
    tensor_bytes,
    trace_step,
)
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload

_CALIBRATION_SECONDS = 3.0
_CALIBRATION_FRACTION = 0.4
"""Share of the limit that the real step may be expected to take."""
_FACTORS = (8, 4, 2)
"""Micro batches of the real step, as multiples of the baseline's: the first that time and memory permit."""
_LARGEST_BATCH_BYTES = 256 * 2**20
_REAL_MODE_STEPS = 4
"""Plain steps of the larger size that take as long as one mode whose real steps are followed."""
_BATCH_SECONDS = 0.7
_MOST_SAMPLE_BYTES = 32 * 2**20
"""Samples beyond are the first ones again: they are held beside the training, whose memory is to be seen."""


class WorkloadMemory:
    """A workload whose memory is looked at; the members that are not documented here are `MemorySubject`'s.

    Args:
        loaded: the workload.
        device: where it trains.
        seed: of the weights.
        room_bytes: what the look itself may use.
    """

    refusal = "its steps could not be followed"

    def __init__(self, loaded: LoadedWorkload, device: torch.device, *, seed: int, room_bytes: float) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._loaded, self._device, self._seed, self._room = loaded, device, seed, room_bytes
        self._sample_seconds = math.inf

    def build(self, baseline: TrainConfig, deadline: float) -> None:
        loaded = self._loaded
        self._baseline, self._deadline = baseline, deadline
        self._micro_batches = count_traced(baseline)
        self._training = Training(loaded, baseline, device=self._device, seed=self._seed)
        self.models, self.optimizers = [self._training.model], [self._training.optimizer]
        dataset = self._training.windows.loader.dataset
        self._batches = SampleBatches(dataset, loaded.collate, max(TRACED) * baseline.micro_batch_size)
        self._batch_bytes = tensor_bytes(list_tensors(self._batches.make(baseline.micro_batch_size)))
        is_bare = baseline.activation_checkpointing == "off"
        self._bare = self._training.model if is_bare else loaded.workload.build_model().to(self._device)
        self._shapes = ShapeModel(self._bare)

    def list_tracers(self) -> Iterator[Tracer]:
        size = self._baseline.micro_batch_size
        fits = max(TRACED) * self._batch_bytes <= _LARGEST_BATCH_BYTES
        yield Tracer(self._trace_shapes, (TRACED[0] * size, TRACED[1] * size) if fits else (size, 2 * size))
        small, large = (size // 2, size) if size > 1 else (1, 2)
        yield Tracer(self._trace_real, (small, large), lambda: _REAL_MODE_STEPS * self._sample_seconds * large)

    def look_ahead_bytes(self) -> float:
        # On the host the next batch is loaded while one is trained on.
        return self._batch_bytes / self._baseline.micro_batch_size if self._device.type == "cpu" else 0.0

    def calibrate(self) -> Calibration:
        """Return the largest real step that there is time and memory for."""
        size = self._baseline.micro_batch_size
        found = self._measure(size)
        if found.peak is None:
            return found
        most_seconds = min(_CALIBRATION_SECONDS, (self._deadline - time.monotonic()) / 2)
        for factor in _FACTORS:
            expected = found.outside + factor * (found.peak - found.outside)
            seconds = 2 * factor * size * self._sample_seconds
            if seconds <= most_seconds and expected <= _CALIBRATION_FRACTION * self._room:
                larger = attempt(lambda: self._measure(factor * size))  # noqa: B023 - called at once
                return found if isinstance(larger, str) else larger
        return found

    def _trace_shapes(self, config: TrainConfig, size: int, updates: bool, /) -> StepBytes:
        # A copy of the workload: what it notes on itself, a mask for instance, must not stay there without data.
        loaded = replace(self._loaded, workload=copy.copy(self._loaded.workload))
        return self._shapes.trace(loaded, config, self._device, self._batches.make(size), updates=updates)

    def _trace_real(self, config: TrainConfig, size: int, _updates: bool, /) -> StepBytes:
        training = self._training
        if config != self._baseline:
            training = Training(self._loaded, config, device=self._device, seed=self._seed)
        return trace_step(training, self._batches.make(size), self._device, micro_batches=self._micro_batches)

    def _measure(self, size: int) -> Calibration:
        training, batch = self._training, self._batches.make(size)
        window = Window([batch] * self._micro_batches, [size] * self._micro_batches, ends_epoch=False)
        training.windows = ResidentWindows(window, window.batches)

        def take_steps() -> None:
            # The optimizer makes its state in the first one, and what is wasted grows.
            for _ in range(2):
                began = time.perf_counter()
                training.step()
                self._sample_seconds = min(self._sample_seconds, (time.perf_counter() - began) / size)

        peak = measure_peak(take_steps, self._device)
        models = [training.model] if self._bare is training.model else [training.model, self._bare]
        own = [*list_weights(models), *state_tensors(training.optimizer), *list_tensors(batch)]
        return Calibration(size, measure_outside_bytes(self._device, tensor_bytes(own)), peak)


class SampleBatches:
    """Batches of real samples of any size; few samples are repeated."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, most: int) -> None:
        self._collate = collate or default_collate
        stream = iter(dataset) if isinstance(dataset, IterableDataset) else (dataset[i] for i in range(len(dataset)))
        began, held = time.perf_counter(), 0
        self._samples: list[Any] = []
        for sample in islice(stream, most):
            self._samples.append(sample)
            held += sum(tensor.nbytes for tensor in list_tensors(sample))
            if time.perf_counter() - began > _BATCH_SECONDS or held > _MOST_SAMPLE_BYTES:
                break

    def make(self, size: int) -> Any:
        """Return a batch on the host."""
        return self._collate(list(islice(cycle(self._samples), size)))
