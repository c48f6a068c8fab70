from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fake_time import FakeTime

from autotune.machine.limits import products, repetitions
from autotune.machine.limits.products import list_arithmetics, measure_burst, measure_sustained

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """The dtype and edge of every product asked for."""
    found: list[tuple[torch.dtype, int]] = []
    real = torch.mm

    def watch(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        found.append((left.dtype, left.shape[0]))
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watch)
    return found


def plant_seconds(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> FakeTime:
    """Have a product of each edge take its planted time and no other."""
    time = FakeTime(monkeypatch, products, repetitions)

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        time.spend(seconds[left.shape[0]])
        return out

    monkeypatch.setattr(torch, "mm", multiply)
    return time


def test_a_product_counts_two_operations_for_each_of_n_cubed(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[torch.dtype, int]]
) -> None:
    seconds = itertools.count()  # a second passes at each look: every repetition takes one
    for module in (products, repetitions):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(seconds)))
    burst = measure_burst("fp32", CPU, 1.0)
    assert {edge for _, edge in seen} == {128}  # no time for a larger one
    assert burst.flops_per_second == 2 * 128**3
    assert burst.largest_edge == 128


def test_matrices_grow_as_far_as_time_allows(seen: list[tuple[torch.dtype, int]]) -> None:
    assert measure_burst("fp32", CPU, 1e-6).largest_edge == 128
    assert {edge for _, edge in seen} == {128}
    seen.clear()
    assert measure_burst("fp32", CPU, 1.0).largest_edge == max(edge for _, edge in seen)
    assert 128 < max(edge for _, edge in seen) <= 4096
    assert {dtype for dtype, _ in seen} == {torch.float32}


def test_growth_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products._EDGES, "cpu", (8, 4096))
    time = plant_seconds(monkeypatch, {8 << doubling: 0.001 * 8**doubling for doubling in range(10)})
    measure_burst("fp32", CPU, 1.0)
    assert 0.5 < time.now < 2.0


def test_what_is_clearly_slower_is_looked_at_no_longer_than_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products._EDGES, "cpu", (8, 4096))
    seconds = {8 << doubling: 0.001 * 8**doubling for doubling in range(10)}
    time = plant_seconds(monkeypatch, seconds)
    rate = 2 * 8**3 / 0.001
    burst = measure_burst("bf16", CPU, 10.0, least_rate=20 * rate)
    # 32 x 32 is the first that takes longer than threads wait for each other; a run and three repetitions of each size.
    assert burst.largest_edge == 32
    assert time.now == pytest.approx(4 * (0.001 + 0.008 + 0.064))
    assert burst.flops_per_second == pytest.approx(rate)


def test_what_is_slow_for_an_instant_only_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products._EDGES, "cpu", (8, 64))
    plant_seconds(monkeypatch, {8: 1e-5, 16: 0.04, 32: 0.04, 64: 0.04})
    # One size had the rate: the others were held up.
    assert measure_burst("bf16", CPU, 10.0, least_rate=2 * 8**3 / 1e-5).largest_edge == 64


def test_the_best_size_counts_and_the_largest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products._EDGES, "cpu", (8, 64))
    plant_seconds(monkeypatch, {8: 1e-4, 16: 1e-4, 32: 2e-3, 64: 2e-2})
    burst = measure_burst("fp32", CPU, 2.0)
    assert burst.flops_per_second == pytest.approx(2 * 16**3 / 1e-4)
    assert burst.largest_edge == 64


def test_a_size_that_was_held_up_at_first_gets_another_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products._EDGES, "cpu", (8, 32))
    seconds = {8: 1e-2, 16: 1e-2, 32: 1e-2}
    time = plant_seconds(monkeypatch, seconds)
    real = products.best_seconds

    def disturbance_ends(*arguments: Any) -> float:
        seconds[8] = 1e-5
        return real(*arguments)

    monkeypatch.setattr(products, "best_seconds", disturbance_ends)
    assert measure_burst("fp32", CPU, 2.0).flops_per_second == pytest.approx(2 * 8**3 / 1e-5)
    assert time.now == pytest.approx(2.0, rel=0.2)


def test_growth_is_not_stopped_by_threads_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products._EDGES, "cpu", (8, 512))
    # On a busy machine the small ones take a time slice each; eight times as long would not fit for the next.
    plant_seconds(monkeypatch, {8: 0.04, 16: 0.04, 32: 0.04, 64: 0.05, 128: 0.2, 256: 1.6})
    burst = measure_burst("fp32", CPU, 1.0)
    assert burst.largest_edge == 64
    assert burst.flops_per_second == pytest.approx(2 * 64**3 / 0.05)


def test_what_a_product_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    time = plant_seconds(monkeypatch, {16: 0.05})
    rate = measure_sustained("bf16", CPU, edge=16, window_seconds=2.0)
    assert rate == pytest.approx(2 * 16**3 / 0.05)
    assert time.now == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_tf32_is_tried_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_tf32: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ("tf32" in list_arithmetics(GPU)) is has_tf32
    assert list_arithmetics(GPU)[0] == "fp32"
    assert "tf32" not in list_arithmetics(CPU)


def test_matrices_leave_most_of_a_gpu_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 4 * 4 * 4 * 1000**2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert products._largest_edge(GPU, torch.float32) == 1000
    assert products._largest_edge(GPU, torch.bfloat16) == 1414
    assert products._largest_edge(CPU, torch.float32) == products._EDGES["cpu"][1]
