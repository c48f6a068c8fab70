"""What a trial's purpose asks of its training: one run for each, whatever the steps come from."""

from __future__ import annotations

from pathlib import Path

from autotune.measure.timing import Progress
from autotune.records.config import TrainConfig
from autotune.records.trial import TrialSpec
from autotune.runs.gradients import GradientRun
from autotune.runs.learning import learn
from autotune.runs.source import Found, Run, StepSource
from autotune.runs.timing import time_steps


def make_run(
    source: StepSource,
    spec: TrialSpec,
    config: TrainConfig,
    folder: Path,
    *,
    seed: int,
    leads: bool = True,
    progress: Progress | None = None,
) -> Run[Found]:
    """Return the run of a trial, the source prepared for its first step.

    Args:
        source: of the steps.
        spec: what is asked.
        config: that the source trains with.
        folder: the trial's own, for what does not fit into a result.
        seed: that the training was started with.
        leads: this process writes; the others of a launcher only train along.
        progress: told what a measurement is at; None where nobody asks.
    """
    match spec.purpose:
        case "quality":
            return _learn(source, spec, seed)
        case "fidelity":
            assert spec.fidelity is not None
            return GradientRun(source, spec.fidelity, folder, seed=seed, leads=leads).run()
        case "tape":
            return source.read_data()
    return time_steps(source, config, spec.limits, seed=seed, progress=progress)


def _learn(source: StepSource, spec: TrialSpec, seed: int) -> Run[Found]:
    curve = yield from learn(source, spec.quality_steps, seed=seed, evaluate=spec.evaluate)
    return Found(curves=(curve,))
