"""Small trainings for the drift guard: right ones, and ones that are wrong under autocast only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from autotune.drift.guard.check_schedule import CheckPace
from autotune.drift.guard.guard import Alarm, DriftGuard
from autotune.engine.loop import Training
from autotune.records import TrainConfig
from autotune.records.quality import LossBand, Margin
from autotune.targets.workload import LoadedWorkload, check_workload

CPU = torch.device("cpu")
SAMPLES, BATCH = 250, 8


class Guarded(DriftGuard):
    """Looks every ten steps, whatever it costs."""

    pace = CheckPace(first_step=5, least_steps=10, most_cost=1e9)


class Fit:
    """Fits noisy points of a smooth function; the last batch of an epoch is a short one."""

    baseline = TrainConfig(micro_batch_size=BATCH)

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU()]
        return nn.Sequential(nn.BatchNorm1d(6), *layers, nn.Linear(32, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(SAMPLES, 6, generator=generator)
        noise = torch.randn(SAMPLES, 1, generator=generator)
        return TensorDataset(features, torch.sin(features.sum(1, keepdim=True)) + 0.2 * noise)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets = batch
        loss = F.mse_loss(model(features).float(), targets)
        return self.spoil(loss, model) if torch.is_autocast_enabled("cpu") else loss

    def spoil(self, loss: Tensor, model: nn.Module) -> Tensor:
        return loss


class Scaled(Fit):
    def spoil(self, loss: Tensor, model: nn.Module) -> Tensor:
        return 1.3 * loss


class Halted(Fit):
    """One layer learns nothing; the loss is right."""

    def spoil(self, loss: Tensor, model: nn.Module) -> Tensor:
        return loss + 0.0 * loss.detach()

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[4].register_forward_hook(lambda *parts: parts[2].detach() if torch.is_autocast_enabled("cpu") else None)
        return model


class Hungry(Fit):
    """There is not enough memory without autocast."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().compute_loss(model, batch)


class Fragile(Fit):
    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            raise TypeError("this loss takes no float32")
        return super().compute_loss(model, batch)


class OwnNoise(Fit):
    """Draws noise from a generator of its own, as diffusion models do."""

    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(1)

    def draw(self, features: Tensor) -> Tensor:
        return torch.randn(features.shape, generator=self.source)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets = batch
        noise = self.draw(features)
        return super().compute_loss(model, (features + noise, targets + 3.0 * noise[:, :1]))


_hidden = torch.Generator().manual_seed(1)


class HiddenNoise(OwnNoise):
    """The same from a generator in a global."""

    def draw(self, features: Tensor) -> Tensor:
        return torch.randn(features.shape, generator=_hidden)


def load(workload: Any) -> LoadedWorkload:
    return check_workload(workload, label="guarded_workloads.py:workload", fingerprint="0" * 12)


def start(
    workload: Any, *, band: LossBand | None = None, guard: type[DriftGuard] = Guarded, **changes: Any
) -> tuple[Training, DriftGuard]:
    """Return a training that is about to start with some settings changed, and its guard."""
    loaded = load(workload)
    config = loaded.baseline.replace(**changes)
    training = Training(loaded, config, device=CPU, seed=0)
    limit = Margin(amount=0.005)
    return training, guard(loaded, training, config, loaded.baseline, device=CPU, band=band, limit=limit)


def run(training: Training, guard: DriftGuard | None, *, first: int = 1, last: int) -> tuple[Alarm | None, list[float]]:
    """Take some steps as the loop does; return the first alarm, and the losses."""
    losses: list[float] = []
    since, samples = first - 1, SAMPLES * training.windows.epoch + BATCH * training.windows.batches_done
    for step in range(first, last + 1):
        outcome = training.step()
        losses.append(float(outcome.loss))
        samples += outcome.samples
        alarm = None if guard is None else guard.check_step(step)
        if guard is not None and alarm is None and step % 10 == 0:
            rate = training.optimizer.param_groups[0]["lr"]
            alarm = guard.record_losses(losses[since - step :], step=step, samples=samples, learning_rate=rate)
            since = step
        if alarm is not None:
            return alarm, losses
    return None, losses
