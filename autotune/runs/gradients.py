"""Record a training's gradients: the same windows at the same weights, once at the start and once further on.

    M windows, weights held ── K steps ── weights written or loaded ── M windows, weights held ── gradient trace

Both arms begin with the same seed, and a candidate loads the weights that the baseline has written. A workload comes
back to its first windows; a script goes on through its data all the while, so that both arms see the same batches at
the same samples.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from autotune.drift.record.step_records import StepRecords
from autotune.drift.record.trace_file import WEIGHTS_FILE
from autotune.engine.determinism import without_dropout
from autotune.engine.gradients import StepRecorder
from autotune.measure.throughput import TrainingEndedError, finite_or_none
from autotune.records.trial import GradientPlan, LossCurve
from autotune.runs.source import Found, Run, StepSource


class GradientRun:
    """Holds a training's weights and records what its optimizers get and do.

    Args:
        source: of the steps.
        plan: which windows, at which weights.
        folder: the trial's own.
        seed: that the training was started with.
        leads: this process writes; the others of a launcher hold their weights all the same.
    """

    def __init__(
        self,
        source: StepSource,
        plan: GradientPlan,
        folder: Path,
        *,
        seed: int,
        leads: bool = True,
    ) -> None:
        self._source, self._plan, self._folder, self._leads = source, plan, folder, leads
        self._seed, self._losses = seed, list[Tensor]()
        self._recorder = StepRecorder(source.name_parameters)
        self._recorder.keeps_state = plan.keeps_state
        self._points = StepRecords(self._recorder)
        self._windows = plan.first_windows or plan.windows
        self._done = 0
        self._samples = self._trained = 0
        self._stack = ExitStack()
        source.record(self._recorder)
        if not plan.dropout:  # from now on: a script may take the functions from torch before it trains
            self._stack.enter_context(without_dropout())

    def run(self) -> Run[Found]:
        """Record; return where the trace was written.

        Raises:
            TargetError: no optimizer step was seen.
            TrainingEndedError: the training took no step.
        """
        with self._stack:
            try:
                yield from self._record_points()
            except TrainingEndedError:
                if not self._samples:
                    raise
        path = self._points.write(self._folder) if self._leads else None
        return Found(curves=self._list_curves(), captures=path, draws_random=self._source.draws_random)

    def _list_curves(self) -> tuple[LossCurve, ...]:
        """Return the losses between the points, if there were any."""
        losses = tuple(finite_or_none(float(loss)) for loss in self._losses)
        return (LossCurve(seed=self._seed, losses=losses, samples=self._trained),) if losses else ()

    def _record_points(self) -> Run[None]:
        plan, first = self._plan, self._windows
        yield from self._record_point(first, until=first)
        if not plan.later_steps:
            return
        if plan.weights is None or self._source.samples_per_window is not None:
            self._recorder.holds = False
            yield from self._take_steps(first, until=first + plan.later_steps)
        if plan.weights is not None:
            self._source.load_weights(Path(plan.weights))
        else:
            self._source.save_weights(self._folder / WEIGHTS_FILE, writes=self._leads)
        yield from self._record_point(plan.windows, until=first + plan.later_steps + plan.windows)

    def _record_point(self, windows: int, *, until: int) -> Run[None]:
        self._windows, restarts = windows, self._source.rewind(self._recorder)
        if restarts:
            self._done, until = 0, windows
        self._points.begin_point(restarts=restarts)
        yield from self._take_steps(0, until=until)

    def _take_steps(self, number: int, *, until: int) -> Run[None]:
        """Take steps up to the end of a window.

        Points end after as many samples in both arms where the data only go on: a loss scaler leaves steps out in
        one of them.
        """
        per_window = self._source.samples_per_window
        while self._done < until * (per_window or 1):
            self._source.begin_window(number, is_last=self._recorder.holds and number == self._windows - 1)
            step = yield
            number += 1
            self._samples += step.samples
            self._done += 1 if per_window is None else step.samples
            if self._recorder.holds:
                self._points.add(step.samples)
            else:
                self._points.pass_over(step.samples)
                self._losses.append(step.loss)
                self._trained += step.samples
