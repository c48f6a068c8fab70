"""Has the training loss risen for good? A training held against its own lowest level, however long it takes. Pure.

    x_n = mean loss of window n          sd = 1.48 median|x_n - x_(n-1)| / sqrt(2) over the last 32
    lowest = least, over all groups of 4 windows, of  mean + z_j sd / 2       so the true level was hardly higher
    sum += cut((x_n - lowest - tolerance) / sd, ±3),  back to 0 when it falls below         alarm above the boundary

z_j grows with the number of groups, and the boundary's risk shrinks with each return to 0, so that the sum of all risks
stays what it is: a week is as safe as an hour. The cut lets no single spike alarm, however high: it takes five windows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.drift.compare.loss_band import Rise, step_back
from autotune.measure.racing import racing_boundary

RISK = 0.005
"""Of a false alarm in a whole training: half for the lowest level, half for the boundary, at normal noise."""

_GROUP = 4
_DIFFERENCES, _FEWEST_DIFFERENCES = 32, 8
_CUT = 3.0
_RHO = 4.0  # the boundary is tightest early: what has risen for good is to be found soon
_TO_SD = 1.4826 / math.sqrt(2.0)
_BASEL = 6.0 / math.pi**2  # times the sum of 1 / n² is 1
_SAME_RATE = 1.0 + 1e-6


@dataclass(frozen=True)
class Tolerance:
    """How far above its lowest level a healthy loss may stay; the larger of two.

    Attributes:
        of_level: a share of that level.
        of_drop: a share of what the training has learned, from its first windows to that level.
    """

    of_level: float
    of_drop: float


@dataclass
class RiseWatch:
    """Takes one window of steps after another; starts anew where the learning rate rises.

    Attributes:
        window_steps: optimizer steps of a window: whole epochs where the loss goes up and down within one.
        tolerance: for healthy ups and downs.
        first: level of the first windows; the other attributes are the state of the test.
    """

    window_steps: int
    tolerance: Tolerance
    first: float | None = None
    lowest: float | None = None
    rate: float = math.inf
    groups: int = 0
    returns: int = 1
    excess: float = 0.0
    looks: int = 0
    clean_step: int = 0
    losses: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)

    def record(self, losses: Sequence[float], *, step: int, learning_rate: float) -> Rise | None:
        """Take the losses of the last steps.

        Args:
            losses: finite, one for each step.
            step: optimizer steps after the last of them.
            learning_rate: now.
        """
        if learning_rate > self.rate * _SAME_RATE:
            self._start_anew(step)
        self.rate = min(self.rate, learning_rate)
        for number, loss in enumerate(losses, start=1):
            self.losses.append(loss)
            if len(self.losses) >= self.window_steps:
                mean, self.losses = statistics.fmean(self.losses), []
                rise = self._end_window(mean, step=step - len(losses) + number)
                if rise is not None:
                    return rise
        return None

    def capture(self) -> dict[str, Any]:
        """Return the state as numbers and lists."""
        return {name: value for name, value in vars(self).items() if name not in ("window_steps", "tolerance")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a captured state."""
        copied = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
        vars(self).update(copied)

    def _start_anew(self, step: int) -> None:
        self.rate, self.lowest = math.inf, None
        self.losses, self.latest = [], []
        self._return_to_zero(step)

    def _return_to_zero(self, step: int) -> None:
        self.excess, self.looks, self.clean_step = 0.0, 0, step
        self.returns += 1

    def _end_window(self, mean: float, *, step: int) -> Rise | None:
        if self.latest:
            self.differences = [*self.differences, abs(mean - self.latest[-1])][-_DIFFERENCES:]
        self.latest = [*self.latest, mean][-_GROUP:]
        if self.first is None and len(self.latest) == _GROUP:
            self.first = statistics.fmean(self.latest)
        if len(self.differences) < _FEWEST_DIFFERENCES:
            return None
        sd = _TO_SD * statistics.median(self.differences)
        rise = self._test(mean, sd, step=step) if self.lowest is not None else None
        if len(self.latest) == _GROUP:
            self._lower(statistics.fmean(self.latest), sd, step=step)
        return rise

    def _test(self, mean: float, sd: float, *, step: int) -> Rise | None:
        assert self.lowest is not None
        drop = 0.0 if self.first is None else max(0.0, self.first - self.lowest)
        tolerance = max(self.tolerance.of_level * abs(self.lowest), self.tolerance.of_drop * drop)
        above = mean - self.lowest - tolerance
        without_noise = _CUT if above > 0.0 else -_CUT  # a loss of exactly 0 all along is not above itself
        self.excess += max(-_CUT, min(_CUT, above / sd)) if sd > 0.0 else without_noise
        self.looks += 1
        if self.excess <= 0.0:
            self._return_to_zero(step)
            return None
        risk = 0.5 * RISK * _BASEL / self.returns**2
        if self.excess <= racing_boundary(self.looks, 1.0, risk=risk, rho=_RHO):
            return None
        found = (
            f"the training loss was down at {self.lowest:.4g} and has been above {self.lowest + tolerance:.4g} for "
            f"{self.looks * self.window_steps:,} steps, {mean:.4g} now, while the learning rate did not rise"
        )
        return Rise(found, step_back(self.clean_step, step), self.clean_step)

    def _lower(self, level: float, sd: float, *, step: int) -> None:
        self.groups += 1
        z = math.sqrt(2.0 * math.log(self.groups**2 / (0.5 * RISK * _BASEL)))
        bound = level + z * sd / math.sqrt(_GROUP)
        if self.lowest is None or bound < self.lowest:
            self.lowest = bound
            if self.looks:
                self._return_to_zero(step)
