"""The built-in demo: a small convolutional network that learns to name figures in pictures drawn on the fly.

    figure's number -> picture drawn, warped, blurred, noisy (`demo_pictures`) -> three convolutions -> one of eight

It needs no download, and its trouble is that of most first trainings: the data is made in the training process, one
sample after the other, and takes more of a step than the arithmetic; both pass through blocks of memory that come and
go. A step takes well below a second on two CPU cores, and the training sees a picture only once.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from autotune.records.config import TrainConfig
from autotune.targets.demo_pictures import FIGURES, draw_picture

# An epoch is 1,024 steps at the baseline's batch size.
_PICTURES = 32_768
_HELD_OUT_PICTURES = 256
_WIDTHS = (16, 32, 64)
# A short training is evaluated after some tens of steps: at PyTorch's 0.1 the running statistics would lag behind.
_NORM_MOMENTUM = 0.2
_LEARNING_RATE, _WARMUP_STEPS = 3e-3, 20


class DemoWorkload:
    """An eight-class image classifier, with the plain settings of a first training script.

    Attributes:
        baseline: batches of 32, everything else PyTorch's default.
        metric: share of held-out pictures that are named rightly; 0.125 is guessing.
        gradient_clip_norm: largest gradient norm.
        drop_last: BatchNorm over a last batch of a few pictures would be noisy.
    """

    baseline = TrainConfig(micro_batch_size=32)
    metric = ("accuracy", "maximize")
    gradient_clip_norm = 1.0
    drop_last = True

    def build_model(self) -> nn.Module:
        """Return a freshly initialised model."""
        return FigureNetwork()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW over all parameters."""
        return AdamW(model.parameters(), lr=_LEARNING_RATE)

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Return a linear warm-up, then a linear decay to zero over the first epoch."""
        total = _PICTURES // self.baseline.effective_batch_size
        return LambdaLR(optimizer, functools.partial(learning_rate_factor, total_steps=total))

    def train_dataset(self) -> DrawnPictures:
        """Return the training pictures."""
        return DrawnPictures()

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats per picture."""
        pictures, figures = batch
        return F.cross_entropy(model(pictures).float(), figures)

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        """Return the share of a fixed set of pictures that are named rightly."""
        pictures, figures = draw_held_out()
        # The training's batch size: a compiled model then meets no new shape.
        size = self.baseline.micro_batch_size
        named = torch.cat([model(part.to(device)).argmax(dim=1).cpu() for part in torch.split(pictures, size)])
        return float((named == figures).double().mean())


class DrawnPictures(Dataset[tuple[Tensor, int]]):
    """Pictures drawn anew each time; all randomness comes from torch's global generator.

    A sample is a float32 picture `[3, 48, 48]` and its figure's place in `FIGURES`.
    """

    def __len__(self) -> int:
        return _PICTURES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < _PICTURES:
            raise IndexError(f"picture {index} of {_PICTURES}")
        figure = index % len(FIGURES)
        # One number from torch, which gives each loader worker a seed of its own; numpy's would be the same in all.
        random = np.random.default_rng(int(torch.randint(2**62, ())))
        return torch.from_numpy(draw_picture(FIGURES[figure], random)), figure


class FigureNetwork(nn.Module):
    """Convolution, BatchNorm, ReLU and pooling, three times: `[batch, 3, 48, 48]` -> logits `[batch, 8]`."""

    def __init__(self) -> None:
        super().__init__()
        incoming = (3, *_WIDTHS)
        stages = (_build_stage(incoming[i], width, stride=1 if i else 2) for i, width in enumerate(_WIDTHS))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(_WIDTHS[-1], len(FIGURES))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits of the figures."""
        logits: Tensor = self.head(self.stages(pictures).amax(dim=(2, 3)))
        return logits


def _build_stage(incoming: int, width: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(incoming, width, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(width, momentum=_NORM_MOMENTUM),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def learning_rate_factor(step: int, *, total_steps: int) -> float:
    """Return the share of the peak learning rate at an optimizer step: up linearly, then down linearly to zero."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    return max(0.0, 1 - (step - _WARMUP_STEPS) / max(1, total_steps - _WARMUP_STEPS))


@functools.cache
def draw_held_out() -> tuple[Tensor, Tensor]:
    """Return the pictures that are evaluated on and their figures; drawn once per process, always the same."""
    figures = [number % len(FIGURES) for number in range(_HELD_OUT_PICTURES)]
    pictures = [draw_picture(FIGURES[figure], np.random.default_rng(number)) for number, figure in enumerate(figures)]
    return torch.from_numpy(np.stack(pictures)), torch.tensor(figures)


workload = DemoWorkload()
