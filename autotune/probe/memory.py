"""What the memory of a training is made of, and what other settings would need.

    a step's shapes at two sizes, for each mode ── a line ──────────────┐
    a real step, larger than the user's own ── what no shape can tell ──┴── peak by mode and micro batch

Where a training does not run on shapes alone, its real steps are followed instead; where those cannot be followed
either, there is no prediction.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autotune.engine.activation_checkpointing import apply_activation_checkpointing, can_checkpoint
from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.loop import Training
from autotune.engine.windows import ResidentWindows, Window
from autotune.measure.memory import measure_outside_bytes, measure_peak, peak_host_bytes
from autotune.probe.memory_lines import (
    Calibration,
    Trace,
    attempt,
    conclude,
    find_line,
    find_lines,
    list_modes,
    undisturbed,
)
from autotune.probe.memory_shapes import (
    ShapeModel,
    StepBytes,
    count_traced,
    list_tensors,
    list_weights,
    resize_call,
    state_bytes,
    state_tensors,
    tensor_bytes,
    trace_calls,
    trace_step,
)
from autotune.probe.samples import SampleBatches
from autotune.records.config import Precision, TrainConfig
from autotune.records.facts import MemoryFacts
from autotune.records.measurement import Measurement
from autotune.targets.workload import LoadedWorkload

_CALIBRATION_SECONDS = 3.0
_CALIBRATION_FRACTION = 0.4
"""Share of the limit that the real step may be expected to take."""
_FACTORS = (8, 4, 2)
"""Micro batches of the real step, as multiples of the baseline's: the first that time and memory permit."""
_TRACED = (2, 8)
"""Micro batches whose shapes are followed, as multiples of the baseline's."""
_LARGEST_BATCH_BYTES = 256 * 2**20
_REAL_MODE_STEPS = 4
"""Plain steps of the larger size that take as long as one mode whose real steps are followed."""


def look_at_memory(  # noqa: PLR0913 - what is asked, and of what
    loaded: LoadedWorkload,
    baseline: TrainConfig,
    device: torch.device,
    *,
    seed: int,
    base_bytes: int,
    limit_bytes: int,
    supported: Sequence[Precision],
    checkpoints: bool,
    room_bytes: int | None = None,
    budget_seconds: float = 8.0,
) -> MemoryFacts:
    """Return a workload's memory; whatever it cannot do is told in `missing`, and nothing is raised.

    No training of it should be alive: what it holds would count as the process's own. Random generators are left as
    they were; its objects run on tensors without data, so it should not be trained afterwards.

    Args:
        loaded: the workload.
        baseline: its own settings.
        device: where it trains.
        seed: of the weights.
        base_bytes: in use before a training was built: of a GPU, or the resident set.
        limit_bytes: what a training may use.
        supported: precisions that run on the device.
        checkpoints: the model has blocks to checkpoint.
        room_bytes: what the look itself may use; None for the limit.
        budget_seconds: wall time, about; modes there is no time for are left out.
    """
    facts = _no_facts(base_bytes, limit_bytes)
    modes = list_modes(baseline, supported, checkpoints=checkpoints)
    with undisturbed(device):
        deadline = time.monotonic() + budget_seconds
        room = min(limit_bytes, room_bytes or limit_bytes)
        found = attempt(lambda: _WorkloadLook(loaded, modes[0], device, deadline, room).run(facts, modes, seed))
        return facts.replace(missing=f"it could not be looked at: {found}") if isinstance(found, str) else found


class _WorkloadLook:
    """One look at a workload's memory."""

    def __init__(
        self, loaded: LoadedWorkload, baseline: TrainConfig, device: torch.device, deadline: float, room: float
    ) -> None:
        self._loaded, self._baseline, self._device, self._deadline, self._room = (
            loaded,
            baseline,
            device,
            deadline,
            room,
        )
        self._micro_batches = count_traced(baseline)
        self._sample_seconds = math.inf

    def run(self, facts: MemoryFacts, modes: Sequence[TrainConfig], seed: int) -> MemoryFacts:
        """Return the facts with what was found."""
        self._build(seed)
        model, optimizer = self._training.model, self._training.optimizer
        facts = _count_weights(facts, [model], [optimizer])
        trace: Trace = self._trace_shapes
        sizes, refusal = self._choose_sizes(), ""
        line = attempt(lambda: find_line(trace, self._baseline, sizes))
        if isinstance(line, str):
            trace, refusal, size = self._trace_real, line, self._baseline.micro_batch_size
            sizes = (size // 2, size) if size > 1 else (1, 2)
            line = attempt(lambda: find_line(trace, self._baseline, sizes))
        calibration = attempt(lambda: self._calibrate())
        facts = facts.replace(optimizer_bytes=state_bytes(optimizer))
        if isinstance(line, str) or isinstance(calibration, str):
            why = calibration if isinstance(calibration, str) else refusal
            return facts.replace(missing=f"its steps could not be followed: {why}")
        costs = _REAL_MODE_STEPS * self._sample_seconds * sizes[1] if refusal else 0.0
        lines = find_lines(trace, modes, sizes, line, deadline=self._deadline - costs)
        # On the host the next batch is loaded while one is trained on.
        look_ahead = self._batch_bytes / self._baseline.micro_batch_size if self._device.type == "cpu" else 0.0
        return conclude(facts, lines, calibration, look_ahead=look_ahead)

    def _build(self, seed: int) -> None:
        loaded, baseline = self._loaded, self._baseline
        self._seed = seed
        self._training = Training(loaded, baseline, device=self._device, seed=seed)
        dataset = self._training.windows.loader.dataset
        self._batches = SampleBatches(dataset, loaded.collate, max(_TRACED) * baseline.micro_batch_size)
        self._batch_bytes = tensor_bytes(list_tensors(self._batches.make(baseline.micro_batch_size)))
        is_bare = baseline.activation_checkpointing == "off"
        self._bare = self._training.model if is_bare else loaded.workload.build_model().to(self._device)
        self._shapes = ShapeModel(self._bare)

    def _choose_sizes(self) -> tuple[int, int]:
        size = self._baseline.micro_batch_size
        fits = max(_TRACED) * self._batch_bytes <= _LARGEST_BATCH_BYTES
        return (_TRACED[0] * size, _TRACED[1] * size) if fits else (size, 2 * size)

    def _trace_shapes(self, config: TrainConfig, size: int, updates: bool, /) -> StepBytes:
        # A copy of the workload: what it notes on itself, a mask for instance, must not stay there without data.
        loaded = replace(self._loaded, workload=copy.copy(self._loaded.workload))
        return self._shapes.trace(loaded, config, self._device, self._batches.make(size), updates=updates)

    def _trace_real(self, config: TrainConfig, size: int, _updates: bool, /) -> StepBytes:
        training = self._training
        if config != self._baseline:
            training = Training(self._loaded, config, device=self._device, seed=self._seed)
        return trace_step(training, self._batches.make(size), self._device, micro_batches=self._micro_batches)

    def _calibrate(self) -> Calibration:
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


def look_at_script_memory(  # noqa: PLR0913 - what is asked, and of what
    hooks: ScriptHooks,
    baseline: TrainConfig,
    device: torch.device,
    *,
    measurement: Measurement,
    base_bytes: int,
    limit_bytes: int,
    supported: Sequence[Precision],
    checkpoints: bool,
    budget_seconds: float = 8.0,
) -> MemoryFacts:
    """Return a script's memory: counted from its objects, its models' shapes held against the peak that was measured.

    The loss of a script is not to be had; its models' outputs are summed instead. Nothing is raised.

    Args:
        hooks: on the script, which inspected its models; it has trained and does not go on.
        baseline: its own settings.
        device: where it trains.
        measurement: of it, with its peak.
        base_bytes: in use before the script began: of a GPU, or the resident set.
        limit_bytes: what a training may use.
        supported: precisions that run on the device, and that the script can be given.
        checkpoints: a model has blocks to checkpoint.
        budget_seconds: wall time, about; modes there is no time for are left out.
    """
    deadline = time.monotonic() + budget_seconds
    roots, optimizers = hooks.models.roots, hooks.optimizers.optimizers
    facts = _count_weights(_no_facts(base_bytes, limit_bytes), roots, optimizers)
    facts = facts.replace(optimizer_bytes=sum(map(state_bytes, optimizers)))
    weights = list_weights(roots)
    own = tensor_bytes([*weights, *(p.grad for p in weights), *(t for one in optimizers for t in state_tensors(one))])
    with undisturbed(device):
        outside, seen = measure_outside_bytes(device, own), measurement.peak_memory
        # The measurement's peak has loader workers in it, and this process's own has what came after.
        peak = min(seen.host_bytes, peak_host_bytes()) if seen.device_bytes is None else outside + seen.device_bytes
        modes = list_modes(baseline, supported, checkpoints=checkpoints)
        size = baseline.micro_batch_size
        sizes = (_TRACED[0] * size, _TRACED[1] * size)
        trace = partial(_trace_script, hooks, device, facts, size)
        line = attempt(lambda: find_line(trace, modes[0], sizes))
        if isinstance(line, str):
            return facts.replace(missing=f"its models do not run on shapes alone: {line}")
        lines = find_lines(trace, modes, sizes, line, deadline=deadline)
        return conclude(facts, lines, Calibration(size, outside, peak), look_ahead=0.0)


def _trace_script(
    hooks: ScriptHooks, device: torch.device, facts: MemoryFacts, own_size: int, config: TrainConfig, size: int, _: bool
) -> StepBytes:
    if not hooks.models.calls:
        raise ValueError("no training call was seen of a model that the script does not compile")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    calls = []
    for position, call in hooks.models.calls.items():
        root = hooks.models.roots[position]
        model = ShapeModel(root.module if isinstance(root, DistributedDataParallel) else root, mode).copy()
        with mode:
            if can_checkpoint(model):
                apply_activation_checkpointing(model, config)
        calls.append((model, resize_call(call, own_size, size, mode, device)))
    state = round(facts.optimizer_bytes)
    passes = trace_calls(calls, config, device, mode) + state
    update = round(facts.weights_bytes + facts.gradient_bytes) + state
    return StepBytes(passes=passes, update=update, optimizer=state)


def _no_facts(base_bytes: int, limit_bytes: int) -> MemoryFacts:
    return MemoryFacts(
        base_bytes=base_bytes, weights_bytes=0, gradient_bytes=0, optimizer_bytes=0, limit_bytes=limit_bytes
    )


def _count_weights(facts: MemoryFacts, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> MemoryFacts:
    stepped = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}.values()
    gradients = sum(p.numel() * p.element_size() for p in stepped)
    return facts.replace(weights_bytes=tensor_bytes(list_weights(models)), gradient_bytes=gradients)
