from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import psutil
import pytest
import torch
from fake_time import FakeTime
from probe_records import target
from record_factory import make_hardware

from autotune.format import format_flops
from autotune.knobs import Facts
from autotune.machine.limits import copies
from autotune.machine.limits import device as limits
from autotune.machine.limits.device import measure_ceilings, spot_check_ceilings
from autotune.machine.limits.products import DTYPES, Burst
from autotune.records import Ceilings, MatmulRate
from autotune.space import build_space

CPU = torch.device("cpu")
FULL = 12.0
ALL = ["fp32", "fp32-medium", "bf16", "fp16"]
"""Arithmetics of a CPU."""


def measured(ceilings: Ceilings) -> list[str]:
    return [rate.dtype for rate in ceilings.matmul]


def refuse(*_: object, **__: object) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rates of a machine on paper; each measurement is there at once. Keys: an arithmetic, `late-` it, memory."""
    rates = {"fp32": 100.0, "fp32-medium": 160.0, "bf16": 200.0, "fp16": 50.0}
    rates |= {"late-fp32": 90.0, "late-fp32-medium": 140.0, "late-bf16": 150.0, "late-fp16": 40.0}
    rates |= {"copy": 10.0, "triad": 12.0}
    monkeypatch.setattr(limits, "measure_burst", lambda name, _device, _share, **_: Burst(rates[name], 64))
    monkeypatch.setattr(limits, "measure_sustained", lambda name, _device, **_: rates[f"late-{name}"])
    monkeypatch.setattr(limits, "measure_memory", lambda _device, _share: (rates["copy"], rates["triad"]))
    monkeypatch.setattr(limits, "measure_copy", lambda _device, _share: rates["copy"])
    monkeypatch.setattr(limits, "_measure_calls", lambda _device: (1e-6, None))
    return rates


@pytest.fixture
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of 1 MiB, for what is not about memory."""
    monkeypatch.setattr(copies, "_MOST_BYTES", 3 * 2**20)


def test_rates_are_plausible() -> None:
    began = perf_counter()
    ceilings = measure_ceilings(CPU, budget_seconds=1.0)
    elapsed = perf_counter() - began
    assert measured(ceilings)[0] == "fp32"
    assert "tf32" not in measured(ceilings)
    # What was timed fits into the time that passed, at least once: 2 n^3 operations for n = 128, and both buffers.
    fp32, memory = ceilings.flops_per_second("fp32"), ceilings.memory_bytes_per_second
    assert fp32 is not None
    assert memory is not None
    assert fp32 > 2 * 128**3 / elapsed
    assert memory > 2 * copies._array_bytes(CPU) / elapsed
    assert ceilings.triad_bytes_per_second is not None
    assert 1 / 20 < ceilings.triad_bytes_per_second / memory < 20
    # A thousand operations in a row were made as well.
    assert ceilings.launch_seconds is not None
    assert 1000 * ceilings.launch_seconds < elapsed
    assert elapsed < 30 * 1.0


@pytest.mark.usefixtures("small_arrays")
def test_what_only_a_gpu_has_is_none_on_a_cpu() -> None:
    ceilings = measure_ceilings(CPU, budget_seconds=0.05)
    assert ceilings.synchronize_seconds is None
    assert ceilings.copy_to_device_bytes_per_second is None
    assert ceilings.copy_from_device_bytes_per_second is None
    assert ceilings.pageable_to_device_bytes_per_second is None
    assert ceilings.pageable_from_device_bytes_per_second is None
    assert ceilings.all_reduce_bytes_per_second is None
    assert ceilings.ranks == 1


@pytest.mark.usefixtures("small_arrays")
@pytest.mark.parametrize("refused", ALL)
def test_a_dtype_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    real = torch.mm

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if left.dtype == DTYPES[refused]:
            raise RuntimeError('"addmm_impl_cpu_" not implemented')
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", multiply)
    assert set(measured(measure_ceilings(CPU, budget_seconds=0.05))) == {
        name for name in ALL if DTYPES[name] != DTYPES[refused]
    }


@pytest.mark.parametrize("budget", [0.1, FULL])
def test_a_dtype_that_is_emulated_is_kept_as_that_and_is_no_limit(planted: dict[str, float], budget: float) -> None:
    planted |= {"bf16": 25.0, "fp16": 24.99, "late-fp16": 1e9}
    ceilings = measure_ceilings(CPU, budget_seconds=budget)
    assert [(rate.dtype, rate.emulated) for rate in ceilings.matmul] == [
        ("fp32", False),
        ("fp32-medium", False),
        ("bf16", False),
        ("fp16", True),
    ]
    emulated = ceilings.find_rate("fp16")
    assert emulated is not None
    assert (emulated.flops_per_second, emulated.sustained_flops_per_second) == (24.99, None)
    assert ceilings.flops_per_second("fp16") is None
    assert ceilings.sustained_flops_per_second("fp16") is None


def test_the_windows_of_what_is_emulated_go_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shares = plant_spending(monkeypatch)
    rates = iter([100.0, 80.0, 1.0, 50.0])
    monkeypatch.setattr(limits, "measure_burst", lambda *_, **__: Burst(next(rates), 64))
    measure_ceilings(CPU, budget_seconds=6.0)
    assert len(shares["window"]) == 3


@pytest.mark.usefixtures("small_arrays")
def test_bf16_that_really_runs_at_a_hundredth_is_ruled_out_by_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        for _ in range(150 if left.dtype == torch.bfloat16 else 0):
            real(left.float(), right.float())
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", multiply)
    ceilings = measure_ceilings(CPU, budget_seconds=1.0)
    rate, plain = ceilings.find_rate("bf16"), ceilings.flops_per_second("fp32")
    assert rate is not None
    assert plain is not None
    assert rate.emulated
    assert rate.flops_per_second < 0.2 * plain
    space = build_space(Facts(target=target(ceilings=ceilings), hardware=make_hardware()))
    assert "precision" not in space.choices
    assert space.unproven == frozenset()
    reason = next(out.reason for out in space.ruled_out if (out.knob, out.value) == ("precision", "bf16"))
    assert reason.startswith(f"emulated here: bf16 {format_flops(rate.flops_per_second)}, 1/")


@pytest.mark.usefixtures("planted")
def test_memory_that_cannot_be_had_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "measure_memory", refuse)
    ceilings = measure_ceilings(CPU, budget_seconds=0.05)
    assert ceilings.memory_bytes_per_second is None
    assert ceilings.triad_bytes_per_second is None
    assert "fp32" in measured(ceilings)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("name", ["measure_burst", "measure_sustained", "_measure_calls"])
def test_nothing_that_is_refused_stops_the_rest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(limits, name, refuse)
    ceilings = measure_ceilings(CPU, budget_seconds=FULL)
    assert ceilings.memory_bytes_per_second == 10.0
    assert measured(ceilings) == ([] if name == "measure_burst" else ALL)
    assert (ceilings.launch_seconds is None) == (name == "_measure_calls")


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("budget", [2.0, 3.0, 5.9])
def test_a_short_budget_leaves_out_what_is_sustained(budget: float) -> None:
    ceilings = measure_ceilings(CPU, budget_seconds=budget)
    assert [rate.sustained_flops_per_second for rate in ceilings.matmul] == [None] * len(ALL)


def test_a_full_budget_has_what_is_sustained(planted: dict[str, float]) -> None:
    planted["late-bf16"] = 210.0
    ceilings = measure_ceilings(CPU, budget_seconds=FULL)
    assert [rate.sustained_flops_per_second for rate in ceilings.matmul] == [90.0, 140.0, 210.0, 40.0]
    # What was kept up was reached.
    assert [rate.flops_per_second for rate in ceilings.matmul] == [100.0, 160.0, 210.0, 50.0]


def plant_spending(monkeypatch: pytest.MonkeyPatch, *, burst: float = 1.0) -> tuple[FakeTime, dict[str, list[float]]]:
    """Have every measurement spend its share, products a part of it; return the clock and the shares."""
    time, shares = FakeTime(monkeypatch, limits), {"burst": [], "convolutions": [], "memory": [], "window": []}

    def spend(kind: str, answer: Any, factor: float = 1.0) -> Callable[..., Any]:
        def measure(*arguments: Any, **named: Any) -> Any:
            share = named.get("window_seconds") or arguments[-1]
            shares[kind].append(share)
            time.spend(factor * share)
            return answer

        return measure

    monkeypatch.setattr(limits, "measure_burst", spend("burst", Burst(1.0, 64), burst))
    monkeypatch.setattr(limits, "measure_convolution", spend("convolutions", 1.0))
    monkeypatch.setattr(limits, "measure_memory", spend("memory", (1.0, 1.0)))
    monkeypatch.setattr(limits, "measure_sustained", spend("window", 1.0))
    monkeypatch.setattr(limits, "_measure_calls", lambda _device: (1e-6, None))
    return time, shares


def test_time_is_shared_and_what_one_leaves_the_others_get(monkeypatch: pytest.MonkeyPatch) -> None:
    time, shares = plant_spending(monkeypatch, burst=0.5)
    measure_ceilings(CPU, budget_seconds=5.9)
    # Four arithmetics, convolutions and two rates of memory: a seventh of 5.9 s, half of it used, and so on.
    bursts = [5.9 / 7, 5.9 * 13 / 14 / 6, 5.9 * 13 / 14 * 11 / 12 / 5, 5.9 * 13 / 14 * 11 / 12 * 9 / 10 / 4]
    assert shares["burst"] == pytest.approx(bursts)
    left = 5.9 - sum(bursts) / 2
    assert shares["convolutions"] == pytest.approx([left / 3 / 4] * 4)
    assert sum(shares["memory"]) == pytest.approx(left * 2 / 3)
    assert time.now == pytest.approx(5.9)


@pytest.mark.parametrize(("budget", "window"), [(6.0, 0.9), (9.0, 1.35), (12.0, 1.8), (15.0, 2.0)])
def test_windows_are_two_seconds_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, budget: float, window: float
) -> None:
    time, shares = plant_spending(monkeypatch)
    measure_ceilings(CPU, budget_seconds=budget)
    assert shares["window"] == pytest.approx([window] * len(ALL))
    assert time.now == pytest.approx(budget)


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_no_budget_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        measure_ceilings(CPU, budget_seconds=budget)


@pytest.mark.usefixtures("small_arrays")
def test_global_state_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SUSTAINED_BUDGET_SECONDS", 0.0)
    torch.manual_seed(3)
    generator, precision, threads = torch.get_rng_state(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    measure_ceilings(CPU, budget_seconds=0.05)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_memory_is_given_back() -> None:
    measure_ceilings(CPU, budget_seconds=0.05)  # libraries keep what they need once
    gc.collect()
    before = psutil.Process().memory_info().rss
    measure_ceilings(CPU, budget_seconds=0.05)
    assert psutil.Process().memory_info().rss - before < copies._array_bytes(CPU)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, planted: dict[str, float]) -> torch.device:
    """A GPU on paper, for which everything is planted that would touch it."""
    copies_of_host = {True: (20.0, 21.0), False: (8.0, 9.0)}
    planted |= {"tf32": 150.0, "late-tf32": 140.0}
    monkeypatch.setattr(limits, "list_arithmetics", lambda _device: ("fp32", "tf32", "bf16", "fp16"))
    monkeypatch.setattr(limits, "measure_host_copies", lambda _device, _share, *, pinned: copies_of_host[pinned])
    monkeypatch.setattr(limits, "_measure_calls", lambda _device: (1e-6, 2e-6))
    monkeypatch.setattr(limits, "_release_memory", lambda _device: None)
    return torch.device("cuda")


def test_a_gpu_has_all_of_them(fake_gpu: torch.device) -> None:
    ceilings = measure_ceilings(fake_gpu, budget_seconds=FULL)
    assert measured(ceilings) == ["fp32", "tf32", "bf16", "fp16"]
    assert [rate.sustained_flops_per_second for rate in ceilings.matmul] == [90.0, 140.0, 150.0, 40.0]
    assert ceilings.replace(matmul=()) == Ceilings(
        memory_bytes_per_second=10.0,
        triad_bytes_per_second=12.0,
        copy_to_device_bytes_per_second=20.0,
        copy_from_device_bytes_per_second=21.0,
        pageable_to_device_bytes_per_second=8.0,
        pageable_from_device_bytes_per_second=9.0,
        launch_seconds=1e-6,
        synchronize_seconds=2e-6,
    )


def test_host_memory_that_may_not_be_page_locked_is_left_out(
    monkeypatch: pytest.MonkeyPatch, fake_gpu: torch.device
) -> None:
    monkeypatch.setattr(
        limits, "measure_host_copies", lambda _device, _share, *, pinned: refuse() if pinned else (8.0, 9.0)
    )
    ceilings = measure_ceilings(fake_gpu)
    assert ceilings.copy_to_device_bytes_per_second is None
    assert ceilings.copy_from_device_bytes_per_second is None
    assert ceilings.pageable_to_device_bytes_per_second == 8.0
    assert ceilings.pageable_from_device_bytes_per_second == 9.0


def test_calls_of_a_gpu_are_a_launch_and_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def take(run: Callable[[], object], device: torch.device, count: int) -> float:
        runs.append(count)
        return {1000: 0.004, 100: 0.0005}[count] + 1.0 / len(runs)

    monkeypatch.setattr(limits, "time_repetition", take)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    # The best of twenty each, the later the better.
    expected = (pytest.approx((0.004 + 1 / 20) / 1000), pytest.approx((0.0005 + 1 / 40) / 100))
    assert limits._measure_calls(torch.device("cuda")) == expected
    assert runs == [1000] * 20 + [100] * 20


def test_a_gpu_gets_both_of_its_caches_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("device"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append("host"), raising=False)
    limits._release_memory(CPU)
    assert emptied == []
    limits._release_memory(torch.device("cuda"))
    assert emptied == ["device", "host"]
    # PyTorch 2.6 has another name for it.
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append("old"), raising=False)
    limits._release_memory(torch.device("cuda"))
    assert emptied[2:] == ["device", "old"]


def known(fp32: float | None, memory: float | None) -> Ceilings:
    matmul = () if fp32 is None else (MatmulRate(dtype="fp32", flops_per_second=fp32),)
    return Ceilings(matmul=matmul, memory_bytes_per_second=memory)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("fp32", "memory", "holds"),
    [
        (100.0, 10.0, True),
        (1000.0, 100.0, True),  # slower now: a ceiling stays a ceiling
        (91.0, 9.1, True),  # within a tenth
        (90.0, 10.0, False),
        (100.0, 9.0, False),
        (None, 10.0, True),  # nothing to hold against
        (100.0, None, True),
        (None, None, True),
    ],
)
def test_known_limits_hold_until_the_machine_beats_them(fp32: float | None, memory: float | None, holds: bool) -> None:
    assert spot_check_ceilings(CPU, known(fp32, memory)) is holds


@pytest.mark.usefixtures("planted")
def test_a_check_that_is_refused_says_nothing_against_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "measure_burst", refuse)
    monkeypatch.setattr(limits, "measure_copy", refuse)
    assert spot_check_ceilings(CPU, known(1.0, 1.0))


def test_a_real_check_tells_a_disturbed_measurement() -> None:
    began = perf_counter()
    assert not spot_check_ceilings(CPU, known(1.0, 1e15))
    assert not spot_check_ceilings(CPU, known(1e20, 1.0))
    assert perf_counter() - began < 30 * 1.0


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
    upload, pageable = ceilings.copy_to_device_bytes_per_second, ceilings.pageable_to_device_bytes_per_second
    assert fp32 is not None
    assert memory is not None
    assert upload is not None
    assert pageable is not None
    assert ceilings.copy_from_device_bytes_per_second is not None
    assert ceilings.pageable_from_device_bytes_per_second is not None
    assert memory > upload
    assert upload > pageable / 2
    assert ceilings.launch_seconds is not None
    assert ceilings.synchronize_seconds is not None
    tf32 = ceilings.flops_per_second("tf32")
    assert (tf32 is not None) == (torch.cuda.get_device_capability() >= (8, 0))
    if tf32 is not None:
        assert tf32 > fp32  # whatever the process had allowed, fp32 was measured without TF32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_full_measurement_on_a_gpu() -> None:
    device = torch.device("cuda")
    ceilings = measure_ceilings(device, budget_seconds=FULL)
    for rate in ceilings.matmul:
        assert rate.sustained_flops_per_second is not None
        assert rate.flops_per_second / 5 < rate.sustained_flops_per_second <= rate.flops_per_second
    assert torch.cuda.memory_allocated(device) < 2**28
    assert spot_check_ceilings(device, ceilings)
