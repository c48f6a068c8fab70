"""What workload.py and train.py share: the two sizes, the data, the optimizer, its schedule and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from autotune.errors import TargetError
from banknote_scenes import Sample
from banknotes import Banknotes, Batch, collate_banknotes, draw_banknotes, open_banknotes
from csp_detector import CspDetector
from detection_boxes import to_corners
from detection_loss import NO_LABEL, compute_detection_loss
from mean_average_precision import Boxes, compute_mean_average_precision, select_detections

WEIGHT_DECAY, WARM_UP_STEPS = 0.05, 20


@dataclass(frozen=True)
class DetectorSize:
    """How big the training is.

    Attributes:
        image_size: height and width of an image in pixels.
        width: channels of the model's stem.
        depth: bottlenecks in each of its stages.
        batch_size: images per optimizer step.
        learning_rate: after the warm-up.
        train_images: drawn pictures in an epoch.
        held_out_images: drawn pictures to evaluate on.
    """

    image_size: int
    width: int
    depth: int
    batch_size: int
    learning_rate: float
    train_images: int
    held_out_images: int


SIZES = {
    "cpu": DetectorSize(
        image_size=160,
        width=24,
        depth=1,
        batch_size=4,
        learning_rate=0.001,
        train_images=1024,
        held_out_images=64,
    ),
    "gpu": DetectorSize(
        image_size=640,
        width=48,
        depth=2,
        batch_size=16,
        learning_rate=0.001,
        train_images=8192,
        held_out_images=128,
    ),
}


def find_size(name: str) -> DetectorSize:
    """Return the size of a name.

    Raises:
        TargetError: there is none.
    """
    if name not in SIZES:
        raise TargetError(f"EXAMPLE_SIZE is {name!r}", hint=f"it must be {' or '.join(SIZES)}")
    return SIZES[name]


def find_banknotes(folder: Path | None, size: DetectorSize) -> Banknotes:
    """Return the photographs in a folder, or drawn pictures without one.

    Raises:
        TargetError: the folder's contents cannot be used.
    """
    if folder is not None:
        return open_banknotes(folder, image_size=size.image_size)
    return draw_banknotes(
        image_size=size.image_size, train_images=size.train_images, held_out_images=size.held_out_images
    )


def build_detector(size: DetectorSize, *, num_classes: int) -> CspDetector:
    """Return a freshly initialised model; weights are drawn from torch's global generator."""
    return CspDetector(num_classes=num_classes, width=size.width, depth=size.depth)


def build_optimizer(model: nn.Module, *, learning_rate: float) -> Optimizer:
    """Return AdamW; biases and BatchNorm's scales do not decay."""
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    other = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": WEIGHT_DECAY}, {"params": other, "weight_decay": 0.0}]
    return AdamW(groups, lr=learning_rate)


def build_scheduler(optimizer: Optimizer) -> LambdaLR:
    """Return a linear warm-up over the first steps, constant from then on; to be stepped once per optimizer step."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))


def compute_batch_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss over a batch's positive cells, and how many these are."""
    images, boxes, labels = batch
    return compute_detection_loss(model(images), boxes, labels, size=(images.shape[2], images.shape[3]))


def read_batches(samples: Dataset[Sample], batch_size: int) -> list[Batch]:
    """Return all of a dataset's samples in batches, in their order."""
    count = len(samples)  # type: ignore[arg-type]
    return [
        collate_banknotes([samples[index] for index in range(start, min(start + batch_size, count))])
        for start in range(0, count, batch_size)
    ]


def evaluate_detector(model: nn.Module, samples: Dataset[Sample], *, device: torch.device, batch_size: int) -> float:
    """Return the mean average precision at an overlap of 0.5 of a model in evaluation mode, without gradients."""
    found: list[Boxes] = []
    truth: list[Boxes] = []
    for images, boxes, labels in read_batches(samples, batch_size):
        height, width = images.shape[2:]
        found += select_detections(model(images.to(device)), size=(height, width))
        corners = to_corners(boxes, image_height=height, image_width=width)
        kept = labels != NO_LABEL
        truth += [Boxes(*(part[row] for part in parts)) for row, *parts in zip(kept, corners, labels, strict=True)]
    return compute_mean_average_precision(found, truth)
