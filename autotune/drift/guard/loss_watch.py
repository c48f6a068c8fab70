"""Watches the losses of a whole training: against the baseline's band first, against its own lowest level all along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.drift.compare.loss_band import BandWatch, Rise
from autotune.drift.guard.loss_rise import RiseWatch, Tolerance
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
        is_shuffled: each epoch has an order of its own; else only whole epochs are like one another.
    """

    def __init__(
        self, band: LossBand | None, *, allowed: float, epoch_steps: int | None, is_shuffled: bool = True
    ) -> None:
        self._band = None if band is None else BandWatch(band, max(0.0, allowed))
        self._rises = _watch_rises(epoch_steps, is_shuffled=is_shuffled)
        self._samples: int | None = None

    def record(self, losses: Sequence[float], *, step: int, samples: int, learning_rate: float) -> Rise | None:
        """Take the losses of the last steps; those that are not finite are left out.

        Args:
            losses: one for each step.
            step: optimizer steps after the last of them.
            samples: trained on by then.
            learning_rate: now.
        """
        if self._samples is None:  # a run that goes on may be told its first losses in the middle of a block
            self._samples = samples - round(samples * min(1.0, len(losses) / max(1, step)))
        since, self._samples = self._samples, samples
        finite = [loss for loss in losses if math.isfinite(loss)]
        rise = None
        if self._band is not None:
            rise = self._band.record(finite, step=step, samples=samples, since=since)
        for watch in self._rises:
            found = watch.record(finite, step=step, learning_rate=learning_rate)
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
        self._samples = None if state["samples"] is None else int(state["samples"])
        if self._band is not None and state["band"] is not None:
            self._band.restore(state["band"])
        for watch, noted in zip(self._rises, state["rises"], strict=True):
            watch.restore(noted)


def _watch_rises(epoch_steps: int | None, *, is_shuffled: bool) -> tuple[RiseWatch, ...]:
    if is_shuffled:
        is_long = epoch_steps is None or epoch_steps > LONGEST_EPOCH
        slow = SLOW if is_long or epoch_steps is None else _whole_epochs(epoch_steps)
        return RiseWatch(SOON, LARGE), RiseWatch(slow, SMALL)
    # The same samples come in the same order: a hard stretch of them is a rise in every epoch.
    return () if epoch_steps is None else (RiseWatch(_whole_epochs(epoch_steps), SMALL),)


def _whole_epochs(epoch_steps: int) -> int:
    return epoch_steps * max(1, round(SLOW / epoch_steps))
