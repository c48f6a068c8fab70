"""The baseline's launches in a search, and the level of the machine that they give at any place in it. Pure.

    level   mean of the anchors, nearer ones weighing more: exp(-launches apart / 8)

Two anchors in a row that differ by more than noise explains, and stay apart, mean that the machine has changed in
between: what was launched there cannot be compared, and levels are not averaged across.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotune.measure.student_t import student_t_quantile
from autotune.records.profile import GUESSED_DEGREES

PRIOR_SD = 0.03
PRIOR_DEGREES = GUESSED_DEGREES
"""What launches of one config are taken to differ by until it is seen, and how many launches that guess is worth."""

ANCHOR_SPACING = 8
"""Launches between two of the baseline, and the reach of each."""

_STEP_CONFIDENCE = 0.999
"""One-sided: so sure it must be that two anchors differ by more than luck."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Sums over some anchors: of their weights, of weight times value over the first anchor's, of squared weights."""

    weight: float
    total: float
    squared: float

    def __add__(self, other: _Weights) -> _Weights:
        return _Weights(self.weight + other.weight, self.total + other.total, self.squared + other.squared)

    def fade(self, launches: float) -> _Weights:
        """Return the same seen from so many launches further away."""
        left = math.exp(-launches / ANCHOR_SPACING)
        return _Weights(left * self.weight, left * self.total, left**2 * self.squared)


_NO_WEIGHTS = _Weights(0.0, 0.0, 0.0)


class BaselineLevel:
    """The launches of the baseline; false when there is none.

    Args:
        anchors: place in the search and log samples per second of each, in order.
        launches: of the search so far.
    """

    def __init__(self, anchors: Sequence[tuple[int, float]], launches: int) -> None:
        self._anchors, self._launches = list(anchors), launches
        self._places = [place for place, _ in self._anchors]
        self._steps = self._find_steps()
        self._jumps = self._find_jumps()
        self._first = self._anchors[0][1] if self._anchors else 0.0  # taken off, so that equal anchors give just that
        self._before = self._accumulate(self._anchors, self._jumps)
        after = self._accumulate([(-place, value) for place, value in reversed(self._anchors)], self._jumps[::-1])
        self._after = after[::-1]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._anchors)

    @property
    def jumps(self) -> int:
        """How many times the machine was seen to change."""
        return sum(self._jumps)

    @property
    def may_have_changed(self) -> bool:
        """The last anchor is far from the one before it: another one tells whether the machine has changed."""
        return bool(self._steps) and self._steps[-1]

    @property
    def values(self) -> tuple[float, ...]:
        """Log samples per second of each launch of the baseline in the search."""
        return tuple(value for _, value in self._anchors)

    def level(self, place: float) -> tuple[float, float]:
        """Return the baseline's log samples per second at a place in the search, and how many launches it is worth.

        Raises:
            ValueError: the baseline was never launched.
        """
        if not self._anchors:
            raise ValueError("the baseline was never launched")
        after = bisect_left(self._places, place)
        weighed = _NO_WEIGHTS
        if after < len(self._places):
            weighed = self._after[after].fade(self._places[after] - place)
        if after > 0 and not (after < len(self._places) and self._places[after] == place and self._jumps[after - 1]):
            weighed += self._before[after - 1].fade(place - self._places[after - 1])
        return self._first + weighed.total / weighed.weight, weighed.weight**2 / weighed.squared

    def _accumulate(self, anchors: Sequence[tuple[float, float]], jumps: Sequence[bool]) -> list[_Weights]:
        """Return for each anchor what it and those before it weigh at its place, back to where the machine changed."""
        sums: list[_Weights] = []
        for index, (place, value) in enumerate(anchors):
            reached = not index or jumps[index - 1]
            earlier = _NO_WEIGHTS if reached else sums[-1].fade(place - anchors[index - 1][0])
            sums.append(earlier + _Weights(1.0, value - self._first, 1.0))
        return sums

    def level_now(self) -> tuple[float, float]:
        """Return the level for a launch to come.

        Raises:
            ValueError: the baseline was never launched.
        """
        return self.level(self._launches)

    def _find_steps(self) -> list[bool]:
        """Return for each two anchors in a row whether they differ by more than all smaller differences explain."""
        largest, squares, degrees = -1.0, PRIOR_DEGREES * PRIOR_SD**2, PRIOR_DEGREES
        for size in sorted(abs(now - then) for then, now in pairwise(self.values)):
            noise = math.sqrt(squares / degrees)
            if size > student_t_quantile(_STEP_CONFIDENCE, degrees) * math.sqrt(2) * noise:
                break
            largest, squares, degrees = size, squares + size**2 / 2, degrees + 1
        return [abs(now - then) > largest for then, now in pairwise(self.values)]

    def _find_jumps(self) -> list[bool]:
        """Return which steps stayed: the anchor after one is near its end. One that comes back was a launch's luck."""
        values = self.values
        jumps: list[bool] = []
        outlier = False
        for index, is_step in enumerate(self._steps):
            after = values[index + 2] if index + 2 < len(values) else None
            stays = after is not None and abs(after - values[index + 1]) < abs(after - values[index])
            jumps.append(is_step and stays and not outlier)
            outlier = is_step and after is not None and not stays
        return jumps

    def is_across_change(self, place: int) -> bool:
        """Return whether the machine changed around a place: what was launched there cannot be compared."""
        after = bisect_left(self._places, place)
        return 0 < after < len(self._places) and self._places[after] != place and self._jumps[after - 1]

    def lowest_level(self, place: int) -> float:
        """Return the level at a place, the slower of the two where the machine changed."""
        return min(self._levels_around(place))

    def highest_level(self, place: int) -> float:
        """Return the level at a place, the faster of the two where the machine changed."""
        return max(self._levels_around(place))

    def _levels_around(self, place: int) -> list[float]:
        if not self.is_across_change(place):
            return [self.level(place)[0]]
        after = bisect_left(self._places, place)
        return [value for _, value in self._anchors[after - 1 : after + 1]]

    def quiet_pairs(self) -> list[list[float]]:
        """Return each two anchors in a row between which the machine did not change.

        The probe's reading is none of them: its process has run a profiler and more by then, or it ran an hour ago.
        """
        return [list(pair) for pair, jump in zip(pairwise(self.values), self._jumps, strict=True) if not jump]
