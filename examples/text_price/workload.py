"""The price of a listing from its text and figures: a transformer encoder that mostly reads padding."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from autotune import TrainConfig
from listings import Batch, ListingDataset, Sample, collate
from price_encoder import PriceModel
from price_regression import (
    CLIP_NORM,
    Padding,
    PriceData,
    build_optimizer,
    build_scheduler,
    choose_encoder,
    choose_size,
    evaluate_smape,
    price_loss,
)


class TextPriceWorkload:
    """A regression of log prices; texts are padded to the limit and split into pieces anew in every epoch."""

    baseline = TrainConfig(micro_batch_size=8, num_workers=0)
    metric = ("smape", "minimize")
    gradient_clip_norm = CLIP_NORM
    evaluation_batch_size = 32

    padding: Padding = "max-length"
    feature_cache = False
    knobs = {"padding": ("max-length", "longest", "grouped"), "feature_cache": (False, True)}
    # Padding is masked out, so what is computed is the same; a cache holds what is computed without it.
    knob_numerics = {"padding": "rounding", "feature_cache": "exact"}

    def __init__(self) -> None:
        """Read from the environment where the data is and how large the training is."""
        folder = os.environ.get("EXAMPLE_DATA")
        size = choose_size(os.environ.get("EXAMPLE_SIZE") or "cpu", asked_by="EXAMPLE_SIZE")
        self._encoder = choose_encoder(os.environ.get("EXAMPLE_ENCODER"), size, asked_by="EXAMPLE_ENCODER")
        self._data = PriceData(Path(folder) if folder else None, size)

    def build_model(self) -> PriceModel:
        return self._data.build_model(self._encoder)

    def build_optimizer(self, model: nn.Module) -> AdamW:
        return build_optimizer(model, self._data.size.learning_rate)

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        steps_per_epoch = -(-len(self._data.parts[0]) // self.baseline.effective_batch_size)
        return build_scheduler(optimizer, steps_per_epoch=steps_per_epoch)

    def train_dataset(self) -> ListingDataset:
        return self._data.training_set(cached=self.feature_cache)

    def collate(self, samples: list[Sample]) -> Batch:
        return collate(samples, limit=self._data.size.limit)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return price_loss(model, batch, self.padding)

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int) -> float:
        return evaluate_smape(model, self._data.held_out, device, batch_size=batch_size)


workload = TextPriceWorkload()
