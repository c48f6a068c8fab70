"""What is at work in a folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.profile import Profile


class SearchStatus(Record):
    """A search: the one at work, or the last."""

    label: str
    """Of its target."""
    holder: str | None
    """The process at work, in words; None when it has ended."""
    trials: dict[str, int]
    """That have ended, by what they were for."""
    profile: Profile | None
    """Its answer as it stands; None before the user's own settings are measured."""
    own_rate: float | None = None
    """Samples per second of the user's own settings, the mean of the launches so far; None before the first."""


class TrainingStatus(Record):
    """A training at work."""

    folder: str
    """Of its run, from the working folder."""
    holder: str
    """The process at work, in words."""
    step: int | None = None
    """The last that was logged; None before the first."""
    planned_steps: int | None = None
    """Of the whole training; None where epochs are counted."""
    loss: float | None = None
    """Mean training loss at that step."""
    samples_per_second: float | None = None
    """At that step."""


class Status(Record):
    """What is at work in a folder."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this record."""
    search: SearchStatus | None
    """The newest; None without one."""
    trainings: tuple[TrainingStatus, ...]
    """Those at work."""
