"""What a search remembers of its finals: every look at a candidate, its share of the risk and its pairs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import TrainConfig


class Round(Record):
    """One pair of fresh processes, by the numbers of their trials; the smaller one ran first."""

    candidate: Annotated[int, Field(ge=0)]
    """Trial of the candidate."""
    baseline: Annotated[int, Field(ge=0)]
    """Trial of the baseline."""


class LookTaken(Record):
    """One look at one candidate: written before its first pair, so that its risk is spent whatever comes after."""

    candidate: TrainConfig
    """Who was looked at."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Of the risk of a false claim that the whole search may take."""
    pilot_sd: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of a pair's log ratio as the search knew it before."""
    pilot_degrees: Annotated[float, Field(ge=0)] = 0.0
    """Degrees of freedom that it counts for."""
    pilot_is_doubtful: bool = False
    """It was seen in launches of another kind: one after the other, where pairs are timed in turns."""
    rounds: tuple[Round, ...] = ()
    """Pairs that this look added; those of earlier looks at the same candidate count beside them."""
    proven: bool = False
    """It ended in a claim: what was spent on this candidate is free again (fixed sequence)."""
    futile: bool = False
    """Ended early: more rounds could hardly have proven anything."""
    failure: str = ""
    """Why the candidate is out; empty while it is in."""


class FinalsRecord(Record):
    """Every look of a search, its resumed sessions included (finals.json)."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    machine: str = ""
    """Fingerprint of the machine and the software that the pairs were measured on."""
    looks: tuple[LookTaken, ...] = ()
    """In the order they were taken."""
