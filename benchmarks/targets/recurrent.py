"""The addition problem (Hochreiter & Schmidhuber 1997) by an LSTM cell that is called step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import Dataset, TensorDataset

from autotune import TrainConfig

LENGTH = 40
SEQUENCES = 8192
UNITS = 64


class AdditionWorkload:
    """Adds the two marked numbers of a sequence."""

    baseline = TrainConfig(micro_batch_size=32)

    def build_model(self) -> nn.Module:
        """Return the net."""
        return StepwiseLstm()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return its optimizer."""
        return Adam(model.parameters(), lr=1e-3)

    def train_dataset(self) -> Dataset[tuple[Tensor, ...]]:
        """Return sequences [length, 2] of numbers and marks, and the sum of the two that are marked [1]."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.rand(SEQUENCES, LENGTH, generator=generator)
        halves = torch.randint(LENGTH // 2, (SEQUENCES, 2), generator=generator)
        places = halves + torch.tensor([0, LENGTH // 2])
        marks = torch.zeros(SEQUENCES, LENGTH).scatter_(1, places, 1.0)
        sums = (numbers * marks).sum(dim=1, keepdim=True)
        return TensorDataset(torch.stack([numbers, marks], dim=2), sums)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean squared error of the sums."""
        sequences, sums = batch
        return F.mse_loss(model(sequences), sums)


class StepwiseLstm(nn.Module):
    """An LSTM cell, called once a step, and a linear read-out of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, UNITS)
        self.read_out = nn.Linear(UNITS, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the sums [batch, 1] of sequences [batch, length, 2]."""
        state = None
        for step in sequences.unbind(dim=1):
            state = self.cell(step, state)
        assert state is not None
        sums: Tensor = self.read_out(state[0])
        return sums


workload = AdditionWorkload()
