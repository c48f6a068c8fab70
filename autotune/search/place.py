"""Where a search is kept, and where its proposals come from, as its stages see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult
from autotune.search.explore.additive import Prior
from autotune.search.explore.stage import Proposals
from autotune.search.finals.risk import KeepsFinals
from autotune.search.scores.objective import Judged
from autotune.space import SearchSpace


class SearchStore(KeepsFinals, Protocol):
    """Where a search is kept, as far as its stages look at it: a `SearchFolder`."""

    @property
    def database(self) -> Path:
        """Of the study's copy."""
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


class OpenStudy(Protocol):
    """Makes what proposes configs; arguments as of `Study`."""

    def __call__(
        self,
        path: Path,
        space: SearchSpace,
        *,
        seed: int,
        known: Sequence[tuple[Judged, float | None]],
        told: Callable[[str], None],
        prior: Prior,
        price: Callable[[TrainConfig], float],
    ) -> Proposals:
        """Return it."""
        ...
