"""Knob `memory_format`: the layout of 4-d weights and inputs."""

from __future__ import annotations

import torch
from torch import nn

from autotune.records.config import TrainConfig


def apply_memory_format(model: nn.Module, config: TrainConfig) -> None:
    """Lay the model's 4-d parameters and buffers out as the config says, in place."""
    if config.memory_format != "channels_last":
        return
    # Not `model.to(memory_format=...)`, which fails on a 5-d buffer.
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def arrange_input(tensor: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    """Return a floating 4-d input `[batch, channels, height, width]` in the model's layout; others unchanged."""
    if config.memory_format == "channels_last" and tensor.ndim == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def has_4d_convolution(model: nn.Module) -> bool:
    """Return whether the model has a 2-d convolution, the only layer that gains from channels_last."""
    return any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())
