"""`--max-time`: when a training has to be over, its last checkpoint written."""

from __future__ import annotations

import time
from dataclasses import dataclass

_CHECKPOINT_FACTOR = 1.5
_STEPS = 2.0
_LEAST_SECONDS = 0.2


@dataclass(frozen=True)
class Deadline:
    """A point in time.

    Attributes:
        until: on `time.monotonic()`, which all processes of a machine share; None for never.
    """

    until: float | None = None

    def is_near(self, *, step_seconds: float, checkpoint_seconds: float) -> bool:
        """Return whether another step might leave too little time for a checkpoint."""
        if self.until is None:
            return False
        needed = _STEPS * step_seconds + _CHECKPOINT_FACTOR * checkpoint_seconds + _LEAST_SECONDS
        return time.monotonic() + needed >= self.until

    def has_room(self, seconds: float) -> bool:
        """Return whether something that takes so long still fits."""
        return self.until is None or time.monotonic() + seconds < self.until

    @property
    def seconds_left(self) -> float | None:
        """Until then, a moment to end things in left aside; None for ever."""
        return None if self.until is None else max(0.01, self.until - time.monotonic() - _LEAST_SECONDS)
