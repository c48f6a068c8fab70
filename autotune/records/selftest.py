"""What a test of the tool on itself found: searches in which the true speed-up is known."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.profile import SearchVerdict


class Outcome(Record):
    """One search and the truth behind it."""

    truth: Annotated[float, Field(gt=0)]
    """True speed-up of the best setting there was."""
    noise: str
    """Where its launches came from: `real`, or the name of a simulated machine."""
    verdict: SearchVerdict
    """What the search said."""
    pairs: Annotated[int, Field(ge=0)] = 0
    """Pairs in its finals."""
    low: float | None = None
    """What was or could have been claimed: the lower end; None without finals."""
    estimate: float | None = None
    """Point estimate of the finals."""
    interval_low: float | None = None
    """Lower end of the two-sided 95 % interval."""
    interval_high: float | None = None
    """Its upper end."""
    launches: Annotated[int, Field(ge=0)] = 0
    """Timed launches of search and finals."""
    raced: Annotated[int, Field(ge=0)] = 0
    """Launches that were ended early as clearly slower."""
    measured_fraction: float | None = None
    """Share of the time used that was spent inside measured blocks."""
    elapsed_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Of the search, on the clock it ran by."""

    @property
    def claimed(self) -> bool:
        """The search called something faster."""
        return self.verdict == "improved"

    @property
    def covered(self) -> bool | None:
        """The 95 % interval of the finals holds the truth; None without finals."""
        if self.interval_low is None or self.interval_high is None:
            return None
        return self.interval_low <= self.truth <= self.interval_high


class Tally(Record):
    """Outcomes with the same truth on the same machine, counted."""

    truth: Annotated[float, Field(gt=0)]
    """True speed-up."""
    noise: str
    """Where the launches came from."""
    runs: Annotated[int, Field(ge=1)]
    """Searches."""
    claims: Annotated[int, Field(ge=0)]
    """Of these, how many called something faster."""
    overclaims: Annotated[int, Field(ge=0)]
    """Of these, how many claimed more than the truth."""
    with_finals: Annotated[int, Field(ge=0)]
    """Searches that came to finals."""
    covered: Annotated[int, Field(ge=0)]
    """Of these, how often the 95 % interval held the truth."""
    launches: Annotated[int, Field(ge=0)]
    """Timed launches."""
    raced: Annotated[int, Field(ge=0)]
    """Of these, how many were ended early as clearly slower."""
    measured_fraction: float | None
    """Mean share of the time that was spent inside measured blocks."""
    worst_false_rate: float
    """Upper 95 % limit of the rate of claims beyond the truth (Clopper-Pearson; 3/n when there was none)."""


class SelftestReport(Record):
    """Record out of a self-test."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    kind: Literal["aa", "power"]
    """aa: nothing is faster; power: something is, by a known amount."""
    tallies: tuple[Tally, ...]
    """By truth and machine."""
    outcomes: tuple[Outcome, ...] = ()
    """Every real search; replayed ones are only counted."""
    elapsed_seconds: Annotated[float, Field(ge=0)]
    """Of the whole self-test."""


class RecordedLaunches(Record):
    """Launches of one and the same training on a real machine."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    launches: tuple[tuple[float, ...], ...]
    """Log seconds per sample of the blocks of each launch, in the order they ran."""
