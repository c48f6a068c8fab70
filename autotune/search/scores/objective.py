"""What a trial is worth: a value and named constraints, zero or less where they hold. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autotune.drift.compare.losses import screen_losses, screen_other_draws
from autotune.records.config import TrainConfig, is_user_knob
from autotune.records.facts import TargetFacts
from autotune.records.measurement import DISTURBED_SHARE
from autotune.records.trial import LossCurve, TrialResult, TrialStatus
from autotune.space import REORDERING_KNOBS, classify_changes

SCREEN_STEPS = 40
"""Steps a single run is screened over: later, equal trainings have gone apart by chance."""

SCREEN_FACTOR = 4.0
LEAST_SCREEN = 0.10
"""A run is screened out for a loss worse by this share or by that multiple of the drift limit, whichever is more.

One seed over a few steps shows no smaller difference than this; the drift check decides at the limit itself."""

KEYS = ("failure", "memory", "drift")
"""Every trial carries every constraint: samplers refuse trials that differ in their number."""


@dataclass(frozen=True)
class Limits:
    """What a trial is held to.

    Attributes:
        host_memory_bytes: of the training process and its workers.
        device_memory_bytes: None on a CPU.
        max_drift: largest relative worsening of the training loss.
    """

    host_memory_bytes: int
    device_memory_bytes: int | None
    max_drift: float

    @property
    def screen_drift(self) -> float:
        """Relative worsening above which one run of a few steps is screened out."""
        return max(SCREEN_FACTOR * self.max_drift, LEAST_SCREEN)


@dataclass(frozen=True)
class Score:
    """A judged trial.

    Attributes:
        value: log of samples per second; None when there is no timing. Of a trial that was too slow to be timed, the
            most that it can reach.
        constraints: by name, feasible at zero or less.
        status: as measured, or drifted.
    """

    value: float | None
    constraints: dict[str, float]
    status: TrialStatus

    def without_drift(self) -> Score:
        """Return it of a training whose losses say nothing, for they differ between launches of one setting."""
        status = TrialStatus.COMPLETED if self.status is TrialStatus.DRIFTED else self.status
        return Score(self.value, self.constraints | {"drift": 0.0}, status)

    @property
    def feasible(self) -> bool:
        """The trial was timed and every constraint holds."""
        timed = self.value is not None and self.status is not TrialStatus.TOO_SLOW
        return timed and all(value <= 0 for value in self.constraints.values())


def draws_otherwise(config: TrainConfig, facts: TargetFacts) -> bool:
    """Return whether settings draw the random numbers of a step, as for masks of dropout, in another order.

    Not those that are another training in other ways too, which a loss may show early, nor the user's own knobs.

    Args:
        config: the settings.
        facts: of the target, its own settings among them.
    """
    changed = classify_changes(config, facts.baseline, facts.numerics)
    reorders = facts.model.draws_random and not REORDERING_KNOBS.isdisjoint(changed)
    return reorders and "semantic" not in changed.values() and not any(map(is_user_knob, changed))


def score_trial(result: TrialResult, baseline: LossCurve, limits: Limits, *, other_draws: bool = False) -> Score:
    """Return the value and the constraints of a trial.

    Args:
        result: the trial, whatever became of it.
        baseline: the baseline's losses from the same seed and data order.
        limits: memory and drift.
        other_draws: it has other masks of dropout, so that its losses are another seed's.
    """
    measurement = result.measurement
    if result.status is TrialStatus.TOO_SLOW and result.samples_per_second_bound is not None:
        # It was cut before it was timed: the bound ranks it as slow, and nothing is known against it otherwise.
        return Score(math.log(result.samples_per_second_bound), dict.fromkeys(KEYS, 0.0), result.status)
    if result.status is not TrialStatus.COMPLETED or measurement is None:
        over = 0.05 if result.status is TrialStatus.OUT_OF_MEMORY else 0.0
        constraints = {"failure": 1.0, "memory": over, "drift": 0.0}
        return Score(value=None, constraints=constraints, status=result.status)
    screen = screen_other_draws if other_draws else screen_losses
    drift = screen(_first_steps(result.curves[0]), _first_steps(baseline)) if result.curves else None
    over_drift = 0.0 if drift is None else drift - limits.screen_drift
    memory = measurement.peak_memory.host_bytes / limits.host_memory_bytes - 1.0
    if measurement.peak_memory.device_bytes is not None and limits.device_memory_bytes is not None:
        memory = max(memory, measurement.peak_memory.device_bytes / limits.device_memory_bytes - 1.0)
    return Score(
        value=math.log(measurement.samples_per_second),
        constraints={"failure": 0.0, "memory": memory, "drift": over_drift},
        status=TrialStatus.DRIFTED if over_drift > 0 else result.status,
    )


def trim_launch(result: TrialResult, baseline: LossCurve) -> TrialResult:
    """Return a launch without what only its file need keep: a search of a thousand has millions of steps.

    Left out are its single steps, and its losses after the first that is not the baseline's, but for a few.
    """
    if result.measurement is not None:
        result = result.replace(measurement=result.measurement.replace(step_seconds=()))
    if result.reference is not None:
        result = result.replace(reference=result.reference.replace(step_seconds=()))
    return result.replace(curves=tuple(_share_losses(curve, baseline) for curve in result.curves))


def _share_losses(curve: LossCurve, baseline: LossCurve) -> LossCurve:
    pairs = enumerate(zip(curve.losses, baseline.losses, strict=False))
    differs = next((place for place, (own, other) in pairs if own != other), None)
    if differs is not None:
        return _first_steps(curve, max(SCREEN_STEPS, differs + 1))
    if len(curve.losses) <= len(baseline.losses):  # the same numbers, kept once
        return curve.replace(losses=baseline.losses[: len(curve.losses)])
    return curve


def _first_steps(curve: LossCurve, most: int = SCREEN_STEPS) -> LossCurve:
    taken = min(most, len(curve.losses))
    samples = round(curve.samples * taken / max(1, len(curve.losses)))
    return curve.replace(losses=curve.losses[:taken], samples=samples)


@dataclass(frozen=True)
class Judged:
    """A trial with its score.

    Attributes:
        result: the trial.
        score: what it is worth.
    """

    result: TrialResult
    score: Score

    @property
    def config(self) -> TrainConfig:
        """The settings that were tried."""
        assert self.result.spec.config is not None
        return self.result.spec.config

    @cached_property
    def reference(self) -> float | None:
        """Log samples per second of the user's settings in turns with it; None where it was timed alone.

        None as well where others took much more from these than from itself: a slow reference makes anything fast.
        """
        own, reference = self.result.measurement, self.result.reference
        if own is None or reference is None or reference.taken_fraction > own.taken_fraction + DISTURBED_SHARE:
            return None
        return math.log(reference.samples_per_second)

    @cached_property
    def key(self) -> str:
        """The settings as text, the same for every launch of them."""
        return self.config.key
