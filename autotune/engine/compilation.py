"""Knob `compile_mode`: torch.compile, in place, so that parameter names and the object stay the user's."""

from __future__ import annotations

import torch
from torch import nn

from autotune.records.config import TrainConfig


def apply_compilation(model: nn.Module, config: TrainConfig) -> None:
    """Compile calls of the model in place; the work happens in its first calls."""
    if config.compile_mode == "off":
        return
    model.compile(mode=None if config.compile_mode == "default" else config.compile_mode)


def compiled_graph_count() -> int:
    """Return how many graphs Dynamo has compiled in this process; it stands still in a steady state."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
