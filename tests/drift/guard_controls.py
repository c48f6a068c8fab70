"""Trainings for the drift guard: healthy ones of many settings, and sick ones with one known mistake each.

A mistake of the numerics shows only under the settings that are tried: under autocast, with one attention kernel, or
compiled. Other mistakes are of the optimizer, the data, or the loss scaler, and begin at some step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from controls import Images, Points, Sequences
from models import Regressor
from synthetic import AugmentedImages, points
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import Dataset, TensorDataset

LATE = 500
"""Step from which a mistake that comes later is there."""


def plant_nothing(_training: Any, _workload: Any) -> None:
    """Leave a training as it is."""


@dataclass(frozen=True)
class Patient:
    """One kind of training.

    Attributes:
        name: for the table.
        build: returns the workload.
        changes: fields of its baseline that differ.
        steps: optimizer steps to train.
        kind: baselines of one kind share their band.
        build_healthy: returns the workload that the band is made from.
        band_steps: optimizer steps of each of its seeds.
        runs: seeds, for a healthy one.
        plant: puts a mistake into the training once it is built.
    """

    name: str
    build: Callable[[], Any]
    changes: dict[str, Any]
    steps: int
    kind: str
    build_healthy: Callable[[], Any]
    band_steps: int
    runs: int = 1
    plant: Callable[[Any, Any], None] = plant_nothing


# --- the workloads, right ------------------------------------------------------------------------------------------


class Timed:
    """Knows how many steps have been taken, and whether its mistake is there yet."""

    steps_taken = 0
    begins = 0

    @property
    def is_sick(self) -> bool:
        return self.steps_taken >= self.begins


class Restarting(Points):
    """Its learning rate rises to its first value again and again, and so does its loss."""

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return CosineAnnealingWarmRestarts(optimizer, T_0=250)


class Settling(Points):
    """Its learning rate falls to almost nothing, so that it ends at a minimum, where the mean gradient vanishes."""

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: max(1e-3, 1.0 - step / 2000))


class WarmingUp(Images):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.02, momentum=0.9)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=1500)


class Restless(Points):
    """Learns far too fast to settle: its loss goes up and down for ever."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)


class Memorising(Points):
    """Sees few points so often that it knows them by heart."""

    def train_dataset(self) -> Dataset[Any]:
        features, targets = points().tensors
        return TensorDataset(features[:200], targets[:200])


def batch_norm_images() -> Images:
    return Images(nn.BatchNorm2d)


def augmented_images() -> Images:
    return Images(dataset=AugmentedImages)


# --- mistakes of the numerics -----------------------------------------------------------------------------------


def under_autocast() -> bool:
    """Return whether the settings that are tried are in force."""
    return torch.is_autocast_enabled("cpu")


class LateLossScale(Timed, Points):
    def __init__(self, factor: float = 1.05, begins: int = 0) -> None:
        self.factor, self.begins = factor, begins

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        return self.factor * loss if under_autocast() and self.is_sick else loss


class GradientScale(Timed, Points):
    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        return 1.05 * loss - 0.05 * loss.detach() if under_autocast() else loss


class HookedPoints(Timed, Points):
    """Changes the gradient of one layer's output under autocast."""

    def __init__(self, change: Callable[[Tensor], Tensor], begins: int = 0) -> None:
        self.change, self.begins = change, begins

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.hidden[2].register_forward_hook(self._hook)
        return model

    def _hook(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if under_autocast() and self.is_sick and output.requires_grad:
            output.register_hook(self.change)
        return output


def zero(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)


def add_noise(gradient: Tensor) -> Tensor:
    return gradient + 3.0 * gradient.detach().std() * torch.randn_like(gradient)


def quantise(gradient: Tensor) -> Tensor:
    """Keep three bits of what reaches the layer, as a badly scaled 4-bit type would."""
    step = gradient.abs().max() / 4
    return torch.round(gradient / step) * step


def spoil(gradient: Tensor) -> Tensor:
    return gradient.index_fill(0, torch.tensor([0]), float("nan"))


class StaleCopy(Timed, Images):
    """Its last layer computes with a low-precision copy of its weights that is renewed every 50 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.copy = -1, torch.zeros(0)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not under_autocast():
            return super().compute_loss(model, batch)
        if self.steps_taken // 50 != self.copied:
            self.copied, self.copy = self.steps_taken // 50, model.head.weight.detach().clone()
        stale = {"head.weight": model.head.weight - model.head.weight.detach() + self.copy}
        images, labels = batch
        return F.cross_entropy(torch.func.functional_call(model, stale, (images,)).float(), labels)


class LeakyAttention(Timed, Sequences):
    """With the tried kernel a token sees those that follow."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        plain = F.scaled_dot_product_attention

        def leak(*args: Any, is_causal: bool = False, **kwargs: Any) -> Tensor:
            return plain(*args, is_causal=False, **kwargs)

        if not torch.backends.cuda.flash_sdp_enabled():
            F.scaled_dot_product_attention = leak
        try:
            return super().compute_loss(model, batch)
        finally:
            F.scaled_dot_product_attention = plain


class Miscompiled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Tensor) -> Tensor:
        predicted: Tensor = self.inner(features)
        return predicted + 0.2 * features[:, :1] if torch.compiler.is_compiling() else predicted


class MiscompiledPoints(Timed, Points):
    def build_model(self) -> nn.Module:
        return Miscompiled(super().build_model())


class TinyUnits(Timed, Points):
    """Predicts in metres what is a few millimetres: half precision loses its gradients unless the loss is scaled."""

    def build_model(self) -> nn.Module:
        return Regressor(256, 1e-2)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=3e-3, eps=1e-12)

    def train_dataset(self) -> Dataset[Any]:
        return points(256, 1e-2)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets = batch
        return F.mse_loss(model(features), targets)


def take_scaler_away(training: Any, _workload: Any) -> None:
    training.scaler = None


# --- mistakes of the data, the optimizer, the loss scaler ----------------------------------------------------------


class WrongLabels(Timed, Images):
    def __init__(self, begins: int = LATE) -> None:
        super().__init__()
        self.begins = begins

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return super().compute_loss(model, (images, labels.roll(1) if self.is_sick else labels))


class SameBatch(Timed, Images):
    """From some step on every batch is the same one."""

    begins = LATE
    kept: Any = None

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.is_sick:
            self.kept = batch if self.kept is None else self.kept
            batch = self.kept
        return super().compute_loss(model, batch)


class HalvedLoss(Timed, Images):
    """Divides by the accumulation steps once more than it should."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        return 0.25 * loss + 0.75 * loss.detach()


class LeapingRate(Points):
    """Its own schedule triples the learning rate."""

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 3.0 if step >= LATE else 1.0)


class Undropped(Timed, Sequences):
    """Without dropout under autocast: it learns faster by heart, and worse for anything new."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        if under_autocast():
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        return super().compute_loss(model, batch)


def wrap_step(training: Any, change: Callable[[Any], None]) -> None:
    """Have something done to the optimizer right after each of its steps."""
    training.optimizer.register_step_post_hook(lambda optimizer, _args, _kwargs: change(optimizer))


def step_too_far(training: Any, workload: Any) -> None:
    """Apply every update twenty times from some step on, and tell of the same learning rate as ever."""
    before: dict[int, Tensor] = {}

    def note(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            before.update({id(leaf): leaf.detach().clone() for leaf in group["params"]})

    def repeat(optimizer: Any) -> None:
        if workload.steps_taken >= LATE:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for leaf in group["params"]:
                        leaf.add_(19.0 * (leaf - before[id(leaf)]))

    training.optimizer.register_step_pre_hook(note)
    wrap_step(training, repeat)


def decay_everything(training: Any, workload: Any) -> None:
    """Shrink all weights a little at each step from some step on."""

    def shrink(optimizer: Any) -> None:
        if workload.steps_taken >= LATE:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for leaf in group["params"]:
                        leaf.mul_(0.99)

    wrap_step(training, shrink)


def blow_up(training: Any, workload: Any) -> None:
    """Push the weights at random, a little harder at each step."""

    def push(optimizer: Any) -> None:
        if workload.steps_taken >= LATE:
            strength = 2e-5 * (workload.steps_taken - LATE)
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for leaf in group["params"]:
                        leaf.add_(strength * torch.randn_like(leaf))

    wrap_step(training, push)


def forget_momentum(training: Any, _workload: Any) -> None:
    """Lose the optimizer's state at each step, as a faulty implementation may."""
    wrap_step(training, lambda optimizer: optimizer.state.clear())


def storm(every: int) -> Callable[[Any, Any], None]:
    """Return what makes a gradient overflow at each so many steps from some step on."""

    def plant(training: Any, workload: Any) -> None:
        leaf = next(training.model.parameters())

        def overflow(gradient: Tensor) -> Tensor:
            is_due = workload.steps_taken >= LATE and workload.steps_taken % every == 0
            return gradient * float("inf") if is_due else gradient

        leaf.register_hook(overflow)

    return plant


# --- the lists ------------------------------------------------------------------------------------------------------

_BF16: dict[str, Any] = {"precision": "bf16"}
_FP16: dict[str, Any] = {"precision": "fp16"}
_FOREACH: dict[str, Any] = {"optimizer_implementation": "foreach"}
_SPLIT: dict[str, Any] = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}


@dataclass(frozen=True)
class Kind:
    """A baseline and how long it is trained."""

    name: str
    build: Callable[[], Any]
    steps: int
    band_steps: int
    others: dict[str, Any] = field(default_factory=dict)

    def patient(self, name: str, changes: dict[str, Any], **parts: Any) -> Patient:
        build = parts.pop("build", self.build)
        return Patient(
            name, build, changes, parts.pop("steps", self.steps), self.name, self.build, self.band_steps, **parts
        )


_MLP = Kind("MLP", Points, 1500, 320)
_RESTARTING = Kind("MLP, restarts", Restarting, 1500, 320)
_SETTLING = Kind("MLP, settling", Settling, 3000, 320)
_RESTLESS = Kind("MLP, restless", Restless, 1500, 320)
_MEMORISING = Kind("MLP, memorising", Memorising, 2500, 320)
_TINY = Kind("MLP, tiny units", TinyUnits, 1000, 160)
_BATCH_NORM = Kind("convolutions, BatchNorm", batch_norm_images, 1200, 200)
_GROUP_NORM = Kind("convolutions, GroupNorm", Images, 1200, 200)
_ONE_CYCLE = Kind("convolutions, one cycle", WarmingUp, 1500, 200)
_AUGMENTED = Kind("convolutions, augmented", augmented_images, 600, 160)
_TRANSFORMER = Kind("transformer", Sequences, 500, 96)
_DROPOUT = Kind("transformer, dropout", lambda: Sequences(dropout=0.3), 500, 96)

HEALTHY: tuple[Patient, ...] = (
    _MLP.patient("MLP, bf16", _BF16, runs=5),
    _SETTLING.patient("MLP, down to a minimum, bf16", _BF16, runs=3),
    _MLP.patient("MLP, other optimizer loop", _FOREACH, runs=3),
    _MLP.patient("MLP, micro batches", _SPLIT, runs=2),
    _MLP.patient("MLP, compiled", {"compile_mode": "default"}, runs=2),
    _RESTARTING.patient("MLP, warm restarts, bf16", _BF16, runs=4),
    _RESTLESS.patient("MLP, learning too fast, bf16", _BF16, runs=4),
    _MEMORISING.patient("MLP, memorising, bf16", _BF16, runs=3),
    _TINY.patient("MLP, tiny units, fp16 scaled", _FP16, runs=2),
    _BATCH_NORM.patient("convolutions with BatchNorm, bf16", _BF16, runs=6),
    _BATCH_NORM.patient("convolutions with BatchNorm, channels last", {"memory_format": "channels_last"}, runs=2),
    _GROUP_NORM.patient("convolutions, micro batches, bf16", {**_SPLIT, **_BF16}, runs=3),
    _ONE_CYCLE.patient("convolutions, one cycle, bf16", _BF16, runs=3),
    _AUGMENTED.patient("convolutions, augmented, fp16 scaled", _FP16, runs=2),
    _TRANSFORMER.patient("transformer, bf16, other attention", {**_BF16, "attention_backend": "math"}, runs=3),
    _DROPOUT.patient("transformer with dropout, bf16", _BF16, runs=3),
)

SICK: tuple[Patient, ...] = (
    _MLP.patient("loss x 1.05 under autocast", _BF16, build=LateLossScale),
    _MLP.patient("loss x 1.05 under autocast, from step 500", _BF16, build=lambda: LateLossScale(begins=LATE)),
    _MLP.patient("gradients x 1.05, loss right", _BF16, build=GradientScale),
    _MLP.patient("a layer's gradient is zero", _BF16, build=lambda: HookedPoints(zero)),
    _MLP.patient("noise of 3 x its size on a layer's gradient", _BF16, build=lambda: HookedPoints(add_noise)),
    _MLP.patient("a layer's gradient in 3 bits, from step 500", _BF16, build=lambda: HookedPoints(quantise, LATE)),
    _MLP.patient("a gradient is NaN, from step 500", _BF16, build=lambda: HookedPoints(spoil, LATE)),
    _GROUP_NORM.patient("a stale copy of a layer's weights", _BF16, build=StaleCopy),
    _TRANSFORMER.patient("attention sees the future", {"attention_backend": "math"}, build=LeakyAttention),
    _MLP.patient("compiled wrongly", {"compile_mode": "default"}, build=MiscompiledPoints),
    _TINY.patient("fp16 without a loss scaler", _FP16, plant=take_scaler_away),
    _GROUP_NORM.patient("wrong labels, from step 500", _BF16, build=WrongLabels),
    _GROUP_NORM.patient("loss divided by 4 once too often", _FOREACH, build=HalvedLoss),
    _GROUP_NORM.patient("every update 20 times, from step 500", _FOREACH, plant=step_too_far),
    _GROUP_NORM.patient("all weights decay, from step 500", _FOREACH, plant=decay_everything),
    _GROUP_NORM.patient("weights are pushed, from step 500", _FOREACH, plant=blow_up),
    _GROUP_NORM.patient("momentum is lost at each step", _FOREACH, plant=forget_momentum),
    _TINY.patient("one gradient in 6 overflows, from step 500", _FP16, plant=storm(6)),
    _TINY.patient("every gradient overflows, from step 500", _FP16, plant=storm(1)),
    _MLP.patient("learning rate x 3 by its own schedule, from step 500", _BF16, build=LeapingRate),
    _GROUP_NORM.patient("the same batch again and again, from step 500", _FOREACH, build=SameBatch),
    _DROPOUT.patient("dropout is left out", _BF16, build=Undropped),
)
