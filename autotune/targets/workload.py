"""The workload protocol: a Python object that builds model, data, optimizer and loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from autotune.errors import ProfileError, TargetError
from autotune.format import with_article
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.reading import MOST_COUNT
from autotune.records.script import Numerics

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel
    from torch.utils.data import Dataset

_EVALUATION_FACTOR = 4  # an evaluation keeps no activations

REQUIRED = ("build_model", "build_optimizer", "train_dataset", "compute_loss")
DOCS_PART = "docs/workloads.md"


@runtime_checkable
class Workload(Protocol):
    """What a training must provide. An object needs these four methods; it need not inherit from anything.

    Optional attributes and methods, looked up by name:

    - `baseline`: a `TrainConfig`, the settings used today (default: PyTorch's defaults, micro batch size 32).
    - `build_scheduler(optimizer)`: a learning-rate scheduler, stepped once per optimizer step.
    - `evaluate(model, device)`: the metric on held-out data, a float. The model comes in evaluation mode, without
      gradients. With a third parameter `batch_size` it is told how many samples to take at once.
    - `evaluation_batch_size`: that number (default: four times the baseline's micro batch size).
    - `build_averaged_model(model)`: a `torch.optim.swa_utils.AveragedModel`, e.g. of an exponential moving average; it
      is updated after each optimizer step, and it is what is evaluated.
    - `metric`: `("name", "minimize" | "maximize")`, what `evaluate` returns.
    - `metrics`: instead of `metric`, `{"name": "minimize" | "maximize", ...}`; `evaluate` then returns a mapping with a
      float for each name.
    - `gradient_clip_norm`: largest gradient norm; gradients are clipped after unscaling.
    - `collate(samples)`: merges a list of samples into a batch (default: PyTorch's).
    - `drop_last`: leave out the last, short effective batch of an epoch (default: False).
    - `shuffle`: visit the samples in a new random order in each epoch (default: True).
    - `find_unused_parameters`: some have no part in a loss, where several processes train (default: False).
    - `knobs`: own knobs, `{"name": (value, ...)}`; the current value is read from and set on the attribute `name`.
    - `knob_numerics`: what they do to the numbers, `{"name": "exact" | "rounding" | "semantic"}` (default: semantic).
    """

    def build_model(self) -> nn.Module:
        """Return a freshly initialised model on the CPU; weights are drawn from torch's global generator."""
        ...

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the model's parameters, which are on the device already."""
        ...

    def train_dataset(self) -> Dataset[Any]:
        """Return the training samples; a map-style dataset."""
        ...

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """Return the mean loss over the batch, a scalar.

        To average over something other than samples, return `(mean loss, count)`: with accumulation the
        micro batches then weigh by their counts (tokens, pixels, boxes).
        """
        ...


@dataclass(frozen=True)
class Metric:
    """One figure that `evaluate` returns."""

    name: str
    direction: Literal["minimize", "maximize"]


@dataclass(frozen=True)
class LoadedWorkload:
    """A checked workload with its optional parts resolved.

    Attributes:
        workload: the user's object.
        label: the target as the user named it.
        fingerprint: see `fingerprint_workload`.
        baseline: the user's own settings.
        knobs: the workload's own knobs and their allowed values.
        metrics: what `evaluate` returns; empty when it cannot evaluate.
        knob_numerics: class of the own knobs that are not semantic.
    """

    workload: Workload
    label: str
    fingerprint: str
    baseline: TrainConfig
    knobs: dict[str, tuple[KnobValue, ...]]
    metrics: tuple[Metric, ...]
    knob_numerics: dict[str, Numerics] = field(default_factory=dict)

    @property
    def gradient_clip_norm(self) -> float | None:
        """Largest gradient norm; None for no clipping."""
        value = getattr(self.workload, "gradient_clip_norm", None)
        return None if value is None else float(value)

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Merges samples into a batch; None for PyTorch's own."""
        function: Callable[[list[Any]], Any] | None = getattr(self.workload, "collate", None)
        return function

    @property
    def drop_last(self) -> bool:
        """Leave out the last, short effective batch of an epoch."""
        return bool(getattr(self.workload, "drop_last", False))

    @property
    def shuffle(self) -> bool:
        """Visit the samples in a new random order in each epoch."""
        return bool(getattr(self.workload, "shuffle", True))

    @property
    def finds_unused_parameters(self) -> bool:
        """Parameters may have no part in a loss, and several processes are to find out which."""
        return bool(getattr(self.workload, "find_unused_parameters", False))

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the user's scheduler; None without one."""
        build = getattr(self.workload, "build_scheduler", None)
        scheduler: LRScheduler | None = None if build is None else build(optimizer)
        return scheduler

    def build_averaged_model(self, model: nn.Module) -> AveragedModel | None:
        """Return the user's average of the weights; None without one."""
        build = getattr(self.workload, "build_averaged_model", None)
        averaged: AveragedModel | None = None if build is None else build(model)
        return averaged

    @property
    def evaluation_batch_size(self) -> int | None:
        """Samples that `evaluate` is to take at once; None where it does not ask."""
        method = getattr(self.workload, "evaluate", None)
        if method is None or "batch_size" not in inspect.signature(method).parameters:
            return None
        return int(getattr(self.workload, "evaluation_batch_size", _EVALUATION_FACTOR * self.baseline.micro_batch_size))

    def evaluate(self, model: nn.Module, device: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Return each metric of a model in evaluation mode, by name; a value may be NaN.

        Args:
            model: to evaluate.
            device: where it is.
            batch_size: samples at once, where `evaluate` takes it; None for `evaluation_batch_size`.

        Raises:
            TargetError: there is no `evaluate`, or it returned something that is not a number for each metric.
        """
        if not self.metrics:
            raise TargetError(f"{self.label} has no evaluate(model, device)", hint="add one, with a metric attribute")
        asked = self.evaluation_batch_size
        size = {} if asked is None else {"batch_size": batch_size or asked}
        returned = self.workload.evaluate(model, device, **size)  # type: ignore[attr-defined]
        names = [metric.name for metric in self.metrics]
        if not hasattr(self.workload, "metrics"):
            returned, hint = {names[0]: returned}, "it must return the metric, one number"
        else:
            hint = f"it must return a mapping with a number for each of {', '.join(names)}"
        if not isinstance(returned, Mapping):
            raise TargetError(f"{self.label}: evaluate returned {type(returned).__name__}", hint=hint)
        return {name: self._read_number(returned, name, hint=hint) for name in names}

    def _read_number(self, returned: Mapping[str, Any], name: str, *, hint: str) -> float:
        if name not in returned:
            raise TargetError(f"{self.label}: evaluate returned no {name!r}", hint=hint)
        try:
            return float(returned[name])
        except (TypeError, ValueError):
            kind = type(returned[name]).__name__
            raise TargetError(f"{self.label}: evaluate returned {kind} for {name!r}", hint=hint) from None

    def set_knobs(self, config: TrainConfig) -> None:
        """Set the workload's own knobs to a config's values.

        Raises:
            ProfileError: the config sets what is no knob of the workload, or a value that is none of the knob's.
        """
        for name, value in self.find_choices(config).items():
            setattr(self.workload, name, value)

    def find_choices(self, config: TrainConfig) -> dict[str, KnobValue]:
        """Return the declared values of own knobs that a config asks for: it may have been written by anybody.

        Raises:
            ProfileError: as of `set_knobs`.
        """
        return {name: self._find_choice(name, value) for name, value in config.user_knobs.items()}

    def _find_choice(self, name: str, value: KnobValue) -> KnobValue:
        declared = self.knobs.get(name, ())
        if value in declared:
            return declared[declared.index(value)]
        if declared:
            listed = ", ".join(str(choice) for choice in declared)
            message, hint = f"{str(value)[:80]!r} is no value of the knob {name}", f"its values are {listed}"
        else:
            message = f"{name[:80]!r} is no knob of {self.label}"
            hint = f"its own knobs are {', '.join(self.knobs)}" if self.knobs else "it has no knobs of its own"
        raise ProfileError(f"the settings do not fit: {message}", hint=f"{hint}; search again for this target")


def check_workload(found: Any, *, label: str, fingerprint: str) -> LoadedWorkload:
    """Return a workload with its optional parts resolved.

    Raises:
        TargetError: a required method is missing, or an optional part has a wrong type or value.
    """
    missing = [name for name in REQUIRED if not callable(getattr(found, name, None))]
    if missing:
        raise TargetError(
            f"{label} is {with_article(type(found).__name__)} without {', '.join(f'{name}()' for name in missing)}",
            hint=f"a workload has the methods {', '.join(REQUIRED)}; see {DOCS_PART}",
        )
    knobs = _read_knobs(found, label=label)
    baseline = getattr(found, "baseline", TrainConfig())
    if not isinstance(baseline, TrainConfig):
        raise TargetError(
            f"{label}: baseline is {with_article(type(baseline).__name__)}",
            hint="write baseline = autotune.TrainConfig(micro_batch_size=64)",
        )
    own = {name: getattr(found, name) for name in knobs}
    return LoadedWorkload(
        workload=found,
        label=label,
        fingerprint=fingerprint,
        baseline=baseline.replace(user_knobs=own),
        knobs=knobs,
        metrics=_read_metrics(found, label=label),
        knob_numerics=_read_numerics(found, knobs, label=label),
    )


def _read_metrics(found: Any, *, label: str) -> tuple[Metric, ...]:
    if not callable(getattr(found, "evaluate", None)):
        return ()
    if hasattr(found, "metrics"):
        return _read_several_metrics(found, label=label)
    metric = getattr(found, "metric", ("metric", "minimize"))
    match metric:
        case (str(name), "minimize" | "maximize" as direction):
            return (Metric(name=name, direction=direction),)
    raise TargetError(f"{label}: metric is {metric!r}", hint='write metric = ("accuracy", "maximize")')


def _read_several_metrics(found: Any, *, label: str) -> tuple[Metric, ...]:
    declared = found.metrics
    if getattr(found, "metric", None) is not None:
        raise TargetError(f"{label} has both metric and metrics", hint="keep one of them")
    metrics = []
    for item in declared.items() if isinstance(declared, Mapping) else ():
        match item:
            case (str(name), "minimize" | "maximize" as direction):
                metrics.append(Metric(name=name, direction=direction))
    if not metrics or len(metrics) != len(declared):
        hint = 'write metrics = {"accuracy": "maximize", "kappa": "maximize"}'
        raise TargetError(f"{label}: metrics is {declared!r}", hint=hint)
    return tuple(metrics)


def _read_knobs(found: Any, *, label: str) -> dict[str, tuple[KnobValue, ...]]:
    declared = getattr(found, "knobs", {})
    if not isinstance(declared, Mapping):
        raise TargetError(
            f"{label}: knobs is {with_article(type(declared).__name__)}",
            hint='write knobs = {"implementation": ("a", "b")}',
        )
    knobs: dict[str, tuple[KnobValue, ...]] = {}
    for name, values in declared.items():
        listed = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
        if len(listed) < 2 or not all(_is_knob_value(value) for value in listed):
            raise TargetError(
                f"{label}: knob {name!r} has the values {values!r}",
                hint="give at least two strings, numbers or booleans",
            )
        if not hasattr(found, name) or getattr(found, name) not in listed:
            raise TargetError(
                f"{label}: knob {name!r} needs an attribute of that name holding one of {listed!r}",
                hint="it is the baseline's value",
            )
        knobs[str(name)] = listed
    return knobs


def _read_numerics(found: Any, knobs: Mapping[str, Any], *, label: str) -> dict[str, Numerics]:
    declared = getattr(found, "knob_numerics", {})
    classes = get_args(Numerics)
    if isinstance(declared, Mapping) and all(name in knobs and kind in classes for name, kind in declared.items()):
        return dict(declared)
    raise TargetError(
        f"{label}: knob_numerics is {declared!r}", hint=f"it gives knobs of its own one of {', '.join(classes)}"
    )


def _is_knob_value(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= MOST_COUNT
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))
