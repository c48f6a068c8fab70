"""A squeeze-and-excitation ResNet over spectrograms, as countermeasures against spoofed speech use it.

Hu, Shen and Sun, "Squeeze-and-Excitation Networks", 2018; Lai et al., "ASSERT: Anti-Spoofing with
Squeeze-Excitation and Residual Networks", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REDUCTION = 8
"""Channels per unit of the bottleneck between squeeze and excitation."""


class Architecture(NamedTuple):
    """Size of the network and of what it sees.

    Attributes:
        widths: channels of each stage; every stage halves the resolution.
        depths: residual blocks of each stage.
        crop_seconds: length of the clips it is trained on.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    crop_seconds: float


ARCHITECTURES = {
    "cpu": Architecture(widths=(16, 32, 64), depths=(1, 1, 1), crop_seconds=1.0),
    "gpu": Architecture(widths=(64, 128, 256, 512), depths=(3, 4, 6, 3), crop_seconds=4.0),
}


class SEResNet(nn.Module):
    """Log power spectrograms `[batch, 1, bins, frames]` -> logits `[batch, 2]` of spoofed and bona fide."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        widths = architecture.widths
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        blocks = []
        incoming = widths[0]
        for width, depth in zip(widths, architecture.depths, strict=True):
            for index in range(depth):
                blocks.append(SEBlock(incoming, width, stride=2 if index == 0 else 1))
                incoming = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(incoming, 2)

    def forward(self, spectrograms: Tensor) -> Tensor:
        features = self.blocks(self.stem(spectrograms))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class SEBlock(nn.Module):
    """Two 3x3 convolutions, whose channels are scaled by what they hold on average, added to a shortcut."""

    def __init__(self, incoming: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(incoming, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            SqueezeExcitation(width),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and incoming == width
            else nn.Sequential(nn.Conv2d(incoming, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.residual(features) + self.shortcut(features))


class SqueezeExcitation(nn.Module):
    """Scale each channel by a gate in 0..1, computed from the means of all channels (Hu et al., equations 2 to 4)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Linear(channels, channels // REDUCTION),
            nn.ReLU(),
            nn.Linear(channels // REDUCTION, channels),
            nn.Sigmoid(),
        )

    def forward(self, features: Tensor) -> Tensor:
        gate: Tensor = self.gate(features.mean(dim=(2, 3)))
        return features * gate[:, :, None, None]


def weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: tuple[float, float]) -> Tensor:
    """Return the mean over the batch of each clip's cross-entropy times its class' weight.

    It divides by the clips, not by their weights as PyTorch does: so the losses of the parts of a batch add up.

    Args:
        logits: `[batch, 2]`.
        labels: `[batch]`, 1 for bona fide.
        class_weights: of spoofed and bona fide clips; 1 on average over the training clips.
    """
    spoofed, bona_fide = class_weights
    losses = F.cross_entropy(logits, labels, reduction="none")
    # Plain numbers, as a tensor of weights would have to be copied to the device in each step.
    return (torch.where(labels == 1, bona_fide, spoofed) * losses).mean()
