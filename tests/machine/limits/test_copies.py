from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from fake_time import FakeTime

from autotune.machine.limits import copies, repetitions
from autotune.machine.limits.copies import measure_copy, measure_host_copies, measure_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of 1 MiB."""
    monkeypatch.setattr(copies, "_MOST_BYTES", 3 * MIB)


def plant_host(monkeypatch: pytest.MonkeyPatch, *, cache: int | None, available: int, headroom: int | None) -> None:
    monkeypatch.setattr(copies, "read_last_level_cache_bytes", lambda root, cpus: cache)
    monkeypatch.setattr(copies, "read_memory_headroom", lambda root: headroom)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


@pytest.mark.usefixtures("small")
def test_bytes_are_counted_as_they_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime(monkeypatch, copies, repetitions)

    def take(seconds: float) -> object:
        return lambda *_, **__: time.spend(seconds)

    monkeypatch.setattr(torch.Tensor, "copy_", take(0.5))
    monkeypatch.setattr(torch, "add", take(0.25))
    assert measure_memory(CPU, 4.0) == (2 * MIB / 0.5, 3 * MIB / 0.25)
    assert time.now == pytest.approx(4.0, abs=0.6)
    assert measure_copy(CPU, 4.0) == 2 * MIB / 0.5


@pytest.mark.usefixtures("small")
def test_each_direction_between_host_and_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_HOST_BYTES", MIB)
    time = FakeTime(monkeypatch, copies, repetitions)
    seconds = iter([0.5, 0.25])

    def run_once(run: Callable[[], torch.Tensor], device: torch.device, share_seconds: float) -> float:
        assert run().nbytes == MIB
        time.spend(share_seconds)
        return next(seconds)

    monkeypatch.setattr(copies, "best_seconds", run_once)
    # The device is a CPU, so that there is one.
    assert measure_host_copies(CPU, 4.0, pinned=False) == (MIB / 0.5, MIB / 0.25)
    assert time.now == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("cache", "available", "headroom", "expected"),
    [
        (32 * MIB, 10**12, None, 128 * MIB),  # four times the cache
        (MIB, 10**12, None, 64 * MIB),  # never small
        (None, 10**12, None, 128 * MIB),  # unknown cache
        (512 * MIB, 10**12, None, 2**30 // 3),  # bounded in all
        (32 * MIB, 1200 * MIB, None, 100 * MIB),  # a quarter of what is free, in three
        (32 * MIB, 10**12, 1200 * MIB, 100 * MIB),  # of the control group
    ],
)
def test_arrays_are_beyond_the_cache_and_within_the_memory(
    monkeypatch: pytest.MonkeyPatch, cache: int | None, available: int, headroom: int | None, expected: int
) -> None:
    plant_host(monkeypatch, cache=cache, available=available, headroom=headroom)
    assert copies._array_bytes(CPU) == expected


def test_arrays_that_fit_the_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_host(monkeypatch, cache=32 * MIB, available=300 * MIB, headroom=None)
    with pytest.raises(RuntimeError, match="would time the cache"):
        measure_memory(CPU, 0.1)
    plant_host(monkeypatch, cache=32 * MIB, available=3 * MIB, headroom=None)
    with pytest.raises(RuntimeError, match="too few"):
        measure_host_copies(CPU, 0.1, pinned=False)


def test_arrays_of_a_gpu_go_by_its_own_cache_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * MIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 2**30, 80 * 2**30))
    assert copies._array_bytes(GPU) == 200 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 80 * 2**30))
    assert copies._array_bytes(GPU) == 2**28 // 3
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert copies._array_bytes(GPU) == 2**28 // 3


def test_real_memory_is_measured() -> None:
    copy, triad = measure_memory(CPU, 0.3)
    assert copy > 0
    assert triad > 0
    # Both move the same kind of bytes through the same bus; a neighbour may disturb one of them.
    assert 1 / 20 < copy / triad < 20
