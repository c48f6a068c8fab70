"""Trainings of which the gate can see nothing: their processes end, or their own gradients are no numbers."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from controls import Points
from torch import Tensor, nn


class Fragile(Points):
    """Ends its process in one way or another where it computes a loss."""

    knobs = {"fault": ("none", "raises", "out-of-memory", "killed")}
    knob_numerics = {"fault": "rounding"}

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        match self.fault:
            case "raises":
                raise RuntimeError("the kernel has no answer")
            case "out-of-memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(model, batch)


class Undefined(Points):
    """Has a parameter whose gradient is not a number, and whose value does not matter: the losses are all right."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.offset = nn.Parameter(torch.zeros(1))
        model.offset.register_hook(lambda gradient: gradient * torch.nan)
        return model

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().compute_loss(model, batch) + 0.0 * model.offset.nan_to_num().sum()


fragile = Fragile()
undefined = Undefined()
