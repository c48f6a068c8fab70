"""Let a script train for its losses, and until it prints its metrics."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

import torch

from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.measure.throughput import finite_or_none
from autotune.records.script import PrintedMetric
from autotune.records.trial import LossCurve, TrialResult, TrialSpec, TrialStatus
from autotune.runs.timing import describe_too_short

if TYPE_CHECKING:
    from autotune.runs.script import ScriptTrial


class LearningRun:
    """Lets a script train for its losses, and until it has printed each of its metrics."""

    def __init__(self, spec: TrialSpec) -> None:
        assert spec.target.script is not None
        self._spec = spec
        self._losses: list[torch.Tensor] = []
        self._samples = 0
        self._learned = False
        self._wanted = {metric.name: metric for metric in spec.target.script.metrics} if spec.evaluate else {}
        self._metrics: dict[str, float] = {}
        self._unheard = set(self._wanted)

    def watch(self, hooks: ScriptHooks) -> None:
        """Losses and lines are all it needs."""

    def begin(self, hooks: ScriptHooks) -> None:
        """Nothing to prepare."""

    def turn(self, is_training: bool) -> None:
        """Time does not matter."""

    def take(self, step: ScriptStep, loss: torch.Tensor) -> bool:
        """Note a step; True when there were enough and no metric is waited for."""
        if not self._learned:
            self._losses.append(loss)
            self._samples += max(1, step.samples)
            self._learned = len(self._losses) >= self._spec.quality_steps
        return self._learned and not self._unheard

    def heard(self, line: str) -> bool:
        """Look for metrics in a printed line; True when each was printed after enough steps, the last one here."""
        found = {name: read_metric(line, metric) for name, metric in self._wanted.items()}
        numbers = {name: value for name, value in found.items() if value is not None}
        self._metrics |= numbers
        if not self._learned or not numbers:
            return False
        self._unheard -= numbers.keys()
        return not self._unheard

    def result(self, trial: ScriptTrial) -> TrialResult:
        """Return the curve; shorter than asked for when the script ended earlier."""
        if not self._losses:
            return describe_too_short(trial)
        losses = tuple(finite_or_none(float(loss)) for loss in self._losses)
        metrics = {name: finite_or_none(self._metrics.get(name, math.nan)) for name in self._wanted}
        curve = LossCurve(seed=trial.spec.seeds[0], losses=losses, samples=self._samples, metrics=metrics)
        return TrialResult(
            spec=trial.spec,
            status=TrialStatus.COMPLETED,
            elapsed_seconds=trial.elapsed_seconds,
            startup_seconds=trial.startup_seconds,
            curves=(curve,),
        )


def read_metric(line: str, metric: PrintedMetric) -> float | None:
    """Return the figure that a printed line holds; None when it holds none."""
    try:
        if metric.pattern is not None:
            found = re.search(metric.pattern, line)
            return None if found is None else float(found.group(1))
        record = json.loads(line) if line.lstrip().startswith("{") else None
        value = record.get(metric.key) if isinstance(record, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, RecursionError, OverflowError):
        return None
