"""Trainings with one known mistake each, and trainings with none: what a check of drift must catch, and must let pass.

A mistake is switched on by the workload's own knob `fault`, which it declares to be mere rounding, or comes with a
setting that the workload's code does not survive. The fault `nothing` is none: the baseline against itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import synthetic
import torch
import torch.nn.functional as F
from models import CausalTransformer, ConvNet, KeyValueMemory, Regressor, group_norm
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from autotune.records.config import TrainConfig

SCHEDULED_STEPS = 400
DISPLACEMENT_UNIT, DISPLACEMENT_POINTS = 1e-2, 256


@dataclass(frozen=True)
class Control:
    """One change of one training.

    Attributes:
        name: unique.
        target: the workload, relative to this folder.
        changes: fields of the workload's baseline that differ.
        caught_by: the check expected to find the mistake, others may too; None for a change that must pass.
        knobs: a script's own, as `--knob` takes them; a workload declares its own.
    """

    name: str
    target: str
    changes: dict[str, object] = field(default_factory=dict)
    caught_by: str | None = None
    knobs: tuple[str, ...] = ()


class Plain:
    """What all the workloads share."""

    baseline = TrainConfig(micro_batch_size=16)
    knobs: dict[str, tuple[str, ...]] = {}
    knob_numerics: dict[str, str] = {}
    fault = "none"

    @property
    def is_faulty(self) -> bool:
        return self.fault not in ("none", "nothing")


class Images(Plain):
    """Classifies small pictures."""

    def __init__(self, norm: Any = group_norm, dataset: Any = synthetic.images) -> None:
        self.norm, self.dataset = norm, dataset

    def build_model(self) -> nn.Module:
        return ConvNet(self.norm)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.02, momentum=0.9)

    def train_dataset(self) -> Dataset[Any]:
        dataset: Dataset[Any] = self.dataset()
        return dataset

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)


class Sequences(Plain):
    """Predicts the next token of ragged sequences.

    Attributes:
        counts: tell how many tokens a loss is the mean of.
    """

    def __init__(self, *, dropout: float = 0.0, counts: bool = True) -> None:
        self.dropout, self.counts = dropout, counts

    def build_model(self) -> nn.Module:
        return CausalTransformer(dropout=self.dropout)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=3e-3)

    def train_dataset(self) -> Dataset[Any]:
        return synthetic.ragged_sequences()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        tokens, targets = batch
        logits = model(tokens).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=synthetic.IGNORED)
        return (loss, (targets != synthetic.IGNORED).sum()) if self.counts else loss


class ForgottenMasks(Sequences):
    """Computes the blocks again in the backward pass without the random state of the forward pass.

    At a dropout of 0.1 the gradient is wrong by 14 to 29 %, yet only a tenth of its own noise is added; at 0.3 it is a
    third of it.
    """

    knobs = {"fault": ("none", "nothing", "forgotten-masks")}
    knob_numerics = {"fault": "rounding"}

    def build_model(self) -> nn.Module:
        return CausalTransformer(dropout=self.dropout, forgets_masks=self.is_faulty)


class Points(Plain):
    """Fits a smooth function."""

    def build_model(self) -> nn.Module:
        return Regressor()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=3e-3)

    def train_dataset(self) -> Dataset[Any]:
        return synthetic.points()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets = batch
        return F.mse_loss(model(features), targets)


class MistakenPoints(Points):
    """Multiplies the loss by 1.05, or only its gradients, so that no printed loss tells.

    Or learns twice as fast, by its optimizer or by its scheduler; or leaves out the short batch at the end of an epoch.
    """

    knobs = {
        "fault": (
            "none",
            "nothing",
            "loss-scale",
            "gradient-scale",
            "doubled-rate",
            "doubled-schedule",
            "dropped-batch",
        )
    }
    knob_numerics = {"fault": "rounding"}

    @property
    def drop_last(self) -> bool:
        return self.fault == "dropped-batch"

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=6e-3 if self.fault == "doubled-rate" else 3e-3)

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        factor = 2.0 if self.fault == "doubled-schedule" else 1.0
        return LambdaLR(optimizer, lambda step: factor * decay(step))

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().compute_loss(model, batch)
        match self.fault:
            case "loss-scale":
                return 1.05 * loss
            case "gradient-scale":
                return 1.05 * loss - 0.05 * loss.detach()
        return loss


class UnscaledHalf(Points):
    """Predicts displacements at many points, in metres: what reaches the last layer on the way back is about 1e-8.

    Half precision ends at 6e-8, and nothing scales the loss.
    """

    knobs = {"fault": ("none", "unscaled-half")}
    knob_numerics = {"fault": "rounding"}

    def build_model(self) -> nn.Module:
        return Regressor(DISPLACEMENT_POINTS, DISPLACEMENT_UNIT)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=3e-3, eps=1e-12)

    def train_dataset(self) -> Dataset[Any]:
        return synthetic.points(DISPLACEMENT_POINTS, DISPLACEMENT_UNIT)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.float16, enabled=self.is_faulty):
            return super().compute_loss(model, batch)


class HurriedSchedule(Points):
    """Moves its schedule on with the micro batches it has seen, not with the optimizer steps."""

    def __init__(self) -> None:
        self.micro_batches = 0

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        self.micro_batches = 0
        return LambdaLR(optimizer, lambda _step: decay(self.micro_batches))

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.micro_batches += 1
        return super().compute_loss(model, batch)


class Learners(Plain):
    """Predicts the answers of learners from a memory that is read and written step by step.

    Attributes:
        implementation: of the memory; the parallel one is several times faster, and forgets.
    """

    metric = ("accuracy", "maximize")
    knobs = {"implementation": ("sequential", "hoisted", "parallel")}
    implementation = "sequential"

    def __init__(self, **knob_numerics: str) -> None:
        self.knob_numerics = knob_numerics

    def build_model(self) -> nn.Module:
        return KeyValueMemory(self.implementation)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=2e-2)

    def train_dataset(self) -> Dataset[Any]:
        return synthetic.learners()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        questions, answers = batch
        return F.cross_entropy(model(questions, answers).float().flatten(0, 1), answers.flatten())

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        questions, answers = (part.to(device) for part in synthetic.held_out_learners().tensors)
        return float((model(questions, answers).argmax(dim=-1) == answers).float().mean())


def decay(step: int) -> float:
    return max(0.05, 1 - step / SCHEDULED_STEPS)


images = Images()
images_batch_norm = Images(nn.BatchNorm2d)
images_augmented = Images(dataset=synthetic.AugmentedImages)
noise_of_worker = Images(dataset=synthetic.NoiseOfWorker)
sequences = Sequences()
sequences_dropout = ForgottenMasks(dropout=0.3)
unequal_means = Sequences(counts=False)
mistaken_points = MistakenPoints()
unscaled_half = UnscaledHalf()
hurried_schedule = HurriedSchedule()
learners = Learners()
learners_rounding = Learners(implementation="rounding")

_FOUR_BY_FOUR: dict[str, object] = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}
_TWO_BY_EIGHT: dict[str, object] = {"micro_batch_size": 2, "gradient_accumulation_steps": 8}


def _switch_on(fault: str) -> dict[str, object]:
    return {"user_knobs": {"fault": fault}}


def _implement(implementation: str) -> dict[str, object]:
    return {"user_knobs": {"implementation": implementation}}


NEGATIVE = (
    Control("unequal-means", "controls.py:unequal_means", _FOUR_BY_FOUR, "additivity"),
    Control("loss-scale", "controls.py:mistaken_points", _switch_on("loss-scale"), "gradients"),
    Control("gradient-scale", "controls.py:mistaken_points", _switch_on("gradient-scale"), "gradients"),
    Control("batch-norm-micro-batch", "controls.py:images_batch_norm", _TWO_BY_EIGHT, "additivity"),
    Control("unscaled-half", "controls.py:unscaled_half", _switch_on("unscaled-half"), "gradients"),
    Control("doubled-rate", "controls.py:mistaken_points", _switch_on("doubled-rate"), "schedule"),
    Control("doubled-schedule", "controls.py:mistaken_points", _switch_on("doubled-schedule"), "schedule"),
    Control("dropped-batch", "controls.py:mistaken_points", _switch_on("dropped-batch"), "tape"),
    Control("hurried-schedule", "controls.py:hurried_schedule", _FOUR_BY_FOUR, "schedule"),
    Control("forgotten-masks", "controls.py:sequences_dropout", _switch_on("forgotten-masks"), "gradients"),
    Control("parallel-memory-rounding", "controls.py:learners_rounding", _implement("parallel"), "gradients"),
    Control("parallel-memory-semantic", "controls.py:learners", _implement("parallel"), "metric"),
    Control("noise-of-worker", "controls.py:noise_of_worker", {"num_workers": 2}, "tape"),
)

POSITIVE = (
    Control("nothing", "controls.py:mistaken_points", _switch_on("nothing")),
    Control("nothing-dropout", "controls.py:sequences_dropout", _switch_on("nothing")),
    Control("workers", "controls.py:images", {"num_workers": 2}),
    Control("workers-augmented", "controls.py:images_augmented", {"num_workers": 2}),
    Control("persistent-workers", "controls.py:images_augmented", {"num_workers": 2, "persistent_workers": True}),
    Control("fused", "controls.py:mistaken_points", {"optimizer_implementation": "fused"}),
    Control("foreach", "controls.py:sequences", {"optimizer_implementation": "foreach"}),
    Control("channels-last", "controls.py:images_batch_norm", {"memory_format": "channels_last"}),
    Control("checkpointing-full", "controls.py:sequences_dropout", {"activation_checkpointing": "full"}),
    Control("checkpointing-selective", "controls.py:sequences_dropout", {"activation_checkpointing": "selective"}),
    Control("bf16", "controls.py:images", {"precision": "bf16"}),
    Control("bf16-batch-norm", "controls.py:images_batch_norm", {"precision": "bf16"}),
    Control("bf16-transformer", "controls.py:sequences", {"precision": "bf16"}),
    Control("micro-batch", "controls.py:images", _FOUR_BY_FOUR),
    Control("micro-batch-counted", "controls.py:sequences", _FOUR_BY_FOUR),
    Control("micro-batch-dropout", "controls.py:sequences_dropout", _FOUR_BY_FOUR),
    Control("two-threads", "controls.py:sequences", {"num_threads": 2}),
    Control("math-attention", "controls.py:sequences", {"attention_backend": "math"}),
    Control("hoisted-memory", "controls.py:learners_rounding", _implement("hoisted")),
)

CONTROLS: tuple[Control, ...] = NEGATIVE + POSITIVE
