from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fake_machine import FOUR_CORES, GIB, V2, write

from autotune.machine import hardware
from autotune.machine.hardware import read_hardware
from autotune.records.hardware import INSTRUCTION_LIMITS

OUTSIDE = ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OUTSIDE:
        monkeypatch.delenv(name, raising=False)


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
@pytest.mark.fault("47", injected="quotas and affinities", outcome="the smaller of both")
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
    assert machine.shared_memory_total_bytes is None
    assert (machine.core_count, machine.numa_node_count, machine.last_level_cache_bytes) == (None, None, None)
    assert (machine.cpu_quota, machine.environment) == (None, ())
    assert machine.missing == (
        "CPU features could not be read: /proc/cpuinfo does not list them",
        "CPU cores, memory nodes, CPU caches could not be read: /sys/devices/system does not list them",
    )


@pytest.mark.usefixtures("eight_cpus", "sixteen_gib")
def test_the_machine_is_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    swap = SimpleNamespace(total=4 * GIB, used=GIB)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    group = {"proc/self/cgroup": "0::/j\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/j/cpu.max": "350000 100000"}
    write(tmp_path, {**group, **FOUR_CORES, "proc/cpuinfo": "model name: x\nflags: avx2 hypervisor\n"})
    machine = read_hardware(root=tmp_path)
    assert (machine.affinity_cpu_count, machine.cpu_quota, machine.usable_cpu_count) == (8, 3.5, 4)
    assert (machine.core_count, machine.numa_node_count, machine.last_level_cache_bytes) == (4, 2, 64 * 2**20)
    assert (machine.swap_total_bytes, machine.swap_used_bytes) == (4 * GIB, GIB)
    assert machine.environment == ("a virtual machine",)
    assert machine.missing == ()


def test_what_holds_instructions_back_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTION_LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert read_hardware(root=tmp_path).instruction_limits == {}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "")
    assert read_hardware(root=tmp_path).instruction_limits == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.parametrize("reason", [OSError("no /proc"), RuntimeError("x"), ValueError("x"), psutil.Error()])
def test_swap_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception) -> None:
    def refuse() -> None:
        raise reason

    monkeypatch.setattr(psutil, "swap_memory", refuse)
    machine = read_hardware(root=tmp_path)
    assert (machine.swap_total_bytes, machine.swap_used_bytes) == (0, 0)
    assert "swap space could not be read (0 stands for unknown)" in machine.missing


def test_a_warning_about_swapped_pages_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> SimpleNamespace:
        warnings.warn("'sin' and 'sout' swap memory stats couldn't be determined", RuntimeWarning, stacklevel=2)
        return SimpleNamespace(total=7, used=5)

    monkeypatch.setattr(psutil, "swap_memory", warn)
    assert read_hardware(root=tmp_path).swap_used_bytes == 5


@pytest.mark.usefixtures("sixteen_gib")
def test_without_affinity_the_cpus_of_the_machine_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    write(tmp_path, FOUR_CORES)
    machine = read_hardware(root=tmp_path)
    assert (machine.usable_cpu_count, machine.affinity_cpu_count, machine.core_count) == (6, None, None)


def test_shared_memory_is_its_own_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=64, used=23, free=41)

    monkeypatch.setattr(hardware.shutil, "disk_usage", disk_usage)
    machine = read_hardware(root=tmp_path)
    assert (machine.shared_memory_total_bytes, machine.shared_memory_free_bytes) == (64, 41)
    assert asked == [tmp_path / "dev/shm"]


def test_reading_the_machine_never_imports_torch() -> None:
    code = (
        "import sys; from autotune.machine.hardware import read_hardware, read_software\n"
        "read_hardware(); print(read_software().torch, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    import torch

    assert done.stdout.split() == [torch.__version__, "False"]
