"""The training loop: steps, health checks, checkpoints, evaluations; it ends at a step boundary.

    step step step ... step │ check: losses, scaler, memory, drift guard, a line of metrics.jsonl │ step step ...
                                  every ten steps, and a line alone where these take long
                                  at an epoch's end, every few minutes, at a stop: a checkpoint; then an evaluation

Losses stay on the device between two checks, so the loop waits for the device once in `log_steps` steps, or more often
where a line or a checkpoint is due before. Of several processes the leader alone is in it, and tells the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from autotune.drift.guard.guard import DriftGuard
from autotune.engine.loop import StepOutcome, Training
from autotune.errors import TargetError
from autotune.isolation.causes import explain_exception
from autotune.records.run import RunPlan
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.checkpoint import Checkpoints
from autotune.train.loop.deadline import Deadline
from autotune.train.loop.evaluations import CUT_KEY, Evaluations
from autotune.train.loop.health_checks import HealthChecks
from autotune.train.loop.meters import Meters
from autotune.train.loop.metrics import MetricsFile, cut_metrics
from autotune.train.loop.progress import Watch, read_learning_rate
from autotune.train.loop.state import Progress, find_non_finite, require_loadable
from autotune.train.loop.user_code import blame_target
from autotune.train.loop.worker_deaths import deferred_worker_deaths, is_lost_worker
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.steps_down import WORKER_CAUSES, Fault, FaultFound
from autotune.train.report import Log, StopNow

Ending = Literal["finished", "stopped"]


@dataclass
class RunLoop:
    """One stretch of a run, with one config.

    Attributes:
        loaded: the workload.
        training: built, and restored if the run goes on.
        plan: how long to train.
        folder: of the run.
        checkpoints: its checkpoints.
        progress: where the run stands.
        meters: what it counts.
        watch: times it and reports.
        evaluations: evaluates it.
        guard: looks for drift; None when there is nothing to guard.
        log: is handed every line of metrics.jsonl.
        should_stop: polled at each step.
        interruptible: inside it a signal, or the end of so many seconds, may raise StopNow.
        deadline: when it has to be over.
        checkpoint_seconds: longest time between two checkpoints.
        policy: the training's thresholds.
        loss: of the last step that was checked.
        last_checkpoint: None before the first one.
    """

    loaded: LoadedWorkload
    training: Training
    plan: RunPlan
    folder: Path
    checkpoints: Checkpoints
    progress: Progress
    meters: Meters
    watch: Watch
    evaluations: Evaluations
    guard: DriftGuard | None
    log: Log
    should_stop: Callable[[], bool]
    interruptible: Callable[[float | None], AbstractContextManager[Any]] = nullcontext
    deadline: Deadline = field(default_factory=Deadline)
    checkpoint_seconds: float = 300.0
    policy: TrainPolicy = TRAIN_POLICY
    loss: float | None = None
    last_checkpoint: Path | None = None
    _losses: list[torch.Tensor] = field(default_factory=list)
    _step_seconds: float = 0.0
    _saved_step: int | None = None

    def __post_init__(self) -> None:
        self._lines = MetricsFile(self.folder)
        self._health = HealthChecks(self.training, self.meters, self.guard, self.evaluations.warn, policy=self.policy)
        # Weights that hold infinities from the start are meant to.
        self._checks_weights = find_non_finite(self.training) is None
        self._saved_step = self.progress.step if self.last_checkpoint is not None else None

    def run(self) -> Ending:
        """Train to the end of the plan, or to a stop, with a checkpoint written.

        Raises:
            FaultFound: a step down may help.
            TargetError: the workload raised.
            OSError: a file of the run cannot be written.
        """
        with deferred_worker_deaths() as defer_deaths:
            try:
                return self._run(defer_deaths)
            finally:
                self._lines.close()

    @contextmanager
    def _waiting_for_device(self) -> Iterator[None]:
        """Blame the target for what its device tells of where it is waited for: what went wrong in a step before.

        Raises:
            TargetError: it does.
        """
        try:
            yield
        except RuntimeError:
            with blame_target(f"{self.loaded.label}: after step {self.progress.step}"):
                raise

    def _run(self, defer_deaths: Callable[[], None]) -> Ending:
        if not self._pick_up_metrics():
            return "stopped"
        saved, first_step = time.perf_counter(), self.progress.step + 1
        self.watch.start(self.progress)
        while not self._is_done():
            outcome = self._step(defer_deaths)
            if outcome is None:
                self.save()
                return "stopped"
            self._note_step(outcome)
            if self.progress.step == first_step:
                require_loadable(self.training)  # of what optimizers keep nothing is there before
            stopping, since = self.should_stop() or self._is_out_of_time(), time.perf_counter() - saved
            is_late = since >= self.checkpoint_seconds and self.progress.step != first_step
            is_looked_at = outcome.ends_epoch or stopping or is_late or self._is_done()
            if self.progress.step % self.policy.log_steps and not is_looked_at:
                if self.progress.step == first_step:  # it also compiles, and starts the workers
                    self.watch.start(self.progress)
                elif self.watch.seconds >= self.policy.show_seconds:
                    with self._waiting_for_device():
                        loss = self._losses[-1].item()
                    self._tell(loss)
                continue
            self._check_health(at_once=outcome.ends_epoch or stopping)
            if stopping or since >= self.checkpoint_seconds or (outcome.ends_epoch and self._can_afford_save(since)):
                self.save()
                saved = time.perf_counter()
            if stopping or (outcome.ends_epoch and not self._is_done() and not self._evaluate()):
                self._save_once()
                return "stopped"
            self.watch.start(self.progress)
        self.save()
        return "finished" if self._evaluate() else "stopped"

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            FaultFound: a weight is not finite: what would be written would be of no use.
            OSError: the disk cannot be written.
        """
        began = time.perf_counter()
        with self._waiting_for_device():
            flaw = find_non_finite(self.training) if self._checks_weights else None
        if flaw is not None:
            raise FaultFound(Fault("non-finite", f"{flaw} is not finite", self.progress.step))
        self._lines.flush()
        seen = None if self.guard is None else self.guard.capture()
        config = self.training.config.model_dump(mode="json")
        notes = {"meters": self.meters.capture(), "guard": seen, "config": config}
        self.checkpoints.anchor_step = None if seen is None else seen["clean_step"]
        with self._waiting_for_device():
            self.last_checkpoint = self.checkpoints.save(self.training, self.progress, notes)
        self.meters.record_checkpoint(time.perf_counter() - began)
        self._saved_step = self.progress.step

    def _save_once(self) -> None:
        if self._saved_step != self.progress.step:
            self.save()

    def _can_afford_save(self, seconds: float) -> bool:
        """Return whether a checkpoint at an epoch's end takes little of so many seconds since the last one."""
        policy, meters = self.policy, self.meters
        is_early = meters.checkpoints < policy.epoch_checkpoints
        return is_early or meters.mean_checkpoint_seconds <= policy.epoch_checkpoint_share * seconds

    def _is_done(self) -> bool:
        if self.plan.steps is not None:
            return self.progress.step >= self.plan.steps
        assert self.plan.epochs is not None
        return self.training.windows.epoch >= self.plan.epochs

    def _is_out_of_time(self) -> bool:
        checkpoint = self.meters.longest_checkpoint_seconds
        step = max(self.watch.step_seconds, self._step_seconds)
        return self.deadline.is_near(step_seconds=step, checkpoint_seconds=checkpoint)

    def _pick_up_metrics(self) -> bool:
        """Drop what is to be trained again, and make up for an evaluation that a stop left out."""
        lines, step = cut_metrics(self.folder, self.progress.step), self.progress.step
        self.loss = next((line.get("loss") for line in reversed(lines) if "samples" in line), self.loss)
        fits_not = self.evaluations.pick_up(lines, step) or not self._has_room_for_evaluation()
        if self.evaluations.step == step:
            self.evaluations.keep_best(self.checkpoints, self.meters, self.last_checkpoint)
        elif step and self.training.windows.batches_done == 0 and not self._is_done():
            if not fits_not:
                return self._evaluate()
            self._write(self.evaluations.leave_out(step, "does not fit into the time limit"))
        return True

    def _step(self, defer_deaths: Callable[[], None]) -> StepOutcome | None:
        """Take a step; return None if the loader's workers went first when the whole process group was asked to stop.

        Raises:
            FaultFound: the workers were lost before anything was trained on; a checkpoint was written.
        """
        windows, began = self.training.windows, time.perf_counter()
        epoch, batches_done = windows.epoch, windows.batches_done
        is_fetched = False

        def note(_phase: str) -> None:
            nonlocal is_fetched
            if not is_fetched:
                is_fetched = True
                self.watch.record_wait(time.perf_counter() - began)
                defer_deaths()

        try:
            with blame_target(f"{self.loaded.label}: step {self.progress.step + 1}"):
                outcome = self.training.step(note)
            self._step_seconds = time.perf_counter() - began
            return outcome
        except TargetError as error:
            _, cause, detail = explain_exception(error.__cause__ or error)
            if is_lost_worker(error.__cause__) and self.training.config.num_workers:
                cause = "dataloader-worker-died"
            # Once there is a batch, weights and generators may have moved, and the step cannot be taken back.
            if is_fetched or cause not in WORKER_CAUSES:
                raise
        if self.plan.world_size > 1:  # the others are in the middle of the step: it is taken again by fresh processes
            raise FaultFound(Fault(cause, detail, self.progress.step))
        windows.move_to(epoch=epoch, batches_done=batches_done)
        if self._is_stopping():
            return None
        self.save()
        raise FaultFound(Fault(cause, detail, self.progress.step))

    def _is_stopping(self) -> bool:
        deadline = time.monotonic() + self.policy.stop_seconds
        while not self.should_stop() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.should_stop()

    def _note_step(self, outcome: StepOutcome) -> None:
        self.progress = Progress(self.progress.step + 1, self.progress.samples + outcome.samples)
        self._losses.append(outcome.loss)
        self._health.check_step(self.progress.step)

    def _check_health(self, *, at_once: bool) -> None:
        """Check the steps since the last check, and write a line: this is where the loop waits for the device."""
        with self._waiting_for_device():
            losses: list[float] = torch.stack([loss.reshape(()) for loss in self._losses]).tolist()
            self._losses.clear()
            self._health.check(losses, self.progress, learning_rate=read_learning_rate(self.training))
        self._tell(losses[-1], at_once=at_once)

    def _tell(self, loss: float, *, at_once: bool = False) -> None:
        """Write a line and report where the training stands."""
        pace, rate = self.watch.measure(self.progress), read_learning_rate(self.training)
        self.loss = loss
        self._write(
            {
                "step": self.progress.step,
                "epoch": self.training.windows.epoch,
                "samples": self.progress.samples,
                "loss": self.loss,
                "learning_rate": None if math.isnan(rate) else rate,
                "samples_per_second": round(pace.samples_per_second, 3),
                "data_wait_fraction": round(pace.data_wait_fraction, 4),
            }
        )
        self.watch.report(pace, self.progress, loss, at_once=at_once)

    def _evaluate(self) -> bool:
        """Evaluate, unless that was done; return False if a stop cut it short, which leaves it to a resume."""
        step = self.progress.step
        if not self.loaded.metrics or self.evaluations.step == step:
            return True
        if not self._has_room_for_evaluation():
            return False
        began = time.perf_counter()
        self.training.announce_pause()
        try:
            # All ranks are in it where the model is sharded, and what is not saved yet has to be after it.
            is_free = not self.training.is_sharded and self._saved_step == step
            with self.interruptible(self.deadline.seconds_left) if is_free else nullcontext():
                found = self.evaluations.run(step, is_stopping=self._is_stopping)
        except StopNow:
            if not self.should_stop():
                self._write({"step": step, CUT_KEY: True})
            return False
        self.meters.record_evaluation(time.perf_counter() - began)
        self._write({"epoch": self.training.windows.epoch, **found})
        if self.evaluations.is_best(self.meters.best):
            self._save_once()
        self.evaluations.keep_best(self.checkpoints, self.meters, self.last_checkpoint)
        return True

    def _has_room_for_evaluation(self) -> bool:
        return self.deadline.has_room(self.meters.mean_evaluation_seconds)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._lines.append(line)
        self.log(line)
