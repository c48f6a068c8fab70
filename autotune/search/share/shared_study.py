"""The study of a worker: its own, with the readings of the others among what it has learnt."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from optuna.trial import FrozenTrial

from autotune.records.config import TrainConfig
from autotune.search.explore.study import Proposal, Study
from autotune.search.scores.objective import Judged
from autotune.space import SearchSpace


class Others(Protocol):
    """The other workers, as far as a study looks at them: a `Fleet`."""

    def list_new_readings(self) -> list[FrozenTrial]:
        """Return the readings of others that were not handed out yet."""
        ...

    def find_wanted(self, closed: Container[object]) -> TrainConfig | None:
        """Return what is to be launched here before anything new; None without such."""
        ...

    def keep(self, judged: Judged, value: float | None, speed: float | None = None) -> None:
        """Keep a finished launch to be sent to them, with its speed where its value is another figure."""
        ...

    def finish(self, config: TrainConfig) -> None:
        """Send what is kept, and end the lease of a launch that was run."""
        ...

    def drop(self, config: TrainConfig) -> None:
        """Give back a launch that was not finished, if it is this worker's."""
        ...


class SharedStudy(Study):
    """A study that learns from other workers what they have launched, and tells them what was launched here.

    Args:
        others: the other workers.
        path: of the copy.
        space: what may be varied.
        known: trials finished earlier, each with its value.
        options: the rest, as of `Study`.
    """

    def __init__(
        self,
        others: Others,
        path: Path | None,
        space: SearchSpace,
        *,
        known: Sequence[tuple[Judged, float | None]] = (),
        **options: Any,
    ) -> None:
        super().__init__(path, space, known=known, **options)
        self._others = others
        for judged, value in known:
            others.keep(judged, value, self._read_speed(judged))

    def propose(
        self,
        closed: Container[object],
        together: Iterable[frozenset[str]] = (),
        dear: Mapping[str, float] = MappingProxyType({}),
        lost: Iterable[frozenset[str]] = (),
    ) -> Proposal | None:
        """Return what a dead worker left, what leads elsewhere, or else the sampler's proposal; as of `Study`."""
        for reading in self._others.list_new_readings():
            self._study.add_trial(reading)
        wanted = self._others.find_wanted(closed)
        return super().propose(closed, together, dear, lost) if wanted is None else self.open(wanted)

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Tell the study how a proposal ended, and the others."""
        super().close(proposal, judged, value)
        self._others.keep(judged, value, self._read_speed(judged))
        self._others.finish(judged.config)

    def _read_speed(self, judged: Judged) -> float | None:
        return None if self._floor is None else self._floor.read(judged)

    def abandon(self, proposal: Proposal) -> None:
        """Take back a proposal that was not finished, or that another worker has begun."""
        super().abandon(proposal)
        self._others.drop(proposal.config)
