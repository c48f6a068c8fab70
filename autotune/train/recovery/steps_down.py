"""What to do when a final training goes wrong: the smallest safe step down. Pure: `Fault` and plan in, `Choice` out.

    out of memory, thrash          micro batch down, accumulation up, the effective batch the same; then recompute
    a loader worker died or hung   the same once more, then no workers
    a compilation failed           eager
    the first step failed          eager, then the baseline's settings: nothing is lost yet
    a loss that is not finite      the baseline's arithmetic
    drift                          the baseline's settings
    a process that was killed      the same once more, then the baseline's settings

Whatever is not listed is the target's own error, and nothing here would mend it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.errors import TargetError
from autotune.knobs import KNOBS
from autotune.records.config import TrainConfig
from autotune.records.run import RunPlan, StepDown, StepDownAction
from autotune.records.trial import Cause
from autotune.sentences.settings import describe_exchanges

PATIENCE_STEPS = 1000
"""A fault that comes again after more optimizer steps than these counts as a new one."""

MEMORY_CAUSES: tuple[Cause, ...] = ("oom-device", "oom-host", "oom-killed", "allocator-thrash")
WORKER_CAUSES: tuple[Cause, ...] = ("dataloader-worker-died", "dataloader-worker-hung", "shm")
DRIFT_CAUSES: tuple[Cause, ...] = ("drift-gradients", "drift-loss")

_KEPT = ("host_allocator", "device_allocator", "learning_rate_scale")  # of the process, or of the effective batch
_UNSUITED = ("compile-error", "not-supported")
_RECOMPUTE = {"off": "selective", "selective": "full"}


@dataclass(frozen=True)
class Fault:
    """Something that went wrong in a training.

    Attributes:
        cause: in a word.
        detail: what was seen, one sentence.
        step: optimizer steps taken by then.
        clean_step: of drift, the optimizer steps up to which all was well; None where the last checkpoint is good.
    """

    cause: Cause
    detail: str
    step: int
    clean_step: int | None = None


class FaultFound(Exception):
    """Something is wrong that a step down may mend.

    Attributes:
        fault: what it is.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class FreshProcessNeeded(TargetError):
    """The device answers nothing any more in this process; what a fresh one is to do is in the run's record."""


@dataclass(frozen=True)
class Choice:
    """What is done about a fault.

    Attributes:
        action: in a word.
        config: the settings from here on.
    """

    action: StepDownAction
    config: TrainConfig


def choose_step_down(fault: Fault, plan: RunPlan, *, can_recompute: bool = False) -> Choice | None:
    """Return the smallest safe step down; None when none of ours would help.

    Args:
        fault: what went wrong.
        plan: the run's, with the steps down so far.
        can_recompute: the model has blocks whose activations can be recomputed.
    """
    config = plan.current_config
    if fault.cause in MEMORY_CAUSES:
        return _use_less_memory(config, can_recompute=can_recompute)
    if fault.cause in WORKER_CAUSES:
        return _use_no_workers(fault, plan) if config.num_workers else None
    if fault.cause in _UNSUITED or (fault.cause == "user-error" and fault.step == 0):
        return _use_less_speed(plan)
    if fault.cause in ("non-finite", "skipped-steps"):
        return _change("baseline-numerics", config, baseline_numerics(config, plan.baseline_config))
    if fault.cause in DRIFT_CAUSES:
        return _change("baseline", config, baseline_settings(plan))
    if fault.cause == "inference-tensor":
        return Choice("gradients-kept", config)
    if fault.cause in ("crash-signal", "device-error"):
        if not _was_tried_again(fault, plan):
            return Choice("again", config)
        return _change("baseline", config, baseline_settings(plan))
    return None


def baseline_numerics(config: TrainConfig, baseline: TrainConfig) -> TrainConfig:
    """Return a config with the baseline's arithmetic; batch, loader, memory savings and own knobs stay."""
    kept = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing")
    rounding = [knob.field for knob in KNOBS if knob.numerics == "rounding" and knob.field not in kept]
    return config.replace(**{name: getattr(baseline, name) for name in rounding})


def baseline_settings(plan: RunPlan) -> TrainConfig:
    """Return the baseline's settings for a training that goes on: its effective batch and learning rates stay.

    A micro batch that was found too large, and workers that were given up, do not come back.
    """
    config, baseline = plan.current_config, plan.baseline_config
    fitting = [one.config.micro_batch_size for one in plan.step_downs if one.action == "fewer-samples"]
    effective = config.effective_batch_size
    micro = _largest_divisor(effective, at_most=min([baseline.micro_batch_size, *fitting]))
    kept: dict[str, Any] = {name: getattr(config, name) for name in _KEPT}
    if any(one.action == "no-workers" for one in plan.step_downs):
        kept |= {"num_workers": 0, "persistent_workers": False}
    return baseline.replace(micro_batch_size=micro, gradient_accumulation_steps=effective // micro, **kept)


def count_alarms(plan: RunPlan) -> int:
    """Return how often the drift guard has taken a run back."""
    return sum(one.cause in (*DRIFT_CAUSES, "skipped-steps") for one in plan.step_downs)


def make_step_down(fault: Fault, choice: Choice, before: TrainConfig, resumed_step: int | None) -> StepDown:
    """Return the record of a step down.

    Args:
        fault: what went wrong.
        choice: what is done about it.
        before: the settings so far.
        resumed_step: of the checkpoint the training goes on from; None when it begins anew.
    """
    changes = describe_exchanges(before, choice.config) or "the same settings once more"
    origin = "from its beginning" if resumed_step is None else f"from step {resumed_step:,}"
    return StepDown(
        step=fault.step,
        resumed_step=resumed_step or 0,
        cause=fault.cause,
        detail=fault.detail,
        action=choice.action,
        sentence=f"step {fault.step:,}: {fault.cause}: {fault.detail}; {changes}; the training goes on {origin}",
        config=choice.config,
    )


def _use_less_memory(config: TrainConfig, *, can_recompute: bool) -> Choice | None:
    micro, effective = config.micro_batch_size, config.effective_batch_size
    if micro > 1:
        smaller = _largest_divisor(effective, at_most=micro // 2)
        accumulation = effective // smaller
        return Choice(
            "fewer-samples", config.replace(micro_batch_size=smaller, gradient_accumulation_steps=accumulation)
        )
    more = _RECOMPUTE.get(config.activation_checkpointing)
    if can_recompute and more is not None:
        return Choice("recompute", config.replace(activation_checkpointing=more))
    return None


def _use_no_workers(fault: Fault, plan: RunPlan) -> Choice:
    if not _was_tried_again(fault, plan):
        return Choice("again", plan.current_config)
    return Choice("no-workers", plan.current_config.replace(num_workers=0, persistent_workers=False))


def _use_less_speed(plan: RunPlan) -> Choice | None:
    """Return the settings without what this machine, or this model, may not be able to do."""
    config = plan.current_config
    if config.compile_mode != "off":
        return Choice("eager", config.replace(compile_mode="off"))
    return _change("baseline", config, baseline_settings(plan))


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(size for size in range(min(number, at_most), 0, -1) if number % size == 0)


def _was_tried_again(fault: Fault, plan: RunPlan) -> bool:
    return any(
        earlier.cause == fault.cause and earlier.action == "again" and fault.step - earlier.step <= PATIENCE_STEPS
        for earlier in plan.step_downs
    )


def _change(action: StepDownAction, before: TrainConfig, after: TrainConfig) -> Choice | None:
    return None if after == before else Choice(action, after)
