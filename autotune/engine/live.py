"""A config applied to somebody's own model, optimizer and loader, in a process that runs already.

Only what the config changes is applied, in the order of `engine/loop.py` and by the same functions; the rest stays as
it was built. What a running process cannot change any more is left out, with a sentence on what to do instead.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from autotune.engine.activation_checkpointing import apply_activation_checkpointing, can_checkpoint
from autotune.engine.allocator import launch_environment
from autotune.engine.compilation import apply_compilation
from autotune.engine.dataloader import move_batch
from autotune.engine.hooks.iteration import OwnSettings, start_changed
from autotune.engine.hooks.loaders import LOADER_KNOBS, apply_loader_knobs
from autotune.engine.hooks.models import is_compiled
from autotune.engine.hooks.script import process_settings
from autotune.engine.memory_format import apply_memory_format, arrange_input
from autotune.engine.optimizer import apply_optimizer_implementation, is_fresh, read_optimizer_facts
from autotune.engine.precision import autocast
from autotune.records.config import SHARED_KNOBS, TrainConfig, changed_fields, is_user_knob

_BY_HAND: dict[str, Callable[[TrainConfig], str]] = {
    "micro_batch_size": lambda config: f"build the loader with batch_size={config.micro_batch_size}",
    "gradient_accumulation_steps": lambda config: (
        f"take an optimizer step once in {config.gradient_accumulation_steps} batches, each loss divided by that number"
    ),
    "learning_rate_scale": lambda config: f"multiply the learning rates by {config.learning_rate_scale!r}",
}
_ALLOCATORS: dict[str, dict[str, Any]] = {
    "host_allocator": {"device_allocator": "default"},
    "device_allocator": {"host_allocator": "default"},
}
"""Each with what has to be set for the other one not to count."""

_UNDONE = {"memory_format": "contiguous", "activation_checkpointing": "off", "compile_mode": "off"}
"""The model's knobs in the order in which they are applied, each with the value that a model has by being built so."""


@dataclass(frozen=True)
class Applied:
    """A training with a config's settings, as far as they could be applied.

    Attributes:
        model: that was given, changed in place; names of parameters stay.
        optimizer: that was given, changed in place; None without one.
        loader: a new one with the same samples in the same order; None without one.
        scaler: scales the loss where the settings ask for fp16; for any other precision it does nothing.
        config: the settings.
        changed: knobs that are applied.
        left_out: what could not be applied and what to do instead, one sentence each.
    """

    model: nn.Module
    optimizer: Optimizer | None
    loader: DataLoader[Any] | None
    scaler: torch.amp.GradScaler
    config: TrainConfig
    changed: tuple[str, ...]
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        """Return what is applied, and what is left out."""
        done = ", ".join(name.removeprefix("user_knobs.") for name in self.changed) or "nothing"
        left = f", {len(self.left_out)} left out: see left_out" if self.left_out else ""
        return f"<Applied: {done}{left}>"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return find_device(self.model)

    def settings(self) -> AbstractContextManager[None]:
        """Return the context of the whole loop: threads, matrix products, cuDNN's choice, the attention kernel."""
        return process_settings(self.config, self.changed)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass and the loss: the settings' precision, or nothing."""
        return autocast(self.config, self.device) if "precision" in self.changed else nullcontext()

    def place(self, batch: Any) -> Any:
        """Return a batch on the model's device, 4-d inputs in its layout."""

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return arrange_input(tensor.to(self.device, non_blocking=self.config.non_blocking), self.config)

        return move_batch(batch, place, self.device)


def apply_live(
    config: TrainConfig,
    baseline: TrainConfig,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: DataLoader[Any] | None = None,
    host_allocators: Mapping[str, str] | None = None,
) -> Applied:
    """Apply what a config changes to a training that has not begun.

    Args:
        config: the settings.
        baseline: those the training was built with.
        model: on its device.
        optimizer: over its parameters, before its first step.
        loader: of the training samples, before its first epoch.
        host_allocators: paths of malloc libraries by knob value, as the machine has them.
    """
    changed = changed_fields(config, baseline)
    left: dict[str, str] = {name: _BY_HAND[name](config) for name in changed if name in _BY_HAND}
    left |= {name: "set it in your own code" for name in changed if is_user_knob(name)}
    left |= {name: "set it where you share the model out over processes" for name in changed if name in SHARED_KNOBS}
    for name in (name for name in changed if name in _ALLOCATORS):
        reason = _find_environment(config.replace(**_ALLOCATORS[name]), host_allocators or {})
        left |= {name: reason} if reason else {}
    for name in (name for name in _UNDONE if name in changed):
        reason = _apply_to_model(name, model, config)
        left |= {name: reason} if reason else {}
    if "optimizer_implementation" in changed:
        reason = _apply_to_optimizer(optimizer, config, find_device(model))
        left |= {"optimizer_implementation": reason} if reason else {}
    if LOADER_KNOBS & {*changed}:
        reason = _explain_loader(loader)
        left |= {name: reason for name in changed if name in LOADER_KNOBS} if reason else {}
        if loader is not None and not reason:
            loader = rebuild_loader(loader, config, frozenset(changed))
    scales = config.precision == "fp16" and "precision" in changed
    return Applied(
        model=model,
        optimizer=optimizer,
        loader=loader,
        scaler=torch.amp.GradScaler(find_device(model).type, enabled=scales),
        config=config,
        changed=tuple(name for name in changed if name not in left),
        left_out=tuple(f"{name.removeprefix('user_knobs.')}: {left[name]}" for name in changed if name in left),
    )


def find_device(model: nn.Module) -> torch.device:
    """Return where a model's first parameter is; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def rebuild_loader(loader: DataLoader[Any], config: TrainConfig, changed: frozenset[str]) -> DataLoader[Any]:
    """Return a loader like another one with the changed loader knobs; it draws the random numbers of the other one.

    Args:
        loader: of a map-style dataset, not iterated yet.
        config: the settings.
        changed: knobs to set.
    """
    kind = type(loader)
    own = OwnSettings(loader.num_workers, loader.persistent_workers)
    rebuilt = copy.copy(loader)
    object.__setattr__(rebuilt, "_iterator", None)  # workers that the other one keeps are its own
    apply_loader_knobs(rebuilt, config, changed)

    def start(self: DataLoader[Any]) -> Any:
        return start_changed(self, own, kind.__iter__)

    object.__setattr__(rebuilt, "__class__", type(kind.__name__, (kind,), {"__iter__": start}))
    return rebuilt


def _explain_loader(loader: DataLoader[Any] | None) -> str:
    """Return why a loader's settings cannot be changed, and what to do; empty where they can."""
    if loader is None:
        return "no loader was given"
    if isinstance(loader.dataset, IterableDataset):
        return "workers would repeat the samples of an iterable dataset: set it where you build the loader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in a way of its own: set it where you build the loader"
    return ""


def _apply_to_model(name: str, model: nn.Module, config: TrainConfig) -> str:
    """Apply a knob of the model; return why it cannot be, empty where it is."""
    if getattr(config, name) == _UNDONE[name]:
        return "leave it out where you build the model"
    if name == "activation_checkpointing":
        if not can_checkpoint(model):
            return "the model has no repeated blocks to recompute"
        apply_activation_checkpointing(model, config)
    elif name == "memory_format":
        apply_memory_format(model, config)
    else:
        if is_compiled(model):
            return "the model is compiled already: leave that out where you build it"
        apply_compilation(model, config)
    return ""


def _apply_to_optimizer(optimizer: Optimizer | None, config: TrainConfig, device: torch.device) -> str:
    """Switch an optimizer to the config's implementation; return why it cannot be, empty where it is."""
    wanted = config.optimizer_implementation
    if optimizer is None:
        return "no optimizer was given"
    if wanted is None:
        return "build the optimizer without foreach= and fused="
    if not is_fresh(optimizer):
        return "the optimizer has taken steps already: apply the settings before its first one"
    facts = read_optimizer_facts(optimizer, device)
    if wanted not in facts.implementations:
        return facts.reason or f"{facts.name} has no {wanted} implementation for {device.type}"
    apply_optimizer_implementation(optimizer, config)
    return ""


def _find_environment(config: TrainConfig, host_allocators: Mapping[str, str]) -> str:
    """Return what to export before the process starts; empty where it was started so."""
    if config.host_allocator == config.device_allocator == "default":
        return "start the process without the allocator that it was started with"
    try:
        needed = launch_environment(config, host_allocators)
    except ValueError as error:
        return str(error)
    missing = {name: value for name, value in needed.items() if os.environ.get(name) != value}
    if not missing:
        return ""
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in missing.items())
    return f"a process has its allocators from its start: export {words}, and start it again"
