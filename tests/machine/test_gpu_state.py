from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pynvml
import pytest
from fake_machine import LOST, NOT_SUPPORTED, UNKNOWN, FakeNvml, Gpu, divided_gpu

from autotune.machine.gpu_state import GpuWatch
from autotune.records.measurement import GpuState

FUNCTION_NOT_FOUND = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
FACTS = ("clock", "drawn", "temperature", "reasons", "old_reasons")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def plant_module(nvml: ModuleType | None) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return plant_module


def two_gpus(**second: Any) -> list[Gpu]:
    return [Gpu("NVIDIA H100", "GPU-aaaa", clock=1_000), Gpu("NVIDIA H100", "GPU-bbbb", clock=2_000, **second)]


def read_clock(index: int) -> int | None:
    state = GpuWatch(index).read()
    return None if state is None else state.sm_clock_mhz


def test_a_state_has_every_fact_in_its_unit(plant: Any) -> None:
    plant(FakeNvml([Gpu("NVIDIA H100", "GPU-1", reasons=pynvml.nvmlClocksEventReasonSwPowerCap)]))
    expected = GpuState(sm_clock_mhz=1_980, power_watts=452.25, temperature_celsius=61, slowdowns=("power-cap",))
    assert GpuWatch().read() == expected


def test_each_reading_is_of_its_moment_and_nvml_stays_open_between_them(plant: Any) -> None:
    gpu = Gpu("NVIDIA H100", "GPU-1", clock=1_980)
    nvml = plant(FakeNvml([gpu]))
    watch = GpuWatch()
    assert nvml.is_open
    first = watch.read()
    calls = nvml.calls
    gpu.clock, gpu.temperature = 1_200, 88
    second = watch.read()
    assert first is not None
    assert second is not None
    assert (first.sm_clock_mhz, first.temperature_celsius) == (1_980, 61)
    assert (second.sm_clock_mhz, second.temperature_celsius) == (1_200, 88)
    assert nvml.calls - calls == 4  # one per fact
    assert nvml.is_open


@pytest.mark.parametrize(
    ("names", "slowdowns"),
    [
        ((), ()),
        (("GpuIdle", "ApplicationsClocksSetting", "SyncBoost", "DisplayClockSetting"), ()),
        (("SwPowerCap",), ("power-cap",)),
        (("HwSlowdown",), ("hardware",)),
        (("HwPowerBrakeSlowdown",), ("hardware",)),
        (("SwThermalSlowdown",), ("thermal",)),
        (("HwThermalSlowdown",), ("thermal",)),
        (("HwThermalSlowdown", "HwSlowdown", "SwPowerCap", "GpuIdle"), ("power-cap", "hardware", "thermal")),
    ],
)
def test_slowdowns_are_the_bits_that_hold_a_clock_down(
    plant: Any, names: tuple[str, ...], slowdowns: tuple[str, ...]
) -> None:
    bits = sum(getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in names)
    plant(FakeNvml([Gpu("NVIDIA H100", "GPU-1", reasons=bits)]))
    state = GpuWatch().read()
    assert state is not None
    assert state.slowdowns == slowdowns


@pytest.mark.parametrize("missing_from", ["driver", "binding"])
def test_the_older_call_is_asked_where_the_newer_one_is_missing(
    plant: Any, monkeypatch: pytest.MonkeyPatch, missing_from: str
) -> None:
    gpu = Gpu("NVIDIA H100", "GPU-1", old_reasons=pynvml.nvmlClocksThrottleReasonHwSlowdown)
    if missing_from == "driver":
        gpu.reasons = pynvml.NVMLError(FUNCTION_NOT_FOUND)
    else:
        monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    plant(FakeNvml([gpu]))
    state = GpuWatch().read()
    assert state is not None
    assert state.slowdowns == ("hardware",)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (("clock",), GpuState(power_watts=452.25, temperature_celsius=61, slowdowns=("power-cap",))),
        (("drawn",), GpuState(sm_clock_mhz=1_980, temperature_celsius=61, slowdowns=("power-cap",))),
        (("temperature",), GpuState(sm_clock_mhz=1_980, power_watts=452.25, slowdowns=("power-cap",))),
        (
            ("reasons", "old_reasons"),
            GpuState(sm_clock_mhz=1_980, power_watts=452.25, temperature_celsius=61, slowdowns=()),
        ),
        (("clock", "drawn", "temperature"), GpuState(slowdowns=("power-cap",))),
    ],
)
def test_a_fact_that_is_not_told_is_left_out(plant: Any, facts: tuple[str, ...], expected: GpuState) -> None:
    errors = {fact: pynvml.NVMLError(NOT_SUPPORTED) for fact in facts}
    plant(FakeNvml([Gpu("NVIDIA H100", "GPU-1", **{"reasons": 4, "old_reasons": 8, **errors})]))
    watch = GpuWatch()
    assert [watch.read(), watch.read()] == [expected, expected]


def test_a_gpu_that_tells_nothing_is_asked_once(plant: Any) -> None:
    errors = {fact: pynvml.NVMLError(NOT_SUPPORTED) for fact in FACTS}
    nvml = plant(FakeNvml([Gpu("NVIDIA H100", "GPU-1", **errors)]))
    watch = GpuWatch()
    assert watch.read() is None
    calls = nvml.calls
    assert watch.read() is None
    assert nvml.calls == calls
    assert not nvml.is_open


@pytest.mark.parametrize("fact", FACTS[:-1])
@pytest.mark.fault("43", injected="a GPU lost while it is watched", outcome="no answer from then on")
def test_a_lost_gpu_answers_none_from_then_on(plant: Any, fact: str) -> None:
    gpu = Gpu("NVIDIA H100", "GPU-1")
    nvml = plant(FakeNvml([gpu]))
    watch = GpuWatch()
    assert watch.read() is not None
    healthy = getattr(gpu, fact)
    setattr(gpu, fact, pynvml.NVMLError(LOST))
    assert watch.read() is None
    setattr(gpu, fact, healthy)
    assert watch.read() is None
    assert not nvml.is_open


@pytest.mark.parametrize("failure", [LOST, UNKNOWN])
def test_nvml_that_dies_at_any_call_never_raises(plant: Any, failure: int) -> None:
    healthy = plant(FakeNvml(two_gpus()))
    watch = GpuWatch(1)
    assert watch.read() is not None
    watch.close()
    last = healthy.calls  # the shutdown
    assert last == 1 + 1 + 2 * 3 + 4 + 1  # open, count, three facts to know each GPU by, the state, close
    for call in range(1, last + 1):
        plant(FakeNvml(two_gpus(), fail_on_call=call, failure=failure))
        watch = GpuWatch(1)
        states = [watch.read(), watch.read()]
        assert states[1] is None or call == last
        watch.close()
        assert watch.read() is None


@pytest.mark.parametrize(
    ("visible", "clocks"),
    [
        (None, [1_000, 2_000, None]),
        ("1", [2_000, None]),
        ("1,0", [2_000, 1_000]),
        ("GPU-bb", [2_000, None]),
        ("1,7,0", [2_000, None, None]),
        ("", [None]),
        ("-1", [None]),
        ("0,0", [None]),
    ],
)
def test_the_index_counts_what_cuda_shows(
    plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, clocks: list[int | None]
) -> None:
    plant(FakeNvml(two_gpus()))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [read_clock(index) for index in range(len(clocks))] == clocks
    assert read_clock(-1) is None


def test_a_gpu_that_cannot_be_identified_keeps_its_number(plant: Any) -> None:
    broken, healthy = two_gpus()
    broken.handle_error = pynvml.NVMLError(UNKNOWN)
    nvml = plant(FakeNvml([broken, healthy]))
    watch = GpuWatch(0)
    assert not nvml.is_open
    assert watch.read() is None
    assert read_clock(1) == 2_000


def test_a_slice_has_the_state_of_its_chip(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml([divided_gpu()]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    assert GpuWatch().read() == GpuState(sm_clock_mhz=1_980, power_watts=452.25, temperature_celsius=61)


def test_hidden_gpus_are_not_even_asked_for(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = plant(FakeNvml(two_gpus()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert GpuWatch().read() is None
    assert nvml.calls == 0


def test_without_bindings_there_is_nothing_to_read(plant: Any) -> None:
    plant(None)
    watch = GpuWatch()
    assert watch.read() is None
    watch.close()


def test_close_lets_go_once(plant: Any) -> None:
    nvml = plant(FakeNvml(two_gpus()))
    watch = GpuWatch()
    watch.close()
    calls = nvml.calls
    assert not nvml.is_open
    watch.close()
    assert watch.read() is None
    assert nvml.calls == calls
