"""What the time of a step's computation is spent on: products, memory traffic, or the calling itself.

    profiler ── one line an operation (its own time, shapes) ──▶ WorkProfile ── measured limits ──▶ StepWork

Of each operation the cost of calling it is overhead. What is left of a matrix product, convolution or attention is
arithmetic, unless the product is so thin that reading its matrices takes longer; what is left of any other is memory
traffic. The rest of a step (Python, autograd's bookkeeping, a GPU's idle time) is overhead as well.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autotune.records.facts import StepWork

_LAUNCH_SECONDS = 5e-6
"""One call, where it was not measured."""

_LEAST_LAUNCHES = 2.0
"""An operation shorter than so many calls of a tiny one is nothing but a call."""

_LEAST_TRAFFIC = 0.02
"""Share of a step below which the rate of its memory traffic says nothing."""

_PRODUCTS = re.compile(
    r"(^aten::(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|_scaled_mm|_addmm_activation|_int_mm)_?$)"
    r"|conv|scaled_dot_product|attention|_rnn|lstm|gru|mkldnn_linear|mm_out|^(extern_kernels|cutlass|flash)"
)
_SYNCHRONIZING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::unique_dim", "aten::_unique2"})
_COMPILED = "CompiledFxGraph"
_ASIDE = re.compile(r"^enumerate\(DataLoader\)")
_OPTIMIZER = "Optimizer.step#"
_ITEM_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4, "bool": 1}


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
    """

    operations: Sequence[OperationTime]
    seconds: float
    steps: int
    calls: int
    host_syncs: int
    on_gpu: bool


class StepProfiler:
    """Profiles whatever runs between `start` and `stop`.

    Args:
        device: where the training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: Any = None
        self._began = 0.0

    def start(self) -> None:
        """Begin; without effect where another profiler is at work."""
        if torch._C._autograd._profiler_enabled():  # PyTorch would end theirs without a word
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True, with_flops=True)
        try:
            profiler.start()
        except (RuntimeError, AssertionError):
            return
        self._profiler = profiler
        self._began = time.perf_counter()

    def stop(self, steps: int) -> WorkProfile | None:
        """End and return what was seen; None when nothing was, or when compiled code hides what it does.

        Args:
            steps: taken since `start`.
        """
        if self._profiler is None:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            events = list(profiler.events())
        except (RuntimeError, AssertionError):
            return None
        return read_events(events, seconds=seconds, steps=steps, on_gpu=self._device.type == "cuda")


def profile_steps(take_step: Callable[[], object], device: torch.device, *, steps: int) -> WorkProfile | None:
    """Return some steps under the profiler; None as of `StepProfiler.stop`."""
    profiler = StepProfiler(device)
    profiler.start()
    for _ in range(steps):
        take_step()
    return profiler.stop(steps)


def read_events(events: Iterable[Any], *, seconds: float, steps: int, on_gpu: bool) -> WorkProfile | None:
    """Return a profile made of the profiler's events; None when compiled code hides what a CPU does.

    Args:
        events: `torch.autograd.profiler_util.FunctionEvent`s.
        seconds: wall time in which they happened.
        steps: taken in it.
        on_gpu: take the time of kernels.
    """
    listed = [event for event in events if str(event.device_type).endswith("CPU")]
    if not listed or (not on_gpu and any(_COMPILED in event.name for event in listed)):
        return None
    aside = _find_spans(listed, lambda name: _ASIDE.match(name) is not None)
    stepping = _find_spans(listed, lambda name: name.startswith(_OPTIMIZER))
    operations, calls, syncs = [], 0, 0
    for event in listed:
        if not _is_operation(event) or _is_within(event, aside):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        operations.append(_read_operation(event, microseconds / 1e6))
        calls += int(event.cpu_parent is None or not _is_operation(event.cpu_parent))
        syncs += int(event.name in _SYNCHRONIZING and not _is_within(event, stepping))
    loading = sum(end - start for start, end in aside) / 1e6
    return WorkProfile(
        operations=operations,
        seconds=max(1e-9, seconds - loading),
        steps=max(1, steps),
        calls=sum(operation.seconds > 0 for operation in operations) if on_gpu else calls,
        host_syncs=syncs,
        on_gpu=on_gpu,
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
        step_seconds: one step without the profiler and without loading; a GPU's kernels are held against it.
        flops_per_second: measured rate of the products' arithmetic; None when not measured, as the next two.
        bytes_per_second: measured rate of a large copy, read plus write.
        launch_seconds: calling one tiny operation.
        enqueue_fraction: as in the record.
    """
    launch = 0.0 if profile.on_gpu else launch_seconds or _LAUNCH_SECONDS
    products = traffic = known_bytes = known_seconds = 0.0
    for operation in profile.operations:
        useful = operation.seconds - launch if operation.seconds > _LEAST_LAUNCHES * launch else 0.0
        if operation.is_product and not _is_thin(operation, flops_per_second, bytes_per_second):
            products += useful
            continue
        traffic += useful
        if useful > 0 and operation.traffic_bytes > 0:
            known_bytes += operation.traffic_bytes
            known_seconds += useful
    whole = step_seconds * profile.steps if profile.on_gpu else profile.seconds
    whole = max(whole, products + traffic)
    return StepWork(
        products_fraction=products / whole,
        traffic_fraction=traffic / whole,
        overhead_fraction=max(0.0, 1.0 - (products + traffic) / whole),
        operations_per_step=profile.calls / profile.steps,
        host_syncs_per_step=profile.host_syncs / profile.steps,
        bytes_per_second=known_bytes / known_seconds if known_seconds > _LEAST_TRAFFIC * whole else None,
        device_busy_fraction=(products + traffic) / whole if profile.on_gpu else None,
        enqueue_fraction=enqueue_fraction,
    )


def _is_thin(operation: OperationTime, flops_per_second: float | None, bytes_per_second: float | None) -> bool:
    """Return whether reading a product's matrices takes longer than multiplying them, at the measured rates."""
    if not operation.flops or not flops_per_second or not bytes_per_second:
        return False
    return operation.traffic_bytes / bytes_per_second > operation.flops / flops_per_second


def _is_operation(event: Any) -> bool:
    name: str = event.name
    return name.startswith(
        ("aten::", "triton_", "extern_kernels", "flash_attn", "torchvision::", "mkldnn::", "quantized")
    )


def _read_operation(event: Any, seconds: float) -> OperationTime:
    inputs = _read_inputs(event)
    sizes = [math.prod(shape) * item_bytes for shape, item_bytes in inputs]
    is_product = _PRODUCTS.search(event.name) is not None
    flops = float(event.flops or 0) if is_product and event.name.startswith("aten::") else 0.0
    written = max(sizes, default=0)
    matrices = [(shape, item_bytes) for shape, item_bytes in inputs if len(shape) >= 2][-2:]
    if flops and len(matrices) == 2:
        (left, item_bytes), (right, _) = matrices
        written = math.prod(left[:-1]) * right[-1] * item_bytes
    return OperationTime(is_product=is_product, seconds=seconds, traffic_bytes=float(sum(sizes) + written), flops=flops)


def _read_inputs(event: Any) -> list[tuple[list[int], int]]:
    """Return shape and bytes of an element of each tensor handed in; of a list of tensors those of each."""
    dtypes = getattr(event, "input_dtypes", None) or []
    found = []
    for place, shape in enumerate(getattr(event, "input_shapes", None) or []):
        item_bytes = _ITEM_BYTES.get(dtypes[place], 4) if place < len(dtypes) else 4
        shapes = shape if shape and isinstance(shape[0], list | tuple) else [shape]
        found += [(list(one), item_bytes) for one in shapes if one and all(isinstance(edge, int) for edge in one)]
    return found


def _find_spans(events: Iterable[Any], is_wanted: Callable[[str], bool]) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in events if is_wanted(event.name)]


def _is_within(event: Any, spans: Iterable[tuple[float, float]]) -> bool:
    return any(start <= event.time_range.start and event.time_range.end <= end for start, end in spans)
