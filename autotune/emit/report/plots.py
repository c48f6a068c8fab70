"""Timeline, memory and losses as geometry: records in, positions in percent out, of which templates make SVG."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotune.emit.report.charts import Dot, Line, Segment, Tick, choose_ticks
from autotune.emit.report.tables import describe_difference
from autotune.emit.report.wording import typeset_factor
from autotune.format import count, format_bytes, format_duration, format_figure
from autotune.records import Profile, TrainConfig, TrialResult, TrialStatus
from autotune.records.explanation import Explanation
from autotune.records.trial import LossCurve
from autotune.sentences.trials import name_status

_STAGES = {
    "probe": "probe",
    "machine": "probe",
    "measure": "search",
    "quality": "loss check",
    "fidelity": "loss check",
    "tape": "loss check",
    "final": "final comparison",
}
_KINDS = {"probe": "phase-2", "search": "phase-4", "loss check": "phase-1", "final comparison": "phase-3"}
_CUT = (TrialStatus.INTERRUPTED, TrialStatus.TIMED_OUT, TrialStatus.TOO_SLOW)
_MEMORY_HEIGHT, _LOSS_HEIGHT = 220, 220
_LEAST_LOSS_SPAN = 1e-3
"""Of the largest loss, that its axis shows at least: below it is noise."""
_MOST_POINTS = 120
_LEAST_POINTS = 2
_LARGEST = 1e100
"""Of a loss that can be drawn."""


@dataclass(frozen=True)
class Timeline:
    """The trials laid end to end; `marks` are those that came to no figure."""

    parts: tuple[Segment, ...]
    marks: tuple[Segment, ...]
    stages: tuple[tuple[str, str, str, str], ...]
    summary: str


@dataclass(frozen=True)
class MemoryChart:
    """Throughput, upwards, against peak memory, to the right; x in percent, y in pixels."""

    height: int
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    dots: tuple[Dot, ...]
    front: tuple[Line, ...]
    summary: str


@dataclass(frozen=True)
class LossChart:
    """Mean training loss of both arms over their seeds; points as `x,y` in percent of the plot."""

    height: int
    ticks: tuple[Tick, ...]
    band: str
    baseline: str
    candidate: str
    samples: str
    summary: str


def draw_timeline(trials: Sequence[TrialResult], search_seconds: float) -> Timeline | None:
    """Return where the time of a search went, by stage; None without a trial.

    Trials do not tell when they began, so that they are laid end to end; what is left is the time between them.
    """
    spent = sum(one.elapsed_seconds for one in trials)
    whole = max(spent, search_seconds)
    if not 0.0 < whole < math.inf:
        return None
    parts, marks, x = [], [], 0.0
    for one in trials:
        width = 100 * one.elapsed_seconds / whole
        stage = _STAGES[one.spec.purpose]
        title = f"trial {one.spec.number}, {stage}, {name_status(one.status)}"
        place = (round(x, 3), round(width, 3))
        parts.append(Segment(title, format_duration(one.elapsed_seconds), f"{width:.0f} %", *place, _KINDS[stage]))
        if one.status is not TrialStatus.COMPLETED:
            parts_kind = "cut" if one.status in _CUT else "lost"
            marks.append(Segment(title, format_duration(one.elapsed_seconds), "", *place, parts_kind))
        x += width
    return Timeline(
        tuple(parts), tuple(marks), tuple(_list_stages(trials, whole)), _summarise_time(trials, spent, whole)
    )


def _list_stages(trials: Sequence[TrialResult], whole: float) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, colour, time with its share, and trials of each stage, and of the time between them."""
    rest = whole
    for stage, kind in _KINDS.items():
        own = [one for one in trials if _STAGES[one.spec.purpose] == stage]
        seconds = math.fsum(one.elapsed_seconds for one in own)
        rest -= seconds
        if own:
            failed = sum(one.status is not TrialStatus.COMPLETED for one in own)
            told = f"{count(len(own), 'trial')}{f', {failed} without a figure' if failed else ''}"
            yield stage, kind, _format_share(seconds, whole), told
    if rest > 0.005 * whole:
        yield "between trials", "rest", _format_share(rest, whole), ""


def _format_share(seconds: float, whole: float) -> str:
    return f"{format_duration(seconds)}, {100 * seconds / whole:.0f} %"


def _summarise_time(trials: Sequence[TrialResult], spent: float, whole: float) -> str:
    lost = math.fsum(one.elapsed_seconds for one in trials if one.status is not TrialStatus.COMPLETED)
    told = f"{count(len(trials), 'trial')} took {format_duration(spent)} of {format_duration(whole)}"
    return f"{told}; {format_duration(lost)} of it came to no figure." if lost else f"{told}."


def draw_memory(profile: Profile, explanation: Explanation | None) -> MemoryChart | None:
    """Return throughput against memory of all that was timed; None where there are not two settings to compare."""
    points = () if explanation is None else explanation.measured
    if len(points) < _LEAST_POINTS:
        return None
    fronts = {one.config.key for one in profile.pareto}
    unit = 2**20 if max(one.memory.used_bytes for one in points) < 2**30 else 2**30  # whose round numbers the axis has
    sizes = [one.memory.used_bytes / unit for one in points]
    rows = choose_ticks(min(1.0, *(one.speedup for one in points)), max(1.0, *(one.speedup for one in points)))
    columns = choose_ticks(min(sizes), max(sizes), count=3)

    def x_of(amount: float) -> float:
        return round(4 + 92 * (amount - columns[0]) / (columns[-1] - columns[0]), 2)

    def y_of(ratio: float) -> float:
        return round(_MEMORY_HEIGHT - 34 - (_MEMORY_HEIGHT - 50) * (ratio - rows[0]) / (rows[-1] - rows[0]), 1)

    dots = tuple(
        Dot(
            x_of(amount),
            y_of(one.speedup),
            _title(one.config, profile, one.speedup, one.memory.used_bytes),
            _kind(one.config, profile, fronts),
        )
        for one, amount in zip(points, sizes, strict=True)
    )
    front = [(x_of(one.memory.used_bytes / unit), y_of(one.speedup)) for one in profile.pareto]
    lines = tuple(
        line for (x1, y1), (x2, y2) in pairwise(front) for line in (Line(x1, y1, x1, y2), Line(x1, y2, x2, y2))
    )
    return MemoryChart(
        height=_MEMORY_HEIGHT,
        rows=tuple(Tick(y_of(tick), typeset_factor(tick)) for tick in rows),
        columns=tuple(_name_sizes(columns, unit, x_of)),
        dots=dots,
        front=lines,
        summary=f"{len(points)} settings; {len(fronts)} that no other beats in both.",
    )


def _name_sizes(sizes: Sequence[float], unit: int, x_of: Callable[[float], float]) -> Iterator[Tick]:
    """Yield the grid lines of an axis of memory: the last one has the unit, so that there is room on a phone."""
    for size in sizes:
        if size >= 0:
            yield Tick(x_of(size), format_bytes(size * unit) if size == sizes[-1] else f"{size:g}")


def _title(config: TrainConfig, profile: Profile, ratio: float, used_bytes: float) -> str:
    what = describe_difference(config, profile.baseline_config)
    return f"{typeset_factor(ratio)}, {format_bytes(used_bytes)}: {what}"


def _kind(config: TrainConfig, profile: Profile, fronts: set[str]) -> str:
    if config == profile.baseline_config:
        return "baseline"
    return "front" if config.key in fronts else "tried"


def draw_losses(trials: Sequence[TrialResult], profile: Profile) -> LossChart | None:
    """Return the training losses of both arms of the loss check; None where no training of both was compared."""
    candidate = profile.candidate_config or profile.config
    ours, theirs = (_find_curves(trials, one) for one in (candidate, profile.baseline_config))
    seeds = [seed for seed in ours if seed in theirs]
    steps = min((len(arm[seed].losses) for arm in (ours, theirs) for seed in seeds), default=0)
    if candidate == profile.baseline_config or steps < _LEAST_POINTS:
        return None
    our_losses, their_losses = ([_thin(arm[seed].losses[:steps]) for seed in seeds] for arm in (ours, theirs))
    mean, before = (_pick(arm, statistics.fmean) for arm in (our_losses, their_losses))
    lows, highs = _pick(their_losses, min), _pick(their_losses, max)
    low, high = min(*mean, *lows), max(*mean, *highs)
    ticks = choose_ticks(low, high, count=4, least=max(_LEAST_LOSS_SPAN * max(abs(low), abs(high)), sys.float_info.min))
    scale = ticks[0], ticks[-1]
    samples = round(theirs[seeds[0]].samples * steps / len(theirs[seeds[0]].losses))
    told = f"at the end {format_figure(before[-1])} with your settings, {format_figure(mean[-1])} with the others"
    return LossChart(
        height=_LOSS_HEIGHT,
        ticks=tuple(Tick(100 - 100 * _place(tick, scale), format_figure(tick)) for tick in ticks),
        band=f"{_trace(highs, scale)} {' '.join(_trace(lows, scale).split()[::-1])}",
        baseline=_trace(before, scale),
        candidate=_trace(mean, scale),
        samples=f"{samples:,} samples",
        summary=f"Mean of {count(len(seeds), 'seed')}; {told}.",
    )


def _pick(arm: Sequence[Sequence[float]], how: Callable[[Sequence[float]], float]) -> list[float]:
    """Return one figure of the losses of all seeds at each point."""
    return [how(at) for at in zip(*arm, strict=True)]


def _trace(values: Sequence[float], scale: tuple[float, float]) -> str:
    last = max(1, len(values) - 1)
    return " ".join(f"{100 * at / last:.2f},{100 - 100 * _place(value, scale):.2f}" for at, value in enumerate(values))


def _place(value: float, scale: tuple[float, float]) -> float:
    return (value - scale[0]) / (scale[1] - scale[0])


def _find_curves(trials: Sequence[TrialResult], config: TrainConfig) -> dict[int, LossCurve]:
    """Return the longest training of each seed in which every loss was finite."""
    found: dict[int, LossCurve] = {}
    for trial in trials:
        for curve in trial.curves if trial.spec.purpose == "quality" and trial.spec.config == config else ():
            known = len(found[curve.seed].losses) if curve.seed in found else 0
            if len(curve.losses) > known and all(one is not None and abs(one) < _LARGEST for one in curve.losses):
                found[curve.seed] = curve
    return found


def _thin(losses: Sequence[float | None]) -> list[float]:
    """Return the means of so many pieces of a curve as can be seen."""
    known = [loss for loss in losses if loss is not None]
    pieces = min(_MOST_POINTS, len(known))
    cuts = [round(place * len(known) / pieces) for place in range(pieces + 1)]
    return [statistics.fmean(known[low:high]) for low, high in pairwise(cuts)]
