"""How fast a device multiplies matrices, per arithmetic: for an instant, and when it goes on for seconds.

    edge:   128 ──▶ 256 ──▶ 512 ──▶ ...       doubled while there is time; the rest of it is shared among them

Emulated arithmetic shows by its rate: whoever asks holds every rate against the one of fp32. A product of it can take
seconds, so the doubling ends at the first one that is long and slow beyond doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from autotune.arithmetics import FASTER_PRODUCTS
from autotune.engine.device import read_device_memory
from autotune.engine.precision import matmul_precision
from autotune.machine.limits.repetitions import LEAST_REPETITIONS, best_seconds, sustained_seconds, time_repetition
from autotune.records.config import TrainConfig

DTYPES = {
    **dict.fromkeys(("fp32", "tf32", "fp32-medium"), torch.float32),
    **{"bf16": torch.bfloat16, "fp16": torch.float16},
}
"""What the matrices are made of, by arithmetic."""

_PRECISIONS = {name: precision for precision, name in FASTER_PRODUCTS.values()}
"""Of float32 products, where it is not the highest."""

DEVICE_MEMORY_FRACTION = 0.25
"""Most of the free memory to take: the rest may be needed by somebody else's process."""

# Smallest and largest edge of the square matrices. A size doubles until one product is long enough to be timed well.
_EDGES = {"cpu": (128, 4096), "cuda": (1024, 8192)}
_LEAST_GROWTH = 2.0
# Waiting for threads on a busy machine does not make a product this long, so its rate is then the arithmetic's own.
_TELLING_SECONDS = 0.03


@dataclass(frozen=True)
class Burst:
    """The best rate of one arithmetic.

    Attributes:
        flops_per_second: of the fastest repetition, over all sizes.
        largest_edge: rows and columns of the largest matrices there was time for.
    """

    flops_per_second: float
    largest_edge: int


def list_arithmetics(device: torch.device) -> tuple[str, ...]:
    """Return the arithmetics worth trying, fp32 first: the others are held against it."""
    # TF32 came with compute capability 8.0; older GPUs accept the setting and ignore it.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ("fp32", "tf32", "bf16", "fp16")
    # Without oneDNN the setting is accepted and ignored.
    has_medium = device.type != "cuda" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return ("fp32", *(("fp32-medium",) if has_medium else ()), "bf16", "fp16")


def measure_burst(name: str, device: torch.device, share_seconds: float, *, least_rate: float = 0.0) -> Burst:
    """Return the best rate of a square matrix product, over the sizes there is time for.

    A product of two n x n matrices is 2 n^3 operations.

    Args:
        name: of the arithmetic.
        device: where to multiply.
        share_seconds: wall time to spend, about; a few products are made also when it is none.
        least_rate: operations per second; arithmetic that is clearly slower is looked at no longer than that takes.

    Raises:
        RuntimeError: the device has no kernel for this arithmetic, or no memory left.
    """
    edge, largest = _EDGES[device.type]
    largest = min(largest, _largest_edge(device, DTYPES[name]))
    seconds: dict[int, float] = {}
    with torch.no_grad(), matmul_precision(_configure(name)):
        # A library that starts with its first product takes none of the time to measure in.
        multiply = {edge: _build_product(edge, device, DTYPES[name])}
        until = perf_counter() + share_seconds
        while True:
            # The shortest of a few: one that the scheduler held up would end the growth far too early.
            seconds[edge] = min(time_repetition(multiply[edge], device, 1) for _ in range(LEAST_REPETITIONS))
            if seconds[edge] > _TELLING_SECONDS and _best_burst(seconds).flops_per_second < least_rate:
                return _best_burst(seconds)
            # Its first run counts as well.
            expected = (1 + LEAST_REPETITIONS) * _growth(seconds, edge) * seconds[edge]
            if 2 * edge > largest or expected > until - perf_counter():
                break
            edge *= 2
            multiply[edge] = _build_product(edge, device, DTYPES[name])
        # On a busy machine no repetition of a long product goes undisturbed, so the short ones get as much time.
        for sizes_left, (size, run) in zip(range(len(multiply), 0, -1), multiply.items(), strict=True):
            share = (until - perf_counter()) / sizes_left
            if share >= LEAST_REPETITIONS * seconds[size]:
                seconds[size] = min(seconds[size], best_seconds(run, device, share))
    return _best_burst(seconds)


def measure_sustained(name: str, device: torch.device, *, edge: int, window_seconds: float) -> float:
    """Return the rate a product of one size keeps up, in operations per second over the last half of a window.

    Args:
        name: of the arithmetic.
        device: where to multiply.
        edge: rows and columns of the matrices; short products would time how threads wait for each other.
        window_seconds: wall time to spend, about.

    Raises:
        RuntimeError: as `measure_burst`.
    """
    with torch.no_grad(), matmul_precision(_configure(name)):
        multiply = _build_product(edge, device, DTYPES[name])
        return 2.0 * edge**3 / sustained_seconds(multiply, device, window_seconds)


def _configure(arithmetic: str) -> TrainConfig:
    return TrainConfig(matmul_precision=_PRECISIONS.get(arithmetic, "highest"))


def _best_burst(seconds: dict[int, float]) -> Burst:
    return Burst(max(2.0 * edge**3 / duration for edge, duration in seconds.items()), largest_edge=max(seconds))


def _growth(seconds: dict[int, float], edge: int) -> float:
    """Return how many times as long a product of twice the edge may take.

    Eight times as many operations, where they are what takes the time; on a busy machine it is the threads that wait
    for each other, however small the matrices, and that shows by products that grew and took hardly longer.
    """
    last = seconds.get(edge // 2)
    return _LEAST_GROWTH if last is None else min(8.0, max(_LEAST_GROWTH, seconds[edge] / last))


def _largest_edge(device: torch.device, dtype: torch.dtype) -> int:
    if device.type != "cuda":
        return _EDGES[device.type][1]
    budget_bytes = DEVICE_MEMORY_FRACTION * read_device_memory(device)[0]
    # Three matrices of this edge, and those of half, a quarter, ... of it: 3 * (1 + 1/4 + 1/16 + ...) = 4.
    return math.isqrt(int(budget_bytes / (4 * dtype.itemsize)))


def _build_product(edge: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
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
