"""Every run over both ways in: a workload that is driven, and a script whose hooks hand over its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record_factory import make_spec, make_target, read_drift_limits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.drift.record.trace_file import WEIGHTS_FILE, GradientTrace, read_trace
from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.hooks.script import ScriptHooks, ScriptSettings
from autotune.engine.hooks.steps import ScriptStep
from autotune.engine.loop import backend_settings
from autotune.measure.throughput import TrainingEndedError
from autotune.records.config import TrainConfig
from autotune.records.script import PrintedMetric, Script
from autotune.records.trial import GradientPlan, TrialSpec, TrialStatus
from autotune.runs.purpose import make_run
from autotune.runs.script import _add_losses
from autotune.runs.script_source import ScriptSource
from autotune.runs.source import Found
from autotune.runs.workload import run_spec
from autotune.runs.workload_source import WorkloadSource
from autotune.targets.workload import check_workload

SAMPLES, BATCH = 40, 8
CPU = torch.device("cpu")
CONFIG = TrainConfig(micro_batch_size=BATCH, num_threads=1, optimizer_implementation="for-loop")
LOADER = f"TensorDataset[{SAMPLES}] by RandomSampler"
METRIC = PrintedMetric(name="metric", direction="minimize", pattern="error=([0-9.]+)")


class Small:
    """A small regression, as a workload and as the parts of a script."""

    baseline = CONFIG

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1))

    def train_dataset(self) -> TensorDataset:
        inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        return 0.5


class RunEnded(Exception):
    """Ends the script, as the trial's process does."""


def make_run_spec(purpose: Any, **more: Any) -> TrialSpec:
    script = Script(command=("python", "train.py"), metrics=(METRIC,))
    usual: dict[str, Any] = {
        "number": 0,
        "target": make_target("small", ".", script=script),
        "baseline": CONFIG,
        "training_loaders": (LOADER,),
        "measure_seconds": 0.5,
    }
    return make_spec(CONFIG, purpose=purpose, **(usual | more))


def run_workload(small: Small, spec: TrialSpec, folder: Path, *, steps: int | None = None) -> Found:
    assert steps is None, "a workload has no end"
    loaded = check_workload(small, label="toy.py:workload", fingerprint="0" * 12)
    with backend_settings(CONFIG):
        source = WorkloadSource(loaded, CONFIG, CPU, seed=0)
        return source.drive(make_run(source, spec, CONFIG, folder, seed=0))


class HookedScript:
    """A script with hooks on it, whose steps go to a run; `RunEnded` ends it, as the end of its process does.

    Attributes:
        found: by the run, once it has ended.
    """

    def __init__(self, spec: TrialSpec, folder: Path) -> None:
        self.found: Found | None = None
        self.hooks = ScriptHooks(
            ScriptSettings(TrainConfig()), on_step=self._take, turn=self._turn, now=time.perf_counter
        )
        self.source = ScriptSource(self.hooks, spec, samples_per_window=BATCH)
        self._run = make_run(self.source, spec, CONFIG, folder, seed=0)
        self._has_begun = False

    def print(self, line: str) -> None:
        if self.source.metrics.read(line):
            self._resume(lambda: self._run.throw(TrainingEndedError()))

    def end(self) -> None:
        while True:
            self._resume(lambda: self._run.throw(TrainingEndedError()))

    def _turn(self, is_training: bool) -> None:
        if not self._has_begun and is_training:
            self._has_begun = True
            self.source.begin()
            self._resume(lambda: next(self._run))
        if self._has_begun:
            self.source.turn(is_training)

    def _take(self, step: ScriptStep) -> None:
        taken = self.source.add_step(step, step.losses[0])
        self._resume(lambda: self._run.send(taken))

    def _resume(self, advance: Callable[[], object]) -> None:
        try:
            advance()
        except StopIteration as end:
            self.found = end.value
            raise RunEnded from None


def train(small: Small, script: HookedScript, steps: int | None) -> None:
    """Train as scripts do, for so many steps or for ever."""
    torch.manual_seed(0)
    model = small.build_model()
    optimizer = small.build_optimizer(model)
    loader = DataLoader(small.train_dataset(), batch_size=BATCH, shuffle=True)
    count = 0
    while True:
        for batch in loader:
            if count == steps:
                return
            optimizer.zero_grad()
            small.compute_loss(model, batch).backward()
            optimizer.step()
            count += 1
        script.print("error=0.5")


def train_as_pyro(small: Small, _script: HookedScript, _steps: int | None) -> None:
    """Train layers that are called past their model, with an optimizer for each parameter, made at its first step."""
    torch.manual_seed(0)
    model = small.build_model()
    parameters = [one for group in small.build_optimizer(model).param_groups for one in group["params"]]
    optimizers: dict[int, torch.optim.Optimizer] = {}
    while True:
        for batch in DataLoader(small.train_dataset(), batch_size=BATCH, shuffle=True):
            hidden = batch[0]
            for layer in model:
                hidden = layer(hidden)
            nn.functional.mse_loss(hidden, batch[1]).backward()
            for at, parameter in enumerate(parameters):
                if at not in optimizers:
                    optimizers[at] = torch.optim.SGD([parameter], lr=0.05)
                optimizers[at].step()
                optimizers[at].zero_grad()


def run_script(
    small: Small,
    spec: TrialSpec,
    folder: Path,
    *,
    steps: int | None = None,
    train: Callable[[Small, HookedScript, int | None], None] = train,
) -> Found:
    script = HookedScript(spec, folder)
    with script.hooks.installed():
        try:
            train(small, script, steps)
            script.end()
        except RunEnded:
            assert script.found is not None
            return script.found
    raise AssertionError("the run went on after the script's end")


RUNS = {"workload": run_workload, "script": run_script}
Runner = Callable[..., Found]


def test_only_a_workloads_skipped_steps_are_counted(tmp_path: Path) -> None:
    """What was not counted is not none: the loss check of half precision would take it for a proof."""
    spec = make_run_spec("quality", quality_steps=4)
    assert run_workload(Small(), spec, tmp_path).curves[0].skipped == 0
    assert run_script(Small(), spec, tmp_path).curves[0].skipped is None


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    threads, generators = torch.get_num_threads(), read_generators()
    torch.set_num_threads(1)
    yield RUNS[request.param]
    torch.set_num_threads(threads)
    restore_generators(generators)


def trace_of(found: Found) -> GradientTrace:
    assert found.captures is not None
    trace = read_trace(found.captures)
    assert trace is not None
    return trace


def test_steps_are_timed_with_their_losses(run: Runner, tmp_path: Path) -> None:
    found = run(Small(), make_run_spec("measure"), tmp_path)
    assert found.measurement is not None
    assert found.measurement.samples_per_second > 0
    (curve,) = found.curves
    blocks = sum(block.optimizer_steps for block in found.measurement.blocks)
    assert len(curve.losses) >= found.measurement.warmup_steps + blocks
    assert curve.samples == BATCH * len(curve.losses)
    assert curve.losses[-1] < curve.losses[0]


def test_a_training_learns_so_many_steps_and_is_evaluated(run: Runner, tmp_path: Path) -> None:
    (curve,) = run(Small(), make_run_spec("quality", quality_steps=12, evaluate=True), tmp_path).curves
    assert (len(curve.losses), curve.samples, curve.metrics) == (12, 12 * BATCH, {"metric": 0.5})
    (short,) = run(Small(), make_run_spec("quality", quality_steps=12), tmp_path).curves
    assert short.losses == curve.losses
    assert short.metrics == {}


@pytest.mark.parametrize(("first", "later_steps"), [(None, 0), (None, 3), (2, 0), (2, 3)])
def test_gradients_are_the_same_twice(run: Runner, tmp_path: Path, first: int | None, later_steps: int) -> None:
    traces = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        weights = str(tmp_path / "one" / WEIGHTS_FILE) if name == "two" and later_steps else None
        plan = GradientPlan(windows=4, first_windows=first, later_steps=later_steps, weights=weights)
        found = run(Small(), make_run_spec("fidelity", fidelity=plan), folder)
        assert not found.draws_random
        if weights is None:  # a candidate that loads them takes no steps between the points where it can come back
            assert [(len(curve.losses), curve.samples) for curve in found.curves] == [(3, 3 * BATCH)][:later_steps]
        traces.append(trace_of(found))
    assert [len(point.gradients.keys) for point in traces[0].points] == [first or 4, 4][: 1 + bool(later_steps)]
    for ours, theirs in zip(traces[0].points, traces[1].points, strict=True):
        assert np.array_equal(ours.gradients.rows, theirs.gradients.rows)
        assert np.array_equal(ours.gradients.keys, theirs.gradients.keys)
        assert np.array_equal(ours.updates.rows, theirs.updates.rows)


class InAnyOrder(Small):
    """Its optimizer gets its parameters in another order each time, as from a set."""

    orders = 0

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.orders += 1
        parameters = list(model.parameters())
        return torch.optim.SGD(parameters if self.orders % 2 else parameters[::-1], lr=0.05)


class Normed(Small):
    """Trained in eval mode, by statistics that each run has others of."""

    models = 0

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Tanh(), nn.Linear(8, 1)).eval()
        self.models += 1
        model[1].running_mean.fill_(float(self.models))
        return model


def trace_twice(run: Callable[[TrialSpec, Path], Found], folder: Path) -> list[GradientTrace]:
    """Return the traces of two runs, the second one at the weights that the first has come to."""
    weights, traces = None, []
    for name in ("one", "two"):
        place = folder / name
        place.mkdir()
        plan = GradientPlan(windows=4, later_steps=3, weights=weights)
        traces.append(trace_of(run(make_run_spec("fidelity", fidelity=plan), place)))
        weights = str(place / WEIGHTS_FILE)
    return traces


def test_gradients_are_the_same_in_whatever_order_the_optimizer_has_its_parameters(run: Runner, tmp_path: Path) -> None:
    small = InAnyOrder()
    traces = trace_twice(partial(run, small), tmp_path)
    assert small.orders == 2
    assert traces[0].layers.names == traces[1].layers.names
    for ours, theirs in zip(traces[0].points, traces[1].points, strict=True):
        assert np.array_equal(ours.gradients.rows, theirs.gradients.rows)


def test_gradients_at_weights_of_another_run_are_by_its_statistics_too(tmp_path: Path) -> None:
    first, second = trace_twice(partial(run_script, Normed()), tmp_path)
    at_first, later = (
        np.array_equal(ours.gradients.rows, theirs.gradients.rows)
        for ours, theirs in zip(first.points, second.points, strict=True)
    )
    assert (at_first, later) == (False, True)


def test_so_they_are_of_layers_that_were_called_before_there_was_an_optimizer(tmp_path: Path) -> None:
    traces = trace_twice(partial(run_script, InAnyOrder(), train=train_as_pyro), tmp_path)
    assert traces[0].layers.names == traces[1].layers.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert [len(point.gradients.keys) for point in traces[0].points] == [3, 4]  # of the first step nothing is known yet
    for ours, theirs in zip(traces[0].points, traces[1].points, strict=True):
        assert np.array_equal(ours.gradients.rows, theirs.gradients.rows)


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_draws_unless_it_is_taken_out(run: Runner, tmp_path: Path, dropout: bool) -> None:
    plan = GradientPlan(windows=3, later_steps=0, dropout=dropout)
    assert run(Small(dropout=0.5), make_run_spec("fidelity", fidelity=plan), tmp_path).draws_random is dropout


def test_data_are_recorded_batch_by_batch(run: Runner, tmp_path: Path) -> None:
    one, two = (run(Small(), make_run_spec("tape", quality_steps=5), tmp_path).tape for _ in range(2))
    assert one is not None
    assert one == two
    assert set(one.shapes[:5]) == {"float32[8, 4] + float32[8, 1]"}
    assert one.samples == SAMPLES


def test_losses_on_several_devices_are_added() -> None:
    losses = (torch.zeros((), device="meta"), torch.ones(()))
    assert _add_losses(ScriptStep(8, losses, micro_batches=2, closures=0)).device.type == "meta"


def test_a_script_that_ends_makes_do_with_what_it_took(tmp_path: Path) -> None:
    (curve,) = run_script(Small(), make_run_spec("quality", quality_steps=12, evaluate=True), tmp_path, steps=7).curves
    assert (len(curve.losses), curve.metrics) == (7, {"metric": 0.5})
    plan = GradientPlan(windows=5, later_steps=4)
    trace = trace_of(run_script(Small(), make_run_spec("fidelity", fidelity=plan), tmp_path, steps=3))
    assert [len(point.gradients.keys) for point in trace.points] == [3]
    with pytest.raises(TrainingEndedError):
        run_script(Small(), make_run_spec("measure"), tmp_path, steps=1)


WORKLOAD = """\
import torch
from torch import nn

class Toy:
    metric = ("accuracy", "maximize")
    width = 8
    knobs = {"width": (8, 16)}

    def build_model(self):
        raise RuntimeError("it was built")

    build_optimizer = train_dataset = compute_loss = evaluate = build_model

workload = Toy()
"""


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_drift": read_drift_limits(metrics=["f1=0.1pp"])}, "a limit is given for 'f1'"),
        ({"named_knobs": ("wdth",)}, "'wdth' is no knob"),
    ],
)
def test_what_a_workload_has_not_is_told_before_it_is_built(
    tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    (tmp_path / "named_toy.py").write_text(WORKLOAD)
    spec = make_spec(None, purpose="probe", target=make_target("named_toy.py:workload", str(tmp_path)), **asked)
    result = run_spec(spec, tmp_path, started=time.monotonic())
    assert (result.status, result.cause) == (TrialStatus.CRASHED, "usage")
    assert message in result.error
    assert result.hint
