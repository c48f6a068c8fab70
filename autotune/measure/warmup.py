"""When a training has settled, so that what is timed from then on is its steady state. Pure.

    first step │ compilation │ ≥ 5 quiet steps, backlog used up ── window A ── window B ── settled when A and B agree
                                                                  5 spans      5 spans

A span is one step, or as many as take 50 ms. Rules after pyperf's warm-up (`pyperf/_worker.py`), on fewer values.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

LEAST_STEPS = 5
STANDING_STEPS = 3
"""Steps for which device memory, loss scale and the like have to stand still."""
TOLERANCE = 0.05
SPAN_SECONDS = 0.05
WINDOW_SPANS = 5
_SCATTERS = 3.0
_TYPICAL_STEPS = 5

Watched = Mapping[str, float | None]
"""Figures that stand still once settled, by what they are; None where there is no such thing."""


class WarmUp:
    """Follows the first steps of a training and says what has not settled yet.

    Args:
        backlog_steps: optimizer steps that use up what the loader has ready while nothing trains.
        least_seconds: under load before the clock of a device is trusted.
    """

    def __init__(self, backlog_steps: int, *, least_seconds: float = 0.0) -> None:
        self._backlog_steps = backlog_steps
        self._least_seconds = least_seconds
        self._steps: list[float] = []
        self._quiet_steps = 0
        self._compile_steps = 0
        self._graphs: int | None = None
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
    def step_seconds(self) -> float:
        """Typical time of the last steps, in seconds."""
        return statistics.median(self._steps[-_TYPICAL_STEPS:])

    @property
    def compile_seconds(self) -> float:
        """Time of the steps up to the last compilation beyond what steps take now, in seconds."""
        return max(0.0, sum(self._steps[: self._compile_steps]) - self._compile_steps * self.step_seconds)

    @property
    def charged_seconds(self) -> float:
        """Time that counts against the cap: neither compilation nor the first step, which sets up kernels and state."""
        return sum(self._steps[max(1, self._compile_steps) :])

    def take(self, seconds: float, *, graphs: int, watched: Watched) -> None:
        """Note one optimizer step: its time, the graphs compiled so far, and the figures that have to stand still."""
        self._steps.append(seconds)
        self._quiet_steps += 1
        if self._graphs is None:
            self._graphs = 0
        if graphs != self._graphs:
            self._graphs = graphs
            self._compile_steps = len(self._steps)
            self._quiet_steps = 0
            self._spans.clear()
            self._open_steps, self._open_seconds = 0, 0.0
        elif len(self._steps) > 1:  # the first step is never typical
            self._add_to_span(seconds)
        for name, value in watched.items():
            same = name in self._watched and self._watched[name] == value
            self._moved[name] = self._moved.get(name, 0) + 1 if same else 0
            self._watched[name] = value

    def find_unsettled(self) -> str:
        """Return what has not settled, for the user; empty once everything has."""
        if self._quiet_steps < LEAST_STEPS:
            return "the first steps"
        if self._quiet_steps < self._backlog_steps:
            return "what the loader had ready"
        moving = [name for name, steps in self._moved.items() if steps < STANDING_STEPS]
        if moving:
            return moving[0]
        if not have_settled(self._spans):
            return "the time of a step"
        return "the device's clock" if sum(self._steps) < self._least_seconds else ""

    def _add_to_span(self, seconds: float) -> None:
        self._open_steps += 1
        self._open_seconds += seconds
        if self._open_seconds >= SPAN_SECONDS:
            self._spans.append(self._open_seconds / self._open_steps)
            self._open_steps, self._open_seconds = 0, 0.0


def have_settled(spans: list[float]) -> bool:
    """Return whether the last spans take as long as those before them.

    The means of two neighbouring windows differ by no more than 5 % or three times the scatter (median absolute
    deviation), and the oldest span is no outlier by Tukey's fence (above the third quartile by 1.5 interquartile
    ranges).

    Args:
        spans: seconds per step, in order.
    """
    recent = spans[-2 * WINDOW_SPANS :]
    if len(recent) < 2 * WINDOW_SPANS:
        return False
    early, late = statistics.fmean(recent[:WINDOW_SPANS]), statistics.fmean(recent[WINDOW_SPANS:])
    middle = statistics.median(recent)
    scatter = statistics.median(abs(value - middle) for value in recent)
    low, _, high = statistics.quantiles(recent, n=4, method="inclusive")
    is_outlier = recent[0] > max(high + 1.5 * (high - low), (1 + TOLERANCE) * middle)
    return abs(early - late) <= max(TOLERANCE * late, _SCATTERS * scatter) and not is_outlier
