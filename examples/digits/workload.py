"""Handwritten digits, augmented on the fly, and a small residual network: a training with BatchNorm, a busy loader."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from autotune import TrainConfig
from autotune.errors import TargetError

IMAGE_SIZE = 32
HELD_OUT_IMAGES = 360
EPOCHS = 20
# An epoch is 22 steps: at PyTorch's 0.1 the running statistics would lag behind for two of them.
NORM_MOMENTUM = 0.2
LARGEST_ANGLE, LARGEST_SHIFT, NOISE_STD = math.radians(12), 0.1, 0.05


class DigitsWorkload:
    """A ten-class image classifier on scikit-learn's bundled digits."""

    baseline = TrainConfig(micro_batch_size=64)
    metric = ("accuracy", "maximize")
    # BatchNorm over a last batch of a few images would be noisy.
    drop_last = True

    def build_model(self) -> nn.Module:
        return ResidualNetwork(widths=(32, 64, 128))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        total = EPOCHS * (len(self.train_dataset()) // self.baseline.effective_batch_size)
        return LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * min(1.0, step / total))) / 2)

    def train_dataset(self) -> AugmentedDigits:
        images, labels = load_images()
        return AugmentedDigits(images[HELD_OUT_IMAGES:], labels[HELD_OUT_IMAGES:])

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        images, labels = load_images()
        held_out = F.interpolate(images[:HELD_OUT_IMAGES], size=IMAGE_SIZE, mode="bilinear", align_corners=False)
        predicted = model(held_out.to(device)).argmax(dim=1).cpu()
        return float((predicted == labels[:HELD_OUT_IMAGES]).double().mean())


class AugmentedDigits(Dataset[tuple[Tensor, int]]):
    """Images rotated, shifted and made noisy anew each time; all randomness comes from torch's global generator.

    A sample is a float32 image `[1, 32, 32]` and its class.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self._labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        angle, right, down = (2 * torch.rand(3) - 1).tolist()
        cosine, sine = math.cos(angle * LARGEST_ANGLE), math.sin(angle * LARGEST_ANGLE)
        placement = torch.tensor(
            [[[cosine, -sine, right * LARGEST_SHIFT], [sine, cosine, down * LARGEST_SHIFT]]], dtype=torch.float32
        )
        grid = F.affine_grid(placement, [1, 1, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
        # One resampling does the enlarging, the turning and the shifting.
        image = F.grid_sample(self._images[index : index + 1], grid, align_corners=False)[0]
        return image + NOISE_STD * torch.randn_like(image), self._labels[index]


class ResidualNetwork(nn.Module):
    """A ResNet of one block per stage: `[batch, 1, 32, 32]` -> logits `[batch, 10]`."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1, bias=False)
        incoming = (widths[0], *widths)
        self.stages = nn.Sequential(*(ResidualBlock(incoming[i], width) for i, width in enumerate(widths)))
        self.norm = nn.BatchNorm2d(widths[-1], momentum=NORM_MOMENTUM)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.norm(self.stages(self.stem(images))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions behind BatchNorm and ReLU, added to a shortcut; halves the resolution."""

    def __init__(self, incoming: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(incoming, momentum=NORM_MOMENTUM)
        self.conv1 = nn.Conv2d(incoming, width, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width, momentum=NORM_MOMENTUM)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(incoming, width, 1, stride=2, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        active = F.relu(self.norm1(features))
        inner = F.relu(self.norm2(self.conv1(active)))
        total: Tensor = self.conv2(inner) + self.shortcut(active)
        return total


@functools.cache
def load_images() -> tuple[Tensor, Tensor]:
    """Return all 1,797 images, float32 `[n, 1, 8, 8]` in 0..1, and their classes, in one fixed shuffled order.

    Raises:
        TargetError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TargetError(
            "the digits example needs scikit-learn, which is not installed", hint="pip install scikit-learn"
        ) from None
    bunch: Any = load_digits()
    # The file's neighbours are by the same writers; shuffled, held-out and training images are alike.
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(bunch.images).float()[order, None] / 16
    return images, torch.from_numpy(bunch.target).long()[order]


workload = DigitsWorkload()
