"""How much memory a step needs, from shapes alone: the step itself runs, on tensors that hold no data.

    model ── copied without data ── one step: forward, backward, optimizer ── every storage followed ── two peaks

`FakeTensorMode` gives each operation's result its shape and no memory, so a step takes a fraction of a second at any
micro batch size. `PeakWatch` adds up the storages that are alive. It finds the bytes that PyTorch's own
`torch.distributed._tools.mem_tracker.MemTracker` finds, in a third of the time, and needs no module hooks. What an
operation allocates inside of itself, and what an allocator wastes, is not in the shapes: a real step has to tell.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from autotune.engine.activation_checkpointing import apply_activation_checkpointing
from autotune.engine.dataloader import move_batch
from autotune.engine.loop import Training
from autotune.engine.optimizer import apply_optimizer_implementation
from autotune.engine.precision import autocast
from autotune.engine.windows import ResidentWindows, Window
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload

TRACED = (2, 8)
"""Micro batches whose shapes are followed, as multiples of the baseline's."""


@dataclass(frozen=True)
class StepBytes:
    """What the tensors of one optimizer step take on the device, in bytes.

    Attributes:
        passes: peak of forward and backward passes, weights and optimizer state included.
        update: peak while the optimizer steps; 0 when it was left out.
        optimizer: its state.
    """

    passes: int
    update: int
    optimizer: int

    @property
    def peak(self) -> int:
        """Of the whole step."""
        return max(self.passes, self.update)


class PeakWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages on a kind of device that are alive, each once.

    Attributes:
        alive_bytes: now.
        peak_bytes: the most since `restart`.
    """

    def __init__(self, device: torch.device, existing: Iterable[Any] = ()) -> None:
        """Begin with the tensors that exist already, in any nesting of containers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive_bytes: int = 0
        self.peak_bytes: int = 0
        self._kind = device.type
        self._seen: Any = WeakIdKeyDictionary()
        self._take(list_tensors(list(existing)))

    def restart(self) -> int:
        """Return the peak and begin a new one."""
        peak, self.peak_bytes = self.peak_bytes, self.alive_bytes
        return peak

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self._take(tree_leaves(results))
        return results

    def _take(self, results: list[Any]) -> None:
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.device.type == self._kind:
                self._follow(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _follow(self, storage: Any) -> None:
        held, size = self._seen.get(storage), storage.nbytes()
        if held is None:
            held = self._seen[storage] = [0]
            weakref.finalize(storage, self._drop, held)
        self.alive_bytes += size - held[0]  # a storage may be resized
        held[0] = size

    def _drop(self, held: list[int]) -> None:
        self.alive_bytes -= held[0]


class ShapeTraining(Training):
    """A training on a model without data, that takes the very steps a real one does."""

    def __init__(
        self, loaded: LoadedWorkload, config: TrainConfig, device: torch.device, model: nn.Module, *, updates: bool
    ) -> None:
        """Prepare the model, which is on the device already; its optimizer steps if it `updates`.

        Raises:
            ValueError: it has nothing to checkpoint.
        """
        # Not the base's own start: it would seed, build the model with its data, and open the dataset. The loss is not
        # scaled, since a scaler reads its overflow flag, and there is none.
        self._loaded, self.config, self.device, self._updates = loaded, config, device, updates
        self.model, self.averaged, self.scheduler, self.scaler = model, None, None, None
        apply_activation_checkpointing(model, config)
        self.optimizer = loaded.workload.build_optimizer(model)
        apply_optimizer_implementation(self.optimizer, config)
        model.train()

    def _update_weights(self) -> None:
        if self._updates:
            super()._update_weights()


class ShapeModel:
    """Makes trainings on copies of a model that hold no data.

    Args:
        model: only read.
        mode: of the copies; None for one of its own.

    Attributes:
        mode: of the copies; whatever is done with them is done inside.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self._model = model

    def copy(self) -> nn.Module:
        """Return a copy to change and to train, without gradients."""
        with FakeCopyMode(self.mode):
            copied = copy.deepcopy(self._model)
        copied.zero_grad(set_to_none=True)
        return copied

    def empty(self, value: Any) -> Any:
        """Return a batch whose tensors hold no data."""
        return move_batch(value, lambda tensor: self.mode.from_tensor(tensor.detach(), static_shapes=True))

    def trace(
        self, loaded: LoadedWorkload, config: TrainConfig, device: torch.device, batch: Any, *, updates: bool = False
    ) -> StepBytes:
        """Return what one step on a batch takes.

        Args:
            loaded: gives the optimizer and the loss.
            config: its settings; the model is not compiled.
            device: where the model is.
            batch: real tensors on the host.
            updates: take the optimizer's step as well, without which its state is not seen.

        Raises:
            Exception: whatever the workload's code cannot do on tensors without data.
        """
        empty, model = self.empty(batch), self.copy()
        with self.mode:
            training = ShapeTraining(loaded, config, device, model, updates=updates)
            return trace_step(training, empty, device, micro_batches=count_traced(config))


def trace_step(training: Training, batch: Any, device: torch.device, *, micro_batches: int) -> StepBytes:
    """Return what one step of a training takes, by following its storages."""
    model, optimizer = training.model, training.optimizer
    window = Window(batches=[batch] * micro_batches, counts=[1] * micro_batches, ends_epoch=False)
    training.windows = ResidentWindows(window, window.batches)
    before = state_bytes(optimizer)
    existing = (list_weights([model]), state_tensors(optimizer), batch)
    peaks = {"backward": 0, "optimizer": 0}
    with PeakWatch(device, existing) as watch:

        def note(phase: str) -> None:
            if phase in peaks:
                peaks[phase] = max(peaks[phase], watch.restart())

        training.step(note)
    state = state_bytes(optimizer)
    # A fresh optimizer makes its state in its first step; in the passes of every later one it is there.
    return StepBytes(passes=peaks["backward"] + state - before, update=peaks["optimizer"], optimizer=state)


def trace_calls(
    models: list[tuple[nn.Module, Any]], config: TrainConfig, device: torch.device, mode: FakeTensorMode
) -> int:
    """Return the peak of forward and backward passes of models without data, one after another, results kept.

    Args:
        models: each with the arguments of a call, `(args, kwargs)`.
        config: its precision, and whether gradients are there before the passes.
        device: where the models are.
        mode: of the models.

    Raises:
        Exception: whatever the models' code cannot do on tensors without data.
    """
    existing = [(list_weights([model]), call) for model, call in models]
    with mode, PeakWatch(device, existing) as watch:
        for _ in range(count_traced(config)):
            results = []
            for model, (args, kwargs) in models:
                with autocast(config, device):
                    results.append(model(*args, **kwargs))
            sum_outputs(results).backward()  # type: ignore[no-untyped-call]
            del results
        peak: int = watch.restart()
        return peak


def count_traced(config: TrainConfig) -> int:
    """Return how many micro batches show a step's peak: from the second on, gradients are there beforehand."""
    return min(2, config.gradient_accumulation_steps)


def resize_call(call: Any, own_size: int, size: int, mode: FakeTensorMode, device: torch.device) -> Any:
    """Return a call's arguments for another micro batch size, without data on the device.

    Args:
        call: its arguments; tensors with as many rows as the script's micro batch has samples are resized.
        own_size: the script's micro batch.
        size: wanted.
        mode: of the models.
        device: where they are.
    """

    def resize(tensor: Tensor) -> Tensor:
        leads = tensor.ndim > 0 and tensor.shape[0] == own_size
        shape = (size, *tensor.shape[1:]) if leads else tuple(tensor.shape)
        return torch.empty(shape, dtype=tensor.dtype, device=device)

    with mode:
        return move_batch(call, resize)


def sum_outputs(results: Any) -> Tensor:
    """Return the sum of all outputs that depend on parameters: the loss of a script is not to be had."""
    return torch.stack([one.sum().float() for one in list_tensors(results) if one.requires_grad]).sum()


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a batch, in any nesting that a batch may have."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    move_batch(value, note)
    return found


def list_weights(models: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of models."""
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]


def count_weights(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> tuple[int, int]:
    """Return the bytes of models' weights, and of the gradients of all that optimizers step.

    Where there is no optimizer, and weights are changed by hand, each that may be trained counts.
    """
    stepped = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    if not stepped:
        stepped = {id(p): p for model in models for p in model.parameters() if p.requires_grad}
    return tensor_bytes(list_weights(models)), sum(p.numel() * p.element_size() for p in stepped.values())


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors an optimizer keeps."""
    return [value for state in optimizer.state.values() for value in tree_leaves(state) if isinstance(value, Tensor)]


def state_bytes(optimizer: Optimizer) -> int:
    """Return what an optimizer keeps."""
    return tensor_bytes(state_tensors(optimizer))


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return what tensors take, those that share a storage counted once; of sparse ones their indices and values."""
    parts = (part for tensor in tensors if isinstance(tensor, Tensor) for part in _list_parts(tensor))
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


def _list_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return what holds a tensor's data; nothing for layouts that do not tell."""
    if tensor.layout is torch.strided:
        return (tensor,)
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()
