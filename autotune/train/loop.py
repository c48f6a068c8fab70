"""The training loop: steps, evaluation, checkpoints, metrics.jsonl; stops at a step boundary when asked.

Losses stay on the device between two log lines, so the loop waits for the device once in `LOG_STEPS` steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from autotune.engine.loop import StepOutcome, Training, evaluate
from autotune.errors import AutotuneError, TargetError
from autotune.records.run import RunPlan
from autotune.targets.workload import LoadedWorkload
from autotune.train.checkpoint import CHECKPOINTS_FOLDER, Progress, save_checkpoint
from autotune.train.metrics import append_metrics, cut_metrics
from autotune.train.worker_deaths import MESSAGE, deferred_worker_deaths

LOG_STEPS = 10
"""Optimizer steps between two lines of metrics.jsonl."""

CHECKPOINT_SECONDS = 300.0
"""Longest time between two checkpoints; one is also written at each epoch's end, at a stop and at the end."""

_SIGNAL_SECONDS = 0.2


@dataclass(frozen=True)
class Report:
    """Where a training stands, for a progress bar.

    Attributes:
        progress: steps and samples.
        epoch: the current epoch, counted from 0.
        total_steps: steps planned; None while they cannot be counted.
        loss: of the last step.
        samples_per_second: since the last report.
        metrics: what `evaluate` returned last, None where not finite; empty before the first evaluation.
    """

    progress: Progress
    epoch: int
    total_steps: int | None
    loss: float
    samples_per_second: float
    metrics: Mapping[str, float | None]


@dataclass
class RunLoop:
    """One session of a run.

    Attributes:
        loaded: the workload.
        training: built, and restored if the run is resumed.
        plan: how long to train, with which settings.
        folder: of the run.
        device: where the model is.
        progress: where the run stands.
        should_stop: polled at each step.
        report: called at each log line.
    """

    loaded: LoadedWorkload
    training: Training
    plan: RunPlan
    folder: Path
    device: torch.device
    progress: Progress
    should_stop: Callable[[], bool]
    report: Callable[[Report], None]
    loss: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    last_checkpoint: Path | None = None
    stepping_seconds: float = 0.0
    stepped_samples: int = 0
    _evaluated_step: int | None = None

    def run(self) -> bool:
        """Train to the end of the plan; return False when stopped early, with a checkpoint written.

        Raises:
            TargetError: the workload raised, or the loss is not finite.
            OSError: a file of the run cannot be written.
        """
        with deferred_worker_deaths() as defer_deaths:
            return self._run(defer_deaths)

    def _run(self, defer_deaths: Callable[[], None]) -> bool:
        self._pick_up_metrics()
        saved = logged = time.perf_counter()
        logged_samples = self.progress.samples
        while not self._is_done():
            outcome = self._step(defer_deaths)
            if outcome is None:
                self.save()
                return False
            self.progress = Progress(self.progress.step + 1, self.progress.samples + outcome.samples)
            stopping = self.should_stop()
            if self.progress.step % LOG_STEPS == 0 or outcome.ends_epoch or self._is_done() or stopping:
                self.loss = self._check(outcome.loss)
                now = time.perf_counter()
                self.stepping_seconds += now - logged
                self.stepped_samples += self.progress.samples - logged_samples
                self._log_step((self.progress.samples - logged_samples) / max(now - logged, 1e-9))
                if stopping or outcome.ends_epoch or self._is_done() or now - saved >= CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.perf_counter()
                if outcome.ends_epoch and not stopping and not self._is_done() and not self._evaluate():
                    return False
                logged, logged_samples = time.perf_counter(), self.progress.samples
            if stopping:
                return False
        self.save()
        return self._evaluated_step == self.progress.step or self._evaluate()

    def save(self) -> None:
        """Write a checkpoint."""
        fingerprint = self.plan.target.fingerprint
        folder = self.folder / CHECKPOINTS_FOLDER
        self.last_checkpoint = save_checkpoint(folder, self.training, self.progress, fingerprint=fingerprint)

    def total_steps(self) -> int | None:
        """Return the optimizer steps of the whole plan; None for epochs of an iterable dataset."""
        if self.plan.steps is not None:
            return self.plan.steps
        batches = self.training.batches_per_epoch
        if batches is None or self.plan.epochs is None:
            return None
        return self.plan.epochs * math.ceil(batches / self.plan.config.gradient_accumulation_steps)

    def _pick_up_metrics(self) -> None:
        """Drop what is to be trained again, and make up for an evaluation that a stop left out."""
        names = [metric.name for metric in self.loaded.metrics]
        for line in cut_metrics(self.folder, self.progress.step):
            if "samples" in line:
                self.loss = line.get("loss")
            elif names and all(name in line for name in names):
                self.metrics, self._evaluated_step = {name: line[name] for name in names}, line["step"]
        at_epoch_end = self.progress.step > 0 and self.training.windows.batches_done == 0
        if at_epoch_end and self._evaluated_step != self.progress.step:
            self._evaluate()

    def _step(self, defer_deaths: Callable[[], None]) -> StepOutcome | None:
        """Take a step; return None if the loader's workers went first when the whole process group was told to stop."""
        windows = self.training.windows
        epoch, batches_done = windows.epoch, windows.batches_done
        is_fetched = False

        def note(_phase: str) -> None:
            nonlocal is_fetched
            if not is_fetched:
                is_fetched = True
                defer_deaths()

        try:
            with blame_target(f"{self.loaded.label}: step {self.progress.step + 1}"):
                return self.training.step(note)
        except TargetError as error:
            # Once there is a batch, weights and generators may have moved, and the step cannot be taken back.
            if is_fetched or not self._lost_workers_to_stop(error):
                raise
        windows.move_to(epoch=epoch, batches_done=batches_done)
        return None

    def _lost_workers_to_stop(self, error: TargetError) -> bool:
        if MESSAGE not in error.message:
            return False
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while not self.should_stop() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.should_stop()

    def _is_done(self) -> bool:
        if self.plan.steps is not None:
            return self.progress.step >= self.plan.steps
        assert self.plan.epochs is not None
        return self.training.windows.epoch >= self.plan.epochs

    def _check(self, loss: Tensor) -> float:
        value = float(loss)
        if not math.isfinite(value):
            saved = f"{self.last_checkpoint} is from before; " if self.last_checkpoint else ""
            raise TargetError(
                f"the loss is {value} at step {self.progress.step}",
                hint=f"{saved}check the data, or train with the baseline's precision",
            )
        return value

    def _log_step(self, samples_per_second: float) -> None:
        assert self.loss is not None
        append_metrics(
            self.folder,
            {
                "step": self.progress.step,
                "epoch": self.training.windows.epoch,
                "samples": self.progress.samples,
                "loss": self.loss,
                "learning_rate": float(self.training.optimizer.param_groups[0]["lr"]),
                "samples_per_second": round(samples_per_second, 3),
            },
        )
        self.report(
            Report(
                progress=self.progress,
                epoch=self.training.windows.epoch,
                total_steps=self.total_steps(),
                loss=self.loss,
                samples_per_second=samples_per_second,
                metrics=self.metrics,
            )
        )

    def _evaluate(self) -> bool:
        """Evaluate; return False if a stop took the evaluation's loader workers, which leaves it to a resume."""
        if not self.loaded.metrics:
            return True
        try:
            with blame_target(f"{self.loaded.label}: evaluate after step {self.progress.step}"):
                found = evaluate(self.loaded, self.training.model, self.plan.config, self.device)
        except TargetError as error:
            if self._lost_workers_to_stop(error):
                return False
            raise
        self.metrics = {name: value if math.isfinite(value) else None for name, value in found.items()}
        self._evaluated_step = self.progress.step
        line = {"step": self.progress.step, "epoch": self.training.windows.epoch, **self.metrics}
        append_metrics(self.folder, line)
        return True


@contextmanager
def blame_target(where: str) -> Iterator[None]:
    """Turn what the user's code raises into a TargetError that keeps it as its cause.

    Raises:
        TargetError: the code inside raised something.
    """
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise TargetError(f"{where} raised {type(error).__name__}: {text}"[:600]) from error
