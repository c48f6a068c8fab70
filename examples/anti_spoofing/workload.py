"""Bona fide or spoofed speech: a squeeze-and-excitation ResNet on spectrograms that the loader computes from audio."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from autotune import TrainConfig
from autotune.errors import TargetError
from equal_error_rate import equal_error_rate, score_clips
from se_resnet import ARCHITECTURES, SEResNet, weighted_cross_entropy
from speech import SpeechClips, open_clips


class AntiSpoofingWorkload:
    """A countermeasure as teams train it for ASVspoof; the baseline is the training before anybody sped it up.

    `EXAMPLE_DATA` names a folder with data of your own, `EXAMPLE_SIZE` is `cpu` or `gpu`.
    """

    baseline = TrainConfig(micro_batch_size=32)
    # A fraction: --metric-limit eer=0.1pp allows 0.001 of it.
    metric = ("eer", "minimize")
    # BatchNorm over a last batch of a few clips would be noisy.
    drop_last = True

    def __init__(self, *, data: str | None, size: str) -> None:
        if size not in ARCHITECTURES:
            raise TargetError(f"EXAMPLE_SIZE is {size!r}", hint=f"it is one of {', '.join(ARCHITECTURES)}")
        self._data = data
        self._architecture = ARCHITECTURES[size]

    @functools.cached_property
    def _training(self) -> SpeechClips:
        return open_clips(self._data, "train", crop_seconds=self._architecture.crop_seconds)

    @functools.cached_property
    def _held_out(self) -> SpeechClips:
        return open_clips(self._data, "dev", crop_seconds=self._architecture.crop_seconds)

    @functools.cached_property
    def _class_weights(self) -> tuple[float, float]:
        return self._training.class_weights()

    def build_model(self) -> nn.Module:
        return SEResNet(self._architecture)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3)

    def train_dataset(self) -> SpeechClips:
        return self._training

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        spectrograms, labels = batch
        return weighted_cross_entropy(model(spectrograms), labels, self._class_weights)

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int) -> float:
        return equal_error_rate(*score_clips(model, self._held_out, device=device, batch_size=batch_size))


workload = AntiSpoofingWorkload(
    data=os.environ.get("EXAMPLE_DATA") or None, size=os.environ.get("EXAMPLE_SIZE") or "cpu"
)
