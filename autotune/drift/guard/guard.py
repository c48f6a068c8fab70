"""The drift guard of a final training: looks for signs that it no longer learns as the baseline would, and says so.

    every step ── is a look due? ── gradients of the batch to come, twice ─┐
    every log line ── losses: against the baseline's band, then against ───┼─▶ Alarm: cause, sentence, last clean step
                      the run's own lowest level; the loss scaler's skips ─┘   or a warning: see below

A look costs a few steps, and waits until its cost is 0.5 % of the time since the one before. It changes nothing of the
training. What it cannot do (too little memory, say) switches it off, with the reason in the summary. A loss that rises
while the gradients show all that differs, and are right, is a warning: the baseline's settings would not mend it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autotune.distributed.training import RankTraining
from autotune.drift.compare.gradients import LAYER_BIAS_FAILS, NOISE_FAILS
from autotune.drift.guard.check_schedule import CheckPace, LookSchedule
from autotune.drift.guard.gradient_watch import GradientWatch, Seen
from autotune.drift.guard.loss_watch import LossWatch
from autotune.drift.guard.skipped_steps import WINDOW_STEPS, SkipWatch
from autotune.drift.record.numerics import SWITCHED, IncomparableGradients, PairedGradients
from autotune.engine.device import release_cached, reserved_bytes, synchronize
from autotune.engine.length import count_epoch_steps
from autotune.engine.loop import Training
from autotune.format import count
from autotune.isolation.causes import explain_exception
from autotune.records.config import TrainConfig
from autotune.records.quality import GradientEquivalence, LossBand, Margin
from autotune.records.run import GuardSummary
from autotune.records.trial import TrialStatus
from autotune.sentences.settings import name_setting
from autotune.space import classify_changes
from autotune.targets.workload import LoadedWorkload

_ACQUITTED = "its gradients are the baseline's, so the cause may be the data, the learning rate or the workload"

AlarmCause = Literal["drift-gradients", "drift-loss", "skipped-steps"]


@dataclass(frozen=True)
class Alarm:
    """A reason to go back to the baseline's settings.

    Attributes:
        cause: short name.
        sentence: what was seen.
        clean_step: optimizer steps up to which everything looked at was as it should be.
    """

    cause: AlarmCause
    sentence: str
    clean_step: int


class DriftGuard:
    """Looks at one training; it must be asked after every optimizer step and told at every log line.

    Attributes:
        pace: how often gradients are looked at.
        warnings: what was seen that going back would not mend; `take_warning` hands them over.
    """

    pace = CheckPace()

    def __init__(
        self,
        loaded: LoadedWorkload,
        training: Training,
        config: TrainConfig,
        baseline: TrainConfig,
        *,
        device: torch.device,
        band: LossBand | None = None,
        limit: Margin | None = None,
        accepted: Sequence[GradientEquivalence] = (),
    ) -> None:
        """Find out what can be looked at.

        Args:
            loaded: the workload.
            training: built with the config, inside its `backend_settings`.
            config: its settings.
            baseline: the settings to fall back to.
            device: where it runs.
            band: where the baseline's loss went; None where it is not known.
            limit: how much worse the training loss may be; None for none.
            accepted: comparisons of gradients on which the settings were accepted; where these differ by more than is
                allowed here, trainings have shown that it does no harm, and gradients are not compared again.
        """
        self._training, self._device = training, device
        special = {f"user_knobs.{name}": kind for name, kind in loaded.knob_numerics.items()}
        changes = classify_changes(config, baseline, special)
        self._inexact = [name for name, kind in changes.items() if kind != "exact"]
        is_another = any(kind == "semantic" for kind in changes.values())
        self._losses = LossWatch(
            None if is_another else band,
            allowed=limit.amount if limit is not None and limit.unit == "relative" else 0.0,
            epoch_steps=count_epoch_steps(training),
            is_shuffled=loaded.shuffle,
        )
        self._skips = SkipWatch()
        self._gradients: GradientWatch | None = None
        self._paired: PairedGradients
        self._off = ""
        self._prepare_gradients(loaded, config, baseline, accepted)
        self._schedule = LookSchedule(self.pace)
        self._clean_step = self._warned_step = 0
        self.warnings: list[str] = []

    @property
    def is_on(self) -> bool:
        """There is something to fall back to."""
        return bool(self._inexact)

    @property
    def words(self) -> str:
        """What it has to say, a few words for a progress page; empty when it is off."""
        if not self.is_on:
            return ""
        if self._gradients is None or self._off:
            return "losses watched, gradients not compared"
        checks = self._gradients.checks
        if not checks:
            return f"first look at the gradients at step {self._schedule.next_step}"
        if self._gradients.is_in_round:
            return f"a closer look at the gradients ({checks} checks)"
        return f"gradients as the baseline's ({count(checks, 'check')})"

    def check_step(self, step: int) -> Alarm | None:
        """Look at the gradients when it is time; called after every optimizer step.

        Args:
            step: optimizer steps taken.
        """
        if step < self._schedule.next_step or self._gradients is None or self._off:
            return None
        batch = self._training.windows.peek() if self._schedule.is_due(step) else None
        if batch is None:  # at the end of an epoch there is none; the next step has one
            return None
        began = time.perf_counter()
        seen = self._look(self._gradients, batch, step)
        self._schedule.record(step, seconds=time.perf_counter() - began, is_open=seen.state == "open")
        if seen.state == "shown":
            return self._alarm("drift-gradients", f"the gradients are not the baseline's: {seen.reason}")
        if seen.state == "fine" and not self._off:
            self._clean_step = step
        return None

    def record_losses(self, losses: Sequence[float], *, step: int, samples: int, learning_rate: float) -> Alarm | None:
        """Take every step's loss since the last log line.

        Args:
            losses: one for each step; those that are not finite are left to the loop.
            step: optimizer steps taken.
            samples: trained on.
            learning_rate: of the first parameter group.
        """
        if not self.is_on:
            return None
        rise = self._losses.record(losses, step=step, samples=samples, learning_rate=learning_rate)
        if rise is None:
            return None
        if self._gradients is None or not self._covers_everything:
            return self._alarm("drift-loss", rise.found, rise.clean_step)
        # A round decides; what lasts is reported again. And what has begun before the last warning has been told.
        if not self._gradients.is_in_round and rise.begun_step >= self._warned_step:
            self._warned_step = step
            self.warnings.append(f"{rise.found}; {_ACQUITTED}")
            self._gradients.force_round()
            self._schedule.look_soon(step + 1)
        return None

    def take_warning(self) -> str | None:
        """Return the oldest warning that was not taken, a sentence; None for none. Asked at every log line."""
        return self.warnings.pop(0) if self.warnings else None

    def record_scale(self, scale: float, *, step: int, skipped: int, steps: int) -> Alarm | None:
        """Take what the loss scaler did since the last log line.

        Args:
            scale: now.
            step: optimizer steps taken.
            skipped: of the last steps, how many were left out.
            steps: how many they are.
        """
        found = self._skips.record(scale, step=step, skipped=skipped, steps=steps) if self.is_on else None
        return None if found is None else self._alarm("skipped-steps", found, max(0, step - WINDOW_STEPS))

    def capture(self) -> dict[str, Any]:
        """Return the state as numbers, texts, lists and dictionaries."""
        return {
            "schedule": self._schedule.capture(),
            "clean_step": self._clean_step,
            "off": self._off,
            "warned_step": self._warned_step,
            "losses": self._losses.capture(),
            "gradients": None if self._gradients is None else self._gradients.capture(),
        }

    def restore(self, state: Mapping[str, Any], *, same_settings: bool = True) -> None:
        """Go on from a captured state of a guard of the same training.

        Args:
            state: captured.
            same_settings: it was under the settings of now; else what it saw of their gradients says nothing of these,
                which have a first look soon.
        """
        self._schedule.restore(state["schedule"])
        self._clean_step, self._warned_step = int(state["clean_step"]), int(state["warned_step"])
        self._losses.restore(state["losses"])
        if not same_settings:
            self._schedule.start_anew()
            return
        self._off = str(state["off"])
        if self._gradients is not None and state["gradients"] is not None:
            self._gradients.restore(state["gradients"])

    def summarize(self) -> GuardSummary:
        """Return what was looked at."""
        gradients, schedule = self._gradients, self._schedule
        return GuardSummary(
            is_on=self.is_on,
            reason=self._explain(),
            gradient_checks=0 if gradients is None else gradients.checks,
            last=None if gradients is None else gradients.last,
            largest_error=None if gradients is None or not gradients.checks else gradients.largest_error,
            last_clean_step=self._clean_step,
            cost_fraction=schedule.cost_fraction if self.is_on else None,
        )

    def _prepare_gradients(
        self,
        loaded: LoadedWorkload,
        config: TrainConfig,
        baseline: TrainConfig,
        accepted: Sequence[GradientEquivalence],
    ) -> None:
        if not set(self._inexact) & set(SWITCHED):
            return
        if self._training.is_sharded:
            self._off = "each process has a shard of the model, and they are not asked to look aside together"
            return
        if isinstance(self._training, RankTraining) and _shares_statistics(self._training.model):
            self._off = "SyncBatchNorm takes its statistics from all processes, and one alone looks aside"
            return
        if count_epoch_steps(self._training) == 1:
            self._off = "an epoch is a single step, so that there is no batch to come to look at"
            return
        if any(_differ(found) for found in accepted):
            self._off = "the search accepted gradients that differ by more than is allowed here, by its trainings"
            return
        self._paired = PairedGradients(self._training, loaded, config, baseline)
        self._gradients = GradientWatch(
            self._paired, samples_per_step=config.effective_batch_size, scales_loss=self._training.scaler is not None
        )

    def _look(self, gradients: GradientWatch, batch: Any, step: int) -> Seen:
        reserved = reserved_bytes(self._device)
        synchronize(self._device)
        try:
            seen = gradients.look(batch, step=step)
        except IncomparableGradients as error:
            seen, self._off = Seen("fine"), str(error)
        except Exception as error:  # a look must never be what ends a training
            status, _, text = explain_exception(error)
            short = status is TrialStatus.OUT_OF_MEMORY
            seen, self._off = Seen("fine"), f"not enough memory for both: {text}" if short else f"a look failed: {text}"
        synchronize(self._device)
        if reserved_bytes(self._device) > reserved:
            release_cached(self._device)  # what the other numerics took more is not the training's to keep
        return seen

    def _alarm(self, cause: AlarmCause, sentence: str, clean_step: int | None = None) -> Alarm:
        return Alarm(cause, sentence, self._clean_step if clean_step is None else clean_step)

    @property
    def _covers_everything(self) -> bool:
        """Whatever is not as the baseline's can be seen in gradients, and those that were looked at are right."""
        if self._gradients is None or self._off or not self._gradients.checks:
            return False
        return not set(self._inexact) - set(self._paired.switched)

    def _explain(self) -> str:
        if not self.is_on:
            return "the settings compute what the baseline's do"
        switched = () if self._gradients is None or self._off else self._paired.switched
        left = [name for name in self._inexact if name not in switched]
        reasons = [f"gradients are not compared: {self._off}"] if self._off else []
        if left and not self._off:
            reasons.append(
                f"only the loss shows what {', '.join(map(name_setting, left))} may do: it cannot be switched in place"
            )
        return "; ".join(reasons)


def _shares_statistics(model: nn.Module) -> bool:
    return any(isinstance(one, nn.SyncBatchNorm) for one in model.modules())


def _differ(found: GradientEquivalence) -> bool:
    if found.is_transient:
        return False  # it was shown to be gone before the first look
    noise = 0.0 if found.noise is None else found.noise.estimate
    return noise > NOISE_FAILS or (found.worst_bias or 0.0) > LAYER_BIAS_FAILS
