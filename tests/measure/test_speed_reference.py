"""The canary leaves everything as it found it, and does the same work whatever the training has set."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.engine.precision import matmul_precision
from autotune.measure.speed_reference import time_reference
from autotune.records import TrainConfig
from autotune.records.config import MatmulPrecision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BRIEF = 2.0**-9
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@contextlib.contextmanager
def restored(set_it: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_it(value)
    try:
        yield
    finally:
        set_it(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    with restored(torch.use_deterministic_algorithms, True, False):
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "float64 by default": lambda: restored(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: restored(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "another device by default": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "bf16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "three threads": lambda: restored(torch.set_num_threads, 3, torch.get_num_threads()),
    "one thread": lambda: restored(torch.set_num_threads, 1, torch.get_num_threads()),
}


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def setting(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What held at each matrix product, which is still taken."""
    seen: list[dict[str, object]] = []
    multiply = torch.mm

    def watch(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.append(
            {
                "dtypes": {left.dtype, right.dtype, out.dtype},
                "shapes": {tuple(left.shape), tuple(right.shape), tuple(out.shape)},
                "threads": torch.get_num_threads(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "precision": torch.get_float32_matmul_precision(),
            }
        )
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watch)
    return seen


def state() -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "random numbers": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
    }


@pytest.mark.usefixtures("setting")
def test_the_canary_leaves_everything_as_it_was() -> None:
    before = state()
    assert time_reference(CPU, seconds=BRIEF) > 0.0
    assert state() == before


@pytest.mark.usefixtures("setting")
def test_the_canary_does_the_same_work_in_every_setting(products: list[dict[str, object]]) -> None:
    time_reference(CPU, seconds=BRIEF)
    assert len(products) >= 2
    for product in products:
        assert product == {
            "dtypes": {torch.float32},
            "shapes": {(192, 192)},
            "threads": 1,
            "autocast": False,
            "precision": "highest",
        }


def test_the_thread_count_is_restored_when_the_canary_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such product")

    monkeypatch.setattr(torch, "mm", fail)
    before = state()
    with pytest.raises(RuntimeError, match="no such product"):
        time_reference(CPU, seconds=BRIEF)
    assert state() == before


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 0), (0.25, 1), (0.375, 2), (1.0, 4), (1.125, 5)])
def test_the_time_is_the_mean_of_its_rounds(
    monkeypatch: pytest.MonkeyPatch, products: list[dict[str, object]], seconds: float, rounds: int
) -> None:
    ticks = itertools.count(start=64.0, step=0.25)
    monkeypatch.setattr("autotune.measure.speed_reference.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    if rounds == 0:
        seconds, rounds = 2.0**-20, 1  # however short, there is one
    assert time_reference(CPU, seconds=seconds) == 0.25
    first_call = 1
    assert len(products) == first_call + rounds


def test_no_graph_is_recorded() -> None:
    with torch.enable_grad():
        time_reference(CPU, seconds=BRIEF)
        assert torch.is_grad_enabled()


def test_no_pool_of_threads_is_started() -> None:
    code = (
        "import os, torch\n"
        "from autotune.measure.speed_reference import time_reference\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        f"time_reference(torch.device('cpu'), seconds={BRIEF})\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["0"]


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of a GPU be small ones of the CPU."""
    for name in ("full", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, _make=make, **kw: _make(*args, **{**kw, "device": CPU}))
    monkeypatch.setattr("autotune.measure.speed_reference._CUDA_SIZE", 64)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_on_a_gpu_the_work_does_not_depend_on_the_config(
    products: list[dict[str, object]], precision: MatmulPrecision
) -> None:
    with matmul_precision(TrainConfig(matmul_precision=precision)):
        before = torch.get_float32_matmul_precision()
        time_reference(CUDA, seconds=BRIEF)
        assert torch.get_float32_matmul_precision() == before
    assert {product["precision"] for product in products} == {"highest"}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_on_a_gpu_everything_is_left_as_it_was(precision: str) -> None:
    torch.cuda.init()
    with restored(torch.set_float32_matmul_precision, precision, torch.get_float32_matmul_precision()):
        time_reference(CUDA, seconds=0.01)  # what the library sets up at its first product stays
        before, generator = state(), torch.cuda.get_rng_state()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert time_reference(CUDA, seconds=0.01) > 0.0
        assert state() == before
        assert torch.equal(torch.cuda.get_rng_state(), generator)
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() <= reserved


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "within",
    [
        torch.inference_mode,
        lambda: torch.autocast("cuda", torch.bfloat16),
        lambda: restored(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: torch.device("cuda"),
    ],
    ids=["inference mode", "bf16 autocast", "float64 by default", "the GPU by default"],
)
def test_on_a_gpu_it_works_in_every_setting(within: Callable[[], AbstractContextManager[Any]]) -> None:
    with within():
        assert time_reference(CUDA, seconds=0.01) > 0.0
