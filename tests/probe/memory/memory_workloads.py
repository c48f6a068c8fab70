"""Workloads whose memory is looked at, each a Transformer block or two; what they do to be hard to follow differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import IterableDataset, TensorDataset

from autotune.records import TrainConfig
from autotune.targets.workload import LoadedWorkload, check_workload

WIDTH, LENGTH, WORDS = 64, 32, 50


class Encoder(nn.Module):
    """Two Transformer blocks over tokens."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Texts:
    """Predicts tokens of random text."""

    baseline = TrainConfig(micro_batch_size=8, num_threads=1)

    def __init__(self, samples: int = 40) -> None:
        self.samples = samples

    def build_model(self) -> nn.Module:
        return Encoder()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3)

    def train_dataset(self) -> Any:
        return TensorDataset(torch.randint(WORDS, (self.samples, LENGTH), generator=torch.Generator().manual_seed(0)))

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[0].flatten())


class Counted(Texts):
    """Returns the loss with its count, and accumulates."""

    baseline = Texts.baseline.replace(gradient_accumulation_steps=4)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        return super().compute_loss(model, batch), batch[0].numel()


class Reading(Texts):
    """Reads its loss in the middle of a step."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        return loss * 2.0 if loss.item() < 0.0 else loss


class Numpy(Texts):
    """Weighs its loss by numpy."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        return super().compute_loss(model, batch) * float(np.ones(3).mean() + 0 * batch[0].numpy().mean())


class Chosen(Texts):
    """Takes as many tokens as there are, known from their values."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        kept = (batch[0] > 0).flatten().nonzero()[:, 0]
        return F.cross_entropy(model(batch[0]).flatten(0, 1)[kept], batch[0].flatten()[kept])


class OnlyReal(Texts):
    """Refuses tensors without data."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        if type(batch[0]) is not Tensor:
            raise RuntimeError("no data\nin here")
        return super().compute_loss(model, batch)


class Broken(Texts):
    """Cannot take a step at all."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("out of\norder")


class Noting(Texts):
    """Keeps something of each batch on itself."""

    last: Tensor | None = None

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        self.last = batch[0]
        return super().compute_loss(model, batch)


class _Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(LENGTH, dtype=torch.int64)


class Endless(Texts):
    """Reads a stream without end."""

    def train_dataset(self) -> Any:
        return _Stream()

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        return super().compute_loss(model, (batch,))


def load(workload: Any) -> LoadedWorkload:
    """Return a checked workload."""
    return check_workload(workload, label="toy.py:workload", fingerprint="0" * 12)


large = Texts()
large.baseline = TrainConfig(micro_batch_size=32, num_threads=1)
