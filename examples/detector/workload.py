"""A banknote detector: a CSP backbone with BatchNorm, three strides, and pictures that are drawn while it trains."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from autotune import TrainConfig
from banknote_scenes import Sample
from banknotes import Banknotes, Batch, collate_banknotes
from detector_training import (
    DetectorSize,
    build_detector,
    build_optimizer,
    build_scheduler,
    compute_batch_loss,
    evaluate_detector,
    find_banknotes,
    find_size,
)


class DetectorWorkload:
    """The training as it was before anyone made it faster: no worker, float32, nothing compiled."""

    metrics = {"map50": "maximize"}
    # BatchNorm over a last batch of one image would be noisy.
    drop_last = True

    def __init__(self, size: DetectorSize, folder: Path | None) -> None:
        """Open nothing yet.

        Args:
            size: of pictures, model and batch.
            folder: with photographs in YOLO's format; None to draw pictures.
        """
        self._size, self._folder = size, folder
        self.baseline = TrainConfig(micro_batch_size=size.batch_size, num_workers=0)

    @functools.cached_property
    def banknotes(self) -> Banknotes:
        """The samples, opened at the first use."""
        return find_banknotes(self._folder, self._size)

    def build_model(self) -> nn.Module:
        return build_detector(self._size, num_classes=len(self.banknotes.class_names))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return build_optimizer(model, learning_rate=self._size.learning_rate)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return build_scheduler(optimizer)

    def train_dataset(self) -> Dataset[Sample]:
        return self.banknotes.train

    def collate(self, samples: list[Sample]) -> Batch:
        return collate_banknotes(samples)

    def compute_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return compute_batch_loss(model, batch)

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int) -> dict[str, float]:
        precision = evaluate_detector(model, self.banknotes.held_out, device=device, batch_size=batch_size)
        return {"map50": precision}


def read_environment() -> DetectorWorkload:
    """Return the workload that EXAMPLE_SIZE (cpu or gpu) and EXAMPLE_DATA (a folder; none: drawn pictures) ask for.

    Raises:
        TargetError: EXAMPLE_SIZE has another value.
    """
    folder = os.environ.get("EXAMPLE_DATA")
    return DetectorWorkload(find_size(os.environ.get("EXAMPLE_SIZE") or "cpu"), Path(folder) if folder else None)


workload = read_environment()
