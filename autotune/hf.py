"""For users of transformers' Trainer: tune what it trains, and train with the answer inside of it.

training_arguments("best.json")      what `TrainingArguments` can express, as keyword arguments
TunedCallback("best.json")           applies more of it, and watches the pace
workload(trainer)                    what `autotune search FILE.py:workload` tunes
"""

from __future__ import annotations

import copy
import functools
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from autotune.adapters.live import LIVE, load_profile
from autotune.adapters.tuned import Tuned
from autotune.emit.export import export_profile
from autotune.engine.dataloader import count_samples, move_batch
from autotune.errors import TargetError, UsageError
from autotune.records.config import TrainConfig
from autotune.records.profile import Profile

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise UsageError(
        f"autotune.hf needs transformers, which cannot be imported here: {error}",
        hint="pip install autotune-torch[frameworks]",
    ) from None

_IGNORED_LABEL = -100


def training_arguments(profile: Profile | str | Path = "best.json") -> dict[str, Any]:
    """Return what an answer changes, as keyword arguments of `transformers.TrainingArguments`.

    Raises:
        ProfileError: the file is no answer.
    """
    arguments: dict[str, Any] = json.loads(export_profile(load_profile(profile), "hf").text)
    return arguments


class TunedCallback(Tuned, TrainerCallback):  # type: ignore[misc]
    """Applies what a running Trainer takes, warns of what it was not given, and of a pace far below the measured one.

    Attributes:
        pace: samples a second so far, and what was promised.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Apply the settings to the process, the model and the optimizer."""
        missing = [
            f"{name}={value!r}"
            for name, value in training_arguments(self._profile).items()
            if not _has(getattr(args, name, None), value)
        ]
        if missing:
            told = "TrainingArguments(..., **autotune.hf.training_arguments(...)) sets them"
            warnings.warn(f"the Trainer was built without {', '.join(missing)}: {told}", stacklevel=2)
        left = _list_unapplied(self._profile)
        if left:
            warnings.warn(f"not applied: {', '.join(left)}; autotune export --to hf tells how", stacklevel=2)
        self._live.begin(given["model"], [given["optimizer"]])

    def on_step_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Count a step."""
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        slow = self.pace.count(samples)
        if slow is not None:
            warnings.warn(slow, stacklevel=2)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Leave the evaluation out of the pace."""
        self.pace.pause()

    def on_save(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Leave the checkpoint out of the pace."""
        self.pace.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        """Put back what holds for the process."""
        self._live.end()


def _has(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return all(getattr(found, name, None) == value for name, value in wanted.items())
    return bool(found == wanted)


def _list_unapplied(profile: Profile) -> list[str]:
    exported = export_profile(profile, "hf")
    return [name for name in exported.unmapped if name not in LIVE]


def workload(trainer: Any) -> TrainerWorkload:
    """Return what a Trainer trains as a workload: model, data, optimizer, schedule, loss and loss on held-out data.

    The Trainer is asked for its parts and never trains; of a `model_init` each training has fresh weights, of a model a
    copy. Its callbacks, metrics and checkpoints have no part in it.

    Args:
        trainer: a `transformers.Trainer` for one process, with a training dataset of known length.

    Raises:
        TargetError: it trains in a way that a workload cannot.
    """
    if isinstance(trainer.eval_dataset, Mapping):
        raise TargetError(
            f"the Trainer has several evaluation sets ({', '.join(map(str, trainer.eval_dataset))})",
            hint="give it the one that is to judge, Trainer(eval_dataset=...), or None",
        )
    kind = TrainerWorkload if trainer.eval_dataset is None else EvaluatedTrainerWorkload
    return kind(trainer)


class TrainerWorkload:
    """A Trainer's parts by the names of the workload protocol.

    Attributes:
        baseline: the settings of its arguments.
        gradient_clip_norm: its `max_grad_norm`; None for no clipping.
        shuffle: its samples are drawn anew in each epoch.
        drop_last: its `dataloader_drop_last`.
        collate: its collator, as its own loader has it.
    """

    def __init__(self, trainer: Any) -> None:
        """Take a Trainer apart; see `workload`."""
        args = trainer.args
        if args.world_size > 1 or args.n_gpu > 1:
            raise TargetError("the Trainer is for several devices", hint="search its script instead, under torchrun")
        if trainer.optimizer is not None:
            raise TargetError(
                "the Trainer was given an optimizer, which is bound to one model",
                hint="name it in TrainingArguments(optim=...), or override create_optimizer",
            )
        loader = trainer.get_train_dataloader()
        sampler = _find_sampler(loader)
        if not isinstance(sampler, RandomSampler | SequentialSampler):
            hint = "search its script instead: autotune search -- python train.py"
            raise TargetError(f"the Trainer draws its samples by {type(sampler).__name__}", hint=hint)
        self._trainer = trainer
        self._dataset: Dataset[Any] = loader.dataset
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self.shuffle, self.drop_last = isinstance(sampler, RandomSampler), bool(args.dataloader_drop_last)
        self.gradient_clip_norm: float | None = args.max_grad_norm or None
        self.baseline = _read_baseline(args)
        self._shifts_labels = _shifts_labels(trainer.model)

    def build_model(self) -> nn.Module:
        """Return a fresh model of `model_init`, else a copy of the Trainer's."""
        if self._trainer.model_init is not None:
            built: nn.Module = self._trainer.call_model_init()
            return built
        # The Trainer has put it on the device, where its weights would count twice.
        model: nn.Module = copy.deepcopy(self._trainer.model.to("cpu"))
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the Trainer's optimizer over another model."""
        trainer = self._trainer
        own = trainer.model
        trainer.model = model
        try:
            optimizer: Optimizer = trainer.create_optimizer()
        finally:
            trainer.model, trainer.optimizer = own, None
        return optimizer

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the Trainer's schedule over all of its steps."""
        steps = self._count_steps()
        try:
            scheduler: LRScheduler = self._trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
        finally:
            self._trainer.lr_scheduler = None
        return scheduler

    def train_dataset(self) -> Dataset[Any]:
        """Return the training samples, as the Trainer's own loader has them."""
        return self._dataset

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """Return the loss by the Trainer's `compute_loss`; with the count of tokens where it is their mean."""
        count = self._count_tokens(batch)
        loss: Tensor = self._trainer.compute_loss(model, dict(batch))  # it may take the labels out
        return loss if count is None else (loss, count)

    def _count_tokens(self, batch: Any) -> Tensor | None:
        trainer = self._trainer
        if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func) or "labels" not in batch:
            return None
        labels = batch["labels"]
        # A causal model predicts each token but the first, and its mean is over those.
        shown = labels[..., 1:] if self._shifts_labels else labels
        count: Tensor = (shown != _IGNORED_LABEL).sum()
        return count

    def _count_steps(self) -> int:
        args = self._trainer.args
        if args.max_steps > 0:
            return int(args.max_steps)
        samples = len(self._dataset)  # type: ignore[arg-type]
        round_off = math.floor if self.drop_last else math.ceil
        batches = max(round_off(samples / args.train_batch_size), 1)
        steps: float = args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps)
        return math.ceil(steps)


class EvaluatedTrainerWorkload(TrainerWorkload):
    """A Trainer's parts, its held-out samples among them.

    Attributes:
        metric: the mean loss over them.
    """

    metric = ("eval_loss", "minimize")

    @functools.cached_property
    def _eval_loader(self) -> DataLoader[Any]:
        own = self._trainer.get_eval_dataloader()
        size = self._trainer.args.per_device_eval_batch_size
        return DataLoader(own.dataset, batch_size=size, collate_fn=own.collate_fn)

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        """Return the mean loss over the held-out samples."""
        total, weights = 0.0, 0.0
        for batch in self._eval_loader:
            returned = self.compute_loss(model, move_batch(batch, lambda tensor: tensor.to(device), device))
            loss, weight = returned if isinstance(returned, tuple) else (returned, count_samples(batch))
            total, weights = total + float(loss) * float(weight), weights + float(weight)
        return total / max(weights, 1.0)


def _shifts_labels(model: Any) -> bool:
    """Return whether a model's own loss is that of a decoder, which shifts the labels itself."""
    loss = getattr(model, "loss_function", None)
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and is_decoder


def _find_sampler(loader: Any) -> Any:
    """Return what draws the samples of a loader that accelerate has prepared: its own `sampler` is another one."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def _read_baseline(args: Any) -> TrainConfig:
    """Return the settings of a Trainer's arguments."""
    on_gpu = args.device.type == "cuda"
    checkpoints = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", False)
    mode: Any = args.torch_compile_mode or "default"
    return TrainConfig(
        micro_batch_size=args.train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        matmul_precision="high" if args.tf32 else "highest",
        activation_checkpointing="full" if checkpoints else "off",
        compile_mode=mode if args.torch_compile else "off",
        num_workers=args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor or 2,
        pin_memory=bool(args.dataloader_pin_memory) and on_gpu,
        persistent_workers=bool(args.dataloader_persistent_workers),
        non_blocking=bool(args.accelerator_config.non_blocking) and on_gpu,
    )
