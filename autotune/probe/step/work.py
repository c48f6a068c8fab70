"""What the time of a step's computation is spent on: products, memory traffic, or the calling itself.

    profiler ── one line an operation (its own time, shapes) ──▶ WorkProfile ── measured limits ──▶ StepWork

Of each operation the cost of calling it is overhead. What is left of a matrix product, convolution or attention is
arithmetic, unless the product is so thin that reading its matrices takes longer; what is left of any other is memory
traffic. The rest of a step (Python, autograd's bookkeeping, a GPU's idle time) is overhead as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.probe.analysis.figures import name_arithmetic
from autotune.records.facts import StepWork, TargetFacts

_LAUNCH_SECONDS = 5e-6
"""One call, where it was not measured."""

_LEAST_LAUNCHES = 2.0
"""An operation shorter than so many calls of a tiny one is nothing but a call."""

_LEAST_TRAFFIC = 0.02
"""Share of a step below which the rate of its memory traffic says nothing."""

_SMALL_BYTES = 2**18
_SLOWEST_TRAFFIC = 16.0
"""A small operation that takes this many times what its bytes take was held up by something else."""


@dataclass(frozen=True)
class OperationTime:
    """One call of an operation.

    Attributes:
        is_product: a matrix product, a convolution or attention.
        seconds: its own time, without the operations it called; on a GPU that of its kernels.
        traffic_bytes: size of its inputs and its output, taken to be as large as the largest input where it is not
            known; 0 when neither is.
        flops: of a matrix product; 0 when not counted.
    """

    is_product: bool
    seconds: float
    traffic_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class WorkProfile:
    """Some steps under the profiler.

    Attributes:
        operations: every call, loading left out.
        seconds: wall time of these steps, loading left out.
        steps: how many.
        calls: operations called from outside of any other.
        host_syncs: times the host asked for a value, the optimizer's own questions left out.
        on_gpu: times are those of kernels.
        sync_places: lines of the user's code that asked most, as `file:line`; empty where they were not looked for.
    """

    operations: Sequence[OperationTime]
    seconds: float
    steps: int
    calls: int
    host_syncs: int
    on_gpu: bool
    sync_places: tuple[str, ...] = ()


def describe_profile(
    profile: WorkProfile | None, facts: TargetFacts, *, enqueue_fraction: float = 1.0
) -> StepWork | None:
    """Return what a step's computation is spent on, at the measured limits; None without a profile.

    Args:
        profile: of some steps.
        facts: with the machine's limits, and the time of a step without the profiler and without loading.
        enqueue_fraction: share of such a step in which the host handed the work over.
    """
    if profile is None:
        return None
    return describe_work(
        profile,
        step_seconds=facts.compute_seconds_per_step,
        flops_per_second=facts.rates.flops_per_second(name_arithmetic(facts)),
        bytes_per_second=facts.ceilings.memory_bytes_per_second,
        launch_seconds=facts.ceilings.launch_seconds,
        enqueue_fraction=enqueue_fraction if facts.device == "cuda" else None,
    )


def describe_work(
    profile: WorkProfile,
    *,
    step_seconds: float,
    flops_per_second: float | None,
    bytes_per_second: float | None,
    launch_seconds: float | None,
    enqueue_fraction: float | None = None,
) -> StepWork:
    """Return the shares of a step.

    Args:
        profile: of some steps.
        step_seconds: one step without the profiler and without loading.
        flops_per_second: measured rate of the products' arithmetic; None when not measured, as the next two.
        bytes_per_second: measured rate of a large copy, read plus write.
        launch_seconds: calling one tiny operation.
        enqueue_fraction: as in the record.
    """
    launch = 0.0 if profile.on_gpu else launch_seconds or _LAUNCH_SECONDS
    products = traffic = known_bytes = known_seconds = 0.0
    for operation in profile.operations:
        useful = operation.seconds - launch if operation.seconds > _LEAST_LAUNCHES * launch else 0.0
        if bytes_per_second and 0 < operation.traffic_bytes < _SMALL_BYTES and not operation.is_product:
            useful = min(useful, _SLOWEST_TRAFFIC * operation.traffic_bytes / bytes_per_second)
        if operation.is_product and not _is_thin(operation, flops_per_second, bytes_per_second):
            products += useful
            continue
        traffic += useful
        if useful > 0 and operation.traffic_bytes > 0:
            known_bytes += operation.traffic_bytes
            known_seconds += useful
    plain = step_seconds * profile.steps  # the profiler makes each call longer, and none of the work
    whole = max(plain if profile.on_gpu else min(plain, profile.seconds), products + traffic)
    return StepWork(
        products_fraction=products / whole,
        traffic_fraction=traffic / whole,
        overhead_fraction=max(0.0, 1.0 - (products + traffic) / whole),
        operations_per_step=profile.calls / profile.steps,
        host_syncs_per_step=profile.host_syncs / profile.steps,
        host_sync_places=profile.sync_places,
        bytes_per_second=known_bytes / known_seconds if known_seconds > _LEAST_TRAFFIC * whole else None,
        device_busy_fraction=(products + traffic) / whole if profile.on_gpu else None,
        enqueue_fraction=enqueue_fraction,
    )


def _is_thin(operation: OperationTime, flops_per_second: float | None, bytes_per_second: float | None) -> bool:
    """Return whether reading a product's matrices takes longer than multiplying them, at the measured rates."""
    if not operation.flops or not flops_per_second or not bytes_per_second:
        return False
    return operation.traffic_bytes / bytes_per_second > operation.flops / flops_per_second
