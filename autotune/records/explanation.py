"""What an answer is made of: what each of its changes is worth, what else was tried, what is left to the user."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.measurement import Fraction, Interval, NonNegative
from autotune.records.probe import Advice, Issue, RuledOut
from autotune.records.profile import ParetoPoint
from autotune.records.script import Numerics

ChangeSource = Literal["none", "finals", "search", "launches"]
"""What a change's worth rests on. finals: the pairs of the answer's proof; search: launches that the search made for
another reason, each held against the baseline of its time; launches: pairs made for the explanation."""


class ChangeEffect(Record):
    """What one change of the answer is worth: the answer over the answer without it (leave-one-out)."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Knobs that go together, e.g. the workers and how much they prefetch; the workload's own as `user_knobs.NAME`."""
    without: TrainConfig
    """The answer with these as the baseline has them."""
    numerics: Numerics
    """What it may do to the numbers: nothing (exact), round them otherwise, or change the training."""
    source: ChangeSource = "none"
    """What the worth rests on."""
    worth: Interval | None = None
    """Two-sided 95 % interval of the ratio; None while it is not known."""
    log_ratios: tuple[float, ...] = ()
    """Of each pair, natural logarithm; empty where there are none."""
    launches: tuple[int, int] = (0, 0)
    """Of the answer, and of the answer without the change, that it rests on."""
    memory_bytes: int | None = None
    """Peak of the answer less that of the answer without the change; None while it is not known."""
    alone: Annotated[float, Field(gt=0)] | None = None
    """The baseline with nothing but this change over the baseline, as the search read it; None where it was not
    launched."""
    alone_launches: Annotated[int, Field(ge=0)] = 0
    """That this rests on."""
    failure: str = ""
    """How the answer ended without it; empty where it ran."""


class TriedValue(Record):
    """A value that was launched and is not the answer's."""

    knob: str
    """Field name; the workload's own as `user_knobs.NAME`."""
    value: KnobValue | None
    """The value."""
    launches: Annotated[int, Field(ge=1)]
    """Of settings with it, those of other changes beside it among them."""
    alone: Annotated[float, Field(gt=0)] | None = None
    """Over the baseline with no other change, as the search read it; None where it was not timed alone."""
    best: Annotated[float, Field(gt=0)] | None = None
    """The same of the fastest settings with it; None where none was timed."""
    least_bytes: Annotated[int, Field(ge=0)] | None = None
    """Least peak of the settings with it; None unless memory was what the search made small."""
    failed: dict[str, int] = {}
    """Launches that came to no timing, by how they ended."""


class RefusedChanges(Record):
    """Changes that did not pass the loss check where they were made together."""

    changes: Annotated[tuple[str, ...], Field(min_length=1)]
    """Each as `field=value`; the workload's own as `user_knobs.NAME=value`."""
    best: Annotated[float, Field(gt=0)] | None = None
    """Fastest settings with all of them over the baseline, as the search read it; None where none was timed."""


class StepShare(Record):
    """One optimizer step of some settings, as their launches were timed."""

    seconds: Annotated[float, Field(gt=0)]
    """Mean wall time."""
    data_wait_fraction: Fraction
    """Share of it spent waiting for the loader."""
    launches: Annotated[int, Field(ge=1)]
    """That it is the mean of."""


class Explanation(Record):
    """Why an answer is what it is (explanation.json)."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    label: str
    """Of the target."""
    config: TrainConfig
    """What is explained: the answer, or the candidate that is not proven."""
    baseline_config: TrainConfig
    """The user's own settings."""
    is_proven: bool
    """It is the answer."""
    together: Interval | None = None
    """All changes over the baseline, 95 %, from the finals; None where they are not known."""
    changes: tuple[ChangeEffect, ...] = ()
    """The one that is worth most first, then what is not known."""
    tried: tuple[TriedValue, ...] = ()
    """Values that are not the answer's, by knob."""
    refused: tuple[RefusedChanges, ...] = ()
    """What learned something else, or could not be shown to learn the same."""
    measured: tuple[ParetoPoint, ...] = ()
    """All settings that were timed and not refused, as the search read them: not proven."""
    before: StepShare | None = None
    """A step of the baseline; None without a launch."""
    after: StepShare | None = None
    """A step of what is explained."""
    bottleneck: str = ""
    """The probe's verdict on the baseline."""
    ruled_out: tuple[RuledOut, ...] = ()
    """What was not tried, and why."""
    troubles: tuple[Issue, ...] = ()
    """What slows the training and is no setting: for the user alone to mend."""
    advice: tuple[Advice, ...] = ()
    """What the probe expected of each setting."""
    machine: str = ""
    """Fingerprint of the machine and the software that the pairs were measured on."""
    rounds: tuple[tuple[int, ...], ...] = ()
    """Trials that were launched for the explanation, those of a round together, the explained settings' first."""
    spent_seconds: NonNegative = 0.0
    """That these took."""
    note: str = ""
    """Why nothing more was launched; empty where nothing was asked for, or nothing was missing."""
