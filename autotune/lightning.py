"""For users of Lightning: tune what a module and its data train, and train with the answer in a Lightning Trainer.

from_lightning(module, datamodule)   what `autotune search FILE.py:workload` tunes
TunedCallback("best.json")           applies what a running Trainer takes, and watches the pace
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from autotune.adapters.live import LIVE
from autotune.adapters.tuned import Tuned
from autotune.emit.export import export_profile
from autotune.engine.dataloader import count_samples, move_batch, read_batch_size
from autotune.errors import TargetError, UsageError
from autotune.records.config import TrainConfig, spread_config

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise UsageError(
        f"autotune.lightning needs Lightning, which cannot be imported here: {error}",
        hint="pip install autotune-torch[frameworks]",
    ) from None

_ACCUMULATION = "gradient_accumulation_steps"
_SCRIPT_HINT = "search its script instead: autotune search -- python train.py"


class TunedCallback(Tuned, Callback):  # type: ignore[misc]
    """Applies what a running Trainer takes, warns of what it cannot, and of a pace far below the measured one.

    Attributes:
        pace: samples a second so far, and what was promised.
    """

    _samples = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the accumulation set once the loader is there, and before a schedule is made for a number of steps."""
        if stage != "fit" or _ACCUMULATION not in self._changed:
            return
        own, plain = vars(pl_module).get("configure_optimizers"), pl_module.configure_optimizers

        def configure_optimizers() -> Any:
            del pl_module.configure_optimizers
            if own is not None:
                pl_module.configure_optimizers = own
            self._accumulate(trainer)
            return plain()

        pl_module.configure_optimizers = configure_optimizers

    def _accumulate(self, trainer: Any) -> None:
        """Accumulate as the answer has it, where its micro batch is what the loader gives."""
        each = spread_config(self._profile.config, self._profile.world_size)
        trainer.fit_loop.setup_data()
        loader = trainer.train_dataloader
        found = read_batch_size(loader) if isinstance(loader, DataLoader) else None
        if found == each.micro_batch_size:
            trainer.accumulate_grad_batches = each.gradient_accumulation_steps
            return
        given = "batches of a size that it does not tell" if found is None else f"batches of {found}"
        told = f"the loader gives {given}, and the answer's are of {each.micro_batch_size}"
        warnings.warn(f"{told}: the accumulation is left as it is, for the same effective batch", stacklevel=2)

    @property
    def _changed(self) -> set[str]:
        exported = export_profile(self._profile, "lightning")
        return {*exported.mapped, *exported.unmapped}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply the settings to the process, the Trainer, the model and the optimizers."""
        left = sorted(self._changed - LIVE - {_ACCUMULATION})
        if left:
            told = "autotune export --to lightning tells how"
            warnings.warn(f"to be set where Trainer and loader are built: {', '.join(left)}; {told}", stacklevel=2)
        self._live.begin(pl_module, trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the micro batches of a step."""
        count = _count_batch(batch, trainer.train_dataloader)
        if count is None:
            return
        self._samples += count * trainer.world_size
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        slow = self.pace.count(self._samples)
        self._samples = 0
        if slow is not None:
            warnings.warn(slow, stacklevel=2)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the evaluation out of the pace."""
        self.pace.pause()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Leave the checkpoint out of the pace."""
        self.pace.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put back what holds for the process."""
        self._live.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put it back as well when the training fails."""
        self._live.end()


def from_lightning(
    module: Any,
    datamodule: Any,
    *,
    metric: tuple[str, str] | None = None,
    gradient_clip_norm: float | None = None,
    **settings: Any,
) -> LightningWorkload:
    """Return what a LightningModule and its data train as a workload.

    Of the module `training_step`, `configure_optimizers` and, with a metric, `validation_step` are called, without a
    Trainer: other hooks and callbacks have no part in it.

    Args:
        module: a LightningModule, of which each training has a copy; or a function that builds one, with fresh weights.
        datamodule: its `train_dataloader` says what is trained on, in which batches; for a metric it has a
            `val_dataloader` too.
        metric: name that `validation_step` logs, and "minimize" or "maximize"; None judges by the training loss alone.
        gradient_clip_norm: the Trainer's `gradient_clip_val`.
        settings: fields of `TrainConfig` that are the Trainer's own today, as `precision="bf16"`.

    Raises:
        TargetError: it trains in a way that a workload cannot.
    """
    if metric is None:
        return LightningWorkload(module, datamodule, gradient_clip_norm, settings)
    return EvaluatedLightningWorkload(module, datamodule, gradient_clip_norm, settings, metric=metric)


class TrainingStep(nn.Module):
    """A LightningModule whose training step is its forward pass, which is what is compiled."""

    def __init__(self, module: Any) -> None:
        """Take the module."""
        super().__init__()
        self.module = module
        self._indices = (0,) if _takes_index(module.training_step) else ()

    def forward(self, batch: Any) -> Any:
        """Return what the module's `training_step` returns."""
        return self.module.training_step(batch, *self._indices)

    def _apply(self, *given: Any, **named: Any) -> Self:
        super()._apply(*given, **named)  # type: ignore[no-untyped-call]
        weight = next(self.module.parameters(), None)
        if weight is not None:
            self.module.to(weight.device)  # where `self.device` comes from, which a parent's `to` leaves as it was
        return self


class LightningWorkload:
    """A LightningModule and its data by the names of the workload protocol.

    Attributes:
        baseline: the settings of its loader, and those that were named.
        gradient_clip_norm: largest gradient norm; None for no clipping.
        shuffle: its samples are drawn anew in each epoch.
        drop_last: as its loader has it.
        collate: as its loader has it.
        weights_prefix: before the module's own names of its weights, in those of `TrainingStep`.
    """

    weights_prefix = "module."

    def __init__(
        self, module: Any, datamodule: Any, gradient_clip_norm: float | None, settings: Mapping[str, Any]
    ) -> None:
        """Take a module and its data apart; see `from_lightning`."""
        datamodule.prepare_data()
        datamodule.setup("fit")
        loader = _require_plain(datamodule.train_dataloader())
        self._module, self._datamodule = module, datamodule
        self._dataset: Dataset[Any] = loader.dataset
        self._schedules: dict[int, Any] = {}
        self._has_metrics = False
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self.shuffle, self.drop_last = isinstance(loader.sampler, RandomSampler), loader.drop_last
        self.gradient_clip_norm = gradient_clip_norm
        self.baseline = TrainConfig(
            micro_batch_size=loader.batch_size or 1,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor or 2,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
            persistent_workers=loader.persistent_workers,
        ).replace(**settings)

    def build_model(self) -> TrainingStep:
        """Return the module, fresh where a function builds it, else a copy."""
        module = copy.deepcopy(self._module) if isinstance(self._module, nn.Module) else self._module()
        if not module.automatic_optimization:
            raise TargetError(
                "the module optimizes by itself (automatic_optimization = False)",
                hint=_SCRIPT_HINT,
            )
        _log_to(module, {})  # nobody listens, and without a Trainer each call would warn
        self._has_metrics = any(map(_is_metric, module.modules()))
        return TrainingStep(module)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the module's optimizer."""
        optimizer, schedule = _read_configured(model.module.configure_optimizers())  # type: ignore[operator, union-attr]
        self._schedules = {id(optimizer): schedule}
        return optimizer

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the schedule that came with the optimizer, taken on once a step; None without one."""
        found = self._schedules.get(id(optimizer))
        if found is None:
            return None
        schedule = found if isinstance(found, Mapping) else {"scheduler": found}
        scheduler: LRScheduler = schedule["scheduler"]
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TargetError(
                "configure_optimizers returns ReduceLROnPlateau, which waits for a metric",
                hint="return a scheduler that is stepped by steps or epochs",
            )
        steps = self._count_epoch_steps() if schedule.get("interval", "epoch") == "epoch" else 1
        return EveryFewSteps(scheduler, optimizer, steps * int(schedule.get("frequency", 1)))

    def _count_epoch_steps(self) -> int:
        samples, each = len(self._dataset), self.baseline.effective_batch_size  # type: ignore[arg-type]
        return max(samples // each if self.drop_last else -(-samples // each), 1)

    def train_dataset(self) -> Dataset[Any]:
        """Return the training samples."""
        return self._dataset

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the module's `training_step`."""
        returned = model(batch)
        if self._has_metrics:
            _reset_metrics(model)  # nobody reads them, and some keep every batch
        loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
        return loss


class EvaluatedLightningWorkload(LightningWorkload):
    """A LightningModule and its data, the held-out ones among them.

    Attributes:
        metric: what its `validation_step` logs.
    """

    def __init__(self, *parts: Any, metric: tuple[str, str]) -> None:
        """Take them apart; see `from_lightning`."""
        super().__init__(*parts)
        self.metric = metric

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        """Return the mean of what `validation_step` logs by the metric's name, weighted by samples.

        Of a logged metric, as torchmetrics has them, it is what that computes in the end. Of several loaders all
        batches count.

        Raises:
            TargetError: it logs nothing by that name.
        """
        name = self.metric[0]
        module: Any = model.module
        _reset_metrics(module)
        logged = list(self._log_batches(module, device))
        if not logged:
            raise TargetError(f"validation_step logs no {name!r}", hint=f"write self.log({name!r}, value) in it")
        mean = _average(logged)
        _reset_metrics(module)
        return mean

    def _log_batches(self, module: Any, device: torch.device) -> Iterator[tuple[Any, int]]:
        """Yield what is logged by the metric's name in each batch, and the samples of the batch."""
        found = self._datamodule.val_dataloader()
        for loader_index, loader in enumerate(found if isinstance(found, list | tuple) else [found]):
            for index, batch in enumerate(loader):
                placed = move_batch(batch, lambda tensor: tensor.to(device), device)
                values: dict[str, Any] = {}
                _log_to(module, values)
                _call_step(module.validation_step, placed, index, loader_index)
                _log_to(module, {})
                if self.metric[0] in values:
                    value = values[self.metric[0]]
                    yield value if _is_metric(value) else float(value), _count_batch(batch, loader) or 1


class EveryFewSteps(LRScheduler):
    """A schedule that goes on once in some optimizer steps, as Lightning's does at the end of an epoch."""

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer, steps: int) -> None:
        """Hold a schedule that has begun already.

        Args:
            scheduler: of the optimizer.
            optimizer: its learning rates may have been scaled since.
            steps: between two steps of the schedule.
        """
        self.optimizer, self._scheduler, self._steps, self._taken = optimizer, scheduler, steps, 0
        before = scheduler.get_last_lr()
        factors = [
            group["lr"] / rate if rate else 1.0 for group, rate in zip(optimizer.param_groups, before, strict=True)
        ]
        for one in _list_parts(scheduler):
            one.base_lrs = [rate * factor for rate, factor in zip(one.base_lrs, factors, strict=True)]

    def step(self, epoch: int | None = None) -> None:
        """Count an optimizer step."""
        self._taken += 1
        if self._taken % self._steps == 0:
            self._scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates as they are."""
        return self._scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"taken": self._taken, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._taken = state_dict["taken"]
        self._scheduler.load_state_dict(state_dict["scheduler"])


def _list_parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield the schedulers that hold learning rates to begin from: itself, or those that it takes in turn."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts is not None:
        for part in parts:
            yield from _list_parts(part)
    elif hasattr(scheduler, "base_lrs"):
        yield scheduler


class _Log:
    """Takes the place of a module's `log` and `log_dict`; a class, so that the module can be copied and saved."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def one(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self.values[name] = value

    def several(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self.values.update(values.items())  # a collection of metrics is no mapping, but has `items`


def _log_to(module: Any, values: dict[str, Any]) -> None:
    log = _Log(values)
    module.log, module.log_dict = log.one, log.several


def _require_plain(loader: Any) -> DataLoader[Any]:
    """Return a loader whose batches a workload can have: all samples, in their order or shuffled, so many at once.

    Raises:
        TargetError: they are others.
    """
    if not isinstance(loader, DataLoader) or not _is_plain(loader):
        told = "train_dataloader returns no plain DataLoader with all samples in any order, in batches of one size"
        raise TargetError(told, hint=_SCRIPT_HINT)
    if loader.worker_init_fn is not None and loader.num_workers > 0:
        raise TargetError("train_dataloader has a worker_init_fn, which a workload has not", hint=_SCRIPT_HINT)
    return loader


def _is_plain(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return False
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return isinstance(sampler, SequentialSampler)


def _count_batch(batch: Any, loader: Any) -> int | None:
    """Return the samples of a batch; by its loader where it holds no tensor itself, as a graph's; None if unknown."""
    try:
        return count_samples(batch)
    except ValueError:
        return read_batch_size(loader) if isinstance(loader, DataLoader) else None


def _takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step takes the batch's index, by any name, as a Trainer tells it."""
    found = [one for one in inspect.signature(step).parameters.values() if one.name != "dataloader_idx"]
    by_place = [one for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(by_place) > 1 or any(one.kind is one.VAR_POSITIONAL for one in found)


def _call_step(step: Callable[..., Any], batch: Any, index: int, loader_index: int) -> None:
    """Call a `validation_step` with the indices that it takes."""
    indices = (index,) if _takes_index(step) else ()
    takes_loader = "dataloader_idx" in inspect.signature(step).parameters
    step(batch, *indices, **({"dataloader_idx": loader_index} if takes_loader else {}))


def _is_metric(value: Any) -> bool:
    """Return whether something sums up batches, as a metric of torchmetrics does."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


def _reset_metrics(model: nn.Module) -> None:
    with torch.inference_mode(False):  # an evaluation's mode must not be that of what the next training step adds to
        for one in filter(_is_metric, model.modules()):
            one.reset()  # type: ignore[operator]


def _average(logged: Sequence[tuple[Any, int]]) -> float:
    """Return the mean of values weighted by their samples; a metric has computed one value of all of its batches."""
    metrics = {id(value): value for value, _ in logged if _is_metric(value)}
    computed = {key: float(metric.compute()) for key, metric in metrics.items()}
    total = sum(count for _, count in logged)
    return float(sum(computed.get(id(value), value) * count for value, count in logged) / total)


def _read_configured(returned: Any) -> tuple[Optimizer, Any]:
    """Return the only optimizer that `configure_optimizers` returned, and its schedule or None.

    Raises:
        TargetError: there are several, or none.
    """
    schedules: list[Any] = []
    if isinstance(returned, list | tuple) and len(returned) == 1 and isinstance(returned[0], Mapping):
        returned = returned[0]
    if isinstance(returned, Mapping):
        returned, schedules = returned["optimizer"], [returned.get("lr_scheduler")]
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
        returned, schedules = returned
    optimizers = list(returned) if isinstance(returned, list | tuple) else [returned]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise TargetError(
            f"configure_optimizers returned {len(optimizers)} optimizers",
            hint="a workload has one; search the script instead: autotune search -- python train.py",
        )
    return optimizers[0], schedules[0] if schedules else None
