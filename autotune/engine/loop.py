"""One training step, done right, and the one place that says in which order the knobs are applied.

    threads, products, cuDNN, attention `backend_settings`, restored at the end
    model -> device -> memory format -> checkpointing -> compilation, or sharding over processes
          -> optimizer -> its implementation -> scheduler -> loss scaler -> loader

A step fetches the micro batches of one effective batch, weighs each loss by its share of the true samples (or of
the counts the workload returns), unscales before clipping, steps the scheduler once if the optimizer stepped, and
never waits for the device (fp16 loss scaling excepted: PyTorch's scaler reads its overflow flag).
"""

from __future__ import annotations

import numbers
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from autotune.engine.activation_checkpointing import apply_activation_checkpointing
from autotune.engine.compilation import apply_compilation, captures_graphs, distinct_compile_cache
from autotune.engine.dataloader import EpochBatchSampler, Order, build_loader, move_batch
from autotune.engine.kernels import attention_backend, cudnn_benchmark
from autotune.engine.memory_format import apply_memory_format, arrange_input
from autotune.engine.optimizer import apply_learning_rate_scale, apply_optimizer_implementation
from autotune.engine.precision import autocast, build_scaler, matmul_precision
from autotune.engine.threads import intra_op_threads
from autotune.engine.windows import Window, Windows
from autotune.errors import TargetError
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload

Mark = Callable[[str], None]
T = TypeVar("T")

SMALLEST_COUNT = 1e-12
"""What a step counts at least, where `compute_loss` counts: its loss and gradients are zero then, not 0 / 0."""


@dataclass(frozen=True)
class StepOutcome:
    """One optimizer step.

    Attributes:
        samples: true samples trained on.
        loss: mean loss over them, a detached scalar on the device.
        ends_epoch: the step used the last samples of its epoch.
    """

    samples: int
    loss: Tensor
    ends_epoch: bool


class Training:
    """A model with everything needed to take optimizer steps.

    Attributes:
        is_sharded: several processes have a shard of the model each.
        config: the settings.
        model: the user's model, on the device.
        device: where it is.
        averaged: the average of its weights that the workload builds, or None.
        optimizer: over its parameters.
        scheduler: learning-rate scheduler, or None.
        scaler: loss scaler for fp16, or None.
        windows: where the training stands in its data.
    """

    is_sharded = False

    def __init__(
        self,
        loaded: LoadedWorkload,
        config: TrainConfig,
        *,
        device: torch.device,
        seed: int,
        random_sources: Sequence[str] = (),
        worker_timeout_seconds: float = 0.0,
    ) -> None:
        """Build the training from the workload; the global generators are seeded first.

        Args:
            loaded: the workload.
            config: the settings.
            device: where to train.
            seed: of weights, data order and dropout.
            random_sources: global generators that samples or collation draw from.
            worker_timeout_seconds: longest wait for a loader's worker; 0 to wait for ever.

        Raises:
            TargetError: a part of the workload returns something of the wrong type.
        """
        loaded.set_knobs(config)
        seed_everything(seed)
        self._loaded, self.config, self.device = loaded, config, device
        self.model = self._place_model(_build_model(loaded))
        apply_memory_format(self.model, config)
        self.averaged = _check_averaged(loaded.build_averaged_model(self.model), loaded)
        apply_activation_checkpointing(self.model, config)
        self._prepare_model()
        self.optimizer = _expect(loaded.workload.build_optimizer(self.model), Optimizer, loaded, "build_optimizer")
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise TargetError(
                f"{loaded.label}: LBFGS calls the model many times a step", hint="choose another optimizer"
            )
        apply_optimizer_implementation(self.optimizer, config)
        apply_learning_rate_scale(self.optimizer, config)
        self.scheduler = _check_scheduler(loaded.build_scheduler(self.optimizer), loaded)
        self.scaler = build_scaler(config, device)
        order = Order(seed=seed, shuffle=loaded.shuffle, drop_last=loaded.drop_last)
        loader, sampler = self._build_loader(order, random_sources)
        self.windows = Windows(loader, sampler, config.gradient_accumulation_steps)
        self.windows.limit_waiting(worker_timeout_seconds)
        self.batches_per_epoch = None if sampler is None else len(sampler)
        self.model.train()
        # The weights are drawn; what the training draws from here on must not depend on how they were.
        seed_everything(seed + 1)

    def step(self, mark: Mark | None = None) -> StepOutcome:
        """Take one optimizer step over one effective batch.

        Args:
            mark: called with `data`, `copy`, `forward`, `backward`, `optimizer` when that phase ends.

        Raises:
            TargetError: the dataset is empty, or compute_loss returns something that is not a scalar loss.
        """
        note = mark or _ignore
        window = self.windows.next_window()
        note("data")
        loss = self._accumulate(window, note)
        self._update_weights()
        note("optimizer")
        return StepOutcome(samples=window.samples, loss=loss, ends_epoch=window.ends_epoch)

    def call_model(self, call: Callable[[nn.Module], T]) -> T:
        """Return what a call finds with the model that is evaluated: the average of its weights, where there is one."""
        return call(self.model if self.averaged is None else self.averaged.module)

    def announce_pause(self) -> None:
        """Say that the next step may be long in coming, where other processes wait for it; here are none."""

    def place(self, batch: Any) -> Any:
        """Return a batch on the device, 4-d inputs in the model's layout."""
        return move_batch(batch, self._place_tensor, self.device)

    def _place_model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def _prepare_model(self) -> None:
        apply_compilation(self.model, self.config)

    def _build_loader(self, order: Order, sources: Sequence[str]) -> tuple[DataLoader[Any], EpochBatchSampler | None]:
        dataset, collate = self._loaded.workload.train_dataset(), self._loaded.collate
        return build_loader(dataset, self.config, order, collate=collate, random_sources=sources)

    def _accumulate(self, window: Window, note: Mark) -> Tensor:
        total, alone = sum(window.counts), len(window.batches) == 1
        reference: Tensor | float | None = None
        weight_sum: Tensor | float = 0.0
        loss_sum: Tensor | float = 0.0
        for batch, count in zip(window.batches, window.counts, strict=True):
            placed = self.place(batch)
            note("copy")
            loss, weight = self._forward(placed)
            note("forward")
            if alone:
                self._backward(loss)
                loss_sum = loss.detach().clone() if captures_graphs(self.config, self.device) else loss.detach()
            elif weight is None:
                # The total of samples is known beforehand, so the gradients come out right as they are.
                share = count / total
                self._backward(loss * share)
                loss_sum = loss_sum + loss.detach() * share
            else:
                # The total of counts is known only at the end: weigh relative to the first, correct afterwards.
                reference = _at_least(weight, 1.0) if reference is None else reference
                self._backward(loss * (weight / reference))
                weight_sum = weight_sum + weight
                loss_sum = loss_sum + weigh(loss.detach(), weight)
            note("backward")
        if reference is None:
            return torch.as_tensor(loss_sum)
        # Nothing counted anywhere: gradients and loss are zero, and must not become 0 / 0.
        weight_sum = _at_least(weight_sum, SMALLEST_COUNT)
        self._scale_gradients(reference / weight_sum)
        return torch.as_tensor(loss_sum / weight_sum)

    def _forward(self, batch: Any) -> tuple[Tensor, Tensor | float | None]:
        with autocast(self.config, self.device):
            returned = self._compute_loss(batch)
        parts = returned if isinstance(returned, tuple) else (returned, None)
        if len(parts) != 2:
            raise TargetError(
                f"{self._loaded.label}: compute_loss returned a tuple of {len(parts)}",
                hint="return the mean loss, or (mean loss, count)",
            )
        loss, weight = parts
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TargetError(
                f"{self._loaded.label}: compute_loss returned {_describe(loss)}",
                hint="return the mean loss, a scalar tensor that depends on the model's parameters",
            )
        return loss, self._read_count(weight, loss)

    def _compute_loss(self, batch: Any) -> Any:
        return self._loaded.workload.compute_loss(self.model, batch)

    def _read_count(self, weight: Any, loss: Tensor) -> Tensor | float | None:
        if isinstance(weight, Tensor) and weight.numel() == 1:
            return weight.detach().reshape(()).to(loss.device)
        if weight is None or isinstance(weight, numbers.Real):
            return None if weight is None else float(weight)
        raise TargetError(
            f"{self._loaded.label}: compute_loss returned {_describe(weight)} as the count",
            hint="return (mean loss, count) with one number: how many tokens, pixels or boxes the loss is the mean of",
        )

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def _scale_gradients(self, factor: Tensor | float) -> None:
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def _update_weights(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self._loaded.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._loaded.gradient_clip_norm)
        if self.scaler is None:
            self.optimizer.step()
            stepped = True
        else:
            stepped = self._step_scaled(self.scaler)
        if self.scheduler is not None and stepped:
            self.scheduler.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        # When a gradient overflows, the scaler does not call the optimizer, or a fused one that does nothing; the
        # schedule must not move on. Only the scale, which then falls, tells in both cases.
        scale = None if self.scheduler is None else scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        return scale is None or scaler.get_scale() >= scale

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        placed = tensor.to(self.device, non_blocking=self.config.non_blocking)
        return arrange_input(placed, self.config)


@contextmanager
def backend_settings(config: TrainConfig) -> Iterator[None]:
    """Apply every knob that is global state of torch, and restore what was there."""
    with ExitStack() as stack:
        stack.enter_context(intra_op_threads(config))
        stack.enter_context(matmul_precision(config))
        stack.enter_context(cudnn_benchmark(config))
        stack.enter_context(attention_backend(config))
        stack.enter_context(distinct_compile_cache(config))
        yield


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _expect(value: Any, kind: type, loaded: LoadedWorkload, method: str) -> Any:
    if not isinstance(value, kind):
        raise TargetError(
            f"{loaded.label}: {method}() returned {_describe(value)}",
            hint=f"it must return a {kind.__module__}.{kind.__name__}",
        )
    return value


def _build_model(loaded: LoadedWorkload) -> nn.Module:
    model: nn.Module = _expect(loaded.workload.build_model(), nn.Module, loaded, "build_model")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise TargetError(
            f"{loaded.label}: build_model returned layers without a size yet, as of nn.LazyLinear",
            hint="call the model once in build_model, on a batch of zeros",
        )
    return model


def weigh(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Return a mean loss times what it counts: nothing where nothing counts, and the mean may be 0 / 0."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss * weight, 0.0)
    return loss * weight if weight > 0 else torch.zeros_like(loss)


def _at_least(value: Tensor | float, least: float) -> Tensor | float:
    return value.clamp(min=least) if isinstance(value, Tensor) else max(value, least)


def _check_scheduler(scheduler: Any, loaded: LoadedWorkload) -> LRScheduler | None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TargetError(
            f"{loaded.label}: build_scheduler() returned ReduceLROnPlateau, which waits for a metric",
            hint="return a scheduler that is stepped once per optimizer step",
        )
    return None if scheduler is None else cast(LRScheduler, _expect(scheduler, LRScheduler, loaded, "build_scheduler"))


def _check_averaged(averaged: Any, loaded: LoadedWorkload) -> AveragedModel | None:
    if averaged is None:
        return None
    return cast(AveragedModel, _expect(averaged, AveragedModel, loaded, "build_averaged_model"))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without gradient")
    return "None" if value is None else f"a {type(value).__name__}"


def _ignore(_phase: str) -> None:
    """Mark nothing."""
