"""The facts of one training that comes in both ways: as a workload, and as a script with hooks on it."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from record_factory import make_spec, make_target
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.hooks.script import ScriptHooks, ScriptSettings
from autotune.engine.hooks.steps import ScriptStep
from autotune.machine.limits.products import list_arithmetics
from autotune.probe.collect import collect_facts, time_target
from autotune.probe.sources.script import ScriptProbe
from autotune.probe.sources.script_settings import read_baseline
from autotune.probe.sources.workload import probe_workload
from autotune.probe.time_shares import ProbePolicy, TimeShares
from autotune.records.config import TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.script import Script
from autotune.records.trial import TrialResult, TrialSpec
from autotune.runs.script_source import ScriptSource
from autotune.runs.source import Found
from autotune.targets.workload import check_workload

SAMPLES, BATCH, ACCUMULATION = 48, 8, 2
CPU = torch.device("cpu")
LIMIT_SECONDS = 600.0
POLICY = ProbePolicy(memory_grace=50.0)
"""On a busy machine a look may take many times as long."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Small samples, some of them turned round by numpy's generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = torch.full((4,), float(index))
        return (sample if np.random.rand() < 0.5 else -sample), torch.tensor(index % 3)


class Small:
    """A small classifier, as a workload and as the parts of a script."""

    baseline = TrainConfig(
        micro_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        num_threads=1,
        optimizer_implementation="for-loop",
    )

    def build_model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def train_dataset(self) -> Samples:
        return Samples()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.001, foreach=False)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.last_loss = loss.item()
        return loss


class RunEnded(Exception):
    """Ends the script, as the trial's process does."""


def make_probe_spec() -> TrialSpec:
    limits = {"time_limit_seconds": LIMIT_SECONDS, "warmup_cap_seconds": 0.2, "measure_seconds": 0.2}
    target = make_target("small", ".", script=Script(command=("python", "train.py")))
    return make_spec(None, number=0, purpose="probe", target=target, device="cpu", ceilings_seconds=0.3, **limits)


Kept = list[TrialResult]


def probe_as_workload(small: Small) -> tuple[TrialResult, Kept]:
    kept: Kept = []
    loaded = check_workload(small, label="toy.py:workload", fingerprint="0" * 12)
    return probe_workload(
        make_probe_spec(), loaded, CPU, started=time.monotonic(), keep=kept.append, policy=POLICY
    ), kept


def train(small: Small) -> None:
    """Train for ever, as a script that nobody has changed does."""
    torch.manual_seed(0)
    model = small.build_model()
    optimizer = small.build_optimizer(model)
    loader = DataLoader(small.train_dataset(), batch_size=BATCH, shuffle=True)
    while True:
        for number, batch in enumerate(loader):
            (small.compute_loss(model, batch) / ACCUMULATION).backward()
            if number % ACCUMULATION == ACCUMULATION - 1:
                optimizer.step()
                optimizer.zero_grad()


def probe_as_script(small: Small) -> tuple[TrialResult, Kept]:
    kept: Kept = []
    found: list[Found] = []
    spec, shares, has_begun = make_probe_spec(), TimeShares(time.monotonic(), LIMIT_SECONDS, POLICY), False

    def resume(advance: Callable[[], object]) -> None:
        try:
            advance()
        except StopIteration as end:
            found.append(end.value)
            raise RunEnded from None

    def turn(is_training: bool) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            steps.begin()
            resume(lambda: next(run))
        steps.turn(is_training)
        if not is_training:
            source.turn_aside()

    def take(step: ScriptStep) -> None:
        taken = steps.add_step(step, step.losses[0])
        resume(lambda: run.send(taken))

    hooks = ScriptHooks(ScriptSettings(TrainConfig()), on_step=take, turn=turn, now=time.perf_counter, inspects=True)
    steps = ScriptSource(hooks, spec, samples_per_window=BATCH * ACCUMULATION)
    source = ScriptProbe(hooks, steps, spec, shares=shares)
    source.is_seeded = True
    run = time_target(source, seed=0)
    with hooks.installed(), pytest.raises(RunEnded):
        train(small)
    timed = found[0].complete(spec, elapsed_seconds=shares.elapsed_seconds, startup_seconds=0.0)
    return collect_facts(source, timed, shares, keep=kept.append), kept


WAYS_IN = {"workload": probe_as_workload, "script": probe_as_script}


@pytest.fixture(scope="module", autouse=True)
def _as_it_was() -> Iterator[None]:
    threads, generators = torch.get_num_threads(), read_generators()
    torch.set_num_threads(1)
    torch._dynamo.utils.counters.clear()  # of tests before in this process, after which nothing is looked for
    yield
    torch.set_num_threads(threads)
    restore_generators(generators)


@pytest.fixture(scope="module", params=WAYS_IN)
def probed(request: pytest.FixtureRequest, _as_it_was: None) -> tuple[TrialResult, Kept]:
    return WAYS_IN[request.param](Small())


@pytest.fixture(scope="module")
def facts(probed: tuple[TrialResult, Kept]) -> TargetFacts:
    assert probed[0].facts is not None
    return probed[0].facts


@pytest.mark.parametrize(("more", "size"), [((), 8), ((20,), 28)], ids=["one loader", "two loaders"])
def test_the_batch_of_a_script_is_what_all_its_loaders_give(more: tuple[int, ...], size: int) -> None:
    model, data = nn.Linear(4, 2), TensorDataset(torch.randn(80, 4))
    loaders = [DataLoader(data, batch_size=8, shuffle=True), *(DataLoader(data, batch_size=one) for one in more)]
    steps = list[ScriptStep]()
    hooks = ScriptHooks(ScriptSettings(TrainConfig()), on_step=steps.append, turn=lambda _: None, now=time.perf_counter)
    with hooks.installed():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batches in zip(*loaders, strict=False):
            model(torch.cat([x for (x,) in batches])).sum().backward()
            optimizer.step()
        script, step = Script(command=("python", "train.py")), steps[-1]
        baseline = read_baseline(hooks, script, micro_batches=step.micro_batches, samples=step.samples)
    assert baseline.effective_batch_size == step.samples == size


@pytest.mark.parametrize(
    ("batches", "calls", "evaluations"),
    [(16, 1, 1), (4, 4, 4), (1, 3, 1), (4, 0, 4)],
    ids=["put together", "accumulated", "called for several losses", "called past the hooks"],
)
def test_a_step_evaluates_what_the_script_calls_its_model_with(batches: int, calls: int, evaluations: int) -> None:
    steps: Any = None
    hooks: Any = SimpleNamespace(steps=3, models=SimpleNamespace(roots=[nn.Linear(1, 1)]), device=CPU)
    probe = ScriptProbe(hooks, steps, make_probe_spec(), shares=TimeShares(0.0, LIMIT_SECONDS))
    probe._note_step(ScriptStep(16, (), batches, closures=0, calls=calls))
    assert probe._count_evaluations() == evaluations


@pytest.mark.slow_cases("workload")
def test_the_baseline_is_what_the_training_does(probed: tuple[TrialResult, Kept], facts: TargetFacts) -> None:
    names = ("micro_batch_size", "gradient_accumulation_steps", "optimizer_implementation", "num_threads", "precision")
    assert {name: getattr(facts.baseline, name) for name in names} == {
        name: getattr(Small.baseline, name) for name in names
    }
    assert probed[0].spec.config == facts.baseline


def test_the_model_and_the_optimizer_are_described(facts: TargetFacts) -> None:
    parameters = sum(p.numel() for p in Small().build_model().parameters())
    assert (facts.model.parameter_count, facts.model.parameter_bytes) == (parameters, 4 * parameters)
    assert facts.model.has_batch_norm
    assert facts.numerics["micro_batch_size"] == facts.numerics["gradient_accumulation_steps"] == "semantic"
    assert not facts.model.has_4d_convolution
    assert facts.model.checkpointable_blocks == 3
    # The layers' products, twice for each pass; the first layer has no gradient of its input to compute.
    forward = 2 * (4 * 8 + 3 * 64 + 8 * 3)
    assert facts.model.flops_per_sample == pytest.approx(3 * forward, rel=0.1)
    assert facts.optimizer.name == "AdamW"
    assert "fused" in facts.optimizer.implementations


def test_the_data_are_looked_at(facts: TargetFacts) -> None:
    data = facts.data
    assert (data.sample_count, data.random_sources, data.iterable) == (SAMPLES, ("numpy",), False)
    assert data.seconds_per_sample > 0
    assert data.cpu_fraction is not None
    assert data.batch_bytes == BATCH * (4 * 4 + 8)
    assert data.epoch_start_seconds is not None


def test_a_step_is_taken_apart(facts: TargetFacts) -> None:
    phases = facts.phases
    assert min(phases.forward_seconds, phases.backward_seconds, phases.optimizer_seconds) > 0
    assert facts.compute_seconds_per_step > 0
    assert facts.work is not None
    assert facts.work.operations_per_step > 0


def test_a_line_that_asks_for_a_value_is_named(facts: TargetFacts) -> None:
    lines, first = inspect.getsourcelines(Small.compute_loss)
    line = first + next(at for at, text in enumerate(lines) if ".item()" in text)
    assert facts.work is not None
    assert ACCUMULATION <= facts.work.host_syncs_per_step <= ACCUMULATION + 1  # where an epoch starts, for its seed
    assert [place.rpartition("/")[2] for place in facts.work.host_sync_places] == [f"test_collect.py:{line}"]


def test_the_memory_is_looked_at(facts: TargetFacts) -> None:
    memory, parameters = facts.memory, facts.model.parameter_bytes
    assert memory is not None
    assert memory.missing == ""
    buffers = sum(buffer.nbytes for buffer in Small().build_model().buffers())
    assert (memory.weights_bytes, memory.gradient_bytes) == (parameters + buffers, parameters)
    assert memory.optimizer_bytes >= 2 * parameters
    assert (memory.modes[0].precision, memory.modes[0].activation_checkpointing) == ("fp32", "off")  # others in time
    assert memory.calibrated_micro_batch_size is not None


def test_settings_are_tried_while_it_trains(facts: TargetFacts) -> None:
    tried = {one.knob for one in facts.switched}
    assert tried <= {"matmul_precision", "num_threads"}
    assert ("matmul_precision" in tried) is ("fp32-medium" in list_arithmetics(CPU))
    assert all(math.isfinite(one.log_speedup) and one.log_sd > 0 for one in facts.switched)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_machine_is_measured_last(probed: tuple[TrialResult, Kept], facts: TargetFacts) -> None:
    assert facts.ceilings.device == "cpu"
    assert facts.ceilings.matmul
    result, kept = probed
    assert [one.facts is not None and one.facts.ceilings.matmul for one in kept] == [(), ()]
    assert [one.measurement for one in kept] == [result.measurement] * 2
    assert kept[-1].facts is not None
    assert kept[-1].facts.data.batch_bytes == facts.data.batch_bytes  # the loader alone was looked at by then
