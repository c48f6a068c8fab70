from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch

from autotune.probe import limits
from autotune.probe.limits import measure_ceilings
from autotune.records import Ceilings

CPU = torch.device("cpu")


@pytest.fixture
def one_second_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one second whenever it is read: every timed repetition takes exactly one second."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(limits, "perf_counter", lambda: float(next(seconds)))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """The dtype and edge of every product asked for."""
    seen: list[tuple[torch.dtype, int]] = []
    real = torch.mm

    def watch(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append((left.dtype, left.shape[0]))
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watch)
    return seen


def measured(ceilings: Ceilings) -> list[str]:
    return [rate.dtype for rate in ceilings.matmul]


def test_rates_are_plausible() -> None:
    began = perf_counter()
    ceilings = measure_ceilings(CPU, budget_seconds=2.0)
    elapsed = perf_counter() - began
    assert measured(ceilings)[0] == "fp32"
    assert "tf32" not in measured(ceilings)
    assert ceilings.copy_to_device_bytes_per_second is None
    assert ceilings.memory_bytes_per_second is not None
    # 2 n^3 operations in a product timed here, once, cannot beat the best of many by much.
    matrix = torch.ones(1024, 1024)
    matrix @ matrix
    began_product = perf_counter()
    matrix @ matrix
    rate = 2 * 1024**3 / (perf_counter() - began_product)
    fp32 = ceilings.flops_per_second("fp32")
    assert fp32 is not None
    assert rate / 10 < fp32
    # A product moves 3 n^2 numbers for 2 n^3 operations: arithmetic outruns memory on every machine.
    assert fp32 > ceilings.memory_bytes_per_second / 4
    assert elapsed < 30 * 2.0


def test_a_product_counts_two_operations_for_each_of_n_cubed(one_second_a_look: None, products: Any) -> None:
    ceilings = measure_ceilings(CPU, budget_seconds=1.0)
    assert {edge for _, edge in products} == {128}  # a second each: no time for a larger one
    for rate in ceilings.matmul:
        assert rate.flops_per_second == 2 * 128**3


def test_a_copy_counts_what_it_reads_and_what_it_writes(one_second_a_look: None) -> None:
    ceilings = measure_ceilings(CPU, budget_seconds=1.0)
    assert ceilings.memory_bytes_per_second == 256 * 2**20


def test_the_best_repetition_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([4.0, 3.0, 2.0, 5.0])
    clock = {"now": 0.0}
    monkeypatch.setattr(limits, "perf_counter", lambda: clock["now"])

    def run() -> None:
        clock["now"] += next(durations)

    assert limits._best_seconds(run, CPU, 14.0) == 2.0
    assert next(durations, None) is None


def test_short_runs_are_timed_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0, "runs": 0, "looks": 0}

    def look() -> float:
        clock["looks"] += 1
        return clock["now"]

    def run() -> None:
        clock["now"] += 1e-5 if clock["runs"] else 2e-5
        clock["runs"] += 1

    monkeypatch.setattr(limits, "perf_counter", look)
    assert limits._best_seconds(run, CPU, 0.1) == pytest.approx(1e-5)
    assert clock["runs"] > 50 * clock["looks"]


def test_matrices_grow_as_far_as_time_allows(products: list[tuple[torch.dtype, int]]) -> None:
    measure_ceilings(CPU, budget_seconds=1e-6)
    assert {edge for _, edge in products} == {128}
    products.clear()
    measure_ceilings(CPU, budget_seconds=2.0)
    assert max(edge for dtype, edge in products if dtype == torch.float32) > 128
    assert max(edge for _, edge in products) <= 1024


@pytest.mark.parametrize("refused", ["fp32", "bf16", "fp16"])
def test_a_dtype_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    real = torch.mm

    def refuse(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if left.dtype == limits._DTYPES[refused]:
            raise RuntimeError('"addmm_impl_cpu_" not implemented')
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", refuse)
    # No dtype is called absurdly slow here: this machine may emulate one of them.
    monkeypatch.setattr(limits, "_ABSURD_FRACTION", 0.0)
    assert set(measured(measure_ceilings(CPU, budget_seconds=0.05))) == {"fp32", "bf16", "fp16"} - {refused}


def test_a_dtype_that_is_emulated_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {"fp32": 100.0, "bf16": 2.0, "fp16": 1.99}
    monkeypatch.setattr(limits, "_measure_matmul", lambda name, _device, _share: planted[name])
    monkeypatch.setattr(limits, "_measure_memory", lambda _device, _share: 1.0)
    assert measured(measure_ceilings(CPU, budget_seconds=0.1)) == ["fp32", "bf16"]


def test_memory_that_cannot_be_had_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(limits, "_measure_memory", refuse)
    ceilings = measure_ceilings(CPU, budget_seconds=0.05)
    assert ceilings.memory_bytes_per_second is None
    assert "fp32" in measured(ceilings)


def test_time_is_shared_and_what_one_leaves_the_others_get(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    shares: list[float] = []
    monkeypatch.setattr(limits, "perf_counter", lambda: clock["now"])

    def spend(factor: float) -> Callable[..., float]:
        def measure(*arguments: Any) -> float:
            shares.append(arguments[-1])
            clock["now"] += factor * arguments[-1]
            return 1.0

        return measure

    monkeypatch.setattr(limits, "_measure_matmul", spend(0.5))
    monkeypatch.setattr(limits, "_measure_memory", spend(1.0))
    measure_ceilings(CPU, budget_seconds=8.0)
    assert shares == pytest.approx([2.0, 7 / 3, 35 / 12, 35 / 8])
    assert clock["now"] == pytest.approx(8.0)


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_no_budget_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        measure_ceilings(CPU, budget_seconds=budget)


def test_global_state_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    generator, precision, threads = torch.get_rng_state(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    measure_ceilings(CPU, budget_seconds=0.05)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_on_a_gpu(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        ceilings = measure_ceilings(torch.device("cuda"), budget_seconds=3.0)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    fp32, memory = ceilings.flops_per_second("fp32"), ceilings.memory_bytes_per_second
    upload = ceilings.copy_to_device_bytes_per_second
    assert fp32 is not None
    assert memory is not None
    assert upload is not None
    assert memory > upload
    tf32 = ceilings.flops_per_second("tf32")
    assert (tf32 is not None) == (torch.cuda.get_device_capability() >= (8, 0))
    if tf32 is not None:
        assert tf32 > fp32  # whatever the process had allowed, fp32 was measured without TF32
