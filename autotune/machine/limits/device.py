"""Measured limits of a device. Device in, `Ceilings` out; imports torch, so it runs in a child process.

    |<----------------------- quick -------------------------->|<------- sustained, if there is time ------>|
    | products, convolutions  | launches | memory | host copies | fp32, 2 s | tf32, 2 s | bf16, 2 s | fp16  |
      each takes an equal part of the time that is left: warm-up, then the best of several repetitions

The best repetition is the limit: everything that disturbs a repetition makes it longer. The global precision setting
and the random generators are left as they were; on a CPU fp32 runs under the precision setting of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch

from autotune.engine.device import on_accelerator, release_cached, synchronize
from autotune.machine.limits.convolutions import measure_convolution
from autotune.machine.limits.copies import measure_copy, measure_host_copies, measure_memory
from autotune.machine.limits.products import Burst, list_arithmetics, measure_burst, measure_sustained
from autotune.machine.limits.repetitions import time_repetition
from autotune.records.ceilings import Ceilings, MatmulRate

# Emulated arithmetic is this much slower than fp32; as a ceiling it would only mislead, so it is marked. A CPU that has
# 16-bit products makes them faster than fp32, and one of few or old cores emulates them at a tenth (judgements).
_EMULATED_FRACTION = {"cpu": 0.25, "cuda": 0.05}
# Below this a window would be too short for a chip to heat up in it.
_SUSTAINED_BUDGET_SECONDS = 6.0
_WINDOW_SECONDS = 2.0
_LEAST_QUICK_FRACTION = 0.4
_LAUNCHES = 1000
_SYNCHRONIZATIONS = 100
_CALL_REPETITIONS = 20
_SPOT_CHECK_SECONDS = 0.3
_SPOT_CHECK_TOLERANCE = 0.1

T = TypeVar("T")


def measure_ceilings(device: torch.device, *, budget_seconds: float = 3.0) -> Ceilings:
    """Return the best rates the device reached; what it does not run is left out, what it emulates is marked.

    Args:
        device: where to measure; a GPU's cache of free memory is emptied afterwards.
        budget_seconds: wall time in all, about; each limit is timed at least a few repetitions, however short. From
            6 s on the rates that products keep up are measured as well; windows of 2 s for them need 8 to 14 s in all.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget_seconds <= 0:
        raise ValueError(f"budget_seconds {budget_seconds} is not positive")
    deadline = perf_counter() + budget_seconds
    names, on_gpu = list_arithmetics(device), device.type == "cuda"
    sustained_seconds = 0.0
    if budget_seconds >= _SUSTAINED_BUDGET_SECONDS:
        sustained_seconds = min(_WINDOW_SECONDS * len(names), (1 - _LEAST_QUICK_FRACTION) * budget_seconds)
    quick = _Shares(deadline - sustained_seconds, len(names) + (6 if on_gpu else 3))
    bursts = _measure_bursts(names, device, quick)
    convolutions = {} if on_gpu else quick.attempt(partial(_measure_convolutions, bursts)) or {}
    launch, wait = _attempt(partial(_measure_calls, device)) or (None, None)
    memory, triad = quick.attempt(partial(measure_memory, device), parts=2) or (None, None)
    pinned = pageable = None
    if on_gpu:
        pinned = quick.attempt(partial(measure_host_copies, device, pinned=True), parts=2)
        pageable = quick.attempt(partial(measure_host_copies, device, pinned=False), parts=2)
    sustained = _measure_sustained(bursts, device, deadline) if sustained_seconds else {}
    least = _least_rate(bursts, device)
    _release_memory(device)
    return Ceilings(
        matmul=tuple(
            _build_rate(name, burst, sustained.get(name), least).replace(
                convolution_flops_per_second=convolutions.get(name)
            )
            for name, burst in bursts.items()
        ),
        memory_bytes_per_second=memory,
        triad_bytes_per_second=triad,
        copy_to_device_bytes_per_second=pinned and pinned[0],
        copy_from_device_bytes_per_second=pinned and pinned[1],
        pageable_to_device_bytes_per_second=pageable and pageable[0],
        pageable_from_device_bytes_per_second=pageable and pageable[1],
        launch_seconds=launch,
        synchronize_seconds=wait,
    )


def spot_check_ceilings(device: torch.device, known: Ceilings) -> bool:
    """Return whether known limits still hold: False when the device is seen to be more than 10 % faster.

    Then they were measured while something disturbed the machine. Slower is fine: a ceiling stays a ceiling.
    Takes less than half a second, and on a GPU the first start of its libraries.

    Args:
        device: where to measure.
        known: measured earlier on the same machine.
    """
    shares = _Shares(perf_counter() + _SPOT_CHECK_SECONDS, 2)
    burst = shares.attempt(partial(measure_burst, "fp32", device))
    copy = shares.attempt(partial(measure_copy, device))
    _release_memory(device)
    product = burst.flops_per_second if burst is not None else None
    pairs = ((product, known.flops_per_second("fp32")), (copy, known.memory_bytes_per_second))
    return all(now <= (1 + _SPOT_CHECK_TOLERANCE) * then for now, then in pairs if now is not None and then is not None)


class _Shares:
    """Splits the time that is left among the measurements that are left, so that what one leaves the others get.

    Args:
        deadline: as `perf_counter` counts.
        parts: to split the time into.
    """

    def __init__(self, deadline: float, parts: int) -> None:
        self._deadline = deadline
        self._parts = parts

    def attempt(self, measure: Callable[[float], T], *, parts: int = 1) -> T | None:
        """Return what was measured in some parts of the time left; None when the device refuses."""
        share = max(0.0, self._deadline - perf_counter()) * parts / self._parts
        self._parts -= parts
        return _attempt(partial(measure, share))


def _attempt(measure: Callable[[], T]) -> T | None:
    try:
        return measure()
    except (RuntimeError, MemoryError):
        # No kernel for this dtype, no memory left, or no page-locked memory: all are RuntimeErrors in torch.
        return None


def _measure_bursts(names: tuple[str, ...], device: torch.device, shares: _Shares) -> dict[str, Burst]:
    bursts: dict[str, Burst] = {}
    for name in names:
        least = _least_rate(bursts, device)
        burst = shares.attempt(lambda share: measure_burst(name, device, share, least_rate=least))  # noqa: B023
        if burst is not None:
            bursts[name] = burst
    return bursts


def _measure_convolutions(bursts: dict[str, Burst], share_seconds: float) -> dict[str, float | None]:
    """Return the rate of each arithmetic of a CPU that is not emulated: one that is would take seconds to say so."""
    least = _least_rate(bursts, torch.device("cpu"))
    real = [name for name, burst in bursts.items() if burst.flops_per_second >= least]
    return {name: _attempt(partial(measure_convolution, name, share_seconds / len(real))) for name in real}


def _least_rate(bursts: dict[str, Burst], device: torch.device) -> float:
    """Return the rate below which an arithmetic counts as emulated; 0 without one of fp32 to hold it against."""
    return _EMULATED_FRACTION[device.type] * bursts["fp32"].flops_per_second if "fp32" in bursts else 0.0


def _measure_sustained(bursts: dict[str, Burst], device: torch.device, deadline: float) -> dict[str, float | None]:
    sustained: dict[str, float | None] = {}
    least = _least_rate(bursts, device)
    real = {name: burst for name, burst in bursts.items() if burst.flops_per_second >= least}
    for name, burst in real.items():
        window = min(_WINDOW_SECONDS, max(0.0, deadline - perf_counter()) / (len(real) - len(sustained)))
        measure = partial(measure_sustained, name, device, edge=burst.largest_edge, window_seconds=window)
        sustained[name] = _attempt(measure)
    return sustained


def _build_rate(name: str, burst: Burst, sustained: float | None, least: float) -> MatmulRate:
    # What was kept up was reached as well, if by chance never in the burst.
    best = max(burst.flops_per_second, sustained or 0.0)
    return MatmulRate.model_validate(
        {
            "dtype": name,
            "flops_per_second": best,
            "sustained_flops_per_second": sustained,
            "emulated": burst.flops_per_second < least,
        }
    )


def _measure_calls(device: torch.device) -> tuple[float, float | None]:
    """Return the seconds of one tiny operation in a row of many, and of waiting for an idle GPU."""
    add = partial(torch.zeros(1, dtype=torch.float32, device=device).add_, 1.0)
    launch = min(time_repetition(add, device, _LAUNCHES) for _ in range(_CALL_REPETITIONS)) / _LAUNCHES
    if device.type != "cuda":
        return launch, None
    wait = partial(synchronize, device)
    waits = (time_repetition(wait, device, _SYNCHRONIZATIONS) for _ in range(_CALL_REPETITIONS))
    return launch, min(waits) / _SYNCHRONIZATIONS


def _release_memory(device: torch.device) -> None:
    if not on_accelerator(device):
        return
    release_cached(device)
    # Page-locked memory has a cache of its own. Its public name is newer than the oldest PyTorch supported here (2.6).
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
