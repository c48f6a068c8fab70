"""The budget: one deadline for the whole command. What is kept back of it, and for what, is `search.reserve`'s."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

CLOSING_SECONDS = 1.0
"""Kept for the last kill and for writing the answer."""

_MEASURE_SECONDS = 2.0
"""Launches of one config differ by their luck and by the machine's mood, which more blocks in one launch do not average
out: two seconds a launch buy two to three times the pairs that twelve would."""

_SHORT_MEASURE_SECONDS, _SHORT_BUDGET_SECONDS = 1.5, 120.0


@dataclass(frozen=True)
class Budget:
    """A deadline.

    Attributes:
        seconds: the whole budget.
        started: when the command started, on `now`'s clock.
        now: a clock that never goes back.
    """

    seconds: float
    started: float
    now: Callable[[], float] = time.monotonic

    @property
    def elapsed_seconds(self) -> float:
        """Time used so far."""
        return self.now() - self.started

    @property
    def remaining_seconds(self) -> float:
        """Time until the deadline, the closing reserve taken off; never negative."""
        return max(0.0, self.seconds - CLOSING_SECONDS - self.elapsed_seconds)


def measure_seconds_for(budget_seconds: float) -> float:
    """Return how long one launch measures, in seconds; long steps take what a few of them need."""
    return _MEASURE_SECONDS if budget_seconds > _SHORT_BUDGET_SECONDS else _SHORT_MEASURE_SECONDS
