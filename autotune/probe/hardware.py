"""What the machine and its software are. Nothing in, `HardwareInfo` and `SoftwareInfo` out.

    /proc, /sys, /dev/shm ──┐
    psutil (memory) ────────┼──▶ HardwareInfo          NVML (driver), torch/version.py (text) ──▶ SoftwareInfo
    NVML (GPUs) ────────────┘

The only user of psutil and NVML. Neither torch nor CUDA is started: a fact that cannot be read becomes a default and
a sentence in `missing`, never an exception.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from autotune import __version__
from autotune.probe.cgroups import read_cpu_quota, read_memory_headroom, read_memory_limit
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
# Codes of nvml.h by number, because old bindings lack the names.
_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED, _VERSION_MISMATCH = 12, 9, 18
_GPU_IS_LOST, _RESET_REQUIRED = 15, 16
_EXPLANATIONS = {
    _LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not installed (a container needs the NVIDIA runtime for it)",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    _VERSION_MISMATCH: "the loaded NVIDIA driver and its library differ in version (restart after a driver update)",
}

T = TypeVar("T")


@dataclass(frozen=True)
class _Device:
    handle: Any = None
    name: str = ""
    uuid: str = ""
    error: Exception | None = None


class _NvmlFailure(Exception):
    """NVML as a whole cannot be used; the text says why."""


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
        with _open_nvml() as nvml:
            driver = _to_text(nvml.nvmlSystemGetDriverVersion())
    except _NvmlFailure:
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
    visible = _parse_visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible == ():
        return (), ()
    try:
        with _open_nvml() as nvml:
            return _list_gpus(nvml, visible)
    except _NvmlFailure as reason:
        return (), (f"GPUs could not be read: {reason}",)


@contextmanager
def _open_nvml() -> Iterator[Any]:
    """Yield the NVML bindings, initialised; every way in which they fail becomes one exception.

    Raises:
        _NvmlFailure: the bindings, the library or the driver is missing, mismatched or broken.
    """
    try:
        import pynvml
    except ImportError:
        raise _NvmlFailure("the Python package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        yield pynvml
    except (pynvml.NVMLError, AttributeError) as reason:
        # A binding older than this package lacks functions: an AttributeError.
        raise _NvmlFailure(_explain(reason)) from None
    finally:
        try:
            pynvml.nvmlShutdown()
        except (pynvml.NVMLError, AttributeError):
            pass  # What was read stays true when a driver fails to let go.


def _parse_visible_devices(value: str | None) -> tuple[str, ...] | None:
    """Return what CUDA_VISIBLE_DEVICES lets through: ordinals or UUIDs in order; None for all.

    As CUDA reads it: the list ends at the first entry that is none (`-1`), and an entry that repeats hides everything.
    Source: `torch.cuda._parse_visible_devices`.
    """
    if value is None:
        return None
    entries: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not (entry.isascii() and entry.isdigit()) and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(str(int(entry)) if entry.isdigit() else entry)
    return tuple(entries) if len(set(entries)) == len(entries) else ()


def _list_gpus(nvml: Any, visible: tuple[str, ...] | None) -> tuple[tuple[GpuInfo, ...], tuple[str, ...]]:
    devices = [_identify(nvml, partial(nvml.nvmlDeviceGetHandleByIndex, i)) for i in range(nvml.nvmlDeviceGetCount())]
    gpus: list[GpuInfo] = []
    missing: list[str] = []
    for entry in visible if visible is not None else map(str, range(len(devices))):
        device = _find_device(nvml, entry, devices)
        if device is None:
            missing.append(f"CUDA_VISIBLE_DEVICES names GPU {entry}, which is not there: it hides what follows")
            break
        try:
            gpu, gaps = _read_gpu(nvml, device)
        except nvml.NVMLError as reason:
            missing.append(f"GPU {entry} could not be read: {_explain(reason)}")
            continue
        gpus.append(gpu)
        missing += [f"{gap} of GPU {entry} ({gpu.name}) could not be read" for gap in gaps]
    by_number = visible is None or any(entry.isdigit() for entry in visible)
    unlike = len({device.name for device in devices if device.error is None}) > 1
    if by_number and unlike and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        missing.append("CUDA's order of these unlike GPUs could not be read: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return tuple(gpus), tuple(missing)


def _identify(nvml: Any, find_handle: Callable[[], Any]) -> _Device:
    """Return a device by its handle; one that fails keeps its place, so that the numbers of the others hold."""
    try:
        handle = find_handle()
        uuid = _read_optional(nvml, lambda: nvml.nvmlDeviceGetUUID(handle))
        return _Device(handle, _to_text(nvml.nvmlDeviceGetName(handle)), _to_text(uuid or ""))
    except nvml.NVMLError as reason:
        return _Device(error=reason)


def _find_device(nvml: Any, entry: str, devices: list[_Device]) -> _Device | None:
    """Return the device of a number, of a UUID or of its unique beginning; None when there is no such device."""
    if entry.isdigit():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if entry.startswith("MIG-"):
        return _identify(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(entry))
    matches = [device for device in devices if device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _read_gpu(nvml: Any, device: _Device) -> tuple[GpuInfo, list[str]]:
    """Return one GPU and what it does not tell.

    Raises:
        pynvml.NVMLError: the GPU cannot be identified, or it fell off the bus.
    """
    if device.error is not None:
        raise device.error
    handle = device.handle
    memory = _read_optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = _read_optional(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    power_milliwatts = _read_optional(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    compute = _read_optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    graphics = _read_optional(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
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


def _read_optional(nvml: Any, read: Callable[[], T]) -> T | None:
    """Return a fact, None when this GPU or this binding does not offer it; a lost GPU is no missing fact."""
    try:
        return read()
    except (nvml.NVMLError, AttributeError) as reason:
        if getattr(reason, "value", None) in (_GPU_IS_LOST, _RESET_REQUIRED):
            raise
        return None


def _explain(reason: Exception) -> str:
    return _EXPLANATIONS.get(getattr(reason, "value", -1), str(reason))


def _to_text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
