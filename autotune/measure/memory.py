"""Peak memory of a training process: what its limit is compared with."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from autotune.engine.device import (
    on_accelerator,
    peak_reserved_bytes,
    read_device_memory,
    reserved_bytes,
    reset_peak,
    synchronize,
)
from autotune.records.measurement import PeakMemory

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"
"""Written to /proc/self/clear_refs it sets VmHWM back to VmRSS (proc(5), since Linux 4.0)."""


class MemoryMeter:
    """Follows the peak; call `sample` now and then, since loader workers do not report a peak of their own.

    Args:
        device: where it trains.
        list_others: finds other processes of the same training on this machine.
    """

    def __init__(self, device: torch.device, list_others: Callable[[], Sequence[int]] = tuple) -> None:
        self._device, self._list_others = device, list_others
        self._worker_peak = 0
        self._others: dict[int, int] = {}

    def sample(self) -> None:
        """Note what the loader workers hold now: their proportional set size, shared pages counted once."""
        others = self._list_others()
        workers = sum(_child_bytes()) + sum(sum(_child_bytes(pid)) for pid in others)
        self._worker_peak = max(self._worker_peak, workers)
        self._others |= {pid: _read_kibibytes(Path(f"/proc/{pid}/status")) for pid in others}

    def reset_device(self) -> None:
        """Forget the device's peak so far; called after the optimizer's state exists."""
        reset_peak(self._device)

    def read(self) -> PeakMemory:
        """Return the peak: resident sets of all processes plus workers, and device memory reserved here by PyTorch."""
        device = peak_reserved_bytes(self._device)
        host = peak_host_bytes() + sum(self._others.values()) + self._worker_peak
        return PeakMemory(host_bytes=host, device_bytes=device)


def peak_host_bytes() -> int:
    """Return the largest resident set of this process so far, or since `reset_host_peak`."""
    return _read_kibibytes(_STATUS) or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    """Return the resident set of this process; 0 where the system does not tell."""
    return _read_kibibytes(_STATUS, "VmRSS")


def reset_host_peak() -> bool:
    """Forget the largest resident set so far; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Collect garbage and hand freed memory back to the system: the host's, and what PyTorch keeps of a GPU's."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # no glibc


def measure_outside_bytes(device: torch.device, own_bytes: int) -> int:
    """Return what is in use beside some tensors once free memory was released.

    Args:
        device: of a GPU the use by all processes counts (context and libraries too), of the host by this one.
        own_bytes: what the tensors take; on a GPU all of PyTorch's are left out instead.
    """
    release_free_memory()
    if not on_accelerator(device):
        return max(0, resident_bytes() - own_bytes)
    free, total = read_device_memory(device)
    return max(0, total - free - reserved_bytes(device))


def measure_peak(run: Callable[[], None], device: torch.device) -> int | None:
    """Return the most in use while something ran, as `measure_outside_bytes` counts; None when it cannot be known.

    What a GPU holds beside PyTorch's memory is read after the run: libraries are loaded in it, others come and go.
    """
    release_free_memory()
    if on_accelerator(device):
        reset_peak(device)
        run()
        synchronize(device)
        reserved = peak_reserved_bytes(device) or 0
        return measure_outside_bytes(device, 0) + reserved
    forgotten, before = reset_host_peak(), peak_host_bytes()
    run()
    after = peak_host_bytes()
    return after if forgotten or after > before else None


def worker_bytes() -> int | None:
    """Return what a child process (a loader worker) holds on average, None without one.

    The proportional set size: private pages plus a part of those shared, batches in shared memory among them.
    """
    found = [held for held in _child_bytes() if held]
    return round(sum(found) / len(found)) if found else None


def _child_bytes(parent: int | str = "self") -> list[int]:
    return [_read_kibibytes(Path(f"/proc/{pid}/smaps_rollup")) for pid in list_children(parent)]


def list_children(parent: int | str = "self") -> list[int]:
    """Return the processes that one has started and that still run.

    Args:
        parent: its number; this one without.
    """
    try:
        files = Path(f"/proc/{parent}/task").glob("*/children")
        return [int(pid) for file in files for pid in file.read_text().split()]
    except OSError:
        return []


def _read_kibibytes(file: Path, names: str = "VmHWM|Pss") -> int:
    try:
        found = re.search(rf"^(?:{names}):\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found.group(1)) if found else 0
