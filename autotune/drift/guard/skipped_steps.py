"""Steps that a loss scaler leaves out: one now and then is its work, many in a row are a training that stands still."""

from __future__ import annotations

from collections import deque

WARMUP_STEPS = 50
"""The scale starts far too high on purpose, and comes down in these."""
WINDOW_STEPS = 100
MOST_SKIPPED = 0.1
"""Share of the last steps that may be left out; in a healthy training it is one in two thousand."""
LEAST_SCALE = 1.0
"""Below it the gradients overflow without any scaling."""


class SkipWatch:
    """Counts the steps that were left out.

    Attributes:
        skipped: in all.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._looks: deque[tuple[int, int, int]] = deque()  # step, steps and skipped ones since the look before

    def record(self, scale: float, *, step: int, skipped: int, steps: int) -> str | None:
        """Take what happened since the last look, and return what is wrong, part of a sentence; None for nothing.

        Args:
            scale: now.
            step: optimizer steps so far.
            skipped: of the last steps, how many were left out.
            steps: how many they are.
        """
        self.skipped += skipped
        if step - steps >= WARMUP_STEPS:
            self._looks.append((step, steps, skipped))
        while self._looks and self._looks[0][0] <= step - WINDOW_STEPS:
            self._looks.popleft()
        if scale < LEAST_SCALE:
            return f"the loss scale has fallen to {scale:.3g}: gradients overflow even so"
        lost = sum(look[2] for look in self._looks)
        seen = sum(look[1] for look in self._looks)
        # Of a whole window, also when only part of it has been seen.
        if lost <= MOST_SKIPPED * WINDOW_STEPS:
            return None
        return f"the loss scaler left out {lost} of the last {seen} steps"
