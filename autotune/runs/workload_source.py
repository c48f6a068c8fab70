"""A workload's training as a source of steps: it takes one whenever a run asks for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.engine.data_trace import record_data
from autotune.engine.dataloader import mix_seed, moved_generators, read_generators
from autotune.engine.device import read_device_generator
from autotune.engine.evaluation import evaluate
from autotune.engine.gradients import StepRecorder, name_parameters
from autotune.engine.loop import StepOutcome, Training, seed_everything
from autotune.measure.clock import Clock, clock_for
from autotune.measure.timing import Timing
from autotune.records.config import TrainConfig
from autotune.records.trial import GROWTH_STEPS
from autotune.runs.source import Found, Run, Step, drive
from autotune.targets.workload import LoadedWorkload

T = TypeVar("T")

_SETTLING_STEPS = 24
"""A loss scale that starts at 2^16 has fallen to any sensible one by then."""


class WorkloadSource:
    """Drives the training of a workload; the members are `StepSource`'s."""

    samples_per_window: int | None = None

    def __init__(
        self,
        loaded: LoadedWorkload,
        config: TrainConfig,
        device: torch.device,
        *,
        seed: int,
        random_sources: tuple[str, ...] = (),
    ) -> None:
        """Build the training.

        Args:
            loaded: the workload.
            config: its settings.
            device: where it trains.
            seed: of its weights, its data order and its random numbers.
            random_sources: generators that its samples draw from.

        Raises:
            TargetError: a part of the workload returns something of the wrong type.
        """
        self.training = self._build(loaded, config, device, seed, random_sources)
        self.device = device
        self.clock: Clock = clock_for(device)
        self.timing: Timing | None = None
        self.draws_random = False
        self._loaded, self._config, self._seed = loaded, config, seed
        self._generators: tuple[dict[str, Any], torch.Tensor | None] | None = None

    def drive(self, run: Run[T]) -> T:
        """Take every step that a run asks for; return what it has found out."""
        return drive(run, self.take_step)

    def _build(
        self, loaded: LoadedWorkload, config: TrainConfig, device: torch.device, seed: int, sources: tuple[str, ...]
    ) -> Training:
        return Training(loaded, config, device=device, seed=seed, random_sources=sources)

    def conclude(self, found: Found) -> Found:
        """Return what a run has found out, once its training is over."""
        return found

    def list_others(self) -> tuple[int, ...]:
        return ()

    def read_ranks(self) -> tuple[float, ...]:
        return ()

    def name_parameters(self) -> Mapping[int, str]:
        return name_parameters(self.training.model)

    def read_loss_scale(self) -> float | None:
        scaler = self.training.scaler
        return None if scaler is None else scaler.get_scale()

    def pin_loss_scale(self) -> bool:
        scaler = self.training.scaler
        if scaler is not None:
            scaler.set_growth_interval(GROWTH_STEPS)
        return True

    def find_metrics(self) -> Run[dict[str, float]]:
        yield from ()
        return evaluate(self._loaded, self.training, self._config)

    def read_data(self) -> Run[Found]:
        yield from ()
        windows = self.training.windows
        return Found(tape=record_data(windows, windows.sampler, self._config.gradient_accumulation_steps))

    def record(self, recorder: StepRecorder) -> None:
        optimizer = self.training.optimizer
        optimizer.register_step_pre_hook(lambda one, _args, _kwargs: recorder.before(one))
        optimizer.register_step_post_hook(lambda one, _args, _kwargs: recorder.after(one))

    def rewind(self, recorder: StepRecorder) -> bool:
        self.training.windows.move_to(epoch=0, batches_done=0)
        if self.training.scaler is not None:
            self._settle_scale(recorder)
        return True

    def begin_window(self, number: int, *, is_last: bool) -> None:
        training = self.training
        # The end of an epoch has a short batch, where a wrong weighing of unequal parts shows.
        last = training.batches_per_epoch
        if is_last and last is not None and training.windows.epoch == 0 and training.windows.batches_done:
            steps = self._config.gradient_accumulation_steps
            training.windows.move_to(epoch=0, batches_done=(last - 1) // steps * steps)
        self._seed_window(mix_seed(self._seed, number))
        self._generators = read_generators(), self._read_device_generator()

    def _seed_window(self, seed: int) -> None:
        seed_everything(seed)

    def save_weights(self, path: Path, *, writes: bool) -> None:
        if writes:
            torch.save(self.training.model.state_dict(), path)

    def load_weights(self, path: Path) -> None:
        self.training.model.load_state_dict(torch.load(path, map_location=self.device, weights_only=True))

    def take_step(self) -> Step:
        """Take one optimizer step, timed where its timing is wanted."""
        outcome = self._step() if self.timing is None else self.timing.take_step(self.training.step)
        return Step(outcome.samples, outcome.loss)

    def _step(self) -> StepOutcome:
        outcome = self.training.step()
        if self._generators is not None:
            (before, device_before), self._generators = self._generators, None
            moved = bool(moved_generators(before, read_generators()))
            device_after = self._read_device_generator()
            if device_before is not None and device_after is not None:
                moved = moved or not torch.equal(device_before, device_after)
            self.draws_random = self.draws_random or moved
        return outcome

    def _settle_scale(self, recorder: StepRecorder) -> None:
        training = self.training
        schedule = None if training.scheduler is None else copy.deepcopy(training.scheduler.state_dict())
        groups = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        for _ in range(_SETTLING_STEPS):
            recorder.holds = True
            self.begin_window(0, is_last=False)
            self._step()
            training.windows.move_to(epoch=0, batches_done=0)
            if recorder.take() is not None:
                break
        # The step that got through has moved the schedule on, and no other arm has taken it.
        if training.scheduler is not None and schedule is not None:
            training.scheduler.load_state_dict(schedule)
        for group, before in zip(training.optimizer.param_groups, groups, strict=True):
            group.update(before)

    def _read_device_generator(self) -> torch.Tensor | None:
        return read_device_generator(self.device)
