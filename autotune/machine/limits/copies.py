"""How fast memory is: of the device itself, and between the host and a GPU. A device in, bytes per second out.

    copy   target = source          two arrays, each byte read once and written once
    triad  c = a + s * b            three arrays, two read and one written

Source of both and of the size of an array: J. McCalpin, STREAM (https://www.cs.virginia.edu/stream/ref.html).
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import psutil
import torch

from autotune.engine.device import on_accelerator, read_device_memory
from autotune.machine.cgroups import read_memory_headroom
from autotune.machine.cpus import read_affinity, read_last_level_cache_bytes
from autotune.machine.limits.products import DEVICE_MEMORY_FRACTION
from autotune.machine.limits.repetitions import best_seconds

_ROOT = Path("/")
# STREAM: each array at least four times as large as all last-level caches together, so that none of it stays cached.
_CACHES_PER_ARRAY = 4
_CACHE_BYTES = 32 * 2**20
_LEAST_ARRAY_BYTES = 64 * 2**20
_MOST_BYTES = 2**30
_ARRAYS = 3
_HOST_BYTES = 128 * 2**20
_LEAST_HOST_BYTES = 2**20
_SCALE = 0.5


def measure_memory(device: torch.device, share_seconds: float) -> tuple[float, float]:
    """Return the best rates of a copy and of a triad inside the device's memory, in bytes read and written per second.

    Args:
        device: whose memory.
        share_seconds: wall time to spend, about.

    Raises:
        RuntimeError: there is not enough memory left.
    """
    until = perf_counter() + share_seconds
    source, target, other = _build_arrays(device, _ARRAYS)
    copy = best_seconds(lambda: target.copy_(source), device, (until - perf_counter()) / 2)
    triad = best_seconds(lambda: torch.add(source, other, alpha=_SCALE, out=target), device, until - perf_counter())
    return 2.0 * source.nbytes / copy, 3.0 * source.nbytes / triad


def measure_copy(device: torch.device, share_seconds: float) -> float:
    """Return the copy's rate alone, as `measure_memory`.

    Raises:
        RuntimeError: as `measure_memory`.
    """
    until = perf_counter() + share_seconds
    source, target = _build_arrays(device, 2)
    return 2.0 * source.nbytes / best_seconds(lambda: target.copy_(source), device, until - perf_counter())


def measure_host_copies(device: torch.device, share_seconds: float, *, pinned: bool) -> tuple[float, float]:
    """Return the best rates of copies from the host's memory to a GPU, and back, in bytes per second.

    Args:
        device: the GPU.
        share_seconds: wall time to spend, about.
        pinned: whether the host's memory is page-locked.

    Raises:
        RuntimeError: there is not enough memory left, or none that may be page-locked.
    """
    until = perf_counter() + share_seconds
    total = min(_HOST_BYTES, int(DEVICE_MEMORY_FRACTION * min(_free_bytes(torch.device("cpu")), _free_bytes(device))))
    if total < _LEAST_HOST_BYTES:
        raise RuntimeError(f"{total} bytes are too few to time their copy")
    # Written before it is copied, as every array here.
    host = torch.ones(total // 4, dtype=torch.float32, device="cpu")
    if pinned:
        host = host.pin_memory()
    there = torch.ones(host.shape, dtype=host.dtype, device=device)
    upload = best_seconds(lambda: there.copy_(host, non_blocking=pinned), device, (until - perf_counter()) / 2)
    download = best_seconds(lambda: host.copy_(there, non_blocking=pinned), device, until - perf_counter())
    return host.nbytes / upload, host.nbytes / download


def _build_arrays(device: torch.device, count: int) -> list[torch.Tensor]:
    """Return arrays that have been written: untouched pages of a CPU are all the same page of zeros, always cached."""
    numbers = _array_bytes(device) // 4
    return [torch.ones(numbers, dtype=torch.float32, device=device) for _ in range(count)]


def _array_bytes(device: torch.device) -> int:
    cache = _cache_bytes(device)
    wanted = min(max(_LEAST_ARRAY_BYTES, _CACHES_PER_ARRAY * cache), _MOST_BYTES // _ARRAYS)
    granted = int(DEVICE_MEMORY_FRACTION * _free_bytes(device)) // _ARRAYS
    if granted < min(wanted, cache):
        raise RuntimeError(f"{granted} bytes for an array would time the cache, not the memory")
    return min(wanted, granted)


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _CACHE_BYTES))
    cpus = read_affinity()
    return (read_last_level_cache_bytes(_ROOT, cpus) if cpus is not None else None) or _CACHE_BYTES


def _free_bytes(device: torch.device) -> int:
    if on_accelerator(device):
        return read_device_memory(device)[0]
    available, headroom = psutil.virtual_memory().available, read_memory_headroom(_ROOT)
    return available if headroom is None else min(available, headroom)
