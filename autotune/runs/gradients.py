"""A workload's fidelity trial: the same windows at the same weights, once at the start and once further on.

seed ── M windows, weights held ── K steps of the baseline ── the same M windows, weights held ── captures
(a candidate loads the weights that the baseline wrote)
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch

from autotune.drift.record.step_records import NotedPoints
from autotune.drift.record.trace_file import WEIGHTS_FILE
from autotune.engine.dataloader import mix_seed, moved_generators, read_generators
from autotune.engine.determinism import make_reference, without_dropout
from autotune.engine.gradients import StepRecorder, name_parameters
from autotune.engine.loop import Training, seed_everything
from autotune.engine.tape import record_tape
from autotune.records.config import TrainConfig
from autotune.records.trial import FidelityPlan, Tape, TrialResult, TrialSpec, TrialStatus
from autotune.targets.workload import LoadedWorkload

_SETTLING_STEPS = 24
"""A loss scale that starts at 2^16 has fallen to any sensible one by then."""


def capture_workload(
    spec: TrialSpec, config: TrainConfig, loaded: LoadedWorkload, device: torch.device, folder: Path, *, started: float
) -> TrialResult:
    """Return where a workload's gradients and weight changes were written.

    Raises:
        TargetError: the workload cannot be trained, or its optimizer never steps.
    """
    assert spec.fidelity is not None
    training = Training(loaded, config, device=device, seed=spec.seeds[0], random_sources=spec.random_sources)
    startup = time.monotonic() - started
    if spec.fidelity.dropout:
        run = _Capture(training, config, spec.fidelity, seed=spec.seeds[0], device=device)
        path = run.run(folder)
    else:
        with without_dropout():
            run = _Capture(training, config, spec.fidelity, seed=spec.seeds[0], device=device)
            path = run.run(folder)
    return TrialResult(
        spec=spec,
        status=TrialStatus.COMPLETED,
        elapsed_seconds=time.monotonic() - started,
        startup_seconds=startup,
        captures=path,
        draws_random=run.draws_random,
    )


def record_workload_tape(
    spec: TrialSpec, config: TrainConfig, loaded: LoadedWorkload, device: torch.device, *, started: float
) -> TrialResult:
    """Return what a workload's loader hands over.

    Raises:
        TargetError: the dataset is empty.
    """
    training = Training(loaded, config, device=device, seed=spec.seeds[0], random_sources=spec.random_sources)
    windows, steps = training.windows, config.gradient_accumulation_steps
    tape: Tape = record_tape(windows, windows.sampler, steps)
    return TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=time.monotonic() - started, tape=tape)


class _Capture:
    """One fidelity trial of a training that is built."""

    def __init__(
        self, training: Training, config: TrainConfig, plan: FidelityPlan, *, seed: int, device: torch.device
    ) -> None:
        self._training, self._config, self._plan = training, config, plan
        self._seed, self._device = seed, device
        self._recorder = StepRecorder(name_parameters(training.model))
        self._recorder.keeps_state = plan.keeps_state
        self._points = NotedPoints(self._recorder)
        self.draws_random = False

    def run(self, folder: Path) -> str:
        plan, training = self._plan, self._training
        if plan.reference:
            make_reference(training.model)
        optimizer = training.optimizer
        optimizer.register_step_pre_hook(lambda one, _args, _kwargs: self._recorder.before(one))
        optimizer.register_step_post_hook(lambda one, _args, _kwargs: self._recorder.after(one))
        self._capture_point()
        if plan.later_steps:
            self._go_on(folder)
            self._capture_point()
        return self._points.write(folder)

    def _go_on(self, folder: Path) -> None:
        model = self._training.model
        if self._plan.weights is not None:
            state = torch.load(self._plan.weights, map_location=self._device, weights_only=True)
            model.load_state_dict(state)
            return
        self._recorder.holds = False
        for step in range(self._plan.later_steps):
            self._take_step(self._plan.windows + step)
        self._recorder.take()
        torch.save(model.state_dict(), folder / WEIGHTS_FILE)

    def _capture_point(self) -> None:
        windows, counted = self._training.windows, self._plan.windows
        windows.move_to(epoch=0, batches_done=0)
        self._settle_scale()
        self._points.begin_point()
        for number in range(counted - 1):
            self._points.add(self._take_step(number))
        # The end of an epoch has a short batch, where a wrong weighing of unequal parts shows.
        last = self._training.batches_per_epoch
        if last is not None and windows.epoch == 0 and windows.batches_done:
            steps = self._config.gradient_accumulation_steps
            windows.move_to(epoch=0, batches_done=(last - 1) // steps * steps)
        self._points.add(self._take_step(counted - 1))

    def _settle_scale(self) -> None:
        training = self._training
        if training.scaler is None:
            return
        schedule = None if training.scheduler is None else copy.deepcopy(training.scheduler.state_dict())
        groups = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        for _ in range(_SETTLING_STEPS):
            self._recorder.holds = True
            self._take_step(0)
            training.windows.move_to(epoch=0, batches_done=0)
            if self._recorder.take() is not None:
                break
        # The step that got through has moved the schedule on, and no other arm has taken it.
        if training.scheduler is not None and schedule is not None:
            training.scheduler.load_state_dict(schedule)
        for group, before in zip(training.optimizer.param_groups, groups, strict=True):
            group.update(before)

    def _take_step(self, number: int) -> int:
        """Take one step with random numbers that depend on its number alone; return its samples."""
        seed_everything(mix_seed(self._seed, number))
        before, device_before = read_generators(), self._device_generator()
        outcome = self._training.step()
        moved = bool(moved_generators(before, read_generators()))
        device_after = self._device_generator()
        if device_before is not None and device_after is not None:
            moved = moved or not torch.equal(device_before, device_after)
        self.draws_random = self.draws_random or moved
        return outcome.samples

    def _device_generator(self) -> Any:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
