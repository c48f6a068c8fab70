"""Trainings whose limit is known because it was planted."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autotune import TrainConfig


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Random rows; `seconds` of sleep and `work` of computation are what a sample costs."""

    def __init__(self, width: int, *, count: int = 4096, seconds: float = 0.0, work: int = 0) -> None:
        self.rows = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
        self.count, self.seconds, self.work = count, seconds, work

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index % 64]
        if self.seconds:
            time.sleep(self.seconds)
        if self.work:
            sum(value * value for value in range(self.work))
        return row, row.mean()


class Planted:
    """A workload around one limit."""

    width, batch, optimizer = 64, 32, torch.optim.SGD
    seconds, work = 0.0, 0

    def __init__(self) -> None:
        self.baseline = TrainConfig(micro_batch_size=self.batch)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]

    def train_dataset(self) -> Dataset[Any]:
        return Rows(self.width, seconds=self.seconds, work=self.work)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(model(rows).flatten(), targets)


class SlowDataset(Planted):
    """Samples that cost far more than the model."""

    work = 20_000


class SleepingDataset(Planted):
    """Samples that wait, as for a remote disk."""

    seconds = 0.001


class TinyOperations(Planted):
    """Hundreds of operations on eight numbers."""

    width, batch = 8, 4

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(80):
            layers += [nn.Linear(8, 8), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(8, 1))


class BigProducts(Planted):
    """Large matrix products."""

    width, batch = 1024, 512

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))


class Elementwise(nn.Module):
    """One small product and a chain of elementwise operations on large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16_384))
        self.last = nn.Linear(16_384, 1)

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows * self.scale
        for _ in range(12):
            wide = wide * 0.999 + 0.001
        return self.last(wide)


class MemoryTraffic(Planted):
    """Memory traffic without arithmetic to speak of."""

    width, batch = 16_384, 256

    def build_model(self) -> nn.Module:
        return Elementwise()


class HiddenSync(BigProducts):
    """Asks for values in every step."""

    batch = 128

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        if loss.item() != loss.item():
            raise RuntimeError("not a number")
        return loss


class BigOptimizer(Planted):
    """An embedding of which a step uses next to nothing and the optimizer walks everything."""

    optimizer = torch.optim.AdamW

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(200_000, 64), "last": nn.Linear(64, 1)})

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        rows, targets = batch
        parts: Any = model
        indices = (rows[:, 0].abs() * 1000).long()
        return nn.functional.mse_loss(parts["last"](parts["table"](indices)).flatten(), targets)


class ThinProducts(Planted):
    """Products of large matrices with single rows: what they cost is reading the matrices."""

    width, batch = 4096, 1

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1))


slow_dataset = SlowDataset()
sleeping_dataset = SleepingDataset()
tiny_operations = TinyOperations()
big_products = BigProducts()
memory_traffic = MemoryTraffic()
hidden_sync = HiddenSync()
big_optimizer = BigOptimizer()
thin_products = ThinProducts()

EXPECTED = {
    "slow_dataset": "input",
    "sleeping_dataset": "input",
    "tiny_operations": "launch",
    "big_products": "compute",
    "memory_traffic": "bandwidth",
    "hidden_sync": "host-syncs",
    "big_optimizer": "bandwidth",
    "thin_products": "bandwidth",
}
"""The limit of each; `host-syncs` is a trouble, not a limit."""
