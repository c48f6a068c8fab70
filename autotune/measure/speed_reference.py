"""The canary: the same small piece of work before and after each training, to see how fast the machine itself is.

On a CPU it runs on one thread: a parallel region would start a pool of threads that forked loader workers inherit.
"""

from __future__ import annotations

import time

import torch

from autotune.engine.device import release_cached, synchronize
from autotune.engine.precision import matmul_precision
from autotune.engine.threads import single_thread
from autotune.records.config import TrainConfig

ROUND_SECONDS = 0.15
_CPU_SIZE, _CUDA_SIZE = 192, 1024
_CPU_COPY_BYTES, _CUDA_COPY_BYTES = 2**20, 2**24


def time_reference(device: torch.device, *, seconds: float = ROUND_SECONDS) -> float:
    """Return the mean seconds of one matrix product and one copy, repeated for a while; draws no random number.

    Args:
        device: where the training runs.
        seconds: how long to repeat.
    """
    if device.type == "cuda":
        with matmul_precision(TrainConfig()):  # the same work whatever the training is allowed
            mean = _repeat(device, _CUDA_SIZE, _CUDA_COPY_BYTES, seconds)
        release_cached(device)  # what the canary held is no part of the training's memory
        return mean
    with single_thread():
        return _repeat(device, _CPU_SIZE, _CPU_COPY_BYTES, seconds)


def _repeat(device: torch.device, size: int, copied_bytes: int, seconds: float) -> float:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        left = torch.full((size, size), 0.5, device=device, dtype=torch.float32)
        product = torch.empty_like(left)
        source = torch.zeros(copied_bytes, device=device, dtype=torch.uint8)
        copy = torch.empty_like(source)
        rounds = 0
        torch.mm(left, left, out=product)  # the first call sets up the library
        synchronize(device)
        began = time.perf_counter()
        elapsed = 0.0
        while elapsed < seconds:
            torch.mm(left, left, out=product)
            copy.copy_(source)
            synchronize(device)
            rounds += 1
            elapsed = time.perf_counter() - began
    return elapsed / rounds
