"""The report's charts as geometry: records in, positions in percent of the width and pixels of height out.

Percentages keep the text at its own size on any screen; the templates turn the positions into static SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.emit.report.tables import describe_difference
from autotune.emit.report.wording import format_interval, typeset_factor
from autotune.format import count, format_time
from autotune.records import Interval, Profile, StepPhases, TargetFacts, TrainConfig, TrialResult, TrialStatus
from autotune.sentences.trials import name_status

_PHASES = (
    ("data_wait_seconds", "waiting for data"),
    ("copy_seconds", "copy to device"),
    ("forward_seconds", "forward"),
    ("backward_seconds", "backward"),
    ("optimizer_seconds", "optimizer"),
    ("other_seconds", "everything else"),
)
_WORK = (
    ("products_fraction", "matrix products", "phase-4"),
    ("traffic_fraction", "memory traffic", "phase-3"),
    ("overhead_fraction", "overhead of small operations", "phase-1"),
)
_TRIALS_HEIGHT = 240
_FAILED_BAND = 28
_EDGE = 2.0
_ROW_HEIGHT = 22


@dataclass(frozen=True)
class Segment:
    """One part of a step; `x` and `width` in percent, `kind` is the name of its colour."""

    name: str
    time: str
    share: str
    x: float
    width: float
    kind: str


@dataclass(frozen=True)
class Tick:
    """A grid line: its position (percent or pixels, by axis) and label."""

    position: float
    label: str


@dataclass(frozen=True)
class Dot:
    """A trial: `x` in percent, `y` in pixels, what it says, and whether it finished."""

    x: float
    y: float
    title: str
    kind: str


@dataclass(frozen=True)
class Line:
    """A straight piece of a line: x in percent, y in pixels."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True)
class TrialsChart:
    """Throughput of the trials relative to the baseline, in order."""

    height: int
    ticks: tuple[Tick, ...]
    baseline_y: float
    dots: tuple[Dot, ...]
    best: tuple[Line, ...]
    failed_y: float | None
    summary: str


@dataclass(frozen=True)
class FinalsChart:
    """Ratio of each fresh-process pair, and the interval they give, None where they are too few; x in percent."""

    height: int
    ticks: tuple[Tick, ...]
    one_x: float
    low_x: float | None
    high_x: float | None
    estimate_x: float | None
    pairs: tuple[Dot, ...]
    summary: str


def draw_phases(phases: StepPhases) -> tuple[Segment, ...]:
    """Return the phases of one step as parts of a bar; none when nothing was timed."""
    seconds = [(label, max(0.0, getattr(phases, field))) for field, label in _PHASES]
    if phases.other_seconds <= 0:
        seconds.pop()
    return _draw_parts(seconds, [f"phase-{index}" for index in range(1, len(_PHASES) + 1)])


def draw_work(facts: TargetFacts) -> tuple[Segment, ...]:
    """Return what the computation of one step is spent on as parts of a bar; none when it is not known."""
    if facts.work is None:
        return ()
    seconds = [(label, getattr(facts.work, field) * facts.compute_seconds_per_step) for field, label, _ in _WORK]
    return _draw_parts(seconds, [kind for _, _, kind in _WORK])


def _draw_parts(seconds: Sequence[tuple[str, float]], kinds: Sequence[str]) -> tuple[Segment, ...]:
    total = sum(value for _, value in seconds)
    if total <= 0:
        return ()
    segments, x = [], 0.0
    for (name, value), kind in zip(seconds, kinds, strict=False):
        width = 100 * value / total
        share = f"{width:.0f} %"
        segments.append(Segment(name, format_time(value), share, round(x, 3), round(width, 3), kind))
        x += width
    return tuple(segments)


def draw_trials(trials: Sequence[TrialResult], baseline: TrainConfig, *, baseline_rate: float) -> TrialsChart | None:
    """Return the chart of the search's timed trials; None when there were none."""
    timed = [trial for trial in trials if trial.spec.purpose == "measure" and trial.spec.config is not None]
    if not timed:
        return None
    ratios = [_ratio(trial, baseline_rate) for trial in timed]
    known = [1.0, *(ratio for ratio in ratios if ratio is not None)]
    ticks = choose_ticks(min(known), max(known))
    has_failed = None in ratios
    failed_y = _TRIALS_HEIGHT - _FAILED_BAND / 2
    plot_height = _TRIALS_HEIGHT - (_FAILED_BAND if has_failed else 0)

    def y_of(ratio: float) -> float:
        return round(plot_height - 8 - (plot_height - 24) * (ratio - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    xs = [_spread(index, len(timed)) for index in range(len(timed))]
    rivals = [None if trial.spec.config == baseline else ratio for trial, ratio in zip(timed, ratios, strict=True)]
    return TrialsChart(
        height=_TRIALS_HEIGHT,
        ticks=tuple(Tick(y_of(tick), typeset_factor(tick)) for tick in ticks),
        baseline_y=y_of(1.0),
        dots=tuple(
            Dot(x, failed_y if ratio is None else y_of(ratio), _describe_trial(trial, baseline, ratio), kind)
            for x, trial, ratio in zip(xs, timed, ratios, strict=True)
            for kind in [_kind(trial, baseline, ratio)]
        ),
        best=tuple(_draw_best(xs, rivals, y_of)),
        failed_y=failed_y if has_failed else None,
        summary=_summarise(ratios, rivals),
    )


def draw_finals(trials: Sequence[TrialResult], profile: Profile) -> FinalsChart | None:
    """Return the chart of the finals; None when no pair was completed."""
    confirmation = profile.evidence.confirmation
    ratios = find_pair_ratios(trials, profile)
    if confirmation is not None:
        ratios = [math.exp(ratio) for ratio in confirmation.log_ratios]
    if not ratios:
        return None
    speedup = profile.speedup
    ends = () if speedup is None else (speedup.low, speedup.high)
    ticks = choose_ticks(min(1.0, *ends, *ratios), max(1.0, *ends, *ratios), count=4)

    def x_of(ratio: float) -> float:
        return round(8 + 84 * (ratio - ticks[0]) / (ticks[-1] - ticks[0]), 2)

    pairs = tuple(
        Dot(x_of(ratio), _ROW_HEIGHT * (index + 0.5), f"pair {index + 1}: {typeset_factor(ratio)}", "pair")
        for index, ratio in enumerate(ratios)
    )
    return FinalsChart(
        height=_ROW_HEIGHT * (len(ratios) + 1) + 8,
        ticks=tuple(Tick(x_of(tick), typeset_factor(tick)) for tick in ticks),
        one_x=x_of(1.0),
        low_x=None if speedup is None else x_of(speedup.low),
        high_x=None if speedup is None else x_of(speedup.high),
        estimate_x=None if speedup is None else x_of(speedup.estimate),
        pairs=pairs,
        summary=_summarise_finals(len(ratios), speedup),
    )


def _summarise_finals(pairs: int, speedup: Interval | None) -> str:
    start = f"{count(pairs, 'pair')} of fresh processes"
    if speedup is None:
        return f"{start}, too few for an interval."
    return f"{start}; together {typeset_factor(speedup.estimate)}, {format_interval(speedup)}."


def find_pair_ratios(trials: Sequence[TrialResult], profile: Profile) -> list[float]:
    """Return candidate over baseline throughput of each pair of consecutive finals, in order.

    A launch that failed takes its partner with it.
    """
    arms = (profile.baseline_config, profile.candidate_config or profile.config)
    ratios: list[float] = []
    waiting: TrialResult | None = None
    for trial in trials:
        if trial.spec.purpose != "final" or trial.spec.config not in arms:
            continue
        if waiting is None or trial.spec.config == waiting.spec.config:
            waiting = trial
            continue
        plain, tuned = (waiting, trial) if waiting.spec.config == arms[0] else (trial, waiting)
        rates = _completed_rate(tuned), _completed_rate(plain)
        if rates[0] is not None and rates[1] is not None:
            ratios.append(rates[0] / rates[1])
        waiting = None
    return ratios


def choose_ticks(low: float, high: float, *, count: int = 5, least: float = 0.05) -> list[float]:
    """Return about `count` round values that enclose an interval of at least some width, ascending; at least two."""
    span = max(high - low, least)
    step = 10.0 ** math.floor(math.log10(span / count))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * count >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def _draw_best(xs: Sequence[float], ratios: Sequence[float | None], y_of: Callable[[float], float]) -> list[Line]:
    """Return the best ratio so far as steps, from the baseline's own at the left edge to the right edge."""
    lines, best, start = [], 1.0, 0.0
    for x, ratio in zip(xs, ratios, strict=True):
        if ratio is None or ratio <= best:
            continue
        lines += [Line(start, y_of(best), x, y_of(best)), Line(x, y_of(best), x, y_of(ratio))]
        best, start = ratio, x
    return [*lines, Line(start, y_of(best), 100.0, y_of(best))]


def _kind(trial: TrialResult, baseline: TrainConfig, ratio: float | None) -> str:
    if ratio is None:
        return "failed"
    return "baseline" if trial.spec.config == baseline else "tried"


def _summarise(ratios: Sequence[float | None], rivals: Sequence[float | None]) -> str:
    failed = sum(ratio is None for ratio in ratios)
    start = f"{count(len(ratios), 'timed trial')}, {failed} of them failed"
    best = max((ratio for ratio in rivals if ratio is not None), default=0.0)
    if best <= 1.0:
        return f"{start}; no single trial ran faster than your settings."
    return f"{start}; the fastest single trial ran at {typeset_factor(best)} the speed of your settings."


def _ratio(trial: TrialResult, baseline_rate: float) -> float | None:
    rate = _completed_rate(trial)
    return None if rate is None else rate / baseline_rate


def _completed_rate(trial: TrialResult) -> float | None:
    if trial.status is not TrialStatus.COMPLETED or trial.measurement is None:
        return None
    return trial.measurement.samples_per_second


def _describe_trial(trial: TrialResult, baseline: TrainConfig, ratio: float | None) -> str:
    outcome = name_status(trial.status) if ratio is None else typeset_factor(ratio)
    return f"trial {trial.spec.number}, {outcome}: {describe_difference(trial.spec.config, baseline)}"


def _spread(index: int, count: int) -> float:
    return 50.0 if count == 1 else round(_EDGE + (100 - 2 * _EDGE) * index / (count - 1), 3)
