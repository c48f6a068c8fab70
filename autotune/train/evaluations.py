"""The evaluations of a run: at a batch size of their own, in inference mode, never the end of the training.

An evaluation that runs out of memory is tried again with half of its batch; one that still does is left out, and said:
the checkpoint is there, and can be evaluated elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from autotune.engine.evaluation import evaluate
from autotune.engine.loop import Training
from autotune.errors import TargetError
from autotune.records.run import Best
from autotune.targets.workload import LoadedWorkload
from autotune.train.blame import blame_target
from autotune.train.steps_down import MEMORY_CAUSES
from autotune.trial.causes import explain_exception


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

    def run(self, step: int) -> dict[str, float | None]:
        """Evaluate after an optimizer step and return the metrics; all None where there is not enough memory.

        Raises:
            TargetError: the workload cannot evaluate.
        """
        where = f"{self.loaded.label}: evaluate after step {step}"
        found: dict[str, float] | None = None
        while found is None:
            error = None
            try:
                with blame_target(where):
                    found = self._evaluate()
            except TargetError as raised:
                error = raised
            if error is not None and not self._can_try_again(error, where):
                break
        self.step = step
        names = [metric.name for metric in self.loaded.metrics]
        values = {name: math.nan for name in names} if found is None else found
        self.metrics = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return self.metrics

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
        try:
            return evaluate(
                self.loaded,
                training,
                training.config,
                batch_size=self._batch_size,
                inference=self.is_inference,
            )
        except RuntimeError as error:
            if not self.is_inference or explain_exception(error)[1] in MEMORY_CAUSES:
                raise
        self.is_inference = False
        found = self._evaluate()
        self.warn("evaluate does not work in inference mode: it is run without gradients instead")
        return found

    def _can_try_again(self, error: TargetError, where: str) -> bool:
        """Make an evaluation that ran out of memory smaller; False when it is as small as it can be.

        Raises:
            TargetError: it failed for another reason.
        """
        if explain_exception(error.__cause__ or error)[1] not in MEMORY_CAUSES:
            raise error
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._batch_size is None or self._batch_size == 1:
            hint = "give evaluate a parameter batch_size" if self._batch_size is None else "evaluate it elsewhere"
            self.warn(f"{where} ran out of memory and was left out; its checkpoint is there: {hint}")
            return False
        self._batch_size //= 2
        self.warn(f"{where} ran out of memory: tried again with {self._batch_size} samples at once")
        return True
