"""A script's memory: counted from its objects, its models' shapes held against the peak that was measured.

The loss of a script is not to be had; its models' outputs are summed instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autotune.engine.activation_checkpointing import exchange_activation_checkpointing
from autotune.engine.hooks.script import ScriptHooks
from autotune.measure.memory import measure_outside_bytes, peak_host_bytes
from autotune.probe.memory.lines import Calibration
from autotune.probe.memory.look import Tracer
from autotune.probe.memory.shapes import (
    TRACED,
    ShapeModel,
    StepBytes,
    count_weights,
    list_weights,
    resize_call,
    state_bytes,
    state_tensors,
    tensor_bytes,
    trace_calls,
)
from autotune.records.config import TrainConfig
from autotune.records.measurement import Measurement


class ScriptMemory:
    """A script whose memory is looked at; the members that are not documented here are `MemorySubject`'s.

    Args:
        hooks: on the script, which inspected its models; it has trained and does not go on.
        measurement: of it, with its peak.
    """

    refusal = "its models do not run on shapes alone"

    def __init__(self, hooks: ScriptHooks, measurement: Measurement) -> None:
        self.models: list[nn.Module] = list(hooks.models.roots)
        self.optimizers: list[Optimizer] = list(hooks.optimizers.optimizers)
        self._hooks, self._device, self._measured = hooks, hooks.device, measurement.peak_memory

    def build(self, baseline: TrainConfig, deadline: float) -> None:
        self._size = baseline.micro_batch_size
        self._state = sum(map(state_bytes, self.optimizers))
        weights = list_weights(self.models)
        states = (tensor for one in self.optimizers for tensor in state_tensors(one))
        own = tensor_bytes([*weights, *(p.grad for p in weights), *states])
        outside, seen = measure_outside_bytes(self._device, own), self._measured
        # The measurement's peak has loader workers in it, and this process's own has what came after.
        peak = min(seen.host_bytes, peak_host_bytes()) if seen.device_bytes is None else outside + seen.device_bytes
        self._calibration = Calibration(self._size, outside, peak)

    def list_tracers(self) -> Iterator[Tracer]:
        yield Tracer(self._trace, (TRACED[0] * self._size, TRACED[1] * self._size))

    def look_ahead_bytes(self) -> float:
        return 0.0  # the measured peak has it

    def calibrate(self) -> Calibration:
        return self._calibration

    def _trace(self, config: TrainConfig, size: int, _updates: bool, /) -> StepBytes:
        if not self._hooks.models.calls:
            raise ValueError("no training call was seen of a model that the script does not compile")
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        calls = []
        for position, call in self._hooks.models.calls.items():
            root = self.models[position]
            model = ShapeModel(root.module if isinstance(root, DistributedDataParallel) else root, mode).copy()
            with mode:
                exchange_activation_checkpointing(model, config)
            calls.append((model, resize_call(call, self._size, size, mode, self._device)))
        passes = trace_calls(calls, config, self._device, mode) + self._state
        update = sum(count_weights(self.models, self.optimizers)) + self._state
        return StepBytes(passes=passes, update=update, optimizer=self._state)
