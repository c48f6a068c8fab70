from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml
import pytest
from fake_machine import CHIP_FACTS, GIB, LOST, NOT_SUPPORTED, UNKNOWN, FakeNvml, Gpu, divided_gpu, two_unlike_gpus

from autotune.machine.gpus import read_gpus
from autotune.machine.hardware import read_hardware, read_software
from autotune.records.hardware import GpuInfo

NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    def plant_module(nvml: ModuleType | None) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return plant_module


def name_gpus() -> tuple[list[str], tuple[str, ...]]:
    gpus, missing = read_gpus()
    return [gpu.name for gpu in gpus], missing


def test_gpus_are_read_in_full(plant: Any) -> None:
    nvml = plant(FakeNvml(two_unlike_gpus()))
    (big, small), missing = read_gpus()
    assert missing == ()
    assert big.name == "NVIDIA H200"
    assert (big.memory_total_bytes, big.memory_free_bytes) == (80 * GIB, 79 * GIB)
    assert big.other_processes == 3  # 101, 102, 103: one of them twice, and ourselves left out
    assert small.name == "NVIDIA RTX A2000"
    assert (small.compute_capability, small.power_limit_watts, small.other_processes) == ("8.6", 70.5, 0)
    assert (big.sm_clock_mhz, big.sm_clock_max_mhz, big.temperature_celsius, big.slowdowns) == (1_980, 2_100, 61, ())
    assert (big.utilization_fraction, big.pcie_generation, big.pcie_width) == (0.37, 5, 16)
    assert (big.nvlinks, big.mig, small.mig) == (2, "off", None)
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H200", "NVIDIA RTX A2000"]),
        ("", []),
        ("-1", []),
        ("1", ["NVIDIA RTX A2000"]),
        ("1,0", ["NVIDIA RTX A2000", "NVIDIA H200"]),
        (" 0 , 1 ", ["NVIDIA H200", "NVIDIA RTX A2000"]),
        ("1,-1,0", ["NVIDIA RTX A2000"]),
        ("0,0", []),
        ("NoDevFiles", []),
        ("GPU-aabb-2222", ["NVIDIA RTX A2000"]),
        ("GPU-aab,GPU-aaaa", ["NVIDIA RTX A2000", "NVIDIA H200"]),
    ],
)
def test_visible_devices(plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert name_gpus() == (names, ())


@pytest.mark.parametrize(
    ("visible", "names", "named"),
    [("1,7,0", ["NVIDIA RTX A2000"], "7"), ("GPU-aa", [], "GPU-aa"), ("GPU-ffff", [], "GPU-ffff")],
    ids=["beyond the last", "ambiguous", "unknown"],
)
def test_a_device_that_is_not_there_hides_what_follows(
    plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str], named: str
) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, missing = name_gpus()
    assert found == names
    assert missing == (f"CUDA_VISIBLE_DEVICES names GPU {named}, which is not there: it hides what follows",)


def test_hidden_gpus_are_not_even_asked_for(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = plant(FakeNvml(two_unlike_gpus()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    name_gpus()
    assert nvml.calls == 0


@pytest.mark.parametrize(
    ("visible", "order", "warned"),
    [(None, None, True), ("1", None, True), ("GPU-aaaa", None, False), (None, "PCI_BUS_ID", False)],
)
def test_unlike_gpus_by_number_need_a_fixed_order(
    plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, warned: bool
) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    _, missing = name_gpus()
    assert any("CUDA_DEVICE_ORDER" in sentence for sentence in missing) == warned


def test_two_like_gpus_need_no_order(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml([Gpu("NVIDIA L4", "GPU-1"), Gpu("NVIDIA L4", "GPU-2")]))
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    assert name_gpus() == (["NVIDIA L4", "NVIDIA L4"], ())


def test_a_slice_has_its_own_memory_and_the_chips_clock(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml([divided_gpu()]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    expected = GpuInfo(
        name="NVIDIA H200 MIG 1g.18gb",
        memory_total_bytes=18 * GIB,
        memory_free_bytes=17 * GIB,
        compute_capability="9.0",
        other_processes=1,
        sm_clock_mhz=1_980,
        sm_clock_max_mhz=2_100,
        temperature_celsius=61,
        pcie_generation=5,
        pcie_width=16,
        mig="slice",
    )
    assert read_gpus() == ((expected,), ())


@pytest.mark.parametrize("closed", ["driver", "binding"])
def test_a_slice_whose_chip_is_closed_to_us_is_still_read(
    plant: Any, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    plant(FakeNvml([divided_gpu(chip_error=pynvml.NVMLError(NO_PERMISSION))]))
    if closed == "binding":
        monkeypatch.delattr(FakeNvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    (gpu,), missing = read_gpus()
    assert missing == ()
    assert (gpu.memory_total_bytes, gpu.mig) == (18 * GIB, "slice")
    assert (gpu.compute_capability, gpu.sm_clock_mhz, gpu.temperature_celsius) == (None, None, None)


def test_a_slice_of_a_lost_gpu_is_said(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml([divided_gpu(chip_error=pynvml.NVMLError(LOST))]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    assert read_gpus() == ((), ("GPU MIG-5 could not be read: GPU is lost",))


def test_a_slice_that_is_not_there_is_said(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml([divided_gpu()]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-6")
    assert read_gpus() == ((), ("GPU MIG-6 could not be read: Not Found",))


def test_the_memory_that_a_slice_does_not_tell_is_said(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pynvml.NVMLError(NOT_SUPPORTED)
    plant(FakeNvml([divided_gpu(memory=refused, compute=refused)]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    (gpu,), missing = read_gpus()
    assert missing == (
        "the memory (0 stands for unknown) of GPU MIG-5 (NVIDIA H200 MIG 1g.18gb) could not be read",
        "the other processes of GPU MIG-5 (NVIDIA H200 MIG 1g.18gb) could not be read",
    )
    assert (gpu.memory_total_bytes, gpu.other_processes) == (0, 0)


@pytest.mark.parametrize("visible", [None, "0", "GPU-1"])
def test_a_divided_gpu_is_not_what_cuda_shows(plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    plant(FakeNvml([divided_gpu()]))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (gpu,), missing = read_gpus()
    assert (gpu.mig, gpu.utilization_fraction) == ("on", None)
    named = visible or "0"
    assert missing == (f"GPU {named} (NVIDIA H200) is divided (MIG): CUDA shows its slices, not the GPU itself",)


@pytest.mark.parametrize(
    ("links", "active"),
    [([], 0), ([0, 0], 0), ([1] * 18, 18), ([1, 0, 1, 1], 3), ([1] * 99, 36)],
    ids=["none", "all down", "all", "one down", "a driver that answers for ever"],
)
def test_active_links_are_counted_up_to_the_last(plant: Any, links: list[int], active: int) -> None:
    plant(FakeNvml([Gpu("NVIDIA H100", "GPU-1", links=links)]))
    (gpu,), _ = read_gpus()
    assert gpu.nvlinks == active


def test_a_gpu_that_is_held_down_says_why(plant: Any) -> None:
    reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
    plant(FakeNvml([Gpu("NVIDIA H100", "GPU-1", clock=900, temperature=84, reasons=reasons)]))
    (gpu,), _ = read_gpus()
    assert (gpu.sm_clock_mhz, gpu.temperature_celsius, gpu.slowdowns) == (900, 84, ("power-cap",))


def test_what_a_gpu_does_not_offer_stays_unknown_without_a_word(plant: Any) -> None:
    refused = pynvml.NVMLError(NOT_SUPPORTED)
    silent = (*CHIP_FACTS, "utilization", "pcie_generation", "pcie_width", "mig")
    plant(FakeNvml([Gpu("NVIDIA GB10", "GPU-1", **dict.fromkeys(silent, refused))]))
    known = GpuInfo(name="NVIDIA GB10", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB)
    assert read_gpus() == ((known,), ())


IN_EVERY_FACT = (
    *("handle_error", "name", "memory", "capability", "power", "compute", "utilization", "clock", "temperature"),
    *("clock_max", "pcie_generation", "pcie_width", "links", "mig"),
)


@pytest.mark.parametrize(
    ("place", "visible"),
    [
        *((place, None) for place in IN_EVERY_FACT),
        *itertools.product(("name", "power"), ("0,1", "GPU-bb,GPU-cc")),
    ],
)
@pytest.mark.fault("43", injected="a GPU that is lost", outcome="left out; the others stay")
def test_a_lost_gpu_is_left_out_and_the_others_stay(
    plant: Any, monkeypatch: pytest.MonkeyPatch, place: str, visible: str | None
) -> None:
    error = pynvml.NVMLError(LOST)
    lost = Gpu("NVIDIA L4", "GPU-bb")
    setattr(lost, place, [1, error] if place == "links" else error)
    plant(FakeNvml([lost, Gpu("NVIDIA L4", "GPU-cc")]))
    by_uuid = visible is not None and visible.startswith("GPU-")
    unidentified = place in ("handle_error", "name")
    if visible is not None:
        # A GPU that cannot be identified has no UUID either: then only the healthy one can be named by it.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-cc" if by_uuid and unidentified else visible)
    names, missing = name_gpus()
    assert names == ["NVIDIA L4"]
    if by_uuid and unidentified:
        assert missing == ()
    else:
        assert missing == (f"GPU {'GPU-bb' if by_uuid else '0'} could not be read: GPU is lost",)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not installed"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "differ in version"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded"),
        (UNKNOWN, "Unknown Error"),
    ],
)
@pytest.mark.fault(
    "43", injected="NVML without a driver, of another version", outcome="one sentence; the rest is probed"
)
def test_nvml_that_does_not_start_is_one_sentence(plant: Any, failure: int, words: str) -> None:
    plant(FakeNvml(two_unlike_gpus(), fail_on_call=1, failure=failure))
    names, missing = name_gpus()
    assert names == []
    assert len(missing) == 1
    assert missing[0].startswith("GPUs could not be read: ")
    assert words in missing[0]
    assert read_software().driver is None


@pytest.mark.parametrize("failure", [LOST, UNKNOWN])
@pytest.mark.fault("43", injected="NVML that fails at each call in turn", outcome="never raised, never silent")
def test_nvml_that_dies_at_any_call_never_raises_and_is_never_silent(plant: Any, failure: int) -> None:
    healthy = plant(FakeNvml(two_unlike_gpus()))
    name_gpus()
    last = healthy.calls  # the shutdown
    assert last > 30
    for call in range(1, last + 1):
        plant(FakeNvml(two_unlike_gpus(), fail_on_call=call, failure=failure))
        names, missing = name_gpus()
        assert set(names) <= {"NVIDIA H200", "NVIDIA RTX A2000"}
        if len(names) < 2:
            assert missing, f"silent at call {call}"
        if call == last:
            assert names == ["NVIDIA H200", "NVIDIA RTX A2000"]


def test_old_bindings_without_a_function(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCudaComputeCapability")
    assert [gpu.compute_capability for gpu in read_gpus()[0]] == [None, None]
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCount")
    names, missing = name_gpus()
    assert names == []
    assert "nvmlDeviceGetCount" in missing[0]


def test_a_driver_older_than_the_bindings(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # nvmlDeviceGetComputeRunningProcesses is _v3 of it in the bindings of today; a driver of CUDA 11.0 has no such one.
    def mismatch(_: Any) -> Any:
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    nvml = plant(FakeNvml([Gpu("old", "GPU-aaaa")]))
    nvml.NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", mismatch)
    assert name_gpus() == (["old"], ("the other processes of GPU 0 (old) could not be read",))


def test_missing_bindings(plant: Any) -> None:
    plant(None)
    names, missing = name_gpus()
    assert names == []
    assert missing == ("GPUs could not be read: the Python package nvidia-ml-py is not installed",)
    assert read_software().driver is None


def test_driver_version_is_text_whatever_the_bindings_return(plant: Any) -> None:
    nvml = plant(FakeNvml([]))
    assert read_software().driver == "580.95.05"
    assert not nvml.is_open


def test_no_gpu_is_nothing_missing(plant: Any) -> None:
    plant(FakeNvml([]))
    assert name_gpus() == ([], ())


def test_the_machine_has_the_gpus_and_their_sentences(tmp_path: Path, plant: Any) -> None:
    plant(FakeNvml([divided_gpu()]))
    machine = read_hardware(root=tmp_path)
    gpus, missing = read_gpus()
    assert machine.gpus == gpus
    assert machine.missing[-1:] == missing
