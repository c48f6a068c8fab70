from __future__ import annotations

import pytest
import torch
from fake_time import FakeTime

from autotune.machine.limits import convolutions, device, repetitions
from autotune.machine.limits.convolutions import measure_convolution
from autotune.machine.limits.device import measure_ceilings
from autotune.machine.limits.products import Burst

CPU = torch.device("cpu")


def test_a_convolution_counts_its_operations_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    time, shapes = FakeTime(monkeypatch, repetitions), []

    def convolve(source: torch.Tensor, kernel: torch.Tensor, *, padding: int) -> torch.Tensor:
        shapes.append((source.dtype, tuple(source.shape), tuple(kernel.shape), padding))
        time.spend(0.5)
        return source

    monkeypatch.setattr(convolutions, "conv2d", convolve)
    images = 2 * torch.get_num_threads()
    operations = 2 * (images * 28 * 28 * 128) * (128 * 3 * 3)  # each output is a sum over a patch
    assert measure_convolution("bf16", 1.0) == pytest.approx(operations / 0.5)
    assert set(shapes) == {(torch.bfloat16, (images, 128, 28, 28), (128, 128, 3, 3), 1)}


def test_a_real_convolution_has_a_rate_and_leaves_the_generator() -> None:
    before = torch.get_rng_state()
    assert measure_convolution("fp32", 0.0) > 1e6
    assert torch.equal(torch.get_rng_state(), before)


def test_each_arithmetic_that_is_not_emulated_has_its_own_and_one_refused_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products, asked = {"fp32": 100.0, "fp32-medium": 150.0, "bf16": 200.0, "fp16": 1.0}, []

    def measure(name: str, share_seconds: float) -> float:
        asked.append(name)
        if name == "bf16":
            raise RuntimeError("could not create a primitive")
        return 3.0 * products[name]

    monkeypatch.setattr(device, "measure_burst", lambda name, *_, **__: Burst(products[name], 64))
    monkeypatch.setattr(device, "measure_memory", lambda *_: (10.0, 12.0))
    monkeypatch.setattr(device, "measure_convolution", measure)
    ceilings = measure_ceilings(CPU, budget_seconds=0.05)
    assert asked == ["fp32", "fp32-medium", "bf16"]
    assert [rate.convolution_flops_per_second for rate in ceilings.matmul] == [300.0, 450.0, None, None]
    assert [rate.flops_per_second for rate in ceilings.matmul] == [100.0, 150.0, 200.0, 1.0]
