"""One session of a run: stretches of training, each with one config, and a step down between two of them.

    build ── restore ── RunLoop ── finished or stopped
      ▲                    │ fault
      └── step down: written to the run's record, from the last consistent checkpoint

Everything of a stretch lives in one function call, so that a device's memory is free again when the next one begins.
"""

from __future__ import annotations

import gc
import math
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autotune.distributed.training import RankTraining
from autotune.distributed.world import Command, World
from autotune.drift.guard.guard import DriftGuard
from autotune.engine.activation_checkpointing import can_checkpoint
from autotune.engine.device import release_cached
from autotune.engine.loop import Training, backend_settings
from autotune.errors import CheckpointError, TargetError
from autotune.isolation.causes import explain_exception
from autotune.probe.model import keeps_statistics
from autotune.records.config import TrainConfig
from autotune.records.run import GuardSummary, RunPlan
from autotune.records.training_process import TrainingProgress
from autotune.sentences.settings import describe_exchanges
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.checkpoint import Checkpoints, Restored
from autotune.train.loop.deadline import Deadline
from autotune.train.loop.evaluations import Evaluations
from autotune.train.loop.meters import Meters
from autotune.train.loop.progress import Watch
from autotune.train.loop.state import Progress, require_loadable
from autotune.train.loop.training_loop import Ending, RunLoop
from autotune.train.loop.user_code import blame_target
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.ranks.sameness import is_same_split
from autotune.train.recovery.steps_down import (
    AdjustableKnobs,
    Choice,
    Fault,
    FaultFound,
    FreshProcessNeeded,
    choose_step_down,
    make_step_down,
    workload_knobs,
)
from autotune.train.runs.folder import RunFolder


@dataclass(frozen=True)
class StretchEnd:
    """How a stretch ended.

    Attributes:
        ending: finished or stopped; None after a fault.
        fault: what went wrong; None when nothing did.
        choice: what is done about it.
        knobs: that could be changed for it.
    """

    ending: Ending | None = None
    fault: Fault | None = None
    choice: Choice | None = None
    knobs: AdjustableKnobs | None = None


@dataclass
class Session:
    """A run at work.

    Attributes:
        loaded: the workload.
        folder: of the run.
        options: how to train.
        callbacks: who is told, and who may stop it.
        device: where to train.
        began: `time.monotonic()` at the session's start.
        deadline: when it has to be over.
        random_sources: global generators that the dataset draws from.
        policy: the training's thresholds.
        world: the other processes of the training, of which this one is the leader; None without any.
        progress: where the run stands.
        meters: what it counts.
        guard: what the drift guard looked at; None before there was one.
        may_split: a batch learns the same in smaller micro batches; None where that is not known.
    """

    loaded: LoadedWorkload
    folder: RunFolder
    options: TrainingOptions
    callbacks: TrainingCallbacks
    device: torch.device
    began: float
    deadline: Deadline
    random_sources: tuple[str, ...]
    policy: TrainPolicy = TRAIN_POLICY
    world: World | None = None
    progress: Progress = field(default_factory=Progress)
    meters: Meters = field(default_factory=Meters)
    guard: GuardSummary | None = None
    may_split: bool | None = None
    loss: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    epoch: int = 0
    last_checkpoint: str = ""

    def run(self) -> Ending:
        """Train until the plan is done or a stop is asked for, stepping down where that helps.

        Raises:
            TargetError: the training fails, and no step down is left.
            CheckpointError: there is nothing to resume.
            OSError: a file of the run cannot be written.
        """
        self.checkpoints = Checkpoints(
            self.folder.checkpoints,
            fingerprint=self.folder.plan.target.fingerprint,
            kept=self.options.checkpoints_kept,
            policy=self.policy,
        )
        resumes = self.options.resume
        self._check_split_of_parent()
        while True:
            end = self._run_stretch(resumes=resumes)
            if end.ending is not None:
                return end.ending
            assert end.fault is not None
            assert end.choice is not None
            assert end.knobs is not None
            if end.fault.cause != "device-error":  # the device only tells the same error again
                self._free_memory()
            resumes = self._step_down(end.fault, self._keep_sameness(end.fault, end.choice, end.knobs))
            if end.fault.cause == "device-error" or self.world is not None:
                raise FreshProcessNeeded(end.fault.detail, hint=f"go on with --resume --run-dir {self.folder.path}")

    @property
    def plan(self) -> RunPlan:
        """What the run was started with, and the steps down since."""
        return self.folder.plan

    def measure_progress(self) -> TrainingProgress:
        """Return how far the run has come, over all of its sessions."""
        meters = self.meters
        return TrainingProgress(
            steps=self.progress.step,
            samples=self.progress.samples,
            loss=self.loss if self.loss is not None and math.isfinite(self.loss) else None,  # a scaler may skip it
            training_seconds=meters.training_seconds,
            training_samples=meters.training_samples,
            data_wait_seconds=meters.data_wait_seconds,
            peak_memory_bytes=meters.peak_memory_bytes,
        )

    def _run_stretch(self, *, resumes: bool) -> StretchEnd:
        config, training = self.plan.current_config, None
        with backend_settings(config):
            try:
                with blame_target(f"{self.loaded.label}: setting up"):
                    training = self._build_training(config)
                loop = self._prepare(training, self._restore(training, resumes=resumes))
                try:
                    return StretchEnd(loop.run())
                finally:
                    self._note(loop)
            except (FaultFound, TargetError) as error:
                fault = self._find_fault(error)
                can_recompute = training is not None and _can_recompute(training.model)
                knobs = workload_knobs(can_recompute=can_recompute, splits=self.may_split is not False)
                choice = choose_step_down(fault, self.plan, knobs, policy=self.policy)
                if choice is None:
                    raise self._give_up(error) from error.__cause__
                return StretchEnd(fault=fault, choice=choice, knobs=knobs)

    def _check_split_of_parent(self) -> None:
        """Take back a smaller micro batch that would be another training: the parent of this process cannot tell."""
        plan = self.plan
        last = plan.step_downs[-1] if plan.step_downs else None
        if last is None or last.action != "fewer-samples" or last.cause != "oom-killed":
            return
        model = self.loaded.workload.build_model()
        model.train()
        knobs = workload_knobs(can_recompute=_can_recompute(model))
        before = plan.replace(step_downs=plan.step_downs[:-1])
        fault, choice = Fault(last.cause, last.detail, last.step), Choice(last.action, last.config)
        try:
            kept = self._keep_sameness(fault, choice, knobs, plan=before)
        except TargetError:
            self.folder.write_plan(before)  # or no resume could ever go on
            raise
        if kept != choice:
            self.folder.write_plan(before)
            self._step_down(fault, kept)
            if self.world is not None:  # the others have been given the plan already
                raise FreshProcessNeeded(fault.detail, hint=f"go on with --resume --run-dir {self.folder.path}")

    def _keep_sameness(
        self, fault: Fault, choice: Choice, knobs: AdjustableKnobs, *, plan: RunPlan | None = None
    ) -> Choice:
        """Return what is done about a fault: what was chosen, or the next where smaller micro batches learn otherwise.

        Args:
            fault: what went wrong.
            choice: what was chosen.
            knobs: that could be changed.
            plan: without that choice; None for the run's.

        Raises:
            TargetError: nothing else helps.
        """
        if choice.action != "fewer-samples":
            return choice
        if self.may_split is None:
            self.may_split = is_same_split(self.loaded, choice.config, self.device, sources=self.random_sources)
        if self.may_split is None:
            self.callbacks.warn("whether smaller micro batches learn the same could not be found out")
        if self.may_split is not False:
            return choice
        other = choose_step_down(fault, plan or self.plan, replace(knobs, splits=False), policy=self.policy)
        if other is None:
            raise TargetError(
                f"{fault.detail}; a smaller micro batch would be another training: the gradient of a batch is not that "
                "of its parts, or a layer keeps statistics of it, as BatchNorm does",
                hint="free memory and go on with --resume, or choose a smaller batch yourself in a new run",
            )
        return other

    def _build_training(self, config: TrainConfig) -> Training:
        more: dict[str, Any] = {
            "seed": self.plan.seed,
            "random_sources": self.random_sources,
            "worker_timeout_seconds": self.options.worker_timeout_seconds,
        }
        if self.world is not None:
            return RankTraining(self.loaded, config, world=self.world, **more)
        return Training(self.loaded, config, device=self.device, **more)

    def _restore(self, training: Training, *, resumes: bool) -> Restored:
        require_loadable(training)
        if not resumes or not self.checkpoints.exist():
            if resumes:
                self._require_no_checkpoint_before()
            return Restored(Progress(), {})
        restored = self.checkpoints.load(training)
        if self.world is not None:
            self.world.tell(Command.LOAD)
            self.world.share(str(restored.path))
        for problem in restored.problems:
            self.callbacks.warn(f"{problem}; the one before it is used")
        if training.batches_per_epoch is None:
            self.callbacks.warn(
                "the samples of an iterable dataset need not be those an uninterrupted training would see"
            )
        return restored

    def _require_no_checkpoint_before(self) -> None:
        """Make sure that a run without a checkpoint has had none, but one that was taken back: it begins as it did.

        Raises:
            CheckpointError: it ended with one.
        """
        summary = self.folder.read_summary()
        was_taken_back = any(self.folder.checkpoints.glob("suspect-*"))
        if summary is not None and summary.checkpoint and not was_taken_back:
            raise CheckpointError(
                f"{self.folder.checkpoints} has no checkpoint, and the run ended with one at step {summary.steps:,}",
                hint="put it back, or train without --resume, into a new --run-dir",
            )
        self.callbacks.warn("the run has no checkpoint to go on from: it begins as it did")

    def _prepare(self, training: Training, restored: Restored) -> RunLoop:
        plan, callbacks = self.plan, self.callbacks
        self.progress, self.meters = restored.progress, Meters()
        self.meters.restore(restored.notes.get("meters") or {})
        self.meters.find_best(self.folder.checkpoints)
        callbacks.begins(self.progress.step)
        guard = self._build_guard(training)
        is_same = restored.notes.get("config") == plan.current_config.model_dump(mode="json")
        if guard is not None and restored.notes.get("guard"):
            guard.restore(restored.notes["guard"], same_settings=is_same)
        keeps_gradients = any(one.action == "gradients-kept" for one in plan.step_downs)
        evaluations = Evaluations(self.loaded, training, callbacks.warn, is_inference=not keeps_gradients)
        endures = any(one.action == "endured" for one in plan.step_downs)
        return RunLoop(
            loaded=self.loaded,
            training=training,
            plan=plan,
            folder=self.folder.path,
            checkpoints=self.checkpoints,
            progress=self.progress,
            meters=self.meters,
            watch=self._build_watch(evaluations, guard),
            evaluations=evaluations,
            guard=guard,
            log=callbacks.log,
            should_stop=callbacks.should_stop,
            interruptible=callbacks.interruptible,
            deadline=self.deadline,
            checkpoint_seconds=self.options.checkpoint_seconds,
            last_checkpoint=restored.path,
            policy=replace(self.policy, thrashing_checks=sys.maxsize) if endures else self.policy,
        )

    def _build_watch(self, evaluations: Evaluations, guard: DriftGuard | None) -> Watch:
        plan = self.plan
        same = plan.current_config.precision == plan.config.precision
        return Watch(
            self.meters,
            plan,
            evaluations,
            guard=guard,
            report=self.callbacks.report,
            began=self.began,
            flops_utilization=plan.flops_utilization if same else None,
            policy=self.policy,
        )

    def _build_guard(self, training: Training) -> DriftGuard | None:
        plan = self.plan
        if plan.current_config == plan.baseline_config:
            if self.guard is None:
                self.guard = GuardSummary(is_on=False, reason="the settings are the baseline's own")
            return None
        return DriftGuard(
            self.loaded,
            training,
            plan.current_config,
            plan.baseline_config,
            device=self.device,
            band=plan.loss_band,
            limit=plan.drift_limit,
            accepted=plan.accepted,
        )

    def _note(self, loop: RunLoop) -> None:
        """Remember what the summary tells, and let go of the rest."""
        self.progress, self.loss, self.metrics = loop.progress, loop.loss, loop.evaluations.metrics
        self.epoch = loop.training.windows.epoch
        self.last_checkpoint = str(loop.last_checkpoint or "")
        if loop.guard is not None:
            self.guard = loop.guard.summarize()

    def _find_fault(self, error: FaultFound | TargetError) -> Fault:
        if isinstance(error, FaultFound):
            return error.fault
        _, cause, detail = explain_exception(error.__cause__ or error)
        return Fault(cause, detail, self.progress.step)

    def _give_up(self, error: FaultFound | TargetError) -> TargetError:
        saved = f"{self.last_checkpoint} is from before; " if self.last_checkpoint else ""
        if isinstance(error, FaultFound):
            return TargetError(error.fault.detail, hint=f"{saved}check the data, the learning rate and the settings")
        return TargetError(error.message, hint=error.hint or (f"{saved}--resume goes on from it" if saved else ""))

    def _step_down(self, fault: Fault, choice: Choice) -> bool:
        """Write a step down into the run's record and say it; return whether there is a checkpoint to go on from."""
        step = self.checkpoints.newest_step(not_after=fault.clean_step)
        if step is None and fault.cause == "drift-loss":
            step = self.checkpoints.oldest_step()  # the rise began before it, but less of it is in there than later
        if fault.clean_step is not None:
            self.checkpoints.set_aside_after(step or 0)  # before the record: a kill in between repeats the alarm
        changes = describe_exchanges(self.plan.current_config, choice.config) or "the same settings once more"
        origin = "from its beginning" if step is None else f"from step {step:,}"
        sentence = f"step {fault.step:,}: {fault.cause}: {fault.detail}; {changes}; the training goes on {origin}"
        step_down = make_step_down(fault, choice, resumed_step=step or 0, sentence=sentence)
        self.folder.add_step_down(step_down)
        self.callbacks.step_down(step_down)
        return step is not None

    def _free_memory(self) -> None:
        gc.collect()
        release_cached(self.device)


def _can_recompute(model: nn.Module) -> bool:
    return can_checkpoint(model) and not keeps_statistics(model)  # a recomputed layer would update them twice
