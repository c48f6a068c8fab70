"""When the drift guard looks at gradients: early once, then so seldom that it costs next to nothing.

look ── owes its seconds ──▶ the next one is due when they are MOST_COST of the time that has passed since
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckPace:
    """How often gradients are looked at.

    Attributes:
        first_step: optimizer steps before the first look.
        least_steps: between two looks.
        most_cost: largest share of the training's time that looks may take, the first one left aside.
    """

    first_step: int = 20
    least_steps: int = 500
    most_cost: float = 0.005


class LookSchedule:
    """Says when a look is due; between two, asking costs a comparison of integers.

    Attributes:
        next_step: optimizer steps at which it is asked again in earnest.
        spent_seconds: all looks together.
    """

    def __init__(self, pace: CheckPace, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pace, self._clock = pace, clock
        self.next_step = pace.first_step
        self.spent_seconds = 0.0
        self._began = self._ended = clock()
        self._last_step = 0
        self._owed_seconds = self._debt_seconds = 0.0

    @property
    def cost_fraction(self) -> float:
        """Share of the time since the training began, the time between two sessions left out."""
        return min(1.0, self.spent_seconds / max(self._clock() - self._began, 1e-9))

    def is_due(self, step: int) -> bool:
        """Return whether to look now; where the last look is not paid for, the next step to ask at is put off."""
        if step < self.next_step:
            return False
        passed, steps = self._clock() - self._ended, max(1, step - self._last_step)
        missing = self._owed_seconds / self._pace.most_cost - passed
        if missing > 0.0:
            self.next_step = step + max(1, math.ceil(missing * steps / max(passed, 1e-9)))
            return False
        return True

    def record(self, step: int, *, seconds: float, is_open: bool) -> None:
        """Take what a look cost.

        Args:
            step: optimizer steps taken.
            seconds: of the look.
            is_open: the next step is to be looked at too, at once; its time will be owed with this one's.
        """
        self.spent_seconds += seconds
        self._debt_seconds += seconds
        self._ended, self._last_step = self._clock(), step
        self.next_step = step + (1 if is_open else self._pace.least_steps)
        self._owed_seconds = 0.0 if is_open else self._debt_seconds
        self._debt_seconds = self._debt_seconds if is_open else 0.0

    def look_soon(self, step: int) -> None:
        """Put the next look forward to a step, whatever is owed."""
        self.next_step, self._owed_seconds = min(self.next_step, step), 0.0

    def start_anew(self) -> None:
        """Go on with other settings: their first look comes as soon after the last one as after a beginning."""
        self.look_soon(self._last_step + self._pace.first_step)
        self._debt_seconds = 0.0

    def capture(self) -> list[float]:
        """Return the state as numbers; of the seconds that are owed, what has not been paid for."""
        now = self._clock()
        owed = max(0.0, self._owed_seconds - self._pace.most_cost * (now - self._ended))
        return [self.next_step, self._last_step, self.spent_seconds, now - self._began, owed, self._debt_seconds]

    def restore(self, state: Sequence[float]) -> None:
        """Go on from a captured state."""
        self.next_step, self._last_step = int(state[0]), int(state[1])
        self.spent_seconds = float(state[2])
        self._ended = self._clock()
        self._began = self._ended - float(state[3])
        self._owed_seconds, self._debt_seconds = float(state[4]), float(state[5])
