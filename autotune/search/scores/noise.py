"""How much the machine's figures varied in a search, and why. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from autotune.measure.confidence import pooled_sd
from autotune.records.measurement import Block, GpuState, Interference
from autotune.records.profile import MachineNoise
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.scores.ranking import Ranking

_FRACTIONS = (
    "foreign_cpu_fraction",
    "steal_fraction",
    "throttled_fraction",
    "cpu_pressure_fraction",
    "io_pressure_fraction",
    "memory_pressure_fraction",
)


def summarise_noise(launches: Iterable[TrialResult], ranking: Ranking) -> MachineNoise:
    """Return the noise of the machine over the timed launches of a search.

    Args:
        launches: of search and finals, also those without a timing.
        ranking: of the search's trials.
    """
    ended = list(launches)
    measurements = [one.measurement for one in ended if one.measurement is not None]
    too_slow = sum(one.status is TrialStatus.TOO_SLOW for one in ended)
    blocks = [block for one in measurements for block in one.blocks]
    searched, known = ranking.machine_noise
    # What the search has seen counts as degrees seen before; of a proof's launches each setting has several.
    sd, degrees = pooled_sd(_group_finals(ended), prior_sd=searched, prior_degrees=known)
    anchors = ranking.baseline_level.values
    return MachineNoise(
        launch_sd=sd,
        degrees_of_freedom=degrees,
        block_sd=ranking.block_sd,
        baseline_range=math.exp(max(anchors) - min(anchors)) if anchors else 1.0,
        machine_changes=ranking.baseline_level.jumps,
        launches=len(measurements) + too_slow,
        not_steady=sum(not one.steady for one in measurements),
        raced=sum(one.ended_by == "racing" for one in measurements) + too_slow,
        blocks=len(blocks),
        disturbed=sum(block.disturbed for block in blocks),
        interference=mean_interference(blocks),
    )


def _group_finals(launches: Iterable[TrialResult]) -> list[list[float]]:
    """Return the log throughputs of a proof's launches, those of one setting together."""
    groups: dict[str, list[float]] = {}
    for one in launches:
        if one.spec.purpose == "final" and one.measurement is not None and one.spec.config is not None:
            groups.setdefault(one.spec.config.key, []).append(math.log(one.measurement.samples_per_second))
    return list(groups.values())


def mean_interference(blocks: Sequence[Block]) -> Interference | None:
    """Return the mean over blocks; GPU slowdowns where they held in at least a tenth of the blocks."""
    seen = [block.interference for block in blocks if block.interference is not None]
    if not seen:
        return None
    means = {name: _mean(getattr(one, name) for one in seen) for name in _FRACTIONS}
    faults = [one.major_faults for one in seen if one.major_faults is not None]
    gpus = [one.gpu for one in seen if one.gpu is not None]
    return Interference(**means, major_faults=sum(faults) if faults else None, gpu=_mean_gpu(gpus))


def _mean_gpu(states: Sequence[GpuState]) -> GpuState | None:
    if not states:
        return None
    clock, power = _mean(one.sm_clock_mhz for one in states), _mean(one.power_watts for one in states)
    temperature = _mean(one.temperature_celsius for one in states)
    counts = Counter(reason for one in states for reason in one.slowdowns)
    return GpuState(
        sm_clock_mhz=None if clock is None else round(clock),
        power_watts=power,
        temperature_celsius=None if temperature is None else round(temperature),
        slowdowns=tuple(sorted(reason for reason, count in counts.items() if count >= len(states) / 10)),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
