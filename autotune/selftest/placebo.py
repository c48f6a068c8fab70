"""Trainings whose true speed-up is known: placebo settings that do nothing, and a planted busy wait.

placebo      40 settings, all the same          truth 1.00x
planted_N    the baseline waits N % longer      truth 1 + N/100, by construction: N % of each step's own time
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from autotune.records.config import TrainConfig

PLACEBOS = 40
PLANTED_PERCENT = (3, 5, 10, 20)
KNOB = "planted"

_SAMPLES, _FEATURES, _WIDTH = 4096, 64, 256


class Placebo:
    """A tiny classifier on separable random points, with one knob of its own that changes no number.

    One thread: a thread pool beside other work would make the smallest effect the largest noise.

    Attributes:
        planted: percent of each step's own time that it waits on top, or the number of a placebo.
    """

    baseline = TrainConfig(micro_batch_size=256, num_threads=1)
    knob_numerics = {KNOB: "exact"}
    planted: int = 0

    def __init__(self, values: tuple[int, ...], *, waits: bool) -> None:
        """Prepare a training whose knob has these values, the first one the baseline's."""
        self.knobs = {KNOB: values}
        self.planted = values[0]
        self._waits = waits
        self._ended: float | None = None

    def build_model(self) -> nn.Module:
        """Return a two-layer perceptron."""
        return nn.Sequential(nn.Linear(_FEATURES, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 2))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return plain SGD."""
        return SGD(model.parameters(), lr=0.05)

    def train_dataset(self) -> TensorDataset:
        """Return points on both sides of a plane."""
        generator = torch.Generator().manual_seed(7)
        points = torch.randn(_SAMPLES, _FEATURES, generator=generator)
        return TensorDataset(points, (points.sum(dim=1) > 0).long())

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy, after waiting for the planted share of what the last step took."""
        self._wait()
        points, labels = batch
        return nn.functional.cross_entropy(model(points), labels)

    def _wait(self) -> None:
        now = time.perf_counter()
        if self._waits and self._ended is not None:
            until = now + self.planted / 100 * (now - self._ended)
            while time.perf_counter() < until:
                pass
        self._ended = time.perf_counter()


placebo = Placebo(tuple(range(PLACEBOS)), waits=False)
planted_3, planted_5, planted_10, planted_20 = (Placebo((percent, 0), waits=True) for percent in PLANTED_PERCENT)
