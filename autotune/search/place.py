"""Where a search is kept, as its stages see it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult
from autotune.search.purse import KeepsFinals


class Place(KeepsFinals, Protocol):
    """Where a search is kept, as far as its stages look at it: a `SearchFolder`."""

    @property
    def database(self) -> Path:
        """Of the study."""
        ...

    def read_probe(self) -> ProbeReport | None:
        """Return the probe's report; None when there is none yet."""
        ...

    def write_probe(self, report: ProbeReport) -> None:
        """Save the probe's report."""
        ...

    def read_trials(self) -> list[TrialResult]:
        """Return every finished trial in order."""
        ...

    def count_interrupted(self) -> int:
        """Return how many timings of earlier sessions were cut."""
        ...
