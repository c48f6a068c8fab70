"""Tiny trainings whose gradients and data are written down: 62 samples, so that an epoch of 8 ends in a short batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

SAMPLES = 62
RATE, DECAY = 0.01, 0.8


def points(count: int = SAMPLES) -> TensorDataset:
    """Return `([4], [])`: points and a smooth function of them."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(count, 4, generator=generator)
    return TensorDataset(features, features.sin().sum(1) + 0.1 * torch.randn(count, generator=generator))


class Training:
    """Fits a smooth function by a perceptron."""

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        dataset: Callable[[], Dataset[Any]] = points,
    ) -> None:
        self.dropout, self.norm, self.train_dataset = dropout, norm, dataset

    def build_model(self) -> nn.Module:
        drop = self.dropout
        first = (nn.Linear(4, 32), self.norm(32), nn.Tanh(), nn.Dropout(drop))
        return nn.Sequential(*first, nn.Linear(32, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 1))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=RATE)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets = batch
        return F.mse_loss(model(features).squeeze(-1).float(), targets)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """The same points, with noise from torch's generator in each visit."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, target = points()[index]
        return features + torch.randn(4), target


class Stream(IterableDataset[Any]):
    """The same points, one after another."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points())


class Scheduled(Training):
    """The learning rate of the first layer falls with each step, that of the others stays."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        layers = list(model.children())
        first, others = layers[0].parameters(), [one for layer in layers[1:] for one in layer.parameters()]
        return SGD([{"params": first}, {"params": others, "lr": 0.05}], lr=RATE, momentum=0.9)

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, [lambda step: DECAY**step, lambda _step: 1.0])


class Clipped(Training):
    gradient_clip_norm = 0.05


class _Idle(SGD):
    """Has a step that is none of torch's, so that nothing is seen of it."""

    def __getattribute__(self, name: str) -> Any:
        return (lambda *_: None) if name == "step" else super().__getattribute__(name)


class NeverSteps(Training):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return _Idle(model.parameters(), lr=0.1)


class Overflows(Training):
    """Its gradients do not fit into any loss scale."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().compute_loss(model, batch) * 1e38


class Fails(Training):
    """Goes wrong after some calls."""

    def __init__(self, end: Callable[[], None], *, calls: int) -> None:
        super().__init__()
        self.end, self.calls = end, calls

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls -= 1
        if self.calls < 0:
            self.end()
        return super().compute_loss(model, batch)


def _raise() -> None:
    raise ValueError("the labels do not fit the points")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


plain = Training()
dropping = Training(dropout=0.4)
normed = Training(norm=nn.BatchNorm1d)
noisy = Training(dataset=Noisy)
noisy_dropping = Training(dataset=Noisy, dropout=0.4)
streamed = Training(dataset=Stream)
short = Training(dataset=lambda: points(20))
empty = Training(dataset=lambda: points(0))
scheduled = Scheduled()
clipped = Clipped()
never_steps = NeverSteps()
overflows = Overflows()
fails_at_once = Fails(_raise, calls=0)
fails_later = Fails(_raise, calls=8)
dies_later = Fails(_die, calls=8)
