"""Measured limits of a device. Device in, `Ceilings` out; imports torch, so it runs in a child process.

    |<- fp32 ->|<- tf32 ->|<- bf16 ->|<- fp16 ->|<- memory copy ->|<- copy to the device ->|
     each takes an equal part of the time that is left: warm-up, then the best of several repetitions

The best repetition is the limit: everything that disturbs a repetition makes it longer. The global precision setting
and the random generators are left as they were; on a CPU fp32 runs under the precision setting of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from autotune.engine.precision import tf32
from autotune.records.ceilings import Ceilings, MatmulRate
from autotune.records.config import TrainConfig

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Smallest and largest edge of the square matrices. A size doubles until one product is long enough to be timed well.
_EDGES = {"cpu": (128, 1024), "cuda": (1024, 8192)}
# Both buffers of a memory copy together: beyond the last-level cache of all but the largest CPUs and GPUs.
_COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}
_PINNED_BYTES = 128 * 2**20
_LEAST_REPETITIONS = 3
# One timed repetition is at least this long, so that a synchronisation (tens of microseconds) does not count.
_REPETITION_SECONDS = 0.005
# Emulated arithmetic is this much slower than fp32; as a ceiling it would only mislead.
_ABSURD_FRACTION = 0.02
# Leave most of the device's free memory alone: somebody else's process may need it.
_DEVICE_MEMORY_FRACTION = 0.25


def measure_ceilings(device: torch.device, *, budget_seconds: float = 3.0) -> Ceilings:
    """Return the best rates the device reached; what it does not run, or only emulates, is left out.

    Rates: 2 n^3 operations per product of two n x n matrices; a copy in memory reads and writes every byte.

    Args:
        device: where to measure; a GPU's cache of free memory is emptied afterwards.
        budget_seconds: wall time in all, about; each limit is timed at least a few repetitions, however short.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget_seconds <= 0:
        raise ValueError(f"budget_seconds {budget_seconds} is not positive")
    deadline = perf_counter() + budget_seconds
    names = _list_arithmetics(device)
    parts = len(names) + (2 if device.type == "cuda" else 1)
    rates: dict[str, float] = {}
    for position, name in enumerate(names):
        rate = _try_measure(partial(_measure_matmul, name, device), deadline, parts - position)
        if rate is not None and rate >= _ABSURD_FRACTION * rates.get("fp32", 0.0):
            rates[name] = rate
    memory = _try_measure(partial(_measure_memory, device), deadline, parts - len(names))
    upload = None
    if device.type == "cuda":
        upload = _try_measure(partial(_measure_upload, device), deadline, 1)
        torch.cuda.empty_cache()
    return Ceilings(
        matmul=tuple(MatmulRate.model_validate({"dtype": name, "flops_per_second": rates[name]}) for name in rates),
        memory_bytes_per_second=memory,
        copy_to_device_bytes_per_second=upload,
    )


def _list_arithmetics(device: torch.device) -> tuple[str, ...]:
    """Return the arithmetics worth trying, fp32 first: the others are held against it."""
    # TF32 came with compute capability 8.0; older GPUs accept the setting and ignore it.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ("fp32", "tf32", "bf16", "fp16")
    return ("fp32", "bf16", "fp16")


def _try_measure(measure: Callable[[float], float], deadline: float, parts_left: int) -> float | None:
    """Return a rate measured in an equal part of the time left; None when the device refuses."""
    share = max(0.0, deadline - perf_counter()) / parts_left
    try:
        return measure(share)
    except RuntimeError:
        # No kernel for this dtype, no memory left, or no page-locked memory: all are RuntimeErrors in torch.
        return None


def _measure_matmul(name: str, device: torch.device, share_seconds: float) -> float:
    """Return the best rate of a square matrix product in operations per second, over the sizes there is time for."""
    dtype = _DTYPES[name]
    edge, largest = _EDGES[device.type]
    largest = min(largest, _largest_edge(device, dtype))
    until = perf_counter() + share_seconds
    best_rate = 0.0
    with torch.no_grad(), tf32(TrainConfig(allow_tf32=name == "tf32"), device):
        while True:
            multiply = _build_matmul(edge, device, dtype)
            # The shortest of a few: one that the scheduler held up would end the growth far too early.
            seconds = min(_time_repetition(multiply, device, 1) for _ in range(_LEAST_REPETITIONS))
            best_rate = max(best_rate, 2.0 * edge**3 / seconds)
            # A product of twice the edge takes at most eight times as long, and its first run counts as well.
            if 2 * edge > largest or 2 * 8 * seconds > until - perf_counter():
                break
            edge *= 2
        best_seconds = _best_seconds(multiply, device, until - perf_counter())
    return max(best_rate, 2.0 * edge**3 / best_seconds)


def _largest_edge(device: torch.device, dtype: torch.dtype) -> int:
    if device.type != "cuda":
        return _EDGES[device.type][1]
    budget_bytes = _DEVICE_MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]
    return math.isqrt(int(budget_bytes / (3 * dtype.itemsize)))


def _build_matmul(edge: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a product of random matrices that has run once: zeros would let a GPU clock higher."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(edge, edge, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in range(2)
    )
    product = torch.empty(edge, edge, device=device, dtype=dtype)

    def multiply() -> object:
        return torch.mm(left, right, out=product)

    multiply()
    return multiply


def _measure_memory(device: torch.device, share_seconds: float) -> float:
    """Return the best rate of a copy inside the device's memory, in bytes read plus bytes written per second."""
    total_bytes = _COPY_BYTES[device.type]
    if device.type == "cuda":
        total_bytes = min(total_bytes, int(_DEVICE_MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]))
    # Written once before it is timed: untouched pages of a CPU are all the same page of zeros, which stays cached.
    source = torch.ones(total_bytes // 8, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    best = _best_seconds(lambda: target.copy_(source), device, share_seconds)
    return 2.0 * source.nbytes / best


def _measure_upload(device: torch.device, share_seconds: float) -> float:
    """Return the best rate of a copy from page-locked host memory to the device, in bytes per second."""
    source = torch.ones(_PINNED_BYTES // 4, dtype=torch.float32).pin_memory()
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    target.copy_(source, non_blocking=True)
    best = _best_seconds(lambda: target.copy_(source, non_blocking=True), device, share_seconds)
    return source.nbytes / best


def _best_seconds(run: Callable[[], object], device: torch.device, share_seconds: float) -> float:
    """Return the time of one run in the fastest repetition; a repetition makes enough runs to be timed well.

    At least a few repetitions are made, also when no time is left.
    """
    until = perf_counter() + share_seconds
    first = _time_repetition(run, device, 1)
    runs = max(1, math.ceil(_REPETITION_SECONDS / max(first, 1e-9)))
    best, repetitions = first, 1
    while repetitions < _LEAST_REPETITIONS or perf_counter() < until:
        best = min(best, _time_repetition(run, device, runs) / runs)
        repetitions += 1
    return best


def _time_repetition(run: Callable[[], object], device: torch.device, runs: int) -> float:
    _synchronize(device)
    start = perf_counter()
    for _ in range(runs):
        run()
    _synchronize(device)
    return perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
