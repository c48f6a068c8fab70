"""Storages followed one by one: against sizes that are known, and against PyTorch's own tracker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import memory_workloads as toys
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import default_collate

from autotune.measure import memory
from autotune.measure.memory import (
    measure_outside_bytes,
    measure_peak,
    peak_host_bytes,
    reset_host_peak,
    resident_bytes,
    worker_bytes,
)
from autotune.probe.memory.lines import Line, find_line, find_lines, list_modes
from autotune.probe.memory.shapes import PeakWatch, ShapeModel, ShapeTraining, StepBytes, tensor_bytes
from autotune.records import TrainConfig

CPU = torch.device("cpu")
MIB = 2**20
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


def make_batch(size: int) -> Any:
    dataset = toys.Texts().train_dataset()
    return default_collate([dataset[i % len(dataset)] for i in range(size)])


def test_the_peak_is_of_what_is_alive_at_once() -> None:
    weights = torch.zeros(1000)
    with PeakWatch(CPU, [weights]) as watch:
        first = torch.ones(500)
        view = first[:10]
        del first
        assert watch.alive_bytes == 6000
        del view
        second = torch.ones(2000)
        del second
    assert watch.alive_bytes == 4000
    assert watch.restart() == 12000
    assert watch.peak_bytes == 4000


def test_storages_that_are_shared_count_once() -> None:
    block = torch.zeros(100)
    assert tensor_bytes([block, block[:10], None, torch.zeros(2)]) == 408


@pytest.mark.slow_cases("off-fp32", "full-fp32", "selective-bf16", "selective-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_pytorchs_own_tracker_finds_the_same(precision: str, checkpointing: str) -> None:
    config = TrainConfig(precision=precision, activation_checkpointing=checkpointing)
    loaded, shapes, batch = toys.load(toys.Texts()), ShapeModel(toys.Encoder()), make_batch(16)
    mine = shapes.trace(loaded, config, CPU, batch, updates=True)
    tracker, empty, model = MemTracker(), shapes.empty(batch), shapes.copy()
    with shapes.mode:
        training = ShapeTraining(loaded, config, CPU, model, updates=True)
        tracker.track_external(training.model, training.optimizer, *empty)
        with tracker:
            for _ in range(2):
                loss, _count = training._forward(empty)
                loss.backward()
                del loss
                training._update_weights()
                tracker.reset_mod_stats()
    theirs = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert mine.peak == pytest.approx(theirs, rel=0.002)


def test_passes_grow_by_the_sample_and_the_update_does_not() -> None:
    loaded, shapes, config = toys.load(toys.Texts()), ShapeModel(toys.Encoder()), TrainConfig()
    found = [shapes.trace(loaded, config, CPU, make_batch(size), updates=True) for size in (8, 16, 32)]
    assert found[1].passes - found[0].passes == pytest.approx((found[2].passes - found[1].passes) / 2, rel=1e-3)
    assert found[2].update - found[0].update < 24 * toys.LENGTH * 16


def test_accumulation_holds_gradients_during_the_passes() -> None:
    loaded, shapes = toys.load(toys.Texts()), ShapeModel(toys.Encoder())
    once, twice = (
        shapes.trace(loaded, TrainConfig(gradient_accumulation_steps=count), CPU, make_batch(64)) for count in (1, 4)
    )
    gradients = 4 * sum(p.numel() for p in toys.Encoder().parameters())
    assert 0.7 * gradients < twice.passes - once.passes < 1.3 * gradients


def test_a_model_is_only_read() -> None:
    model = toys.Encoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ShapeModel(model).trace(toys.load(toys.Texts()), TrainConfig(), CPU, make_batch(4), updates=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_lines_of_both_half_precisions_are_traced_once() -> None:
    traced = []

    def trace(config: TrainConfig, size: int, updates: bool, /) -> StepBytes:
        traced.append((config.precision, config.activation_checkpointing, size))
        if config.activation_checkpointing == "selective":
            raise RuntimeError("not here")
        state = 50 if updates else 0
        return StepBytes(passes=100 + state + 10 * size, update=180 if updates else 0, optimizer=state)

    modes = list_modes(TrainConfig(), ("fp32", "bf16", "fp16"), checkpoints=True)
    first = find_line(trace, modes[0], (2, 8))
    assert first == Line(fixed=150, growth=10, update=180, optimizer=50)
    assert first.predict(1) == 180
    lines = find_lines(trace, modes, (2, 8), first, deadline=float("inf"))
    assert {line for _, line in lines} == {first}
    assert len(lines) == 6
    assert ("fp16", "off", 2) not in traced
    assert len(find_lines(trace, modes, (2, 8), first, deadline=0.0)) == 1


@needs_proc
def test_the_peak_of_one_piece_of_work_is_its_own() -> None:
    def hold() -> None:
        torch.ones(64 * MIB // 4)

    large = torch.ones(200 * MIB // 4)
    del large
    before = resident_bytes()
    peak = measure_peak(hold, CPU)
    assert peak is not None
    assert 56 * MIB < peak - before < 100 * MIB or peak < before + 100 * MIB
    assert reset_host_peak()
    assert peak_host_bytes() < peak
    kept = torch.ones(64 * MIB // 4)
    with_it, without = measure_outside_bytes(CPU, 0), measure_outside_bytes(CPU, kept.nbytes)
    assert with_it - without == pytest.approx(64 * MIB, rel=0.1)


@needs_proc
def test_a_workers_share_is_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; block = bytearray(32 * 2**20); print('ready', flush=True); sys.stdin.read(1)"
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        monkeypatch.setattr(memory, "list_children", lambda _parent: [process.pid for process in processes])
        found = worker_bytes()
        assert found is not None
        assert 30 * MIB < found < 60 * MIB
    finally:
        for process in processes:
            process.communicate(b"x")
