"""Throughput against memory: the measured settings that no other beats in both (the Pareto front). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.records.config import TrainConfig
from autotune.records.measurement import PeakMemory
from autotune.records.objective import MOST_MEMORY
from autotune.records.profile import ParetoPoint
from autotune.records.search import Preset
from autotune.records.trial import TrialResult
from autotune.search.scores.ranking import Entry, Ranking
from autotune.space import SearchSpace


def find_pareto(
    ranking: Ranking, space: SearchSpace, presets: Sequence[Preset] = (), finals: Sequence[TrialResult] = ()
) -> tuple[ParetoPoint, ...]:
    """Return the front, the fastest first: each needs less memory than every faster one.

    Args:
        ranking: of the search's launches, without what was refused.
        space: that settings are completed in.
        presets: whose names are given where they are on it.
        finals: launches of the finals, whose memory counts too.
    """
    points: list[ParetoPoint] = []
    least = math.inf
    for entry in sorted(ranking.measured, key=lambda one: -one.speed):
        peak = find_peak(entry, finals)
        if peak.used_bytes < MOST_MEMORY * least:
            least = peak.used_bytes
            names = tuple(one.name for one in presets if _apply(one, space) == entry.config)
            points.append(ParetoPoint(config=entry.config, speedup=math.exp(entry.speed), memory=peak, presets=names))
    return tuple(points)


def find_peak(entry: Entry, finals: Sequence[TrialResult]) -> PeakMemory:
    """Return the largest peaks of all launches of some settings, those in the finals among them.

    Raises:
        ValueError: none of them was timed.
    """
    results = [*(one.result for one in entry.launches), *(one for one in finals if one.spec.config == entry.config)]
    peak = PeakMemory.largest(one.measurement.peak_memory for one in results if one.measurement is not None)
    if peak is None:
        raise ValueError("none of the launches was timed")
    return peak


def _apply(preset: Preset, space: SearchSpace) -> TrainConfig | None:
    """Return what is left of a preset in a space; None where nothing is."""
    config = space.keep(preset.apply_to(space.baseline))
    return None if config == space.baseline else config
