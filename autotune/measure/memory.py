"""Peak memory of a training process: what its limit is compared with."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from autotune.records.measurement import PeakMemory

_KIBIBYTES = re.compile(r"^(?:VmHWM|Pss):\s+(\d+) kB$", re.MULTILINE)


class MemoryMeter:
    """Follows the peak; call `sample` now and then, since loader workers do not report a peak of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker_peak = 0

    def sample(self) -> None:
        """Note what the loader workers hold now: their proportional set size, shared pages counted once."""
        workers = sum(_read_kibibytes(Path(f"/proc/{pid}/smaps_rollup")) for pid in _child_pids())
        self._worker_peak = max(self._worker_peak, workers)

    def reset_device(self) -> None:
        """Forget the device's peak so far; called after the optimizer's state exists."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> PeakMemory:
        """Return the peak: resident set of this process plus workers, and device memory reserved by PyTorch."""
        own = _read_kibibytes(Path("/proc/self/status")) or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        device = torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None
        return PeakMemory(host_bytes=own + self._worker_peak, device_bytes=device)


def _child_pids() -> list[int]:
    try:
        return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    except OSError:
        return []


def _read_kibibytes(file: Path) -> int:
    try:
        found = _KIBIBYTES.search(file.read_text())
    except OSError:
        return 0
    return 1024 * int(found.group(1)) if found else 0
