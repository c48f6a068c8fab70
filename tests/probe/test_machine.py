from __future__ import annotations

from typing import Any

import pytest
import torch
from record_factory import make_spec, make_target

from autotune.probe import machine
from autotune.probe.machine import find_ceilings, find_hazards
from autotune.records import Ceilings, MatmulRate, TrialSpec
from autotune.records.script import Script

CPU = torch.device("cpu")
KNOWN = Ceilings(device="cpu", matmul=(MatmulRate(dtype="fp32", flops_per_second=1e15),), memory_bytes_per_second=1e15)
NEW = Ceilings(memory_bytes_per_second=1.0)


def spec(known: Ceilings | None, *, script: bool = False) -> TrialSpec:
    own = Script(command=("python", "train.py")) if script else None
    target = make_target(script=own)
    return make_spec(None, number=0, purpose="probe", target=target, ceilings=known, ceilings_seconds=12.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def measure(device: torch.device, *, budget_seconds: float) -> Ceilings:
        calls.append((device.type, torch.get_num_threads(), budget_seconds))
        return NEW

    def all_reduce(ranks: int, *, device_type: str) -> float:
        calls.append((ranks, device_type))
        return 5.0

    monkeypatch.setattr(machine, "measure_ceilings", measure)
    monkeypatch.setattr(machine, "measure_all_reduce", all_reduce)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return calls


def test_known_limits_that_hold_are_not_measured_again(measured: list[Any]) -> None:
    assert find_ceilings(spec(KNOWN), CPU) == KNOWN
    assert measured == []


def test_beaten_limits_are_measured_again(measured: list[Any]) -> None:
    slow = KNOWN.replace(matmul=(MatmulRate(dtype="fp32", flops_per_second=1.0),))
    assert find_ceilings(spec(slow), CPU) == NEW.replace(device="cpu")
    assert len(measured) == 1


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"device": None}])
def test_limits_of_something_else_are_no_limits(measured: list[Any], changes: dict[str, Any]) -> None:
    assert find_ceilings(spec(KNOWN.replace(**changes)), CPU).memory_bytes_per_second == 1.0


@pytest.mark.slow_cases("16-8-1", "--1", "two--1")
@pytest.mark.parametrize(
    ("world", "here", "ranks"), [("2", "2", 2), ("2", "", 2), ("16", "8", 1), ("", "", 1), ("two", "", 1)]
)
def test_a_script_on_several_ranks_of_this_machine_has_an_all_reduce(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, world: str, here: str, ranks: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    found = find_ceilings(spec(KNOWN, script=True), CPU)
    assert (found.ranks, found.all_reduce_bytes_per_second) == (ranks, 5.0 if ranks > 1 else None)
    assert find_ceilings(spec(KNOWN), CPU) == KNOWN  # a workload is trained by one process


def test_a_short_search_has_no_time_for_an_all_reduce(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = spec(KNOWN, script=True)
    assert find_ceilings(asked.replace(limits=asked.limits.replace(ceilings_seconds=2.0)), CPU) == KNOWN


def test_limits_are_those_of_all_usable_cpus(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    find_ceilings(spec(None), CPU)
    assert measured == [("cpu", 3, 12.0)]
    assert torch.get_num_threads() == before


def test_hazards_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert find_hazards() == ()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with torch.autograd.set_detect_anomaly(True):
        torch.use_deterministic_algorithms(True)
        try:
            assert find_hazards() == ("anomaly-detection", "deterministic-algorithms", "launch-blocking")
        finally:
            torch.use_deterministic_algorithms(False)
