"""PyTorch's profiler around some steps: one line an operation, with its own time and what it was given."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autotune.engine.device import synchronize
from autotune.probe.step.work import OperationTime, WorkProfile
from autotune.probe.time_shares import ProbePolicy

_SHORTEST_SECONDS = 3e-6
"""What an operation of less time was given is of no interest: it is nothing but a call."""

_LEAST_KNOWN = 0.7
_LONG_STEP_SECONDS = 0.5
_MOST_CALLS, _MANY_CALLS = 30_000, 1_000
"""A call makes some ten events with its backward pass, and a hundred thousand take a second and half a gigabyte."""

_PRODUCTS = re.compile(
    r"(^aten::(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|_scaled_mm|_addmm_activation|_int_mm)_?$)"
    r"|conv|scaled_dot_product|attention|_rnn|lstm|gru|mkldnn_linear|mm_out|^(extern_kernels|cutlass|flash)"
)

_SYNCHRONIZING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::unique_dim", "aten::_unique2"})

_COPY_TO_HOST = "Memcpy DtoH (Device -> Pageable"
"""Name of a copy that the host waits for; of one to pinned memory it need not."""

_COMPILED = "CompiledFxGraph"

_ASIDE = re.compile(r"^enumerate\(DataLoader\)")

_OPTIMIZER = "Optimizer.step#"

_STEPS_ENDED = "autotune: the steps are over"

_ITEM_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4, "bool": 1}


class StepProfiler:
    """Profiles whatever runs between `start` and `stop`.

    Args:
        device: where the training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: Any = None
        self._began = 0.0
        self._seconds: float | None = None

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

    def end_steps(self) -> None:
        """Note that the steps are over: what happens until `stop` is none of theirs."""
        if self._profiler is None:
            return
        synchronize(self._device)
        self._seconds = time.perf_counter() - self._began
        with torch.profiler.record_function(_STEPS_ENDED):
            pass

    def stop(self, steps: int) -> WorkProfile | None:
        """End and return what was seen of the steps; None when nothing was, or when compiled code hides what it does.

        Args:
            steps: taken since `start`; 0 to throw away what was seen.
        """
        if self._profiler is None:
            return None
        if self._seconds is None:
            self.end_steps()
        assert self._seconds is not None
        profiler, self._profiler = self._profiler, None
        on_gpu = self._device.type == "cuda"
        try:
            profiler.stop()
            events = list(profiler.events()) if on_gpu else nest_events(profiler.profiler.kineto_results.events())
        except (RuntimeError, AssertionError):
            return None
        return read_events(events, seconds=self._seconds, steps=steps, on_gpu=on_gpu) if steps else None


class HostEvent:
    """One event of a host thread: what `FunctionEvent` says of it, made in a tenth of the time.

    Attributes:
        name: of the operation.
        time_range: itself, for `start` and `end`.
        start: in microseconds, like `end` and its own time.
        end: when it ended.
        self_cpu_time_total: its own time, without that of the events inside of it.
        cpu_parent: the event it is directly inside of; None at the top.
    """

    __slots__ = ("_raw", "cpu_parent", "end", "name", "self_cpu_time_total", "start")
    device_type = "CPU"

    def __init__(self, raw: Any) -> None:
        self._raw, self.name = raw, raw.name()
        self.start = raw.start_ns() / 1000
        self.self_cpu_time_total = raw.duration_ns() / 1000
        self.end = self.start + self.self_cpu_time_total
        self.cpu_parent: HostEvent | None = None

    @property
    def time_range(self) -> HostEvent:
        """When it ran."""
        return self

    @property
    def input_shapes(self) -> Any:
        """Shapes of what was handed in."""
        return self._raw.shapes()

    @property
    def input_dtypes(self) -> Any:
        """Types of what was handed in."""
        return self._raw.dtypes()

    @property
    def flops(self) -> int:
        """Operations, where they are counted."""
        return int(self._raw.flops())


def nest_events(raw: Iterable[Any]) -> list[HostEvent]:
    """Return the profiler's own events of the host, each with the one it is inside of.

    Args:
        raw: `torch._C._autograd._KinetoEvent`s.
    """
    threads: dict[int, list[HostEvent]] = {}
    for one in raw:
        if str(one.device_type()).endswith("CPU") and not one.is_async():
            threads.setdefault(one.start_thread_id(), []).append(HostEvent(one))
    for events in threads.values():
        events.sort(key=lambda event: (event.start, -event.end))
        open_events: list[HostEvent] = []
        for event in events:
            while open_events and event.start >= open_events[-1].end:
                open_events.pop()
            if open_events:
                event.cpu_parent = open_events[-1]
                open_events[-1].self_cpu_time_total -= event.end - event.start
            open_events.append(event)
    return [event for events in threads.values() for event in events]


def count_profiled_steps(
    seconds: float, calls: int | None, *, slow_seconds: float = ProbePolicy.slow_step_seconds
) -> int:
    """Return how many steps to profile: 0 where they are too slow, or make more events than can be read.

    Args:
        seconds: of one step.
        calls: of PyTorch's functions in one step, from Python; None when not counted.
        slow_seconds: a longer step is not profiled.
    """
    if seconds > slow_seconds or (calls or 0) > _MOST_CALLS:
        return 0
    return 1 if seconds > _LONG_STEP_SECONDS or (calls or 0) > _MANY_CALLS else 2


def profile_steps(take_step: Callable[[], object], device: torch.device, *, steps: int) -> WorkProfile | None:
    """Return some steps under the profiler; None as of `StepProfiler.stop`."""
    profiler = StepProfiler(device)
    profiler.start()
    for _ in range(steps):
        take_step()
    return profiler.stop(steps)


def read_events(events: Sequence[Any], *, seconds: float, steps: int, on_gpu: bool) -> WorkProfile | None:
    """Return a profile made of the profiler's events; None when compiled code hides what a CPU does.

    Args:
        events: `torch.autograd.profiler_util.FunctionEvent`s; those after the steps' end are left out.
        seconds: wall time in which they happened.
        steps: taken in it.
        on_gpu: take the time of kernels; without any there is no profile.
    """
    ended = min((start for start, _ in _find_spans(events, lambda name: name == _STEPS_ENDED)), default=math.inf)
    events = [event for event in events if event.time_range.start < ended]
    listed = [event for event in events if str(event.device_type).endswith("CPU")]
    if not listed or (not on_gpu and any(_COMPILED in event.name for event in listed)):
        return None
    if on_gpu and _hides_kernels(events):
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
        syncs += int(_asks_for_values(event, on_gpu=on_gpu) and not _is_within(event, stepping))
    loading = sum(end - start for start, end in aside) / 1e6
    return WorkProfile(
        operations=operations,
        seconds=max(1e-9, seconds - loading),
        steps=max(1, steps),
        calls=sum(operation.seconds > 0 for operation in operations) if on_gpu else calls,
        host_syncs=syncs,
        on_gpu=on_gpu,
    )


def _hides_kernels(events: Iterable[Any]) -> bool:
    """Return whether much of a GPU's time belongs to nothing we know: CUDA graphs, operators of other libraries.

    So it does where no kernel was seen: CUPTI is missing, or the driver grants its counters to administrators alone.
    """
    kernels = known = 0.0
    for event in events:
        if not str(event.device_type).endswith("CPU"):
            if not getattr(event, "is_user_annotation", False):  # a span around kernels, e.g. the optimizer's
                kernels += event.time_range.end - event.time_range.start
        elif _is_operation(event):
            known += event.self_device_time_total
    return known <= 0.0 or known < _LEAST_KNOWN * kernels


def _asks_for_values(event: Any, *, on_gpu: bool) -> bool:
    """Return whether the host waits for what a device has computed: a scalar, a size, or `.cpu()` and `.tolist()`.

    On a GPU a value of the host's own, an index say, is had without its doing anything.
    """
    done = [kernel.name for kernel in getattr(event, "kernels", ())]
    asks = event.name in _SYNCHRONIZING and (bool(done) or not on_gpu)
    return asks or any(name.startswith(_COPY_TO_HOST) for name in done)


def _is_operation(event: Any) -> bool:
    name: str = event.name
    return name.startswith(
        ("aten::", "triton_", "extern_kernels", "flash_attn", "torchvision::", "mkldnn::", "quantized")
    )


def _read_operation(event: Any, seconds: float) -> OperationTime:
    inputs = _read_inputs(event) if seconds > _SHORTEST_SECONDS else []
    sizes = [math.prod(shape) * item_bytes for shape, item_bytes in inputs]
    is_product = _PRODUCTS.search(event.name) is not None
    flops = float(event.flops or 0) if inputs and is_product and event.name.startswith("aten::") else 0.0
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
