"""A script's training as a source of steps: the hooks report each one, and the run that waits gets it."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.engine.data_trace import FIRST_BATCHES, digest_batches
from autotune.engine.dataloader import read_batch_size
from autotune.engine.device import read_generator
from autotune.engine.gradients import StepRecorder, name_parameters
from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.measure.clock import Clock, PausableClock, clock_for
from autotune.measure.hopeless import Phase
from autotune.measure.memory import list_children
from autotune.measure.throughput import TrainingEndedError
from autotune.measure.timing import Timing
from autotune.records.script import PrintedMetric
from autotune.records.trial import DataTrace, TrialSpec
from autotune.runs.source import Found, Run, Step


class PrintedMetrics:
    """The figures of merit that a script prints, the last of each.

    Attributes:
        awaited: names of those that have not been printed since `await_all`.
    """

    def __init__(self, metrics: tuple[PrintedMetric, ...]) -> None:
        self.awaited: set[str] = set()
        self._metrics = {metric.name: metric for metric in metrics}
        self._values = dict.fromkeys(self._metrics, math.nan)

    def await_all(self) -> None:
        """Wait for each to be printed from now on: what was printed before was of a younger model."""
        self.awaited = set(self._metrics)

    def read(self, line: str) -> bool:
        """Look for them in a printed line; True when the last one that was waited for is here."""
        found = {name: read_metric(line, metric) for name, metric in self._metrics.items()}
        numbers = {name: value for name, value in found.items() if value is not None}
        self._values |= numbers
        was_awaited = bool(self.awaited & numbers.keys())
        self.awaited -= numbers.keys()
        return was_awaited and not self.awaited

    def values(self) -> dict[str, float]:
        """Return them by name; NaN for one that was never printed."""
        return dict(self._values)


def read_metric(line: str, metric: PrintedMetric) -> float | None:
    """Return the figure that a printed line holds; None when it holds none."""
    try:
        if metric.pattern is not None:
            found = re.search(metric.pattern, line)
            return None if found is None or found.group(1) is None else float(found.group(1))
        record = _read_object(line) if line.lstrip().startswith("{") else None
        value = record.get(metric.key) if isinstance(record, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return None


def _read_object(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return ast.literal_eval(line.strip())  # as Python prints a dict


class ScriptSource:
    """Hands the steps of a script to a run; the members that are not documented here are `StepSource`'s.

    Args:
        hooks: on the script.
        spec: of the trial.
        samples_per_window: of an optimizer step of all processes under the script's own settings.

    Attributes:
        metrics: that the script prints.
        on_step: told of every step that is timed, beside the run.
    """

    def __init__(self, hooks: ScriptHooks, spec: TrialSpec, *, samples_per_window: int) -> None:
        self.samples_per_window: int | None = samples_per_window
        self.timing: Timing | None = None
        self.draws_random = False
        self.metrics = PrintedMetrics(spec.target.script.metrics if spec.evaluate and spec.target.script else ())
        self.on_step: Callable[[ScriptStep], None] | None = None
        self._hooks, self._spec = hooks, spec
        self._clock: PausableClock | None = None
        self._waited_seconds = 0.0
        self._recorder: StepRecorder | None = None
        self._generators: torch.Tensor | None = None
        self._batches: list[tuple[str, str]] = []

    def read_ranks(self) -> tuple[float, ...]:
        return ()  # one of them is timed, and the others are the script's

    def list_others(self) -> tuple[int, ...]:
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
            return ()
        return tuple(pid for pid in list_children(os.getppid()) if pid != os.getpid())  # its launcher's

    def name_parameters(self) -> Mapping[int, str]:
        return name_parameters(*self._hooks.models.roots)  # what its optimizers hold may be none of theirs

    @property
    def device(self) -> torch.device:
        return self._hooks.device

    @property
    def clock(self) -> Clock:
        return self._standing_clock()

    @property
    def aside_seconds(self) -> float:
        """How long the script has done something else than train."""
        return self._standing_clock().aside_seconds

    def begin(self) -> None:
        """Take notice of the script's first training call: its first batch is here."""
        self._waited_seconds = self._hooks.timer.seconds["data"]
        self._standing_clock()

    def turn(self, is_training: bool) -> None:
        """Stop the clock while the script does something else than train, such as validating."""
        if not is_training:
            self._standing_clock().pause()
            self._hooks.timer.is_aside = True
            if self.timing is not None:
                self.timing.enter(Phase.LOADING)
            return
        self.go_on()
        if self.timing is not None and self._hooks.steps == 0:
            # Of later steps it is not known when their batch was there.
            self.timing.enter(self.timing.phase)
        if self._recorder is not None:
            self._recorder.put_back()
            # What a loader draws comes before a model is called.
            self._generators = read_generator(self.device)

    def go_on(self) -> None:
        """Let the clock go on where it stands."""
        self._standing_clock().resume()
        self._hooks.timer.is_aside = False

    def add_step(self, step: ScriptStep, loss: torch.Tensor) -> Step:
        """Take notice of a step that has ended; return it as a run takes it."""
        samples = max(1, step.samples)
        if self._generators is not None:
            moved = not torch.equal(self._generators, read_generator(self.device))
            self.draws_random = self.draws_random or moved
        if self.timing is not None:
            self.go_on()
            waited = self._hooks.timer.seconds["data"]
            self.timing.record_step(loss, samples, data_wait_seconds=waited - self._waited_seconds)
            self._waited_seconds = waited
            if self.on_step is not None:
                self.on_step(step)
        return Step(samples, loss)

    def read_loss_scale(self) -> float | None:
        return self._hooks.optimizers.read_scale()

    def pin_loss_scale(self) -> bool:
        return False  # the scaler is the script's, and grows as the script has it

    def find_metrics(self) -> Run[dict[str, float]]:
        self.metrics.await_all()
        while self.metrics.awaited:
            try:
                yield
            except TrainingEndedError:
                break
        return self.metrics.values()

    def read_data(self) -> Run[Found]:
        self._hooks.loaders.on_batch = self._note_batch  # its first batch comes before its first training call
        return self._read_data()

    def _read_data(self) -> Run[Found]:
        for _ in range(self._spec.quality_steps):
            try:
                yield
            except TrainingEndedError:
                break
        return Found(tape=self._make_tape())

    def record(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._hooks.optimizers.recorder = recorder
        if self._hooks.models.began_late:  # then a step was taken before the model was found
            for optimizer in self._hooks.optimizers.optimizers:
                optimizer.state.clear()

    def rewind(self, recorder: StepRecorder) -> bool:
        return False

    def begin_window(self, number: int, *, is_last: bool) -> None:
        pass  # the script's data and random numbers come as they come

    def save_weights(self, path: Path, *, writes: bool) -> None:
        if writes:
            parameters = [parameter.detach() for parameter in self._recorded().parameters]
            torch.save((parameters, self._name_buffers()), path)

    def load_weights(self, path: Path) -> None:
        parameters, buffers = self._recorded().parameters, self._name_buffers()
        weights, constants = torch.load(path, map_location=parameters[0].device, weights_only=True)
        with torch.no_grad():
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.copy_(value)
            for name in buffers.keys() & constants.keys():
                if buffers[name].shape == constants[name].shape:  # else it is a cache
                    buffers[name].copy_(constants[name])

    def _name_buffers(self) -> dict[str, Tensor]:
        """Return what models keep beside their parameters: a batch norm in eval mode computes with its statistics."""
        roots = enumerate(self._hooks.models.roots)
        return {f"{number}.{name}": buffer for number, root in roots for name, buffer in root.named_buffers()}

    def _recorded(self) -> StepRecorder:
        assert self._recorder is not None
        return self._recorder

    def _standing_clock(self) -> PausableClock:
        if self._clock is None:
            self._clock = PausableClock(clock_for(self.device))
        return self._clock

    def _note_batch(self, key: str, batch: object) -> None:
        if len(self._batches) < FIRST_BATCHES and key in self._spec.training_loaders:
            self._batches.append(digest_batches([batch]))

    def _make_tape(self) -> DataTrace:
        loader = self._hooks.loaders.training_loader
        samples = None
        if loader is not None:
            try:
                samples = len(loader) * (read_batch_size(loader) or 1)
            except Exception:  # a length that cannot be told, for whatever reason of the script's own
                samples = None
        return DataTrace(
            batches=tuple(digest for digest, _ in self._batches),
            shapes=tuple(shape for _, shape in self._batches),
            samples=samples,
        )
