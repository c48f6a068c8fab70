"""A single-stage, anchor-free detector: a CSPDarknet backbone, a top-down neck and one head per stride."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDES = (8, 16, 32)
BOX_OUTPUTS, OBJECTNESS_OUTPUTS = 4, 1
# Short trainings are evaluated too: at 0.1, three dozen steps leave 2 % of the initial statistics.
NORM_MOMENTUM = 0.1
# Share of cells that hold an object before anything is learned (Lin et al. 2017, Focal Loss, section 4.1).
OBJECT_PRIOR = 0.01


class CspDetector(nn.Module):
    """Images `[batch, 3, height, width]` -> raw predictions `[batch, cells, 5 + classes]`.

    A cell is one position of one of the three maps (strides 8, 16 and 32, in this order, each row by row). Its outputs
    are two offsets of the box's centre and two log sizes (see `detection_boxes.decode_boxes`), the logit of there being
    an object, and the logits of the classes. Height and width must be multiples of 32.

    The stages are those of CSPDarknet (Wang et al. 2019, CSPNet, arXiv:1911.11929), the neck is a feature pyramid
    (Lin et al. 2017, arXiv:1612.03144).
    """

    def __init__(self, *, num_classes: int, width: int, depth: int) -> None:
        """Build it.

        Args:
            num_classes: classes to tell apart.
            width: channels of the stem; each stage doubles them.
            depth: bottlenecks in a stage.
        """
        super().__init__()
        channels = [width * 2**level for level in range(5)]
        neck_width = channels[2]
        self.stem = ConvNormAct(3, width, kernel_size=3, stride=2)
        self.stages = nn.ModuleList(
            nn.Sequential(
                ConvNormAct(channels[level], channels[level + 1], kernel_size=3, stride=2),
                CspBlock(channels[level + 1], channels[level + 1], depth=depth),
            )
            for level in range(4)
        )
        self.laterals = nn.ModuleList(ConvNormAct(incoming, neck_width) for incoming in channels[2:])
        self.merges = nn.ModuleList(CspBlock(2 * neck_width, neck_width, depth=1) for _ in STRIDES[1:])
        self.heads = nn.ModuleList(make_head(neck_width, num_classes) for _ in STRIDES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        pyramid = []
        for stage in self.stages:
            features = stage(features)
            pyramid.append(features)
        lateral = [layer(level) for layer, level in zip(self.laterals, pyramid[1:], strict=True)]
        merged = [lateral[-1]]
        for merge, finer in zip(self.merges, reversed(lateral[:-1]), strict=True):
            enlarged = F.interpolate(merged[0], scale_factor=2.0, mode="nearest")
            merged.insert(0, merge(torch.cat([enlarged, finer], dim=1)))
        maps = [head(level) for head, level in zip(self.heads, merged, strict=True)]
        return torch.cat([level.flatten(2).transpose(1, 2) for level in maps], dim=1)


class ConvNormAct(nn.Sequential):
    """Convolution, BatchNorm and SiLU; a stride of 2 halves height and width."""

    def __init__(self, incoming: int, outgoing: int, *, kernel_size: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(incoming, outgoing, kernel_size, stride, padding=kernel_size // 2, bias=False),
            nn.BatchNorm2d(outgoing, momentum=NORM_MOMENTUM),
            nn.SiLU(),
        )


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution around a shortcut, `[batch, channels, height, width]` kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = ConvNormAct(channels, channels)
        self.convolve = ConvNormAct(channels, channels, kernel_size=3)

    def forward(self, features: Tensor) -> Tensor:
        total: Tensor = features + self.convolve(self.squeeze(features))
        return total


class CspBlock(nn.Module):
    """A cross-stage-partial block: half of the channels pass the bottlenecks, half go round them."""

    def __init__(self, incoming: int, outgoing: int, *, depth: int) -> None:
        super().__init__()
        half = outgoing // 2
        self.through = ConvNormAct(incoming, half)
        self.around = ConvNormAct(incoming, half)
        self.bottlenecks = nn.Sequential(*(Bottleneck(half) for _ in range(depth)))
        self.fuse = ConvNormAct(2 * half, outgoing)

    def forward(self, features: Tensor) -> Tensor:
        halves = [self.bottlenecks(self.through(features)), self.around(features)]
        fused: Tensor = self.fuse(torch.cat(halves, dim=1))
        return fused


def make_head(incoming: int, num_classes: int) -> nn.Sequential:
    """Return the head of one stride: `[batch, incoming, rows, columns]` -> `[batch, 5 + classes, rows, columns]`."""
    last = nn.Conv2d(incoming, BOX_OUTPUTS + OBJECTNESS_OUTPUTS + num_classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    with torch.no_grad():
        last.bias[BOX_OUTPUTS] = -math.log((1 - OBJECT_PRIOR) / OBJECT_PRIOR)  # type: ignore[index]
    return nn.Sequential(ConvNormAct(incoming, incoming, kernel_size=3), last)
