"""A script's fidelity trial: its optimizers step, what they got and did is noted, and the weights are put back.

    script ── M steps, weights held ── K steps ── weights written or loaded ── M steps, weights held ── captures

The script goes on through its data all the while, so both arms see the same batches at the same steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.drift.record.step_records import NotedPoints
from autotune.drift.record.trace_file import WEIGHTS_FILE
from autotune.engine.determinism import without_dropout
from autotune.engine.gradients import StepRecorder
from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.engine.tape import FIRST_BATCHES, digest_batches
from autotune.errors import TargetError
from autotune.records.trial import FidelityPlan, Tape, TrialResult, TrialSpec, TrialStatus
from autotune.runs.timing import describe_too_short

if TYPE_CHECKING:
    from autotune.runs.script import ScriptTrial


class TapeRun:
    """Lets a script train for the data it trains on.

    Args:
        spec: what is asked; its `quality_steps` are the optimizer steps to look at.
    """

    def __init__(self, spec: TrialSpec) -> None:
        self._spec = spec
        self._noted: list[tuple[str, str]] = []
        self._steps = 0

    def watch(self, hooks: ScriptHooks) -> None:
        """Look at every batch of the loaders that are trained from, from the first one on."""
        hooks.loaders.on_batch = self._note

    def begin(self, hooks: ScriptHooks) -> None:
        """Nothing to prepare at the first training call."""

    def turn(self, is_training: bool) -> None:
        """Time does not matter."""

    def take(self, step: ScriptStep, loss: torch.Tensor) -> bool:
        """Count a step; True when there were enough."""
        self._steps += 1
        return self._steps >= self._spec.quality_steps

    def heard(self, line: str) -> bool:
        """What it prints does not matter."""
        return False

    def result(self, trial: ScriptTrial) -> TrialResult:
        """Return what was handed over."""
        return TrialResult(
            spec=trial.spec,
            status=TrialStatus.COMPLETED,
            elapsed_seconds=trial.elapsed_seconds,
            startup_seconds=trial.startup_seconds,
            tape=self.tape(trial.hooks),
        )

    def tape(self, hooks: ScriptHooks) -> Tape:
        """Return what was handed over so far."""
        loader = hooks.loaders.training_loader
        samples = None
        if loader is not None:
            try:
                samples = len(loader) * (loader.batch_size or 1)
            except Exception:  # a length that cannot be told, for whatever reason of the script's own
                samples = None
        return Tape(
            batches=tuple(digest for digest, _ in self._noted),
            shapes=tuple(shape for _, shape in self._noted),
            samples=samples,
        )

    def _note(self, key: str, batch: Any) -> None:
        if len(self._noted) < FIRST_BATCHES and key in self._spec.training_loaders:
            self._noted.append(digest_batches([batch]))


class FidelityRun:
    """Holds a script's weights and notes its gradients.

    Args:
        spec: what is asked.
        folder: the trial's own.
        leads: this process writes; the others of a launcher hold their weights all the same.
        world_size: processes of the training.
    """

    def __init__(self, spec: TrialSpec, folder: Path, *, leads: bool = True, world_size: int = 1) -> None:
        assert spec.fidelity is not None
        self._plan: FidelityPlan = spec.fidelity
        self._folder, self._leads = folder, leads
        self._recorder = StepRecorder()
        self._recorder.keeps_state = self._plan.keeps_state
        self._points = NotedPoints(self._recorder)
        self._points.begin_point()
        # Points begin and end after as many samples in both arms: a loss scaler leaves steps out in one of them.
        step = world_size * (spec.baseline.effective_batch_size if spec.baseline is not None else 1)
        self._ends = (
            self._plan.windows * step,
            (self._plan.windows + self._plan.later_steps) * step,
            (2 * self._plan.windows + self._plan.later_steps) * step,
        )
        self._samples = 0
        self._has_exchanged = False
        self._stack = ExitStack()
        self._hooks: ScriptHooks
        self._generators: torch.Tensor | None = None
        self._draws_random = False

    def watch(self, hooks: ScriptHooks) -> None:
        """Look at steps from the first one on."""
        self._hooks = hooks
        hooks.optimizers.recorder = self._recorder
        if not self._plan.dropout:
            self._stack.enter_context(without_dropout())

    def begin(self, hooks: ScriptHooks) -> None:
        """Nothing to prepare at the first training call."""

    def turn(self, is_training: bool) -> None:
        """Remember where the random numbers stand when a model is called: what a loader draws comes before."""
        if is_training:
            self._generators = _read_generator(self._hooks.device)

    def take(self, step: ScriptStep, loss: torch.Tensor) -> bool:
        """Note a step; True when every point is done."""
        if self._generators is not None:
            now = _read_generator(self._hooks.device)
            self._draws_random = self._draws_random or not torch.equal(self._generators, now)
        self._samples += step.samples
        if self._recorder.holds:
            self._points.add(step.samples)
        else:
            self._points.pass_over(step.samples)
        first, later, last = self._ends
        if self._samples >= last or (self._samples >= first and not self._plan.later_steps):
            return True
        if self._samples >= later and not self._has_exchanged:
            self._has_exchanged = True
            self._exchange_weights()
            self._points.begin_point(restarts=False)
        elif self._samples >= first and not self._has_exchanged:
            self._recorder.holds = False
        return False

    def heard(self, line: str) -> bool:
        """What it prints does not matter."""
        return False

    def result(self, trial: ScriptTrial) -> TrialResult:
        """Return where the captures are; fewer of them when the script ended earlier."""
        self._stack.close()
        if not self._samples:
            return describe_too_short(trial)
        try:
            path = self._points.write(self._folder) if self._leads else None
        except TargetError as error:
            return TrialResult(
                spec=trial.spec,
                status=TrialStatus.UNSUPPORTED,
                cause="no-optimizer-step",
                error=error.message,
                elapsed_seconds=trial.elapsed_seconds,
            )
        return TrialResult(
            spec=trial.spec,
            status=TrialStatus.COMPLETED,
            elapsed_seconds=trial.elapsed_seconds,
            startup_seconds=trial.startup_seconds,
            captures=path,
            draws_random=self._draws_random,
        )

    def _exchange_weights(self) -> None:
        """Write the weights of the later point, or load those that the baseline wrote."""
        parameters = self._recorder.parameters
        if self._plan.weights is None:
            if self._leads:
                torch.save([parameter.detach() for parameter in parameters], self._folder / WEIGHTS_FILE)
            return
        device = parameters[0].device
        with torch.no_grad():
            saved = torch.load(self._plan.weights, map_location=device, weights_only=True)
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(value)


def _read_generator(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device).cpu() if device.type == "cuda" else torch.get_rng_state()
