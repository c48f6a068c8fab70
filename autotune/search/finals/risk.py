"""What a search may risk in all, and what each look at its finals takes of it, beforehand and for ever.

share of a look   0.6 of what is left: 0.6, 0.24, 0.096, ...; their sum never passes 1 (Bonferroni over the looks)

A claim at a look holds at its own share, whatever was seen at earlier looks, as long as the number of its pairs does
not depend on what they showed; pairs of earlier looks at the same candidate count. What was spent on a candidate that
was proven is free again: whoever comes after is tested only because it was (a fixed sequence, as in Maurer, Hothorn
and Lehmacher 1995); not for another look at itself. Whoever is looked at again was chosen among all that have pairs, so
it has its part of the share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from autotune.measure.confidence import NO_PILOT, Pilot
from autotune.records.config import TrainConfig
from autotune.records.finals import FinalsRecord, LookTaken, Round
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult

SHARE_OF_A_LOOK = 0.6
"""Of what is left of the risk."""
LEAST_SHARE = 1e-6
"""With less left nothing can be claimed any more."""


@dataclass(frozen=True)
class Pair:
    """One round: a candidate and the baseline, each in a fresh process.

    Attributes:
        candidate: its launch.
        baseline: the launch beside it.
    """

    candidate: TrialResult
    baseline: TrialResult

    @property
    def candidate_first(self) -> bool:
        """Whether the candidate ran before the baseline."""
        return self.candidate.spec.number < self.baseline.spec.number


def pilot_of(look: LookTaken) -> Pilot:
    """Return what a look took for known of the noise of its pairs."""
    return Pilot(look.pilot_sd, look.pilot_degrees, look.pilot_is_doubtful)


class RiskPurse:
    """The looks of a search so far.

    Args:
        record: of earlier sessions; None for a new search.
        results: trials of these sessions, its pairs among them.
        machine: fingerprint of machine and software; pairs of another one do not count, but what they risked does.
        save: called with the record after each change.
    """

    def __init__(
        self,
        record: FinalsRecord | None = None,
        *,
        results: Iterable[TrialResult] = (),
        machine: str = "",
        save: Callable[[FinalsRecord], None] = lambda _record: None,
    ) -> None:
        before = record or FinalsRecord(machine=machine)
        is_same = before.machine == machine
        self._looks = [look if is_same else look.replace(rounds=()) for look in before.looks]
        self._keys = [look.candidate.key for look in self._looks]
        self._machine, self._save = machine, save
        numbered = {one.spec.number: one for one in results}
        found = [[_find_pair(one, numbered) for one in look.rounds] for look in self._looks]
        self._pairs = [[pair for pair in pairs if pair is not None] for pairs in found]

    @property
    def looks(self) -> tuple[LookTaken, ...]:
        """Every look, in order."""
        return tuple(self._looks)

    @property
    def candidates(self) -> list[TrainConfig]:
        """Everyone who was looked at, in order."""
        found: dict[str, TrainConfig] = {}
        for key, look in zip(self._keys, self._looks, strict=True):
            found.setdefault(key, look.candidate)
        return list(found.values())

    def pairs_of(self, candidate: TrainConfig) -> list[Pair]:
        """Return the pairs of a candidate over all looks, in order."""
        return next((pairs for _, pairs in reversed(self.looks_at(candidate))), [])

    def looks_at(self, candidate: TrainConfig) -> list[tuple[LookTaken, list[Pair]]]:
        """Return the looks at a candidate, in order, each with the pairs that it counted: those of earlier ones too."""
        key, pairs, found = candidate.key, list[Pair](), list[tuple[LookTaken, list[Pair]]]()
        for own, look, new in zip(self._keys, self._looks, self._pairs, strict=True):
            if own == key:
                pairs = [*pairs, *new]
                found.append((look, pairs))
        return found

    def share_for(self, candidate: TrainConfig) -> float:
        """Return the share of the risk that the next look at a candidate has."""
        looks = list(zip(self._keys, self._looks, self._pairs, strict=True))
        latest, own = {key: look for key, look, _ in looks}, candidate.key
        proven = {key for key, look in latest.items() if look.proven}
        spent = math.fsum(look.share for key, look, _ in looks if key not in proven - {own})
        share = SHARE_OF_A_LOOK * max(0.0, 1.0 - spent)
        rivals = {key for key, _, pairs in looks if pairs}
        if own not in proven:  # else it was chosen among the proven ones as well
            rivals -= proven
        return share / len(rivals) if own in rivals else share

    def begin(self, candidate: TrainConfig, pilot: Pilot, *, is_proven: bool = False) -> float:
        """Begin a look: set its share aside for good, and return it.

        Args:
            candidate: looked at.
            pilot: what of the noise is known beforehand.
            is_proven: it is by now, and stays so if this look never ends.
        """
        share = self.share_for(candidate)
        look = LookTaken(
            candidate=candidate,
            share=share,
            pilot_sd=pilot.sd,
            pilot_degrees=pilot.degrees,
            pilot_is_doubtful=pilot.is_doubtful,
        )
        self._keys.append(candidate.key)
        self._looks.append(look.replace(proven=is_proven))
        self._pairs.append([])
        self._write()
        return share

    def add(self, pair: Pair) -> None:
        """Keep a finished pair of the look that was begun last."""
        self._pairs[-1].append(pair)
        one = Round(candidate=pair.candidate.spec.number, baseline=pair.baseline.spec.number)
        self._change(rounds=(*self._looks[-1].rounds, one))

    def forget_pilot(self) -> None:
        """Take nothing of the noise for known beforehand, in the look that was begun last: its pairs are others now."""
        self._change(pilot_sd=NO_PILOT.sd, pilot_degrees=NO_PILOT.degrees, pilot_is_doubtful=False)

    def has_forgotten(self, pilot: Pilot) -> bool:
        """Return whether the look that was begun last with some pilot goes without it."""
        return self._looks[-1].pilot_degrees != pilot.degrees

    def end(self, *, proven: bool, futile: bool = False, failure: str = "") -> None:
        """End the look that was begun last; one that saw nothing new has risked nothing."""
        if self._pairs[-1] or failure:
            self._change(proven=proven, futile=futile, failure=failure)
            return
        self._keys.pop()
        self._looks.pop()
        self._pairs.pop()
        self._write()

    def _change(self, **changes: object) -> None:
        self._looks[-1] = self._looks[-1].replace(**changes)
        self._write()

    def _write(self) -> None:
        self._save(FinalsRecord(machine=self._machine, looks=self.looks))


class KeepsFinals(Protocol):
    """Where a search keeps the looks of its finals."""

    def read_finals(self) -> FinalsRecord | None:
        """Return them; None before the first one."""
        ...

    def write_finals(self, record: FinalsRecord) -> None:
        """Save them."""
        ...


def open_purse(place: KeepsFinals, report: ProbeReport, known: Iterable[TrialResult]) -> RiskPurse:
    """Return the purse of a search, its earlier sessions counted.

    Args:
        place: where its looks are kept.
        report: of the probe, for the machine.
        known: trials of earlier sessions.
    """
    machine = f"{report.hardware.fingerprint}-{report.software.fingerprint}"
    return RiskPurse(place.read_finals(), results=known, machine=machine, save=place.write_finals)


def _find_pair(one: Round, results: dict[int, TrialResult]) -> Pair | None:
    candidate, baseline = results.get(one.candidate), results.get(one.baseline)
    if candidate is None or baseline is None or candidate.measurement is None or baseline.measurement is None:
        return None
    return Pair(candidate, baseline)
