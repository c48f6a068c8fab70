"""A recorded table of launches, as it is kept on disk: a header and one line a launch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import KnobValue
from autotune.records.measurement import Measurement, NonNegative
from autotune.records.probe import ProbeReport
from autotune.records.trial import Cause, LossCurve, TrialStatus


class TableHeader(Record):
    """What was recorded, and where."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    name: str
    """Of the table."""
    imitates: str = ""
    """The machine that was imitated by environment or affinity; empty for the machine itself."""
    recorded_on: str
    """Date of the first launch, ISO 8601."""
    report: ProbeReport
    """Of the target, on this machine."""
    choices: dict[str, tuple[KnobValue, ...]]
    """The space: values by knob, in order; the baseline's among them."""
    drifting: tuple[str, ...] = ()
    """Values, as `knob=value`, that are known to learn something else."""
    space_size: int
    """Configs of the space."""
    recorded_size: int
    """Configs that were to be recorded: fewer where the space was subsampled."""
    measure_seconds: float
    """Longest measurement of a launch."""


class RecordedLaunch(Record):
    """One launch of one config."""

    changes: dict[str, KnobValue | None]
    """What differs from the baseline, by knob; empty for the baseline itself."""
    status: TrialStatus
    """How it ended."""
    cause: Cause = ""
    """What went wrong; empty when completed."""
    elapsed_seconds: NonNegative
    """From the start of the process to its end."""
    startup_seconds: NonNegative = 0.0
    """From the start of the process to the first training step."""
    measurement: Measurement | None = None
    """Its blocks, without the single steps."""
    curve: LossCurve | None = None
    """Losses of the timed steps."""
