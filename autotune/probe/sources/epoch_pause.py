"""What a script does between two epochs: it validates, draws new samples, saves. No setting of a step shortens that.

    timed ── the first epoch's last steps ──▒▒ pause ▒▒── loader starts again ── some more under the profiler
             where they take seconds

An epoch that ends while steps are timed has its pause in their times.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from autotune.engine.device import synchronize
from autotune.engine.hooks.script import ScriptHooks
from autotune.measure.throughput import TrainingEndedError
from autotune.probe.time_shares import OutOfTimeError, time_limit
from autotune.runs.source import Run

_SPARE_STEPS = 2
"""After an epoch's end that is not where it was expected."""


class EpochPause:
    """The time between two epochs of a script.

    Args:
        hooks: on the script.

    Attributes:
        fraction: of an epoch with its pause, what the pause is; the least that it can be where it had not ended in
            time, 0 where it was not seen.
        exceeded_seconds: that it had taken when the time was up; 0 where it ended in time or was not seen.
        is_awaited: it is waited for, by steps that nobody needs.
    """

    def __init__(self, hooks: ScriptHooks) -> None:
        self.fraction = self.exceeded_seconds = 0.0
        self.is_awaited = False
        self._hooks = hooks
        self._steps = 0
        self._seconds_per_step = self._before = 0.0

    def see(self, device: torch.device, seconds_per_step: float, *, micro_batches: int, limit: float) -> Run[None]:
        """Go on to the first step of the second epoch, where the end of the first one is near.

        When the time is up, `OutOfTimeError` is raised in whatever the script does; `give_up` then.

        Args:
            device: where the training runs.
            seconds_per_step: of a usual step.
            micro_batches: of a step.
            limit: seconds that the steps until then may take, and that the pause may.
        """
        self._steps, self._seconds_per_step = self._count_steps(micro_batches), seconds_per_step
        left, loaders = self._steps - self._hooks.steps, self._hooks.loaders
        is_interruptible = threading.current_thread() is threading.main_thread()
        if loaders.restarted_at or left <= 0 or left * seconds_per_step > limit or not is_interruptible:
            return
        self.is_awaited = True
        try:
            with time_limit(left * seconds_per_step + limit):
                for _ in range(left + _SPARE_STEPS):
                    synchronize(device)
                    self._before = time.perf_counter()
                    yield
                    if loaders.restarted_at:
                        self.fraction = self._weigh(loaders.restarted_at - self._before)
                        break
        except (TrainingEndedError, OutOfTimeError):
            pass
        self.is_awaited = False

    def give_up(self) -> None:
        """Note that the time was up: where all steps of the epoch were taken, it was the pause that took it."""
        if self._hooks.steps >= self._steps:
            self.exceeded_seconds = time.perf_counter() - self._before
            self.fraction = self._weigh(self.exceeded_seconds)

    def _weigh(self, seconds: float) -> float:
        return max(0.0, seconds) / max(1e-9, seconds + self._steps * self._seconds_per_step)

    def _count_steps(self, micro_batches: int) -> int:
        """Return the steps of an epoch; 0 where the loader does not tell."""
        loader = self._hooks.loaders.training_loader
        try:
            return 0 if loader is None else math.ceil(len(loader) / micro_batches)
        except Exception:  # without a length, or whatever a sampler of the script's raises
            return 0
