"""What to do when a script's training goes wrong: as `steps_down`, less what hooks and a command cannot do. Pure.

    before its first step    nothing is lost: it is started again with the choice
    after it                 its state is its own: the choice is for whoever starts it again

A script's micro batch is set by its own flags alone, both of them, so that the effective batch stays the same; its
workers by a flag, or by hooks on loaders that a search has seen it train from.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.run import RunPlan, StepDown
from autotune.train.recovery.steps_down import (
    MEMORY_CAUSES,
    WORKER_CAUSES,
    Choice,
    Fault,
    baseline_settings,
    choose_step_down,
)

_BATCH_FLAGS = frozenset({"micro_batch_size", "gradient_accumulation_steps"})


@dataclass(frozen=True)
class AdjustableKnobs:
    """What can be set about a script.

    Attributes:
        flags: fields of a config that its command has a placeholder for, and whose value now is known.
        knows_loaders: the loaders it trains from are known.
    """

    flags: frozenset[str]
    knows_loaders: bool

    @property
    def set_batches(self) -> bool:
        """Micro batch and accumulation can be changed together."""
        return self.flags >= _BATCH_FLAGS

    @property
    def set_workers(self) -> bool:
        """The loader's workers can be changed."""
        return self.knows_loaders or "num_workers" in self.flags


def choose_script_step_down(fault: Fault, plan: RunPlan, levers: AdjustableKnobs) -> Choice | None:
    """Return the smallest safe step down of a script; None when none of ours would help."""
    if fault.cause == "user-error":
        return None  # a workload's first step shows whether it is the settings; a script has done more by then
    if fault.cause in MEMORY_CAUSES:
        fewer = choose_step_down(fault, plan) if levers.set_batches else None
        return fewer or _to_baseline(plan, levers)
    if fault.cause in WORKER_CAUSES and plan.current_config == plan.baseline_config and not levers.set_workers:
        return _once_more(fault, plan)
    if fault.cause == "not-supported":
        return _to_baseline(plan, levers)
    choice = choose_step_down(fault, plan)
    if choice is None:
        return None
    is_settable = choice.action != "no-workers" or levers.set_workers
    return _to_baseline(plan, levers) if choice.action == "baseline" or not is_settable else choice


def choose_for_later(fault: Fault, plan: RunPlan, levers: AdjustableKnobs) -> Choice | None:
    """Return what to start a script with after it has failed for good; once more the same is no answer then."""
    choice = choose_script_step_down(fault, plan, levers)
    if choice is None or choice.action != "again":
        return choice
    tried = StepDown(
        step=fault.step,
        resumed_step=0,
        cause=fault.cause,
        detail=fault.detail,
        action="again",
        sentence="",
        config=choice.config,
    )
    return choose_script_step_down(fault, plan.replace(step_downs=(*plan.step_downs, tried)), levers)


def _once_more(fault: Fault, plan: RunPlan) -> Choice | None:
    was_tried = any(earlier.cause == fault.cause for earlier in plan.step_downs)
    return None if was_tried else Choice("again", plan.current_config)


def _to_baseline(plan: RunPlan, levers: AdjustableKnobs) -> Choice | None:
    config = plan.baseline_config
    if levers.set_batches:
        config = baseline_settings(plan)
    elif any(one.action == "no-workers" for one in plan.step_downs):
        config = config.replace(num_workers=0, persistent_workers=False)
    return None if config == plan.current_config else Choice("baseline", config)
