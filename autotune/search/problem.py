"""What one search has to solve: fixed once its target is probed, the same for every stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autotune.errors import UsageError
from autotune.knobs import Facts
from autotune.probe.run import drop_idle_knobs
from autotune.records.config import TrainConfig
from autotune.records.objective import Objective
from autotune.records.probe import ProbeReport
from autotune.records.search import PlannedRun, SearchState
from autotune.records.trial import LossCurve, TrialResult
from autotune.search.policy import USUAL_POLICY, SearchPolicy
from autotune.search.scores.objective import Limits
from autotune.space import SearchSpace, build_space

_DEVICE_SHARE = 0.95
_HOST_SHARE = 0.92
"""Of the memory that is free on the device, and of the host's: a trial that comes near the rest endangers others."""


@dataclass(frozen=True)
class SearchProblem:
    """One search past its probe.

    Attributes:
        state: what it was asked to do.
        report: of the probe.
        space: what may be varied.
        startup_seconds: of a process beside its steps, as the probe saw it: mostly until its first one.
        baseline_losses: of the baseline in the probe, which those of every launch are screened against.
        planned_samples: of the final training; None when its length is not known.
        policy: its thresholds, as its objective has them.
    """

    state: SearchState
    report: ProbeReport
    space: SearchSpace
    startup_seconds: float
    baseline_losses: LossCurve
    planned_samples: float | None = None
    policy: SearchPolicy = USUAL_POLICY

    @property
    def baseline(self) -> TrainConfig:
        """The user's own settings."""
        return self.report.target.baseline

    @property
    def planned_seconds(self) -> float | None:
        """Length of the final training with the user's own settings; None when it was not given as a time."""
        run = self.state.planned_run
        return run.amount if run is not None and run.unit == "seconds" else None

    @property
    def objective(self) -> Objective:
        """What it makes best."""
        return self.state.objective

    @property
    def charged_samples(self) -> float | None:
        """Samples that bear what is paid once; None where that does not count."""
        return self.planned_samples if self.objective is Objective.TIME_TO_FINISH else None

    @cached_property
    def limits(self) -> Limits:
        """What a trial may use: the user's limit on the device's memory, or on the host's without one."""
        asked, hardware = self.state.memory_limit_bytes, self.report.hardware
        device = None
        if self.report.target.device == "cuda" and hardware.gpus:
            # A driver that does not tell its free memory reports 0; the device then sets its own limit.
            free = self.report.target.device_bytes or hardware.gpus[0].memory_free_bytes
            device = asked or int(_DEVICE_SHARE * free) or None
            asked = None
        host = asked or int(_HOST_SHARE * hardware.memory_limit_bytes)
        return Limits(host_memory_bytes=host, device_memory_bytes=device, max_drift=self.state.max_drift.loss.amount)


def make_problem(state: SearchState, report: ProbeReport, probed: TrialResult, policy: SearchPolicy) -> SearchProblem:
    """Return the problem that a search has to solve.

    Args:
        state: what it was asked to do.
        report: of its probe.
        probed: the trial behind it.
        policy: its thresholds, of a search for speed.

    Raises:
        UsageError: the planned run is given in epochs of a dataset without a length, or a knob is named that cannot be
            varied.
    """
    planned_samples = _find_planned_samples(state.planned_run, report)
    return SearchProblem(
        state,
        report,
        _build_space(state, report),
        startup_seconds=probed.starting_seconds,
        baseline_losses=probed.curves[0],
        planned_samples=planned_samples,
        policy=policy.fit_to(state.objective),
    )


def _build_space(state: SearchState, report: ProbeReport) -> SearchSpace:
    facts = Facts(target=report.target, hardware=report.hardware, allowed=frozenset(state.allowed))
    space = build_space(facts, learning_rate_rule=state.learning_rate_rule)
    space = drop_idle_knobs(space, report.target, report.measurement, report.hardware)
    if state.only or state.exclude:
        space = space.restrict(state.only, state.exclude)
    for preset in state.presets:
        space = space.admit(preset.settings)
    return space


def _find_planned_samples(planned: PlannedRun | None, report: ProbeReport) -> float | None:
    """Return how many samples the planned training has; None when its length is not known.

    Raises:
        UsageError: it is given in epochs of a dataset without a length.
    """
    if planned is None:
        return None
    if planned.unit == "samples":
        return planned.amount
    if planned.unit == "seconds":
        training = planned.amount * (1.0 - report.target.aside_fraction)
        return training * report.measurement.samples_per_second
    count = report.target.data.sample_count
    if count is None:
        raise UsageError(
            "--train-for is in epochs, and this dataset has no length", hint="give it as a time or in samples"
        )
    return planned.amount * count
