"""What to do when a final training goes wrong: the smallest safe step down. Pure: `Fault` and plan in, `Choice` out.

                                a workload                               a script
    out of memory, thrash       micro batch down, accumulation up, the effective batch the same; then
                                recompute; thrash is borne after that    the baseline's settings
    a loader worker died, hung  the same once more, then no workers
    a compilation failed        eager, then the baseline's settings
    an operation is missing     eager, then the baseline's settings      the baseline's settings
    the first step failed       eager, then the baseline's settings      nothing: a script has done more by then
    a loss that is not finite   the baseline's arithmetic
    drift                       the baseline's settings                  it is not looked for
    a table of an evaluation    evaluate without inference mode          nothing: its evaluations are its own
    a process that was killed   the same once more, then the baseline's settings

Whatever is not listed is the target's own error, and nothing here would mend it. A script's micro batch is set by its
own flags alone, both of them; its workers by a flag, or by hooks on loaders that a search has seen it train from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import TargetError
from autotune.knobs import KNOBS
from autotune.records.config import CompileMode, TrainConfig
from autotune.records.run import RunPlan, StepDown, StepDownAction
from autotune.records.trial import Cause
from autotune.train.policy import TRAIN_POLICY, TrainPolicy

MEMORY_CAUSES: tuple[Cause, ...] = ("oom-device", "oom-host", "oom-killed", "allocator-thrash")
WORKER_CAUSES: tuple[Cause, ...] = ("dataloader-worker-died", "dataloader-worker-hung", "shm")
DRIFT_CAUSES: tuple[Cause, ...] = ("drift-gradients", "drift-loss")
DEATH_CAUSES: tuple[Cause, ...] = ("crash-signal", "device-error")

_KEPT = ("host_allocator", "device_allocator", "learning_rate_scale")  # of the process, or of the effective batch
_WITHOUT_GRAPHS: dict[CompileMode, CompileMode] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
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


@dataclass(frozen=True)
class _Situation:
    """A fault, and what can be done about it.

    Attributes:
        fault: what went wrong.
        plan: the run's, with the steps down so far.
        knobs: what can be changed.
        policy: the training's thresholds.
    """

    fault: Fault
    plan: RunPlan
    knobs: AdjustableKnobs
    policy: TrainPolicy

    @property
    def config(self) -> TrainConfig:
        """The settings in force."""
        return self.plan.current_config


Remedy = Callable[[_Situation], Choice | None]
"""Returns one thing that may help; None where it cannot be done, was done, or would change nothing."""


@dataclass(frozen=True)
class AdjustableKnobs:
    """What a step down may change about a training.

    Attributes:
        remedies: for each cause what to try, the smallest change first.
        batches: micro batch and accumulation can be changed, together.
        splits: a smaller micro batch is the same training, as far as that is known.
        workers: the loader's workers can be changed.
        recomputation: the model has blocks whose activations can be recomputed.
    """

    remedies: Mapping[Cause, tuple[Remedy, ...]]
    batches: bool = True
    splits: bool = True
    workers: bool = True
    recomputation: bool = False


def workload_knobs(*, can_recompute: bool = False, splits: bool = True) -> AdjustableKnobs:
    """Return what can be changed about a workload.

    Args:
        can_recompute: its model has blocks whose activations can be recomputed.
        splits: a smaller micro batch is the same training, as far as that is known.
    """
    return AdjustableKnobs(_OF_WORKLOADS, splits=splits, recomputation=can_recompute)


def script_knobs(flags: frozenset[str], *, knows_loaders: bool) -> AdjustableKnobs:
    """Return what can be changed about a script.

    Args:
        flags: fields of a config that its command has a placeholder for, and whose value now is known.
        knows_loaders: the loaders it trains from are known.
    """
    batches = flags >= {"micro_batch_size", "gradient_accumulation_steps"}
    return AdjustableKnobs(_OF_SCRIPTS, batches=batches, workers=knows_loaders or "num_workers" in flags)


def choose_step_down(
    fault: Fault, plan: RunPlan, knobs: AdjustableKnobs, *, repeats: bool = True, policy: TrainPolicy = TRAIN_POLICY
) -> Choice | None:
    """Return the smallest safe step down; None when none of ours would help.

    Args:
        fault: what went wrong.
        plan: the run's, with the steps down so far.
        knobs: what can be changed about the training.
        repeats: the same settings once more are an answer.
        policy: the training's thresholds.
    """
    situation = _Situation(fault, plan, knobs, policy)
    if fault.cause == "user-error" and fault.step:
        return None  # only the first step may have failed by the settings
    if fault.cause in WORKER_CAUSES and not _may_have_workers(situation):
        return None
    found = (remedy(situation) for remedy in knobs.remedies.get(fault.cause, ()) if repeats or remedy is not _repeat)
    return next((choice for choice in found if choice is not None), None)


def baseline_settings(plan: RunPlan, knobs: AdjustableKnobs) -> TrainConfig:
    """Return the baseline's settings for a training that goes on: its effective batch and learning rates stay.

    A micro batch that was found too large, and workers that were given up, do not come back. Where the batches cannot
    be changed they are the baseline's already.
    """
    config, baseline, kept = plan.current_config, plan.baseline_config, dict[str, Any]()
    if knobs.batches:
        fitting = [one.config.micro_batch_size for one in plan.step_downs if one.action == "fewer-samples"]
        micro = _largest_divisor(config.effective_batch_size, at_most=min([baseline.micro_batch_size, *fitting]))
        kept = {name: getattr(config, name) for name in _KEPT}
        kept |= {
            "micro_batch_size": micro,
            "gradient_accumulation_steps": config.effective_batch_size // micro,
        }
    if any(one.action == "no-workers" for one in plan.step_downs):
        kept |= {"num_workers": 0, "persistent_workers": False}
    return baseline.replace(**kept)


def recoverable_causes() -> frozenset[Cause]:
    """Return what another process with other settings, or the same once more, may mend at any step of a workload."""
    return frozenset(_OF_WORKLOADS) - {"user-error"}


def count_alarms(plan: RunPlan) -> int:
    """Return how often the drift guard has taken a run back."""
    return sum(one.cause in (*DRIFT_CAUSES, "skipped-steps") for one in plan.step_downs)


def make_step_down(fault: Fault, choice: Choice, *, resumed_step: int, sentence: str) -> StepDown:
    """Return the record of a step down; the one place that makes it.

    Args:
        fault: what went wrong.
        choice: what is done about it.
        resumed_step: optimizer steps that are kept.
        sentence: all of it, for the user.
    """
    return StepDown(
        step=fault.step,
        resumed_step=resumed_step,
        cause=fault.cause,
        detail=fault.detail,
        action=choice.action,
        sentence=sentence,
        config=choice.config,
    )


def _may_have_workers(situation: _Situation) -> bool:
    # A script with its own settings, whose loaders nobody has seen, may have workers that its config does not tell of.
    is_own = situation.config == situation.plan.baseline_config
    return situation.config.num_workers > 0 or (is_own and not situation.knobs.workers)


def _repeat(situation: _Situation) -> Choice | None:
    fault = situation.fault
    was_done = any(
        earlier.cause == fault.cause
        and earlier.action == "again"
        and fault.step - earlier.step <= situation.policy.retry_within_steps
        for earlier in situation.plan.step_downs
    )
    return None if was_done else Choice("again", situation.config)


def _take_fewer_samples(situation: _Situation) -> Choice | None:
    config = situation.config
    if not (situation.knobs.batches and situation.knobs.splits) or config.micro_batch_size == 1:
        return None
    effective = config.effective_batch_size
    smaller = _largest_divisor(effective, at_most=config.micro_batch_size // 2)
    changed = config.replace(micro_batch_size=smaller, gradient_accumulation_steps=effective // smaller)
    # The gradients of a CUDA graph cannot be accumulated: the next one overwrites them.
    mode = _WITHOUT_GRAPHS.get(config.compile_mode, config.compile_mode)
    return Choice("fewer-samples", changed.replace(compile_mode=mode))


def _recompute(situation: _Situation) -> Choice | None:
    more = _RECOMPUTE.get(situation.config.activation_checkpointing)
    if not situation.knobs.recomputation or more is None:
        return None
    return Choice("recompute", situation.config.replace(activation_checkpointing=more))


def _give_up_workers(situation: _Situation) -> Choice | None:
    if not situation.knobs.workers:  # they cannot be changed alone
        return _take_baseline(situation)
    return Choice("no-workers", situation.config.replace(num_workers=0, persistent_workers=False))


def _run_eagerly(situation: _Situation) -> Choice | None:
    return _change("eager", situation, situation.config.replace(compile_mode="off"))


def _take_baseline_numerics(situation: _Situation) -> Choice | None:
    """Return the baseline's arithmetic; batch, loader, memory savings and user knobs stay."""
    kept = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing")
    rounding = [knob.field for knob in KNOBS if knob.numerics == "rounding" and knob.field not in kept]
    values = {name: getattr(situation.plan.baseline_config, name) for name in rounding}
    return _change("baseline-numerics", situation, situation.config.replace(**values))


def _take_baseline(situation: _Situation) -> Choice | None:
    return _change("baseline", situation, baseline_settings(situation.plan, situation.knobs))


def _keep_gradients(situation: _Situation) -> Choice:
    return Choice("gradients-kept", situation.config)


def _endure(situation: _Situation) -> Choice:
    return Choice("endured", situation.config)


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(size for size in range(min(number, at_most), 0, -1) if number % size == 0)


def _change(action: StepDownAction, situation: _Situation, after: TrainConfig) -> Choice | None:
    return None if after == situation.config else Choice(action, after)


_OF_SCRIPTS: dict[Cause, tuple[Remedy, ...]] = {
    **dict.fromkeys(MEMORY_CAUSES, (_take_fewer_samples, _take_baseline)),
    **dict.fromkeys(WORKER_CAUSES, (_repeat, _give_up_workers)),
    **dict.fromkeys(DEATH_CAUSES, (_repeat, _take_baseline)),
    "compile-error": (_run_eagerly, _take_baseline),
    "not-supported": (_take_baseline,),
    "non-finite": (_take_baseline_numerics,),
}
_OF_WORKLOADS: dict[Cause, tuple[Remedy, ...]] = {
    **_OF_SCRIPTS,
    **dict.fromkeys(MEMORY_CAUSES, (_take_fewer_samples, _recompute)),
    "allocator-thrash": (_take_fewer_samples, _recompute, _endure),
    **dict.fromkeys(DRIFT_CAUSES, (_take_baseline,)),
    "not-supported": (_run_eagerly, _take_baseline),
    "user-error": (_run_eagerly, _take_baseline),
    "skipped-steps": (_take_baseline_numerics,),
    "inference-tensor": (_keep_gradients,),
}
