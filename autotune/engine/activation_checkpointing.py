"""Knob `activation_checkpointing`: recompute activations of repeated blocks in the backward pass.

`full` keeps only each block's input. `selective` also keeps the results of matrix products, attention and
convolutions, which are dear to recompute, and recomputes the rest (PyTorch's selective checkpoint policy). The
random state is kept, so dropout masks are the same when recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autotune.records.config import TrainConfig

_ATEN = torch.ops.aten
_DEAR = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


_OWN_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of modules that checkpoint by themselves: Hugging Face's and timm's."""


def apply_activation_checkpointing(model: nn.Module, config: TrainConfig) -> None:
    """Checkpoint the model's repeated blocks in place; parameter names do not change.

    Raises:
        ValueError: the model has neither repeated blocks nor a switch of its own.
    """
    if config.activation_checkpointing == "off":
        return
    switch = find_switch(model)
    if switch is not None and config.activation_checkpointing == "full":
        switch()
        return
    blocks = find_repeated_blocks(model)
    if not blocks:
        raise ValueError("activation_checkpointing: the model has no repeated blocks to checkpoint")
    for block in blocks:
        _wrap_forward(block, selective=config.activation_checkpointing == "selective")


def checkpoints_itself(model: nn.Module) -> bool:
    """Return whether a model was told to checkpoint by flags of its own."""
    return any(True for _ in _list_own_flags(model))


def exchange_activation_checkpointing(model: nn.Module, config: TrainConfig) -> None:
    """Put the config's checkpointing in the place of what a model does by flags of its own; `full` keeps that.

    A model that has nothing to checkpoint is left without: of several, some may have no blocks.
    """
    if config.activation_checkpointing == "full" and checkpoints_itself(model):
        return
    for module, name in _list_own_flags(model):
        setattr(module, name, False)
    if can_checkpoint(model):
        apply_activation_checkpointing(model, config)


def _list_own_flags(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return ((one, name) for one in model.modules() for name in _OWN_FLAGS if getattr(one, name, False) is True)


def can_checkpoint(model: nn.Module) -> bool:
    """Return whether the model has repeated blocks, or a switch of its own."""
    return find_switch(model) is not None or bool(find_repeated_blocks(model))


def find_switch(model: nn.Module) -> Callable[[], object] | None:
    """Return the model's own switch, as Hugging Face's models have under one name or the other; None without."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        switch: Callable[[], object] | None = getattr(model, name, None)
        if callable(switch):
            return switch
    return None


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks to checkpoint: outermost runs of two or more same-class, parametrised children of a list.

    Only `ModuleList` and `Sequential` are searched, the containers models keep their repeated layers in.
    """
    blocks: list[nn.Module] = []
    pending = list(model.children())
    if isinstance(model, nn.ModuleList | nn.Sequential):
        pending = [model]
    while pending:
        module = pending.pop(0)
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and _is_repetition(children):
            blocks.extend(children)
        else:
            pending.extend(children)
    return blocks


def _is_repetition(children: list[nn.Module]) -> bool:
    if len(children) < 2 or len({type(child) for child in children}) > 1:
        return False
    # A leaf such as Linear holds no activations worth recomputing between its input and its output.
    return all(any(child.children()) and any(True for _ in child.parameters()) for child in children)


def _wrap_forward(block: nn.Module, *, selective: bool) -> None:
    contexts: dict[str, Any] = {}
    if selective:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_dear)
    # A partial of a bound method, not a closure: a deep copy of the model (an average of weights) then runs its own.
    kind = partial if "forward" in vars(block) else _Checkpointed
    block.forward = kind(_run_block, block, block.forward, contexts)


class _Checkpointed(partial[Any]):
    """The forward of a block whose activations are recomputed; a copy and a pickle of the block have its plain one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.args[0], "forward")


def _run_block(block: nn.Module, plain: Callable[..., Any], contexts: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, **contexts, **kwargs)


def _keep_dear(_context: Any, operator: Callable[..., Any], *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
