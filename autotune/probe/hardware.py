"""What the machine and its software are. Nothing in, `HardwareInfo` and `SoftwareInfo` out.

    /proc, /sys, /dev/shm ──┐
    psutil (memory) ────────┼──▶ HardwareInfo          NVML (driver), torch/version.py (text) ──▶ SoftwareInfo
    NVML (GPUs) ────────────┘

Neither torch nor CUDA is started: a fact that cannot be read becomes a default and a sentence in `missing`, never an
exception.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil

from autotune import __version__
from autotune.probe.cgroups import read_cpu_quota, read_memory_headroom, read_memory_limit
from autotune.probe.nvml import (
    NvmlDevice,
    NvmlFailure,
    explain,
    list_devices,
    open_nvml,
    read_optional,
    read_visible_devices,
    to_text,
    walk_visible,
)
from autotune.probe.toolchain import find_host_allocators, has_cpp_compiler, read_torch_build
from autotune.records.hardware import GpuInfo, HardwareInfo, SoftwareInfo

# Instruction sets PyTorch's kernels and oneDNN choose by, as the kernel spells them: x86 `flags`, arm64 `Features`.
_CPU_FEATURES = frozenset(
    (
        *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
        *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16", "sme"),
    )
)


def read_hardware(*, root: Path = Path("/")) -> HardwareInfo:
    """Return the machine as this process may use it.

    Args:
        root: where the file system starts.
    """
    cpu_name, cpu_features, cpu_gaps = _read_cpu(root)
    gpus, gpu_gaps = _read_gpus()
    memory = psutil.virtual_memory()
    limit, headroom = read_memory_limit(root), read_memory_headroom(root)
    return HardwareInfo(
        cpu_name=cpu_name,
        usable_cpu_count=_count_usable_cpus(root),
        cpu_features=cpu_features,
        memory_total_bytes=memory.total,
        memory_limit_bytes=memory.total if limit is None else min(memory.total, limit),
        memory_available_bytes=memory.available if headroom is None else min(memory.available, headroom),
        shared_memory_free_bytes=_read_free_bytes(root / "dev/shm"),
        gpus=gpus,
        missing=(*cpu_gaps, *gpu_gaps),
        host_allocators=find_host_allocators(root),
        has_cpp_compiler=has_cpp_compiler(),
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
        autotune=__version__,
        python=platform.python_version(),
        torch=torch_version,
        cuda=cuda_version,
        driver=driver,
        platform=platform.platform(),
    )


def _read_cpu(root: Path) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return model name, features and what could not be read, from the first processor of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "model name" not in fields and "CPU part" in fields:
        name = f"{platform.machine()} implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    flags = fields.get("flags", fields.get("Features"))
    if flags is None:
        return name, (), ("CPU features could not be read: /proc/cpuinfo does not list them",)
    return name, tuple(sorted(_CPU_FEATURES & set(flags.split()))), ()


def _count_usable_cpus(root: Path) -> int:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_cpu_quota(root)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _read_free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _read_gpus() -> tuple[tuple[GpuInfo, ...], tuple[str, ...]]:
    """Return the GPUs CUDA will show, in its order, and what could not be read."""
    visible = read_visible_devices()
    if visible == ():
        return (), ()
    try:
        with open_nvml() as nvml:
            return _list_gpus(nvml, visible)
    except NvmlFailure as reason:
        return (), (f"GPUs could not be read: {reason}",)


def _list_gpus(nvml: Any, visible: tuple[str, ...] | None) -> tuple[tuple[GpuInfo, ...], tuple[str, ...]]:
    devices = list_devices(nvml)
    gpus: list[GpuInfo] = []
    missing: list[str] = []
    for entry, device in walk_visible(nvml, devices, visible):
        if device is None:
            missing.append(f"CUDA_VISIBLE_DEVICES names GPU {entry}, which is not there: it hides what follows")
            break
        try:
            gpu, gaps = _read_gpu(nvml, device)
        except nvml.NVMLError as reason:
            missing.append(f"GPU {entry} could not be read: {explain(reason)}")
            continue
        gpus.append(gpu)
        missing += [f"{gap} of GPU {entry} ({gpu.name}) could not be read" for gap in gaps]
    by_number = visible is None or any(entry.isdigit() for entry in visible)
    unlike = len({device.name for device in devices if device.error is None}) > 1
    if by_number and unlike and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        missing.append("CUDA's order of these unlike GPUs could not be read: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return tuple(gpus), tuple(missing)


def _read_gpu(nvml: Any, device: NvmlDevice) -> tuple[GpuInfo, list[str]]:
    """Return one GPU and what it does not tell.

    Raises:
        pynvml.NVMLError: the GPU cannot be identified, or it fell off the bus.
    """
    if device.error is not None:
        raise device.error
    handle = device.handle
    memory = read_optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = read_optional(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    power_milliwatts = read_optional(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    compute = read_optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    graphics = read_optional(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
    others = {process.pid for process in (*(compute or ()), *(graphics or ()))} - {os.getpid()}
    gpu = GpuInfo(
        name=device.name,
        memory_total_bytes=int(memory.total) if memory is not None else 0,
        memory_free_bytes=int(memory.free) if memory is not None else 0,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        power_limit_watts=power_milliwatts / 1000 if power_milliwatts is not None else None,
        other_processes=len(others),
    )
    facts = {"the memory (0 stands for unknown)": memory, "the other processes": compute}
    return gpu, [fact for fact, value in facts.items() if value is None]
