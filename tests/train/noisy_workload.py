"""A tiny training with every kind of state a resume must bring back: dropout, augmentation, momentum, a schedule."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from autotune.records.config import TrainConfig

SAMPLES = 44
"""Not a multiple of any batch size used, so that each epoch ends in a short batch."""


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1.0, 1.0, 6) * (index % 5 - 2)
        noise = torch.randn(6) + float(np.random.standard_normal()) + random.gauss(0.0, 1.0)
        return x + 0.1 * noise, x[:1]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        for index in range(SAMPLES):
            x = torch.full((6,), float(index % 5))
            yield x, x[:1]


class Noisy:
    baseline = TrainConfig(micro_batch_size=8, num_threads=1)
    metric = ("error", "minimize")
    gradient_clip_norm = 1.0
    pause_seconds = 0.0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)

    def train_dataset(self) -> Dataset[Any]:
        return Augmented()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.pause_seconds)
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        # An evaluation may draw random numbers too; the training must not notice.
        x = torch.linspace(-1.0, 1.0, 6).repeat(3, 1) + 0.0 * torch.randn(3, 6)
        return float(nn.functional.mse_loss(model(x.to(device)), x[:, :1].to(device)))


class WithMomentum(Noisy):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return StepLR(optimizer, step_size=3, gamma=0.5)


class Collating(Noisy):
    """Draws when it merges samples; without workers that happens in the training's own process."""

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + torch.randn(()) * float(np.random.standard_normal()), y


class Unjudged(Noisy):
    evaluate = None  # type: ignore[assignment]


class Slow(Noisy):
    pause_seconds = 0.03


class Streaming(Noisy):
    def train_dataset(self) -> Dataset[Any]:
        return Stream()


class Diverging(Noisy):
    calls = 0

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().compute_loss(model, batch) * (float("nan") if self.calls > 8 else 1.0)


class Failing(Noisy):
    calls = 0

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise FileNotFoundError(2, "No such file or directory", "labels.csv")
        return super().compute_loss(model, batch)


class EvaluatesForLong(Noisy):
    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        time.sleep(240.0)
        return 0.0


class LosesItsDevice(Noisy):
    """Its device answers nothing any more, once in its life."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        mark = Path("device-lost")
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 9 and not mark.exists():
            mark.touch()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().compute_loss(model, batch)


class WithoutScore(Noisy):
    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        return float("nan")


class TwiceJudged(Noisy):
    metric = None  # type: ignore[assignment]
    metrics = {"error": "minimize", "undefined": "maximize", "size": "minimize"}

    def evaluate(self, model: nn.Module, device: torch.device) -> Any:
        size = sum(parameter.abs().sum() for parameter in model.parameters())
        return {"error": super().evaluate(model, device), "undefined": float("nan"), "size": size}


class PrintsEnvironment(Noisy):
    def build_model(self) -> nn.Module:
        print({name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}, flush=True)
        return super().build_model()


class _LosesItsWorkers(Augmented):
    """Its workers end as if the whole process group had been told to, once the sample after the mark is asked for."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if get_worker_info() is not None and Path(os.environ.get("NOISY_FOLDER", "."), "lose-workers").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


class LosesItsWorkers(Noisy):
    def train_dataset(self) -> Dataset[Any]:
        return _LosesItsWorkers()


class LosesItsWorkersComputing(Noisy):
    """Its workers are killed in the middle of a step, when random numbers have been drawn for it already."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        if Path(os.environ.get("NOISY_FOLDER", "."), "lose-workers").exists():
            for worker in multiprocessing.active_children():
                worker.kill()
            time.sleep(0.2)  # here PyTorch's handler of SIGCHLD would raise
        return loss


class EvaluatesWithWorkers(Noisy):
    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        return sum(float(model(x).mean()) for x, _ in DataLoader(_LosesItsWorkers(), num_workers=1))


noisy = Noisy()
with_momentum = WithMomentum()
collating = Collating()
unjudged = Unjudged()
slow = Slow()
streaming = Streaming()
diverging = Diverging()
failing = Failing()
evaluates_for_long = EvaluatesForLong()
loses_its_device = LosesItsDevice()
without_score = WithoutScore()
twice_judged = TwiceJudged()
prints_environment = PrintsEnvironment()
loses_its_workers = LosesItsWorkers()
loses_its_workers_computing = LosesItsWorkersComputing()
evaluates_with_workers = EvaluatesWithWorkers()
