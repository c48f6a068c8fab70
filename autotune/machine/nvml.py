"""NVIDIA's management library: opened, its failures put into words, its GPUs in CUDA's order.

The only importer of pynvml. Every way in which the library as a whole can fail becomes one `NvmlFailure`; a single
fact that a GPU does not tell becomes None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

# Codes of nvml.h by number, because old bindings lack the names.
_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED, _VERSION_MISMATCH = 12, 9, 18
_GPU_IS_LOST, _RESET_REQUIRED = 15, 16
_EXPLANATIONS = {
    _LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not installed (a container needs the NVIDIA runtime for it)",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    _VERSION_MISMATCH: "the loaded NVIDIA driver and its library differ in version (restart after a driver update)",
}


class NvmlFailure(Exception):
    """NVML as a whole cannot be used; the text says why."""


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU or a slice of one.

    Attributes:
        handle: what NVML calls take; None when there is an error.
        name: product name; empty when there is an error.
        uuid: empty when it is not told.
        error: why the device cannot be identified; None when it can.
        is_slice: it is a part of a GPU that is divided (MIG).
        chip: what is asked of the whole chip, e.g. its temperature: for a slice the GPU it is cut from, where that
            can be reached, else the handle itself.
    """

    handle: Any = None
    name: str = ""
    uuid: str = ""
    error: Exception | None = None
    is_slice: bool = False
    chip: Any = None


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the NVML bindings, initialised; every way in which they fail becomes one exception.

    Raises:
        NvmlFailure: the bindings, the library or the driver is missing, mismatched or broken.
    """
    try:
        import pynvml
    except ImportError:
        raise NvmlFailure("the Python package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        yield pynvml
    except (pynvml.NVMLError, AttributeError) as reason:
        # A binding older than this package lacks functions: an AttributeError.
        raise NvmlFailure(explain(reason)) from None
    finally:
        try:
            pynvml.nvmlShutdown()
        except (pynvml.NVMLError, AttributeError):
            pass  # What was read stays true when a driver fails to let go.


def read_visible_devices() -> tuple[str, ...] | None:
    """Return what CUDA_VISIBLE_DEVICES lets through: ordinals or UUIDs in order; None for all.

    As CUDA reads it: the list ends at the first entry that is none (`-1`), and an entry that repeats hides everything.
    Source: `torch.cuda._parse_visible_devices`.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not (entry.isascii() and entry.isdigit()) and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(str(int(entry)) if entry.isdigit() else entry)
    return tuple(entries) if len(set(entries)) == len(entries) else ()


def list_devices(nvml: Any) -> list[NvmlDevice]:
    """Return every GPU of the machine by NVML's number, hidden ones and those that cannot be identified too.

    Raises:
        pynvml.NVMLError: the GPUs cannot be counted.
    """
    return [_identify(nvml, partial(nvml.nvmlDeviceGetHandleByIndex, i)) for i in range(nvml.nvmlDeviceGetCount())]


def walk_visible(
    nvml: Any, devices: list[NvmlDevice], visible: tuple[str, ...] | None
) -> Iterator[tuple[str, NvmlDevice | None]]:
    """Yield the GPUs CUDA shows, in its order, each with its entry; one that is not there is None and the last.

    CUDA hides what follows an entry without a device. Numbers are NVML's, which are CUDA's on like GPUs or under
    CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        nvml: the open bindings.
        devices: what `list_devices` found.
        visible: what `read_visible_devices` found.
    """
    for entry in visible if visible is not None else map(str, range(len(devices))):
        device = _find_device(nvml, entry, devices)
        yield entry, device
        if device is None:
            return


def read_optional(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return a fact, None when this GPU, driver or binding does not offer it; a lost GPU is no missing fact.

    Args:
        nvml: the open bindings.
        function: name of the call.
        arguments: what it takes, the handle first.

    Raises:
        pynvml.NVMLError: the GPU fell off the bus or needs a reset.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError), AttributeError) as reason:
        # A mismatch: the binding calls the newest version of a function, the driver has an older one alone.
        if getattr(reason, "value", None) in (_GPU_IS_LOST, _RESET_REQUIRED):
            raise
        return None


def explain(reason: Exception) -> str:
    """Return why NVML failed, in a reader's words where they are known."""
    return _EXPLANATIONS.get(getattr(reason, "value", -1), str(reason))


def to_text(value: str | bytes) -> str:
    """Return text as text: old bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _identify(nvml: Any, find_handle: Callable[[], Any]) -> NvmlDevice:
    """Return a device by its handle; one that fails keeps its place, so that the numbers of the others hold."""
    try:
        handle = find_handle()
        uuid = read_optional(nvml, "nvmlDeviceGetUUID", handle)
        return NvmlDevice(handle, to_text(nvml.nvmlDeviceGetName(handle)), to_text(uuid or ""), chip=handle)
    except nvml.NVMLError as reason:
        return NvmlDevice(error=reason)


def _find_device(nvml: Any, entry: str, devices: list[NvmlDevice]) -> NvmlDevice | None:
    """Return the device of a number, of a UUID or of its unique beginning; None when there is no such device."""
    if entry.isdigit():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if entry.startswith("MIG-"):
        return _find_slice(nvml, entry)
    matches = [device for device in devices if device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _find_slice(nvml: Any, uuid: str) -> NvmlDevice:
    """Return a slice and the GPU it is cut from."""
    device = _identify(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
    if device.error is not None:
        return replace(device, is_slice=True)
    try:
        chip = read_optional(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device.handle)
    except nvml.NVMLError as reason:
        return NvmlDevice(error=reason, is_slice=True)
    return replace(device, is_slice=True, chip=device.handle if chip is None else chip)
