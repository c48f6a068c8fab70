"""Throughput against memory: the measured settings that no other beats in both (the Pareto front). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.records.config import TrainConfig
from autotune.records.measurement import PeakMemory
from autotune.records.profile import ParetoPoint
from autotune.records.search import Preset
from autotune.search.scores.ranking import Entry, Ranking
from autotune.space import SearchSpace

_LEAST_SAVING = 0.98
"""Peaks of two launches of the same settings differ by about a hundredth on a host: less is no saving."""


def find_pareto(ranking: Ranking, space: SearchSpace, presets: Sequence[Preset] = ()) -> tuple[ParetoPoint, ...]:
    """Return the front, the fastest first: each needs less memory than every faster one.

    Args:
        ranking: of the search's launches, without what was refused.
        space: that settings are completed in.
        presets: whose names are given where they are on it.
    """
    points: list[ParetoPoint] = []
    least = math.inf
    for entry in sorted(ranking.entries, key=lambda one: -one.score):
        peak = find_peak(entry)
        if peak.used_bytes < _LEAST_SAVING * least:
            least = peak.used_bytes
            names = tuple(one.name for one in presets if _apply(one, space) == entry.config)
            points.append(ParetoPoint(config=entry.config, speedup=math.exp(entry.score), memory=peak, presets=names))
    return tuple(points)


def find_peak(entry: Entry) -> PeakMemory:
    """Return the largest peaks of the launches of some settings."""
    peaks = [one.result.measurement.peak_memory for one in entry.launches if one.result.measurement is not None]
    devices = [one.device_bytes for one in peaks if one.device_bytes is not None]
    return PeakMemory(host_bytes=max(one.host_bytes for one in peaks), device_bytes=max(devices) if devices else None)


def _apply(preset: Preset, space: SearchSpace) -> TrainConfig | None:
    """Return what is left of a preset in a space; None where nothing is."""
    config = space.keep(preset.apply_to(space.baseline))
    return None if config == space.baseline else config
