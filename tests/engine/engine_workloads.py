"""Small trainings that the engine is tried on; all deterministic on a CPU with one thread."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from autotune.engine.dataloader import find_random_sources
from autotune.engine.loop import Training, backend_settings
from autotune.records import TrainConfig
from autotune.targets.workload import LoadedWorkload, check_workload

CPU = torch.device("cpu")


def load(workload: Any) -> LoadedWorkload:
    return check_workload(workload, label="toy.py:workload", fingerprint="0" * 12)


def build(workload: Any, config: TrainConfig, *, seed: int = 0) -> Training:
    sources = find_random_sources(workload.train_dataset())
    return Training(load(workload), config, device=CPU, seed=seed, random_sources=sources)


def train(workload: Any, config: TrainConfig, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step and the weights after the last one."""
    with backend_settings(config):
        training = build(workload, config)
        losses = [float(training.step().loss) for _ in range(steps)]
    return losses, {name: value.clone() for name, value in training.model.state_dict().items()}


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images `[3, 8, 8]` that every generator has a hand in: noise by torch, a shift by numpy, a flip by random."""

    def __init__(self, count: int = 22) -> None:
        generator = torch.Generator().manual_seed(7)
        self._images = torch.randn(count, 3, 8, 8, generator=generator)
        self._labels = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index] + 0.1 * torch.randn(3, 8, 8)
        image = image.roll(int(np.random.randint(0, 3)), dims=-1)
        return (image.flip(-1) if random.random() < 0.5 else image), self._labels[index]


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.attention_in(self.norm(tokens)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
        tokens = tokens + self.dropout(attended)
        return tokens + self.dropout(self.perceptron(tokens))


class Patches(nn.Module):
    """A convolution, two blocks and a linear layer: `[batch, 3, 8, 8]` -> logits `[batch, 5]`."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, kernel_size=2, stride=2)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.convolution(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(dim=1))


class PatchWorkload:
    """Classifies augmented images; every knob has something to act on."""

    def __init__(self, *, dropout: float = 0.0, samples: int = 22, optimizer: dict[str, Any] | None = None) -> None:
        self.dropout = dropout
        self.samples = samples
        self.optimizer = optimizer or {}

    def build_model(self) -> nn.Module:
        return Patches(self.dropout)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, **self.optimizer)

    def train_dataset(self) -> Dataset[Any]:
        return AugmentedImages(self.samples)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Pairs `([4], [])` with a linear relation; sample i can be told by its first feature, i / 100."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(count, 4, generator=generator)
        self.features[:, 0] = torch.arange(count) / 100
        self.targets = self.features @ torch.tensor([1.0, 0.2, -0.4, 0.1])

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


class NumberStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same pairs, one after another."""

    def __init__(self, count: int) -> None:
        self._numbers = Numbers(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._numbers[index] for index in range(len(self._numbers)))


class LineWorkload:
    """Fits `Numbers` by a small network under SGD, in order."""

    shuffle = False

    def __init__(self, samples: int = 24, *, learning_rate: float = 1e-3) -> None:
        self.samples = samples
        self.learning_rate = learning_rate

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def train_dataset(self) -> Any:
        return Numbers(self.samples)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features, targets = batch
        return F.mse_loss(model(features).squeeze(-1).float(), targets)
