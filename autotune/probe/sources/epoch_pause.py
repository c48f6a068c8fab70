"""What a script does between two epochs: it validates, draws new samples, saves. No setting of a step shortens that.

    timed ── profiled ── the first epoch's last steps ──▒▒ pause ▒▒── first step of the next
                         where they take seconds

An epoch that ends while steps are timed has its pause in their times.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from autotune.engine.hooks.script import ScriptHooks
from autotune.measure.clock import Clock
from autotune.measure.throughput import TrainingEndedError
from autotune.probe.time_shares import time_limit
from autotune.runs.source import Run

_SPARE_STEPS = 2
"""After an epoch's end that is not where it was expected."""


class EpochPause:
    """The time between two epochs of a script.

    Args:
        hooks: on the script.

    Attributes:
        fraction: of an epoch with its pause, what the pause is; 0 where it was not seen.
        exceeded_seconds: that it took and more; 0 where it ended in time or was not seen.
        is_awaited: the probe has nothing else to see.
    """

    def __init__(self, hooks: ScriptHooks) -> None:
        self.fraction = self.exceeded_seconds = 0.0
        self.is_awaited = False
        self._hooks = hooks

    @property
    def _has_ended(self) -> bool:
        """The first epoch has."""
        return self._hooks.loaders.restarts > 0

    def see(
        self, clock: Clock, seconds_per_step: float, *, micro_batches: int, limit: float, end: Callable[[], object]
    ) -> Run[None]:
        """Go on to the first step of the second epoch, where the end of the first one is near.

        Args:
            clock: of the device.
            seconds_per_step: of a usual step.
            micro_batches: of a step.
            limit: seconds that the steps until then may take, and that the pause may.
            end: called when the time is up.
        """
        steps = self._count_steps(micro_batches)
        left = steps - self._hooks.steps
        is_interruptible = threading.current_thread() is threading.main_thread()
        if self._has_ended or left <= 0 or left * seconds_per_step > limit or not is_interruptible:
            return
        self.is_awaited = True

        def give_up() -> None:
            self.exceeded_seconds = limit if self._hooks.steps >= steps else 0.0
            end()

        with time_limit(left * seconds_per_step + limit, give_up):
            for _ in range(left + _SPARE_STEPS):
                clock.synchronize()
                before = clock.now()
                try:
                    yield
                except TrainingEndedError:
                    return
                if self._has_ended:
                    clock.synchronize()
                    pause = max(0.0, clock.now() - before - seconds_per_step)
                    self.fraction = pause / (pause + steps * seconds_per_step)
                    return

    def _count_steps(self, micro_batches: int) -> int:
        """Return the steps of an epoch; 0 where the loader does not tell."""
        loader = self._hooks.loaders.training_loader
        try:
            return 0 if loader is None else math.ceil(len(loader) / micro_batches)
        except TypeError:  # an iterable dataset without a length
            return 0
