"""The budget: one deadline for the whole command, with the finals and the drift checks reserved first.

|probe, baseline|        search        | drift checks |        finals        |
0                                      ^ search ends   ^ finals start by      deadline
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

FINALS_SHARE = 0.33
DRIFT_SHARE = 0.20
MOST_DRIFT_SHARE = 0.45
PROBE_SHARE = 0.50
"""Most of the budget a probe may take; a healthy one takes far less."""

CLOSING_SECONDS = 1.0
"""Kept for the last kill and for writing the answer."""


@dataclass(frozen=True)
class Budget:
    """A deadline and its shares.

    Attributes:
        seconds: the whole budget.
        started: when the command started, on `now`'s clock.
        now: a clock that never goes back.
        drift_share: part kept for the drift checks.
    """

    seconds: float
    started: float
    now: Callable[[], float] = time.monotonic
    drift_share: float = DRIFT_SHARE

    @property
    def elapsed_seconds(self) -> float:
        """Time used so far."""
        return self.now() - self.started

    @property
    def remaining_seconds(self) -> float:
        """Time until the deadline, the closing reserve taken off; never negative."""
        return max(0.0, self.seconds - CLOSING_SECONDS - self.elapsed_seconds)

    @property
    def search_remaining_seconds(self) -> float:
        """Time until the search must give way to drift checks and finals; never negative."""
        return max(0.0, self.remaining_seconds - (FINALS_SHARE + self.drift_share) * self.seconds)

    @property
    def drift_remaining_seconds(self) -> float:
        """Time until the drift checks must give way to the finals; never negative."""
        return max(0.0, self.remaining_seconds - FINALS_SHARE * self.seconds)

    def reserve_drift(self, seconds: float) -> Budget:
        """Return the budget that keeps some seconds for the drift checks, within the least and the most of its shares.

        Args:
            seconds: wanted.
        """
        share = min(MOST_DRIFT_SHARE, max(DRIFT_SHARE, seconds / self.seconds))
        return dataclasses.replace(self, drift_share=share)


def measure_seconds_for(budget_seconds: float) -> float:
    """Return how long one launch measures: a sixtieth of the budget, within 1.5 and 12 seconds."""
    return min(12.0, max(1.5, budget_seconds / 60))
