"""`--max-time`: when a training has to be over, its last checkpoint written."""

from __future__ import annotations

import time
from dataclasses import dataclass

from autotune.train.policy import TRAIN_POLICY, TrainPolicy


@dataclass(frozen=True)
class Deadline:
    """A point in time.

    Attributes:
        until: on `time.monotonic()`, which all processes of a machine share; None for never.
        policy: the training's thresholds.
    """

    until: float | None = None
    policy: TrainPolicy = TRAIN_POLICY

    def is_near(self, *, step_seconds: float, checkpoint_seconds: float) -> bool:
        """Return whether another step might leave too little time for a checkpoint."""
        if self.until is None:
            return False
        policy = self.policy
        kept = policy.last_steps * step_seconds + policy.last_checkpoint_share * checkpoint_seconds
        return time.monotonic() + kept + policy.last_seconds >= self.until

    def has_room(self, seconds: float) -> bool:
        """Return whether something that takes so long still fits."""
        return self.until is None or time.monotonic() + seconds < self.until

    @property
    def seconds_left(self) -> float | None:
        """Until then, a moment to end things in left aside; None for ever."""
        return None if self.until is None else max(0.01, self.until - time.monotonic() - self.policy.last_seconds)
