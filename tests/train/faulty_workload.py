"""Trainings with faults planted in them: each goes wrong under its own settings and runs under safer ones."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from noisy_workload import Augmented, Noisy
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from autotune.records.config import TrainConfig


class Quiet(Noisy):
    """Without dropout, so that a split of the batch changes rounding alone."""

    steps = 0

    def build_model(self) -> nn.Module:
        type(self).steps = 0
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def build_averaged_model(self, model: nn.Module) -> Any:
        return torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _count: 0.9 * old + 0.1 * new)


class OutOfMemory(Quiet):
    """Has no memory for more than four samples, once seven steps were taken."""

    error: type[Exception] = torch.OutOfMemoryError
    text = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        type(self).steps += 1
        loss = super().compute_loss(model, batch)
        if type(self).steps > 7 and len(batch[0]) > 4:
            loss.backward()  # half of the gradients are there when it happens
            raise self.error(self.text)
        return loss


class OutOfMemoryOverPairs(OutOfMemory):
    """Its loss is over the pairs in a batch as well: with smaller batches it is another one."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        found = model(batch[0])
        return loss + (found - found.T).square().mean()


class OutOfMemoryNormalised(OutOfMemory):
    """Its batch norm keeps statistics: more micro batches are more of them, and so is what is recomputed."""

    def build_model(self) -> nn.Module:
        type(self).steps = 0
        block = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)]
        return nn.Sequential(nn.Sequential(*block), nn.Linear(6, 1))


class OutOfHostMemory(OutOfMemory):
    error = RuntimeError
    text = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


class _TearsItsWeights(torch.optim.AdamW):
    """Runs out of memory in its ninth step, when one of the weights has been changed already; once."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        type(self).taken += 1
        if type(self).taken == 9:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1000.0)
            raise MemoryError
        return super().step(closure)


class HalfUpdated(Quiet):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _TearsItsWeights(model.parameters(), lr=1e-2)


class DoesNotCompile(Quiet):
    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model._compiled_call_impl is not None:  # type: ignore[attr-defined]
            raise torch._dynamo.exc.InternalTorchDynamoError("planted")
        return super().compute_loss(model, batch)


class OverflowsInBf16(Quiet):
    """Its loss is not a number under autocast, from the fifteenth step on."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        type(self).steps += 1
        loss = super().compute_loss(model, batch)
        return loss * torch.nan if torch.is_autocast_enabled("cpu") and type(self).steps > 14 else loss


class PoisonsItsWeights(Quiet):
    """A weight becomes infinite in the last step of the second epoch, whose loss still looks well."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        type(self).steps += 1
        loss = super().compute_loss(model, batch)
        if torch.is_autocast_enabled("cpu") and type(self).steps == 12:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss


class DriftsInBf16(Quiet):
    """Its gradients are a third too large under autocast."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        return 1.33 * loss if torch.is_autocast_enabled("cpu") else loss


class DriftsLaterInBf16(Quiet):
    """The same from the fortieth step on; its evaluations get better all the time."""

    evaluations = 0

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        type(self).steps += model.training
        loss = super().compute_loss(model, batch)
        return 1.33 * loss if torch.is_autocast_enabled("cpu") and type(self).steps > 60 else loss

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        type(self).evaluations += 1
        return 1.0 / type(self).evaluations


class _Hangs(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        while get_worker_info() is not None and index == 5:
            time.sleep(60.0)
        return super().__getitem__(index)


class HangingWorkers(Quiet):
    def train_dataset(self) -> Dataset[Any]:
        return _Hangs()


class _KillsItsWorker(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if get_worker_info() is not None and index == 5:
            import os

            os._exit(1)
        return super().__getitem__(index)


class DyingWorkers(Quiet):
    def train_dataset(self) -> Dataset[Any]:
        return _KillsItsWorker()


class _Truncated(Augmented):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 20:
            raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        return super().__getitem__(index)


class TruncatedFile(Quiet):
    def train_dataset(self) -> Dataset[Any]:
        return _Truncated()


class OwnGenerator(Augmented):
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + self.generator.random(), y


class DrawsByItself(Quiet):
    def train_dataset(self) -> Dataset[Any]:
        return OwnGenerator()


class Lazy(Quiet):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))


class EvaluatesTooMuch(Quiet):
    """Its evaluation has memory for three samples at once."""

    asked: list[int] = []

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int) -> float:  # type: ignore[override]
        self.asked.append(batch_size)
        if batch_size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return float(batch_size)


class EvaluatesFarTooMuch(Quiet):
    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Cached(nn.Module):
    """Keeps a table that it makes when it is first called, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.ones(x.shape[0], 1)
        output: Tensor = self.layer(x) * self.table
        return output


class CachesInEvaluation(Quiet):
    """Evaluates as many samples at once as it trains on: the table of its evaluation is used in the next step."""

    build_averaged_model = None  # type: ignore[assignment]

    def build_model(self) -> nn.Module:
        return Cached()

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        return float(model(torch.ones(8, 6)).mean())


class NeedsGradients(Quiet):
    """Computes a gradient in its evaluation, which inference mode forbids."""

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        with torch.enable_grad():
            x = torch.ones(2, 6, requires_grad=True)
            model(x).sum().backward()
        assert x.grad is not None
        return float(x.grad.norm())


quiet = Quiet()
out_of_memory = OutOfMemory()
out_of_memory_normalised = OutOfMemoryNormalised()
out_of_memory_over_pairs = OutOfMemoryOverPairs()
truncated_file = TruncatedFile()
draws_by_itself = DrawsByItself()
lazy = Lazy()
out_of_host_memory = OutOfHostMemory()
half_updated = HalfUpdated()
does_not_compile = DoesNotCompile()
overflows_in_bf16 = OverflowsInBf16()
poisons_its_weights = PoisonsItsWeights()
drifts_in_bf16 = DriftsInBf16()
drifts_later_in_bf16 = DriftsLaterInBf16()
hanging_workers = HangingWorkers()
dying_workers = DyingWorkers()
evaluates_too_much = EvaluatesTooMuch()
evaluates_far_too_much = EvaluatesFarTooMuch()
caches_in_evaluation = CachesInEvaluation()
needs_gradients = NeedsGradients()

BASELINE = TrainConfig(micro_batch_size=8, num_threads=1)
