"""What a workload's memory is said to be, against its shapes and against a fresh process."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_workloads as toys
import numpy as np
import pytest
import torch
from torch import Tensor

from autotune.engine.dataloader import moved_generators, read_generators
from autotune.measure.memory import resident_bytes
from autotune.probe.memory.look import look_at_memory
from autotune.probe.memory.workload import WorkloadMemory
from autotune.records import TrainConfig
from autotune.records.facts import MemoryFacts

CPU = torch.device("cpu")
MIB = 2**20
LIMIT = 4 * 2**30


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def look(workload: Any, **options: Any) -> MemoryFacts:
    loaded = toys.load(workload)
    defaults: dict[str, Any] = {
        "base_bytes": 200 * MIB,
        "limit_bytes": LIMIT,
        "supported": ("fp32",),
        "checkpoints": False,
    }
    settings = defaults | options
    subject = WorkloadMemory(loaded, CPU, seed=0, room_bytes=settings["limit_bytes"])
    return look_at_memory(subject, settings.pop("baseline", loaded.baseline), CPU, **settings)


@pytest.fixture(scope="module")
def facts() -> MemoryFacts:
    return look(toys.large, supported=("fp32", "bf16", "fp16"), checkpoints=True, budget_seconds=60.0)


def test_weights_gradients_and_state_are_counted(facts: MemoryFacts) -> None:
    parameters = sum(p.numel() for p in toys.Encoder().parameters())
    assert facts.weights_bytes == facts.gradient_bytes == 4 * parameters
    assert 8 * parameters <= facts.optimizer_bytes < 8 * parameters + 4096
    assert facts.missing == ""
    assert facts.activation_bytes_per_sample == facts.modes[0].bytes_per_sample > 0


def test_every_mode_is_predicted_and_the_baselines_comes_first(facts: MemoryFacts) -> None:
    modes = [(mode.precision, mode.activation_checkpointing) for mode in facts.modes]
    assert modes[0] == ("fp32", "off")
    assert set(modes) == {(p, c) for p in ("fp32", "bf16", "fp16") for c in ("off", "selective", "full")}
    assert len(modes) == 9


def test_checkpointing_and_half_precision_need_less(facts: MemoryFacts) -> None:
    growth = {(mode.precision, mode.activation_checkpointing): mode.bytes_per_sample for mode in facts.modes}
    for precision in ("fp32", "bf16"):
        assert growth[precision, "full"] < growth[precision, "selective"] < growth[precision, "off"]
    for checkpointing in ("off", "full"):
        assert growth["bf16", checkpointing] < growth["fp32", checkpointing]
    assert growth["fp16", "off"] == growth["bf16", "off"]


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(facts: MemoryFacts) -> None:
    for mode in facts.modes:
        largest = mode.largest_micro_batch_size
        assert largest is not None
        assert mode.predict_bytes(largest) <= 0.95 * LIMIT < mode.predict_bytes(largest + 2)


def test_nothing_fits_into_too_little(facts: MemoryFacts) -> None:
    found = look(toys.Texts(), limit_bytes=50 * MIB)
    assert found.modes[0].largest_micro_batch_size == 0


def test_the_real_step_corrects_the_shapes(facts: MemoryFacts) -> None:
    assert facts.calibrated_micro_batch_size is not None
    assert facts.calibrated_micro_batch_size % 32 == 0
    assert facts.calibration_error is not None
    assert -0.9 < facts.calibration_error < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("workload", [toys.Counted(), toys.Endless(), toys.Texts(samples=3), toys.Noting()])
def test_workloads_that_run_on_shapes(workload: Any) -> None:
    found = look(workload)
    assert found.missing == ""
    assert found.activation_bytes_per_sample is not None
    if isinstance(workload, toys.Noting):
        assert type(workload.last) is Tensor


@pytest.mark.parametrize("workload", [toys.Reading(), toys.Numpy(), toys.Chosen(), toys.OnlyReal()])
@pytest.mark.slow
def test_what_does_not_run_on_shapes_is_followed_for_real(workload: Any) -> None:
    found = look(workload, supported=("fp32", "bf16"), checkpoints=True, budget_seconds=60.0)
    assert found.missing == ""
    growth = {(mode.precision, mode.activation_checkpointing): mode.bytes_per_sample for mode in found.modes}
    assert len(growth) == 6
    assert growth["fp32", "full"] < growth["fp32", "off"]


def test_what_takes_no_step_is_counted_and_told_in_one_line() -> None:
    found = look(toys.Broken())
    assert found.modes == ()
    assert found.weights_bytes > 0
    assert found.missing.endswith("RuntimeError: out of order")


def test_a_model_that_cannot_be_built_is_told() -> None:
    class Unbuildable(toys.Texts):
        def build_model(self) -> Any:
            raise OSError("no such checkpoint")

    found = look(Unbuildable())
    assert found.modes == ()
    assert "no such checkpoint" in found.missing


@pytest.mark.slow
def test_a_checkpointed_baseline_is_its_first_mode() -> None:
    baseline = toys.Texts.baseline.replace(activation_checkpointing="full", compile_mode="default")
    found = look(toys.Texts(), baseline=baseline, checkpoints=True, budget_seconds=30.0)
    assert found.modes[0].activation_checkpointing == "full"
    assert {mode.activation_checkpointing for mode in found.modes} == {"off", "full", "selective"}


@pytest.mark.slow
def test_generators_stand_where_they_stood_and_no_tensor_is_left() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    gc.collect()
    before, alive = read_generators(), count_tensors()
    look(toys.Texts())
    assert moved_generators(before, read_generators()) == ()
    gc.collect()
    assert count_tensors() <= alive


def count_tensors() -> int:
    return sum(1 for one in gc.get_objects() if issubclass(type(one), Tensor))


@pytest.mark.slow
def test_the_budget_is_kept() -> None:
    seconds, modes = [], []
    for budget in (600.0, 0.5):  # all of it tells what a part of it may take here and now
        began = time.monotonic()
        found = look(toys.large, supported=("fp32", "bf16"), checkpoints=True, budget_seconds=budget)
        seconds.append(time.monotonic() - began)
        modes.append(len(found.modes))
    assert seconds[1] < seconds[0]
    assert 1 <= modes[1] < modes[0] == 6


TRAIN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import memory_workloads as toys, torch
from autotune.engine.loop import Training
from autotune.measure.memory import peak_host_bytes, resident_bytes
from autotune.records import TrainConfig
torch.set_num_threads(1)
loaded, base = toys.load(toys.large), resident_bytes()
config = loaded.baseline.replace(micro_batch_size=int(sys.argv[2]), activation_checkpointing=sys.argv[3])
loaded.workload.samples = 2 * config.micro_batch_size
training = Training(loaded, config, device=torch.device("cpu"), seed=0)
for _ in range(3):
    training.step()
print(json.dumps([base, peak_host_bytes()]))
"""


@pytest.mark.skipif(not resident_bytes(), reason="needs Linux's /proc")
@pytest.mark.parametrize("checkpointing", ["off", "full"])
@pytest.mark.slow
def test_a_fresh_process_needs_what_was_predicted(facts: MemoryFacts, checkpointing: str) -> None:
    size = 256
    command = [sys.executable, "-c", TRAIN, str(Path(__file__).parent), str(size), checkpointing]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    base, measured = json.loads(finished.stdout)
    mode = facts.find_mode("fp32", checkpointing)
    assert mode is not None
    # This process has more in it than a trial's: what it holds beside the training is replaced by what that one holds.
    grown = mode.predict_bytes(size) - mode.predict_bytes(0)
    assert base + 150 * MIB + grown == pytest.approx(measured, rel=0.35)


@pytest.mark.slow
def test_defaults_are_those_of_a_config() -> None:
    assert look(toys.Texts(), baseline=TrainConfig(micro_batch_size=4)).calibrated_micro_batch_size in (4, 8, 16, 32)
