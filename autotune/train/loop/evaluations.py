"""The evaluations of a run: at a batch size of their own, in inference mode, never the end of the training.

An evaluation that runs out of memory is tried again with half of its batch; one that still does is left out, and said:
the checkpoint is there, and can be evaluated elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.distributed.evaluation import lead_evaluation
from autotune.distributed.training import RankTraining
from autotune.engine.device import release_cached
from autotune.engine.evaluation import evaluate
from autotune.engine.loop import Training
from autotune.errors import TargetError
from autotune.isolation.causes import explain_exception
from autotune.records.run import Best
from autotune.records.trial import Cause
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.checkpoint import Checkpoints
from autotune.train.loop.meters import Meters
from autotune.train.loop.user_code import blame_target
from autotune.train.loop.worker_deaths import is_lost_worker
from autotune.train.recovery.steps_down import MEMORY_CAUSES, WORKER_CAUSES
from autotune.train.report import StopNow

CUT_KEY = "evaluation_cut"
"""In a line of metrics.jsonl: the time limit cut the evaluation after that step short."""


@dataclass
class Evaluations:
    """Evaluates one training.

    Attributes:
        loaded: the workload.
        training: its training.
        warn: told what the user should know.
        is_inference: use inference mode.
        metrics: what the last one found, None where not finite.
        step: optimizer steps taken at the last one; None before the first.
    """

    loaded: LoadedWorkload
    training: Training
    warn: Callable[[str], None]
    is_inference: bool = True
    metrics: dict[str, float | None] = field(default_factory=dict)
    step: int | None = None

    def __post_init__(self) -> None:
        self._batch_size = self.loaded.evaluation_batch_size

    def run(self, step: int, *, is_stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Evaluate after an optimizer step and return the line for metrics.jsonl; all None where it was left out.

        Args:
            step: optimizer steps taken.
            is_stopping: asked when a loader's worker has died: a stop of the whole process group takes these first.

        Raises:
            TargetError: the workload cannot evaluate.
            StopNow: a stop took its workers.
        """
        workers_lost = 0
        while True:
            error = None
            try:
                with blame_target(f"{self.loaded.label}: evaluate after step {step}"):
                    return self._note(step, self._evaluate())
            except TargetError as raised:
                error = raised
            cause = _find_cause(error)
            if cause in WORKER_CAUSES:
                if is_stopping():
                    raise StopNow
                workers_lost += 1
                if workers_lost > 1:
                    return self.leave_out(step, f"lost its loader's workers twice: {error.message}")
            elif cause not in MEMORY_CAUSES:
                raise error
            elif not self._make_smaller(step):
                return self._note(step, {})

    def leave_out(self, step: int, reason: str) -> dict[str, Any]:
        """Do without an evaluation, say it, and return the line for metrics.jsonl."""
        self.warn(f"{self.loaded.label}: evaluate after step {step} {reason}; it was left out, its checkpoint is there")
        return self._note(step, {})

    def pick_up(self, lines: Sequence[Mapping[str, Any]], step: int) -> bool:
        """Go on from the lines of metrics.jsonl; return whether an evaluation after a step was cut short by the time.

        Args:
            lines: in order.
            step: optimizer steps taken.
        """
        names = [metric.name for metric in self.loaded.metrics]
        for line in lines:
            if names and all(name in line for name in names) and "samples" not in line:
                self.metrics, self.step = {name: line[name] for name in names}, line["step"]
        return any(CUT_KEY in line and line["step"] == step for line in lines)

    def keep_best(self, checkpoints: Checkpoints, meters: Meters, path: Path | None) -> None:
        """Keep a checkpoint as the best one if the last evaluation is."""
        if path is None or self.step is None or not self.is_best(meters.best):
            return
        metric = self.loaded.metrics[0].name
        value = self.metrics[metric]
        assert value is not None
        kept = str(checkpoints.keep_best(path))
        meters.best = Best(metric=metric, value=value, step=self.step, checkpoint=kept)

    def is_best(self, earlier: Best | None) -> bool:
        """Return whether the last evaluation is better than every earlier one, by the first metric."""
        if not self.loaded.metrics:
            return False
        first = self.loaded.metrics[0]
        value = self.metrics.get(first.name)
        if value is None:
            return False
        if earlier is None or earlier.metric != first.name:
            return True
        return value < earlier.value if first.direction == "minimize" else value > earlier.value

    def _evaluate(self) -> dict[str, float]:
        training = self.training
        if training.is_sharded:
            assert isinstance(training, RankTraining)
            return lead_evaluation(self.loaded, training, batch_size=self._batch_size)
        try:
            return evaluate(
                self.loaded,
                training,
                training.config,
                batch_size=self._batch_size,
                inference=self.is_inference,
            )
        except RuntimeError as error:
            if not self.is_inference or explain_exception(error)[1] in (*MEMORY_CAUSES, *WORKER_CAUSES):
                raise
        self.is_inference = False
        found = self._evaluate()
        self.warn("evaluate does not work in inference mode: it is run without gradients instead")
        return found

    def _make_smaller(self, step: int) -> bool:
        """Halve the batch of an evaluation that ran out of memory; False when it is as small as it can be."""
        where = f"{self.loaded.label}: evaluate after step {step}"
        release_cached(self.training.device)
        if self._batch_size is None or self._batch_size == 1:
            hint = "give evaluate a parameter batch_size" if self._batch_size is None else "evaluate it elsewhere"
            self.warn(f"{where} ran out of memory and was left out; its checkpoint is there: {hint}")
            return False
        self._batch_size //= 2
        self.warn(f"{where} ran out of memory: tried again with {self._batch_size} samples at once")
        return True

    def _note(self, step: int, found: Mapping[str, float]) -> dict[str, Any]:
        self.step = step
        values = {metric.name: found.get(metric.name, math.nan) for metric in self.loaded.metrics}
        self.metrics = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return {"step": step, **self.metrics}


def _find_cause(error: TargetError) -> Cause:
    if is_lost_worker(error.__cause__):
        return WORKER_CAUSES[0]
    return explain_exception(error.__cause__ or error)[1]
