from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from fake_machine import GIB, LOST, NOT_SUPPORTED, UNKNOWN, V2, FakeNvml, Gpu, two_unlike_gpus, write

from autotune.probe import hardware
from autotune.probe.hardware import read_hardware, read_software


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)


@pytest.fixture
def sixteen_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.parametrize(
    ("maximum", "cpus"),
    [("max 100000", 8), ("250000 100000", 3), ("200000 100000", 2), ("10000 100000", 1), ("9900000 100000", 8)],
)
@pytest.mark.usefixtures("eight_cpus", "sixteen_gib")
def test_usable_cpus_are_the_smaller_of_affinity_and_quota_rounded_up(tmp_path: Path, maximum: str, cpus: int) -> None:
    write(
        tmp_path,
        {"proc/self/cgroup": "0::/j\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/j/cpu.max": maximum},
    )
    assert read_hardware(root=tmp_path).usable_cpu_count == cpus


@pytest.mark.usefixtures("sixteen_gib")
def test_memory_is_bounded_by_group_and_by_machine(tmp_path: Path) -> None:
    group = {"proc/self/cgroup": "0::/j\n", "proc/self/mountinfo": V2}
    write(tmp_path, {**group, "sys/fs/cgroup/j/memory.max": str(4 * GIB), "sys/fs/cgroup/j/memory.current": str(GIB)})
    machine = read_hardware(root=tmp_path)
    assert machine.memory_total_bytes == 16 * GIB
    assert machine.memory_limit_bytes == 4 * GIB
    assert machine.memory_available_bytes == 3 * GIB
    write(tmp_path, {"sys/fs/cgroup/j/memory.max": str(64 * GIB)})
    machine = read_hardware(root=tmp_path)
    assert machine.memory_limit_bytes == 16 * GIB
    assert machine.memory_available_bytes == 12 * GIB


def test_cpu_of_x86_keeps_only_features_that_matter(tmp_path: Path) -> None:
    first = "processor\t: 0\nmodel name\t: Fast CPU @ 3: special\nflags\t\t: sse amx_bf16 avx512f fpu avx2 avx_vnni\n"
    write(tmp_path, {"proc/cpuinfo": first + "\nprocessor\t: 1\nmodel name\t: Other\nflags\t: avx512_fp16\n"})
    machine = read_hardware(root=tmp_path)
    assert machine.cpu_name == "Fast CPU @ 3: special"
    assert machine.cpu_features == ("amx_bf16", "avx2", "avx512f", "avx_vnni")


def test_cpu_of_arm_is_named_by_its_part(tmp_path: Path) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    write(tmp_path, {"proc/cpuinfo": text})
    machine = read_hardware(root=tmp_path)
    assert "implementer 0x41 part 0xd4f" in machine.cpu_name
    assert machine.cpu_features == ("asimd", "bf16", "i8mm", "sve")


def test_an_empty_file_system_gives_defaults_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = read_hardware(root=tmp_path)
    assert machine.cpu_name
    assert machine.shared_memory_free_bytes == 0
    assert machine.host_allocators == {}
    assert machine.missing == ("CPU features could not be read: /proc/cpuinfo does not list them",)


def test_shared_memory_is_its_own_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=64, used=23, free=41)

    monkeypatch.setattr(hardware.shutil, "disk_usage", disk_usage)
    assert read_hardware(root=tmp_path).shared_memory_free_bytes == 41
    assert asked == [tmp_path / "dev/shm"]


def test_reading_the_machine_never_imports_torch() -> None:
    code = (
        "import sys; from autotune.probe.hardware import read_hardware, read_software\n"
        "read_hardware(); print(read_software().torch, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    import torch

    assert done.stdout.split() == [torch.__version__, "False"]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    def plant_module(nvml: ModuleType | None) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return plant_module


def read_gpus(root: Path) -> tuple[list[str], tuple[str, ...]]:
    write(root, {"proc/cpuinfo": "model name: x\nflags: avx2\n"})
    machine = read_hardware(root=root)
    return [gpu.name for gpu in machine.gpus], machine.missing


def test_gpus_are_read_in_full(tmp_path: Path, plant: Any) -> None:
    nvml = plant(FakeNvml(two_unlike_gpus()))
    big, small = read_hardware(root=tmp_path).gpus
    assert big.name == "NVIDIA H200"
    assert (big.memory_total_bytes, big.memory_free_bytes) == (80 * GIB, 79 * GIB)
    assert big.other_processes == 3  # 101, 102, 103: one of them twice, and ourselves left out
    assert small.name == "NVIDIA RTX A2000"
    assert (small.compute_capability, small.power_limit_watts, small.other_processes) == ("8.6", 70.5, 0)
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
def test_visible_devices(
    tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read_gpus(tmp_path) == (names, ())


@pytest.mark.parametrize(
    ("visible", "names", "named"),
    [("1,7,0", ["NVIDIA RTX A2000"], "7"), ("GPU-aa", [], "GPU-aa"), ("GPU-ffff", [], "GPU-ffff")],
    ids=["beyond the last", "ambiguous", "unknown"],
)
def test_a_device_that_is_not_there_hides_what_follows(
    tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str], named: str
) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, missing = read_gpus(tmp_path)
    assert found == names
    assert missing == (f"CUDA_VISIBLE_DEVICES names GPU {named}, which is not there: it hides what follows",)


def test_hidden_gpus_are_not_even_asked_for(tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = plant(FakeNvml(two_unlike_gpus()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    read_gpus(tmp_path)
    assert nvml.calls == 0


@pytest.mark.parametrize(
    ("visible", "order", "warned"),
    [(None, None, True), ("1", None, True), ("GPU-aaaa", None, False), (None, "PCI_BUS_ID", False)],
)
def test_unlike_gpus_by_number_need_a_fixed_order(
    tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, warned: bool
) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    _, missing = read_gpus(tmp_path)
    assert any("CUDA_DEVICE_ORDER" in sentence for sentence in missing) == warned


def test_two_like_gpus_need_no_order(tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml([Gpu("NVIDIA L4", "GPU-1"), Gpu("NVIDIA L4", "GPU-2")]))
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    assert read_gpus(tmp_path) == (["NVIDIA L4", "NVIDIA L4"], ())


def test_a_slice_is_found_by_its_uuid_and_its_missing_memory_is_said(
    tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = pynvml.NVMLError(NOT_SUPPORTED)
    slice_ = Gpu("NVIDIA H200 MIG 1g.18gb", "MIG-5", memory=error, power=error, capability=error, compute=error)
    plant(FakeNvml([Gpu("NVIDIA H200", "GPU-1", slices=[slice_])]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    names, missing = read_gpus(tmp_path)
    assert names == ["NVIDIA H200 MIG 1g.18gb"]
    assert missing == (
        "the memory (0 stands for unknown) of GPU MIG-5 (NVIDIA H200 MIG 1g.18gb) could not be read",
        "the other processes of GPU MIG-5 (NVIDIA H200 MIG 1g.18gb) could not be read",
    )
    (gpu,) = read_hardware(root=tmp_path).gpus
    assert (gpu.memory_total_bytes, gpu.compute_capability, gpu.power_limit_watts, gpu.other_processes) == (
        0,
        None,
        None,
        0,
    )


@pytest.mark.parametrize("place", ["handle_error", "name", "memory", "compute"])
@pytest.mark.parametrize("visible", [None, "0,1", "GPU-bb,GPU-cc"])
def test_a_lost_gpu_is_left_out_and_the_others_stay(
    tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch, place: str, visible: str | None
) -> None:
    lost = Gpu("NVIDIA L4", "GPU-bb", **({} if place == "name" else {place: pynvml.NVMLError(LOST)}))
    if place == "name":
        lost.name = pynvml.NVMLError(LOST)
    plant(FakeNvml([lost, Gpu("NVIDIA L4", "GPU-cc")]))
    by_uuid = visible is not None and visible.startswith("GPU-")
    unidentified = place in ("handle_error", "name")
    if visible is not None:
        # A GPU that cannot be identified has no UUID either: then only the healthy one can be named by it.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-cc" if by_uuid and unidentified else visible)
    names, missing = read_gpus(tmp_path)
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
def test_nvml_that_does_not_start_is_one_sentence(tmp_path: Path, plant: Any, failure: int, words: str) -> None:
    plant(FakeNvml(two_unlike_gpus(), fail_on_call=1, failure=failure))
    names, missing = read_gpus(tmp_path)
    assert names == []
    assert len(missing) == 1
    assert missing[0].startswith("GPUs could not be read: ")
    assert words in missing[0]
    assert read_software().driver is None


@pytest.mark.parametrize("failure", [LOST, UNKNOWN])
def test_nvml_that_dies_at_any_call_never_raises_and_is_never_silent(tmp_path: Path, plant: Any, failure: int) -> None:
    healthy = plant(FakeNvml(two_unlike_gpus()))
    read_gpus(tmp_path)
    last = healthy.calls  # the shutdown
    assert last > 15
    for call in range(1, last + 1):
        plant(FakeNvml(two_unlike_gpus(), fail_on_call=call, failure=failure))
        names, missing = read_gpus(tmp_path)
        assert set(names) <= {"NVIDIA H200", "NVIDIA RTX A2000"}
        if len(names) < 2:
            assert missing, f"silent at call {call}"
        if call == last:
            assert names == ["NVIDIA H200", "NVIDIA RTX A2000"]


def test_old_bindings_without_a_function(tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FakeNvml(two_unlike_gpus()))
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCudaComputeCapability")
    assert [gpu.compute_capability for gpu in read_hardware(root=tmp_path).gpus] == [None, None]
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCount")
    names, missing = read_gpus(tmp_path)
    assert names == []
    assert "nvmlDeviceGetCount" in missing[0]


def test_missing_bindings(tmp_path: Path, plant: Any) -> None:
    plant(None)
    names, missing = read_gpus(tmp_path)
    assert names == []
    assert missing == ("GPUs could not be read: the Python package nvidia-ml-py is not installed",)
    assert read_software().driver is None


def test_driver_version_is_text_whatever_the_bindings_return(plant: Any) -> None:
    nvml = plant(FakeNvml([]))
    assert read_software().driver == "580.95.05"
    assert not nvml.is_open


def test_no_gpu_is_nothing_missing(tmp_path: Path, plant: Any) -> None:
    plant(FakeNvml([]))
    assert read_gpus(tmp_path) == ([], ())
