"""When a training has settled, so that what is timed from then on is its steady state. Pure.

    first step │ compilation │ ≥ 5 quiet steps, backlog used up ── window A ── window B ── settled when A and B agree
                                                                  5 spans      5 spans

A span is one step, or as many as take 50 ms. Rules after pyperf's warm-up (`pyperf/_worker.py`), on fewer values.
Where a step takes a second or more, the first and one or two more are the warm-up: what settles in seconds settles
within them, and ten would be all there is time for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import pairwise

from autotune.records.config import TrainConfig
from autotune.records.trial import TrialLimits

LEAST_STEPS = 5
STANDING_STEPS = 3
"""Steps for which device memory, loss scale and the like have to stand still."""
TOLERANCE = 0.05
SPAN_SECONDS = 0.05
WINDOW_SPANS = 5
_SCATTERS = 2.0
_FEW_SPANS = 3
_LONG_STEP_SECONDS = 0.3
_TYPICAL_STEPS = 5

SLOW_STEP_SECONDS = 1.0
"""From here on a step or two after the first have to do."""
VERY_SLOW_STEP_SECONDS = 2.5
"""And from here on a single one."""
_SLOW_TOLERANCE = 0.1
_IDLE_LOADER = 0.5
"""A loader of which one worker makes a step's samples in this share of the step keeps up: it lives on no backlog."""

Watched = Mapping[str, float | None]
"""Figures that stand still once settled, by what they are; None where there is no such thing."""


class WarmUp:
    """Follows the first steps of a training and says what has not settled yet.

    Args:
        backlog_steps: optimizer steps that use up what the loader has ready while nothing trains.
        graphs: compiled before the first step.
        least_seconds: under load before the clock of a device is trusted.
        sample_seconds: what a step's samples take in one process; None when it is not known.
    """

    def __init__(
        self,
        backlog_steps: int,
        *,
        graphs: int = 0,
        least_seconds: float = 0.0,
        sample_seconds: float | None = None,
    ) -> None:
        self._backlog_steps = backlog_steps
        self._sample_seconds = sample_seconds
        self._least_seconds = least_seconds
        self._steps: list[float] = []
        self._quiet_steps = 0
        self._compile_steps = 0
        self._graphs = graphs
        self._charged_seconds = 0.0
        self._spans: list[float] = []
        self._open_steps = 0
        self._open_seconds = 0.0
        self._watched: dict[str, float | None] = {}
        self._moved: dict[str, int] = {}

    @property
    def steps(self) -> int:
        """Steps taken."""
        return len(self._steps)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self._graphs

    @property
    def later_steps(self) -> tuple[float, ...]:
        """Seconds of each step after the first."""
        return tuple(self._steps[1:])

    @property
    def typical_steps(self) -> tuple[float, ...]:
        """Seconds of each step after the first and after the last compilation."""
        return tuple(self._steps[max(1, self._compile_steps) :])

    @property
    def settled_steps(self) -> tuple[float, ...]:
        """Seconds of each step of the later half of these: what it begins with may be slow yet."""
        steps = self.typical_steps
        return steps[len(steps) // 2 :]

    @property
    def step_seconds(self) -> float:
        """Typical time of the last steps, in seconds, of those after the last compilation where there are any."""
        return statistics.median((self._steps[self._compile_steps :] or self._steps)[-_TYPICAL_STEPS:])

    @property
    def compile_seconds(self) -> float:
        """Time of the steps up to the last compilation beyond what steps take now, in seconds."""
        return max(0.0, sum(self._steps[: self._compile_steps]) - self._compile_steps * self.step_seconds)

    @property
    def block_step_seconds(self) -> float:
        """Time of a fast step, so that a block of steps counted by it is never too short."""
        return min(self._steps[-2 * _TYPICAL_STEPS :])

    @property
    def charged_seconds(self) -> float:
        """Time that counts against the cap: neither compiling nor the first step, which sets up kernels and state."""
        return self._charged_seconds

    def take(self, seconds: float, *, graphs: int, watched: Watched) -> None:
        """Note one optimizer step: its time, the graphs compiled so far, and the figures that have to stand still."""
        self._steps.append(seconds)
        self._quiet_steps += 1
        if graphs != self._graphs:
            self._graphs = graphs
            self._compile_steps = len(self._steps)
            self._quiet_steps = 0
            self._spans.clear()
            self._open_steps, self._open_seconds = 0, 0.0
        elif len(self._steps) > 1:  # the first step is never typical
            self._charged_seconds += seconds
            self._add_to_span(seconds)
        for name, value in watched.items():
            same = name in self._watched and self._watched[name] == value
            self._moved[name] = self._moved.get(name, 0) + 1 if same else 0
            self._watched[name] = value

    def find_unsettled(self) -> str:
        """Return what has not settled, for the user; empty once everything has."""
        if self._is_slow():
            return self._find_slow_unsettled()
        if self._quiet_steps < LEAST_STEPS:
            return "the first steps"
        if self._quiet_steps < self._backlog_steps:
            return "what the loader had ready"
        moving = [name for name, steps in self._moved.items() if steps < STANDING_STEPS]
        if moving:
            return moving[0]
        # Where a step is long, ten of them would never fit a short trial.
        long = self.step_seconds >= _LONG_STEP_SECONDS
        windows = (_FEW_SPANS, WINDOW_SPANS) if long else (WINDOW_SPANS, 2 * WINDOW_SPANS)
        if not have_settled(self._spans, windows=windows):
            return "the time of a step"
        return self._find_unloaded()

    def _find_unloaded(self) -> str:
        loaded = sum(self._steps[self._compile_steps :])
        return "the device's clock" if loaded < self._least_seconds else ""

    def _is_slow(self) -> bool:
        """Return whether every step since the last compilation takes a second or more, the very first left out."""
        later = self.typical_steps
        return bool(later) and min(later) >= SLOW_STEP_SECONDS

    def _find_slow_unsettled(self) -> str:
        *before, last = self._steps[self._compile_steps :]
        enough = 1 if last >= VERY_SLOW_STEP_SECONDS else 2
        if len(before) < enough:
            return "the first steps"
        keeps_up = self._sample_seconds is not None and self._sample_seconds <= _IDLE_LOADER * last
        if self._quiet_steps < self._backlog_steps and not keeps_up:
            return "what the loader had ready"
        moving = [name for name, steps in self._moved.items() if not steps]
        if moving:
            return moving[0]
        # The very first step is never typical: it may only be longer.
        typical = before if self._compile_steps else before[1:]
        is_faster = bool(typical) and last < (1 - _SLOW_TOLERANCE) * min(typical)
        if is_faster or last > (1 + _SLOW_TOLERANCE) * max(before):
            return "the time of a step"
        return self._find_unloaded()

    def _add_to_span(self, seconds: float) -> None:
        self._open_steps += 1
        self._open_seconds += seconds
        if self._open_seconds >= SPAN_SECONDS:
            self._spans.append(self._open_seconds / self._open_steps)
            self._open_steps, self._open_seconds = 0, 0.0


def make_warm_up(config: TrainConfig, limits: TrialLimits, *, graphs: int, least_seconds: float) -> WarmUp:
    """Return what follows the first steps of a launch; the rest as in `WarmUp`.

    Args:
        config: its settings.
        limits: say what a sample costs.
        graphs: compiled so far.
        least_seconds: under load.
    """
    per_sample = limits.seconds_per_sample
    sample_seconds = None if per_sample is None else per_sample * config.effective_batch_size
    return WarmUp(backlog_steps(config), graphs=graphs, least_seconds=least_seconds, sample_seconds=sample_seconds)


def backlog_steps(config: TrainConfig) -> int:
    """Return how many optimizer steps use up what the loader had ready before the first one."""
    if config.num_workers == 0:
        return 0
    return math.ceil((config.num_workers * config.prefetch_factor + 2) / config.gradient_accumulation_steps)


def have_settled(spans: list[float], *, windows: tuple[int, ...] = (WINDOW_SPANS, 2 * WINDOW_SPANS)) -> bool:
    """Return whether the last spans take as long as those before them, over two windows of one of the lengths.

    The means of the windows differ by no more than 5 % or twice the scatter (the median difference of neighbours,
    which a trend hardly widens), and the oldest span is no outlier by Tukey's fence (above the third quartile by 1.5
    interquartile ranges). The longer windows are for what recurs: one stall in nine spans never fits both short ones.

    Args:
        spans: seconds per step, in order.
        windows: lengths, in spans.
    """
    return any(_agree(spans, window) for window in windows)


def _agree(spans: list[float], window: int) -> bool:
    recent = spans[-2 * window :]
    if len(recent) < 2 * window:
        return False
    early, late = statistics.fmean(recent[:window]), statistics.fmean(recent[window:])
    scatter = statistics.median(abs(after - before) for before, after in pairwise(recent))
    low, middle, high = statistics.quantiles(recent, n=4, method="inclusive")
    is_outlier = recent[0] > max(high + 1.5 * (high - low), (1 + TOLERANCE) * middle)
    return abs(early - late) <= max(TOLERANCE * late, _SCATTERS * scatter) and not is_outlier
