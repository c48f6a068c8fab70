"""What the machine and its software are. Nothing in, `HardwareInfo` and `SoftwareInfo` out.

    /proc, /sys, /dev/shm ──┐
    psutil (memory, swap) ──┤
    environment variables ──┼──▶ HardwareInfo          NVML (driver), torch/version.py (text) ──▶ SoftwareInfo
    NVML (GPUs) ────────────┘

Neither torch nor CUDA is started: a fact that cannot be read becomes a default and a sentence in `missing`, never an
exception.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import warnings
from pathlib import Path

import psutil

from autotune.machine.cgroups import read_cpu_quota, read_memory_headroom, read_memory_limit
from autotune.machine.cpus import (
    count_cores,
    count_numa_nodes,
    name_cpu,
    read_affinity,
    read_cpu_fields,
    read_cpu_flags,
    read_last_level_cache_bytes,
    select_features,
)
from autotune.machine.environment import read_surroundings
from autotune.machine.gpus import read_gpus
from autotune.machine.nvml import NvmlFailure, open_nvml, to_text
from autotune.machine.toolchain import (
    find_host_allocators,
    find_preloaded_malloc,
    has_cpp_compiler,
    read_torch_build,
)
from autotune.records.hardware import INSTRUCTION_LIMITS, HardwareInfo, SoftwareInfo
from autotune.version import VERSION


def read_hardware(*, root: Path = Path("/")) -> HardwareInfo:
    """Return the machine as this process may use it.

    Args:
        root: where the file system starts.
    """
    fields = read_cpu_fields(root)
    flags = read_cpu_flags(fields)
    affinity, quota = read_affinity(), read_cpu_quota(root)
    cpus = affinity or frozenset()
    topology = {
        "CPU cores": count_cores(root, cpus),
        "memory nodes": count_numa_nodes(root, cpus),
        "CPU caches": read_last_level_cache_bytes(root, cpus),
    }
    memory = psutil.virtual_memory()
    limit, headroom = read_memory_limit(root), read_memory_headroom(root)
    swap = _read_swap_bytes()
    shared_memory = _read_space_bytes(root / "dev/shm")
    gpus, gpu_gaps = read_gpus()
    return HardwareInfo(
        cpu_name=name_cpu(fields),
        usable_cpu_count=count_usable_cpus(affinity, quota),
        cpu_features=select_features(flags or frozenset()),
        memory_total_bytes=memory.total,
        memory_limit_bytes=memory.total if limit is None else min(memory.total, limit),
        memory_available_bytes=memory.available if headroom is None else min(memory.available, headroom),
        shared_memory_free_bytes=0 if shared_memory is None else shared_memory[1],
        gpus=gpus,
        missing=(*_find_gaps(flags is not None, topology, swap is not None), *gpu_gaps),
        host_allocators=find_host_allocators(root),
        preloaded_malloc=find_preloaded_malloc(),
        has_cpp_compiler=has_cpp_compiler(),
        affinity_cpu_count=None if affinity is None else len(affinity),
        cpu_quota=quota,
        core_count=topology["CPU cores"],
        numa_node_count=topology["memory nodes"],
        last_level_cache_bytes=topology["CPU caches"],
        swap_total_bytes=0 if swap is None else swap[0],
        swap_used_bytes=0 if swap is None else swap[1],
        shared_memory_total_bytes=None if shared_memory is None else shared_memory[0],
        environment=read_surroundings(root),
        instruction_limits={name: os.environ[name] for name in INSTRUCTION_LIMITS if os.environ.get(name)},
    )


def read_software() -> SoftwareInfo:
    """Return the versions a measurement depends on.

    Raises:
        MachineError: PyTorch is not installed.
    """
    torch_version, cuda_version = read_torch_build()
    try:
        with open_nvml() as nvml:
            driver = to_text(nvml.nvmlSystemGetDriverVersion())
    except NvmlFailure:
        driver = None
    return SoftwareInfo(
        autotune=VERSION,
        python=platform.python_version(),
        torch=torch_version,
        cuda=cuda_version,
        driver=driver,
        platform=platform.platform(),
    )


def _find_gaps(has_flags: bool, topology: dict[str, int | None], has_swap: bool) -> list[str]:
    """Return a sentence for each fact of the host that could not be read."""
    gaps = [] if has_flags else ["CPU features could not be read: /proc/cpuinfo does not list them"]
    unread = [name for name, value in topology.items() if value is None]
    if unread:
        gaps.append(f"{', '.join(unread)} could not be read: /sys/devices/system does not list them")
    return gaps if has_swap else [*gaps, "swap space could not be read (0 stands for unknown)"]


def count_usable_cpus(affinity: frozenset[int] | None, quota: float | None) -> int:
    """Return how many CPUs this process may keep busy.

    Args:
        affinity: as `read_affinity` returns it.
        quota: as `read_cpu_quota` returns it.
    """
    count = len(affinity) if affinity else os.cpu_count() or 1
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _read_swap_bytes() -> tuple[int, int] | None:
    """Return total and used; None when they cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # pages swapped in and out, which nobody asked for
            swap = psutil.swap_memory()
    except (psutil.Error, OSError, RuntimeError, ValueError, KeyError):
        return None
    return swap.total, swap.used


def _read_space_bytes(folder: Path) -> tuple[int, int] | None:
    """Return total and free of the file system a folder is on; None without the folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total, usage.free
