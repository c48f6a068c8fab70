"""A training whose optimizer steps are taken by several processes together: with a replica, or a shard, each.

    loss of a micro batch x its samples / samples of all ranks x ranks ── backward ── mean over ranks = the sum
    all micro batches of a step but the last: their gradients stay here until the last one's meet

What DDP or FSDP2 wraps is the workload's `compute_loss`, with the model in it: the user's code is handed its own model,
as in one process, and may call any of its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from autotune.distributed.loader import RankBatchSampler
from autotune.distributed.world import Command, World
from autotune.engine.compilation import compile_blocks
from autotune.engine.dataloader import EpochBatchSampler, Order, build_loader, mix_seed
from autotune.engine.determinism import make_reference
from autotune.engine.loop import SMALLEST_COUNT, Mark, StepOutcome, Training, seed_everything, weigh
from autotune.engine.shards import local_part
from autotune.engine.sharing import (
    find_blocks_to_shard,
    find_unshardable,
    gathered_for_a_while,
    is_sharded,
    meeting,
    refuse_sharding,
    replicate,
    shard,
)
from autotune.engine.windows import Window
from autotune.errors import TargetError, UsageError
from autotune.measure.clock import Clock, clock_for
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload

T = TypeVar("T")

_UNUSED = "finished reduction in the prior iteration"
_NOT_GATHERED = "got mixed torch.tensor and dtensor"


class SharedModel(nn.Module):
    """What is done with a model as a module, for DDP or FSDP2 to wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[nn.Module], T]) -> T:
        """Return what a call finds with the model."""
        return call(self.model)


class OwnTime:
    """Times what a rank does by itself in each step: data and forward passes, before its gradients meet the others'.

    Args:
        device: where it trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = clock_for(device)

    def mark(self) -> None:
        """Note, by turns, that a step begins and that its gradients are about to meet."""
        self._clock.mark()

    def take(self) -> float:
        """Return the seconds since the last call, and start anew; the device must have done all that it was given."""
        self._clock.synchronize()
        return sum(self._clock.take_intervals()[::2])


class RankTraining(Training):
    """One rank's part of a training; all ranks must build it, and take its steps, together.

    Attributes:
        world: this process among the others.
        own_time: told when a step begins and when its gradients are about to meet; None where nobody asks.
    """

    def __init__(
        self,
        loaded: LoadedWorkload,
        config: TrainConfig,
        *,
        world: World,
        seed: int,
        random_sources: Sequence[str] = (),
        worker_timeout_seconds: float = 0.0,
        in_float64: bool = False,
    ) -> None:
        """Build the training as one process would, then tie its gradients to those of the other ranks.

        Args:
            loaded: the workload.
            config: settings of each rank.
            world: this process among the others.
            seed: of weights, data order and dropout.
            random_sources: global generators that samples or collation draw from.
            worker_timeout_seconds: longest wait for a loader's worker.
            in_float64: compute the model in it.

        Raises:
            TargetError: a part of the workload returns something of the wrong type.
            UsageError: the workload cannot be trained by several processes.
            RankLostError: another rank is gone.
        """
        self.world = world
        self.own_time: OwnTime | None = None
        self.is_sharded = is_sharded(config)
        self._in_float64 = in_float64
        super().__init__(
            loaded,
            config,
            device=world.device,
            seed=seed,
            random_sources=random_sources,
            worker_timeout_seconds=worker_timeout_seconds,
        )
        sampler = self.windows.sampler
        has_fillers = isinstance(sampler, RankBatchSampler) and sampler.has_idle_ranks
        require_shareable(self.model, loaded.label, world.size, has_fillers=has_fillers)
        if not self.is_sharded:
            if in_float64:
                make_reference(self.model)
            with world.watching():
                self._shared: nn.Module = replicate(
                    SharedModel(self.model), config, finds_unused=loaded.finds_unused_parameters
                )
        # Weights are the leader's. What each rank draws from here on is its own: equal dropout masks would be no draws.
        seed_everything(mix_seed(seed + 1, world.rank))

    def _place_model(self, model: nn.Module) -> nn.Module:
        # Sharded on the host: it need not fit a device.
        return model if self.is_sharded else super()._place_model(model)

    def _prepare_model(self) -> None:
        if not self.is_sharded:
            super()._prepare_model()
            return
        self._require_shardable()
        if self._in_float64:
            make_reference(self.model)
        self._shared = SharedModel(self.model)
        with self.world.watching():
            self.world.copy_first([*self.model.parameters(), *self.model.buffers()])
            blocks = find_blocks_to_shard(self.model)
            compile_blocks(blocks or [self.model], self.config)
            shard(self._shared, self.model, self.config, self.device)

    def _require_shardable(self) -> None:
        require_shards(self._loaded, self.model, self.config, has_average=self.averaged is not None)
        with self.world.watching():
            why_not = refuse_sharding(self.device)
        if why_not:
            raise _refuse_shards(self._loaded, why_not)

    def call_model(self, call: Callable[[nn.Module], T]) -> T:
        """Return what a call finds with the model that is evaluated; of a sharded one all ranks call it together.

        Args:
            call: given the model.

        Raises:
            RankLostError: another rank is gone.
        """
        if not self.is_sharded:
            return super().call_model(call)
        with self.world.watching(), gathered_for_a_while(self._shared):
            found: T = self._shared(call)
            return found

    def _build_loader(self, order: Order, sources: Sequence[str]) -> tuple[DataLoader[Any], EpochBatchSampler | None]:
        dataset, collate = self._loaded.workload.train_dataset(), self._loaded.collate
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                f"{self._loaded.label}: an iterable dataset cannot be shared out over processes",
                hint="give train_dataset() a length and __getitem__, or train with one process",
            )
        make = partial(RankBatchSampler, rank=self.world.rank, world_size=self.world.size)
        return build_loader(dataset, self.config, order, collate=collate, random_sources=sources, make_sampler=make)

    def _compute_loss(self, batch: Any) -> Any:
        with self.world.watching():
            return self._shared(lambda model: self._loaded.workload.compute_loss(model, batch))

    def _scale_gradients(self, factor: Tensor | float) -> None:
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)

    def _accumulate(self, window: Window, note: Mark) -> Tensor:
        world, total = self.world, window.samples
        if self.is_sharded:
            self._copy_buffers()
        reference: Tensor | None = None
        sums = torch.zeros(2, device=self.device, dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        for index, (batch, count) in enumerate(zip(window.batches, window.counts, strict=True)):
            placed = self.place(batch)
            note("copy")
            with self._meeting(is_last=index == len(window.batches) - 1):
                loss, weight = self._forward(placed)
                note("forward")
                if self.own_time is not None and index == len(window.batches) - 1:
                    self.own_time.mark()
                if weight is None:
                    self._backward_together(loss * (count * world.size / total))
                    sums[0] += loss.detach().reshape(()) * (count / total)
                else:
                    weight = torch.as_tensor(weight, device=self.device, dtype=torch.float32) * (count > 0)
                    # The first count is the leader's: what all relate to must be the same everywhere.
                    reference = world.first(weight.clamp(min=1.0)) if reference is None else reference
                    self._backward_together(loss * (weight / reference))
                    sums += torch.stack([weigh(loss.detach().reshape(()), weight), weight])
            note("backward")
        sums = world.sum(sums)
        if reference is None:
            return sums[0].float()
        counted = sums[1].clamp(min=SMALLEST_COUNT)
        self._scale_gradients((reference * world.size / counted).float())
        return torch.as_tensor(sums[0] / counted).float()

    def _copy_buffers(self) -> None:
        """Have the leader's buffers everywhere, as DistributedDataParallel has by itself."""
        if buffers := list(self.model.buffers()):
            with self.world.watching():
                self.world.copy_first(buffers)

    @contextmanager
    def _meeting(self, *, is_last: bool) -> Iterator[None]:
        with meeting(self._shared, self.config, is_last=is_last):
            try:
                yield
            except RuntimeError as error:
                if _NOT_GATHERED in str(error).lower():
                    raise UsageError(
                        f"{self._loaded.label}: a parameter of a repeated block is used outside of its forward, where "
                        "distributed_strategy fsdp has not gathered it",
                        hint="use distributed_strategy ddp, or let the block's own forward use it",
                    ) from None
                if _UNUSED not in str(error):
                    raise
                raise TargetError(
                    f"{self._loaded.label}: a parameter of the model has no part in the loss, and the processes "
                    "wait for its gradient",
                    hint="freeze it (requires_grad_(False)), or give the workload find_unused_parameters = True",
                ) from None

    def _backward_together(self, loss: Tensor) -> None:
        with self.world.watching():
            self._backward(loss)

    def _update_weights(self) -> None:
        with self.world.watching():  # of shards the norm is found by all
            super()._update_weights()

    def step(self, mark: Mark | None = None) -> StepOutcome:
        """Take one optimizer step with all ranks; the leader has the others take it too.

        Args:
            mark: called with `data`, `copy`, `forward`, `backward`, `optimizer` when that phase ends.

        Raises:
            TargetError: the dataset is empty, or compute_loss returns something that is not a scalar loss.
            RankLostError: another rank is gone, or does not answer.
        """
        if self.world.leads:
            self.world.tell(Command.STEP)
        if self.own_time is not None:
            self.own_time.mark()
        return super().step(mark)

    def announce_pause(self) -> None:
        """Tell the other ranks to wait as long as it takes."""
        self.world.tell(Command.PAUSE)


def require_shards(loaded: LoadedWorkload, model: nn.Module, config: TrainConfig, *, has_average: bool) -> None:
    """Make sure that a model can be sharded over processes.

    Args:
        loaded: the workload.
        model: that it has built.
        config: the settings, which ask for it.
        has_average: the workload keeps an average of the weights.

    Raises:
        UsageError: it cannot.
    """
    why_not = find_unshardable(model, finds_unused=loaded.finds_unused_parameters, has_average=has_average)
    if not why_not and config.memory_format != "contiguous":
        why_not = "FSDP2 shards contiguous weights, and memory_format is channels_last"
    if why_not:
        raise _refuse_shards(loaded, why_not)


def _refuse_shards(loaded: LoadedWorkload, why_not: str) -> UsageError:
    return UsageError(f"{loaded.label}: distributed_strategy fsdp: {why_not}", hint="use distributed_strategy ddp")


def require_shareable(model: nn.Module, label: str, world_size: int, *, has_fillers: bool) -> None:
    """Make sure that nothing in a model sees the samples of one process only.

    Args:
        model: of the workload.
        label: of the workload.
        world_size: processes that train it.
        has_fillers: in an epoch's last micro batch not all of them have a sample.

    Raises:
        UsageError: a layer does, so that several processes would learn something else.
    """
    normed = [(name, one) for name, one in model.named_modules() if isinstance(one, _BatchNorm)]
    alone = [name for name, one in normed if not isinstance(one, nn.SyncBatchNorm)]
    if alone and world_size > 1:
        raise UsageError(
            f"{label}: BatchNorm ({alone[0]}) takes its statistics from the samples of one process, so that "
            f"{world_size} processes would learn something else than one",
            hint="have build_model() return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) (GPUs only), use "
            "another norm, or train with one process",
        )
    if normed and has_fillers:
        raise UsageError(
            f"{label}: the last micro batch of an epoch has fewer samples than there are processes, and "
            "SyncBatchNorm needs one in each",
            hint="give the workload drop_last = True",
        )
