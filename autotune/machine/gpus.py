"""The GPUs CUDA will show, each as the driver tells of it. Nothing in, `GpuInfo` and sentences out.

A fact that a GPU does not offer stays None. What makes the list itself doubtful is said: a GPU that is lost, one that
is divided (MIG), an entry of CUDA_VISIBLE_DEVICES that is not there, unlike GPUs whose order only CUDA knows.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from autotune.machine.gpu_state import CLOCK_SM, read_state
from autotune.machine.nvml import (
    NvmlDevice,
    NvmlFailure,
    explain,
    list_devices,
    open_nvml,
    read_optional,
    read_visible_devices,
    walk_visible,
)
from autotune.records.hardware import GpuInfo
from autotune.records.measurement import GpuState

# NVML_NVLINK_MAX_LINKS of nvml.h, by number because it grows with the bindings; a link beyond the last ends the walk.
_MOST_NVLINKS = 36
_MIG_ENABLED = 1


def read_gpus() -> tuple[tuple[GpuInfo, ...], tuple[str, ...]]:
    """Return the GPUs CUDA will show, in its order, and what could not be read, one sentence each."""
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
        if gpu.mig == "on":
            missing.append(f"GPU {entry} ({gpu.name}) is divided (MIG): CUDA shows its slices, not the GPU itself")
    by_number = visible is None or any(entry.isdigit() for entry in visible)
    unlike = len({device.name for device in devices if device.error is None}) > 1
    if by_number and unlike and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        missing.append("CUDA's order of these unlike GPUs could not be read: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return tuple(gpus), tuple(missing)


def _read_gpu(nvml: Any, device: NvmlDevice) -> tuple[GpuInfo, list[str]]:
    """Return one GPU and what it should tell but does not.

    Raises:
        pynvml.NVMLError: the GPU cannot be identified, or it fell off the bus.
    """
    if device.error is not None:
        raise device.error
    handle, chip = device.handle, device.chip
    memory = read_optional(nvml, "nvmlDeviceGetMemoryInfo", handle)
    capability = read_optional(nvml, "nvmlDeviceGetCudaComputeCapability", chip)
    power_milliwatts = read_optional(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
    compute = read_optional(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    graphics = read_optional(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
    others = {process.pid for process in (*(compute or ()), *(graphics or ()))} - {os.getpid()}
    utilization = read_optional(nvml, "nvmlDeviceGetUtilizationRates", handle)
    state = read_state(nvml, chip) or GpuState()
    gpu = GpuInfo(
        name=device.name,
        memory_total_bytes=int(memory.total) if memory is not None else 0,
        memory_free_bytes=int(memory.free) if memory is not None else 0,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        power_limit_watts=power_milliwatts / 1000 if power_milliwatts is not None else None,
        other_processes=len(others),
        sm_clock_mhz=state.sm_clock_mhz,
        sm_clock_max_mhz=read_optional(nvml, "nvmlDeviceGetMaxClockInfo", chip, CLOCK_SM),
        temperature_celsius=state.temperature_celsius,
        slowdowns=state.slowdowns,
        utilization_fraction=utilization.gpu / 100 if utilization is not None else None,
        pcie_generation=read_optional(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", chip),
        pcie_width=read_optional(nvml, "nvmlDeviceGetMaxPcieLinkWidth", chip),
        nvlinks=_count_nvlinks(nvml, handle),
        mig=_read_mig(nvml, device),
    )
    facts = {"the memory (0 stands for unknown)": memory, "the other processes": compute}
    return gpu, [fact for fact, value in facts.items() if value is None]


def _count_nvlinks(nvml: Any, handle: Any) -> int:
    """Return the active links; slices of a GPU have none of their own."""
    active = 0
    for link in range(_MOST_NVLINKS):
        state = read_optional(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            break
        active += bool(state)
    return active


def _read_mig(nvml: Any, device: NvmlDevice) -> Literal["off", "on", "slice"] | None:
    if device.is_slice:
        return "slice"
    modes = read_optional(nvml, "nvmlDeviceGetMigMode", device.handle)  # the current one and the one after a reset
    if modes is None:
        return None
    return "on" if modes[0] == _MIG_ENABLED else "off"
