"""Tiny trainings for whole searches: a step takes next to nothing, and one knob of their own is known to win."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from autotune.measure import throughput, warmup
from autotune.records.config import TrainConfig

PAUSE_SECONDS = 0.004


def make_points(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(samples, 8, generator=generator)
    return TensorDataset(points, points.sum(dim=1, keepdim=True))


class Tiny:
    """Its own settings wait in each step; without the wait it is several times as fast, and the same training."""

    baseline = TrainConfig(micro_batch_size=16, num_threads=1)
    knobs: dict[str, tuple[Any, ...]] = {"pause": (PAUSE_SECONDS, 0.0)}
    knob_numerics = {"pause": "exact"}
    pause = PAUSE_SECONDS
    samples = 1024

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2)

    def train_dataset(self) -> Dataset[Any]:
        return make_points(self.samples)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.pause)
        points, sums = batch
        return nn.functional.mse_loss(model(points), sums)


class Brief(Tiny):
    """Has settings without end, and is timed in a moment: what a trial takes is its process and its records."""

    baseline = TrainConfig(micro_batch_size=64, num_threads=1)
    knobs = {"placebo": tuple(range(2000))}
    knob_numerics = {"placebo": "exact"}
    pause = 0.0
    placebo = 0

    def build_model(self) -> nn.Module:
        throughput.LEAST_BLOCK_SECONDS, warmup.SPAN_SECONDS = 0.01, 0.002
        return super().build_model()


class Long(Tiny):
    """Takes thousands of steps a second; an epoch, and a checkpoint, is a thousand of them."""

    knobs = {}
    knob_numerics = {}
    pause = 0.0
    samples = 16_000

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Few(Tiny):
    samples = 3


class Empty(Tiny):
    samples = 0


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_points(200))


class Streaming(Tiny):
    def train_dataset(self) -> Dataset[Any]:
        return _Stream()


class BreaksWithWorkers(Tiny):
    """Works by itself; its samples cannot be made in a loader worker."""

    def train_dataset(self) -> Dataset[Any]:
        return _BrokenInWorkers(make_points(self.samples))


class _BrokenInWorkers(Dataset[Any]):
    def __init__(self, points: TensorDataset) -> None:
        self._points = points

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            raise KeyError("no connection in a worker")
        return self._points[index]


class WorksOnce(Tiny):
    """Is well for as long as it is probed, and fails in each process after it."""

    def build_model(self) -> nn.Module:
        probed = Path(os.environ["TINY_FOLDER"], "probed")
        if probed.exists() and probed.read_text() != str(os.getpid()):
            raise OSError("the licence server is gone")
        probed.write_text(str(os.getpid()))
        return super().build_model()


tiny = Tiny()
brief = Brief()
long = Long()
few = Few()
empty = Empty()
streaming = Streaming()
breaks_with_workers = BreaksWithWorkers()
works_once = WorksOnce()
