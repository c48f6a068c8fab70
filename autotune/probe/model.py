"""What models and optimizers are, as far as knobs depend on it; of a workload's or a script's, which has any number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from autotune.engine.activation_checkpointing import find_repeated_blocks
from autotune.engine.memory_format import has_4d_convolution
from autotune.engine.operations import Operations
from autotune.engine.optimizer import current_implementation, read_optimizer_facts
from autotune.records.facts import ModelFacts, OptimizerFacts


def describe_models(
    models: Sequence[nn.Module],
    trainable: Iterable[nn.Parameter],
    operations: Operations,
    *,
    flops_per_sample: float | None,
) -> ModelFacts:
    """Return what models are made of.

    Args:
        models: called one by one in a training.
        trainable: their parameters that are trained.
        operations: seen in a training call of each.
        flops_per_sample: forward and backward; None when not countable.
    """
    parameters = list(trainable)
    return ModelFacts(
        parameter_count=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        has_batch_norm=any(map(keeps_statistics, models)),
        has_4d_convolution=any(map(has_4d_convolution, models)),
        calls_attention=operations.attention,
        checkpointable_blocks=sum(len(find_repeated_blocks(model)) for model in models),
        flops_per_sample=flops_per_sample,
        draws_random=operations.draws_random,
    )


def keeps_statistics(model: nn.Module) -> bool:
    """Return whether each training call changes what a layer keeps: of smaller batches there are more calls.

    Of a model in training mode, layers that it holds in eval mode change nothing.
    """
    return any(_keeps(one) for one in model.modules() if one.training or not model.training)


def _keeps(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    is_spectral = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return is_spectral or isinstance(module, nn.modules.batchnorm._BatchNorm | _SpectralNorm)


def describe_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> OptimizerFacts:
    """Return what all optimizers of a training let be changed."""
    if not optimizers:
        return OptimizerFacts(name="none", implementations=(), reason="the script steps without an optimizer object")
    found = [read_optimizer_facts(optimizer, device) for optimizer in optimizers]
    common = [name for name in found[0].implementations if all(name in one.implementations for one in found)]
    names = " and ".join(dict.fromkeys(one.name for one in found))
    reason = next((one.reason for one in found if one.reason), "")
    return OptimizerFacts(name=names, implementations=tuple(common), reason=reason)


def read_implementation(optimizers: Sequence[Optimizer], device: torch.device) -> str | None:
    """Return the implementation that all optimizers have; None where they differ, or there are none."""
    found = {current_implementation(optimizer, device) for optimizer in optimizers}
    return found.pop() if len(found) == 1 else None


def can_checkpoint(model: ModelFacts) -> bool:
    """Return whether activation checkpointing leaves this model what it is."""
    return model.checkpointable_blocks > 0 and not model.has_batch_norm
