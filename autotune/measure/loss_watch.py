"""Watches the losses of a whole training: against the baseline's band first, against its own lowest level all along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.measure.loss_band import BandWatch, Rise
from autotune.measure.loss_rise import RiseWatch, Tolerance
from autotune.records.quality import LossBand

SOON = 50
"""Optimizer steps of a window in which a large rise shows: in a few hundred steps."""
SLOW = 1000
"""The same for a small one."""
LONGEST_EPOCH = 5000
"""Epochs up to so many steps are one window each, for a loss can rise and fall within an epoch."""
LARGE, SMALL = Tolerance(of_level=0.10, of_drop=0.05), Tolerance(of_level=0.05, of_drop=0.03)
"""What a rise has to exceed in either."""


class LossWatch:
    """Takes every step's loss, a few at a time.

    Args:
        band: where the baseline's loss went; None when it is not known, or another training's.
        allowed: share by which the loss may be above the baseline's.
        epoch_steps: optimizer steps of an epoch; None where it has no known end.
    """

    def __init__(self, band: LossBand | None, *, allowed: float, epoch_steps: int | None) -> None:
        self._band = None if band is None else BandWatch(band, max(0.0, allowed))
        self._rises = (RiseWatch(SOON, LARGE), RiseWatch(_slow_window(epoch_steps), SMALL))
        self._samples = 0

    @property
    def is_in_band(self) -> bool:
        """There is a band, and the training has not left its samples behind."""
        return self._band is not None and not self._band.is_over

    def note(self, losses: Sequence[float], *, step: int, samples: int, learning_rate: float) -> Rise | None:
        """Take the losses of the last steps; those that are not finite are left out.

        Args:
            losses: one for each step.
            step: optimizer steps after the last of them.
            samples: trained on by then.
            learning_rate: now.
        """
        since, self._samples = self._samples, samples
        finite = [loss for loss in losses if math.isfinite(loss)]
        rise = None
        if self._band is not None:
            rise = self._band.note(finite, step=step, samples=samples, since=since)
        for watch in self._rises:
            found = watch.note(finite, step=step, learning_rate=learning_rate)
            rise = rise or found
        return rise

    def capture(self) -> dict[str, Any]:
        """Return the state as numbers, lists and dictionaries."""
        return {
            "samples": self._samples,
            "band": None if self._band is None else self._band.capture(),
            "rises": [watch.capture() for watch in self._rises],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a captured state."""
        self._samples = int(state["samples"])
        if self._band is not None and state["band"] is not None:
            self._band.restore(state["band"])
        for watch, noted in zip(self._rises, state["rises"], strict=True):
            watch.restore(noted)


def _slow_window(epoch_steps: int | None) -> int:
    if epoch_steps is None or epoch_steps > LONGEST_EPOCH:
        return SLOW
    return epoch_steps * max(1, round(SLOW / epoch_steps))
