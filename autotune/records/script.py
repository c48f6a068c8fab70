"""A script as a target: somebody's unmodified training program, started by a command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_serializer

from autotune.records.codec import Record
from autotune.records.config import KnobValue
from autotune.records.secrets import mask_words

Numerics = Literal["exact", "rounding", "semantic"]


class UserKnob(Record):
    """A knob of the script's own, filled into a placeholder of its command."""

    name: str
    """Name of the placeholder."""
    values: Annotated[tuple[KnobValue, ...], Field(min_length=2)]
    """Values to try; the first is the user's own."""
    numerics: Numerics = "semantic"
    """What a change does to the training."""


class PrintedMetric(Record):
    """How a figure of merit of the script's own is found in what it prints."""

    name: str
    """What it is called."""
    direction: Literal["minimize", "maximize"]
    """Which way it is better."""
    pattern: str | None = None
    """Regular expression with one group, searched in each line; None to read JSON lines."""
    key: str | None = None
    """Key of a JSON object printed on a line of its own; None to search by pattern."""


class Script(Record):
    """A command line with placeholders."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The words as typed; `{name}` and `{name:value}` stand for a knob, the value being the user's own. In a file, and
    in what is read from one, `***` stands for each secret."""
    knobs: tuple[UserKnob, ...] = ()
    """The script's own knobs."""
    metrics: tuple[PrintedMetric, ...] = ()
    """The figures to judge quality by; empty for the training loss alone."""
    quality_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of a quality run; None to let the budget decide."""
    quality_epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the training data of a quality run; None to count steps."""

    @field_serializer("command")
    def _mask_secrets(self, command: tuple[str, ...]) -> tuple[str, ...]:
        return mask_words(command)
