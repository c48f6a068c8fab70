"""The health checks of a training, every few steps, and what is a fault: losses, loss scale, allocator, drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autotune.drift.guard.guard import Alarm, DriftGuard
from autotune.engine.device import count_allocation_retries
from autotune.engine.loop import Training
from autotune.train.loop.meters import Meters
from autotune.train.loop.state import Progress
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.steps_down import Fault, FaultFound


class HealthChecks:
    """The health checks of one training.

    Args:
        training: to check.
        meters: count what is found.
        guard: looks for drift; None when there is nothing to guard.
        warn: is given what is no fault, and should be known.
        policy: the training's thresholds.
    """

    def __init__(
        self,
        training: Training,
        meters: Meters,
        guard: DriftGuard | None,
        warn: Callable[[str], None],
        *,
        policy: TrainPolicy = TRAIN_POLICY,
    ) -> None:
        self._policy = policy
        self._training, self._meters, self._guard, self._warn = training, meters, guard, warn
        self._retries = count_allocation_retries(training.device)
        self._scale = 1.0 if training.scaler is None else training.scaler.get_scale()
        self._thrashing = 0

    def check_step(self, step: int) -> None:
        """Let the drift guard check, when it is due.

        Raises:
            FaultFound: the gradients are not the baseline's.
        """
        if self._guard is not None:
            _heed(self._guard.check_step(step), step)

    def check(self, losses: Sequence[float], progress: Progress, *, learning_rate: float) -> None:
        """Check the steps since the last check.

        Args:
            losses: of each of them.
            progress: where the training stands.
            learning_rate: of the first parameter group.

        Raises:
            FaultFound: something is wrong.
        """
        self._check_losses(losses, progress.step)
        self._check_scaler(len(losses), progress.step)
        self._check_allocator(progress.step)
        if self._guard is not None:
            alarm = self._guard.record_losses(
                losses, step=progress.step, samples=progress.samples, learning_rate=learning_rate
            )
            while (warning := self._guard.take_warning()) is not None:
                self._warn(f"step {progress.step:,}: {warning}")
            _heed(alarm, progress.step)

    def _check_losses(self, losses: Sequence[float], step: int) -> None:
        wrong = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        # A loss scaler leaves out the step whose scaled loss overflows; that is its work, unless it is every step.
        if not wrong or (self._training.scaler is not None and len(wrong) < len(losses)):
            return
        first = step - len(losses) + 1 + wrong[0]
        raise FaultFound(Fault("non-finite", f"the loss is {losses[wrong[0]]} at step {first}", step))

    def _check_scaler(self, steps: int, step: int) -> None:
        scaler = self._training.scaler
        if scaler is None:
            return
        scale = scaler.get_scale()
        skipped = round(math.log2(self._scale / scale)) if 0.0 < scale < self._scale else 0
        self._scale = scale
        self._meters.skipped_steps += skipped
        if self._guard is not None:
            _heed(self._guard.record_scale(scale, step=step, skipped=skipped, steps=steps), step)

    def _check_allocator(self, step: int) -> None:
        retries = count_allocation_retries(self._training.device)
        new, self._retries = retries - self._retries, retries
        self._meters.allocator_retries += new
        self._thrashing = self._thrashing + 1 if new else 0
        if self._thrashing >= self._policy.thrashing_checks:
            found = f"the device's allocator had to give memory back {retries} times by step {step}"
            raise FaultFound(Fault("allocator-thrash", found, step))


def _heed(alarm: Alarm | None, step: int) -> None:
    if alarm is not None:
        raise FaultFound(Fault(alarm.cause, alarm.sentence, step, alarm.clean_step))
