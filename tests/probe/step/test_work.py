from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.probe.step.profiler import StepProfiler, count_profiled_steps, nest_events, profile_steps, read_events
from autotune.probe.step.work import OperationTime, WorkProfile, describe_work

CPU = torch.device("cpu")
MM = [[], [128, 64], [64, 32]]


def event(
    name: str, own: float = 10.0, *, start: float = 0.0, end: float = 0.0, parent: Any = None, **facts: Any
) -> SimpleNamespace:
    """An event as the profiler gives it: microseconds, on the CPU unless said otherwise."""
    plain = {
        "name": name,
        "self_cpu_time_total": own,
        "self_device_time_total": 0.0,
        "time_range": SimpleNamespace(start=start, end=end or start + own),
        "cpu_parent": parent,
        "input_shapes": [],
        "flops": 0,
        "device_type": "DeviceType.CPU",
    }
    return SimpleNamespace(**{**plain, **facts})


def read(*events: SimpleNamespace, seconds: float = 1.0, steps: int = 1, on_gpu: bool = False) -> WorkProfile:
    profile = read_events(list(events), seconds=seconds, steps=steps, on_gpu=on_gpu)
    assert profile is not None
    return profile


def describe(profile: WorkProfile, **changes: Any) -> Any:
    plain: dict[str, Any] = {
        "step_seconds": 1.0,
        "flops_per_second": 1e9,
        "bytes_per_second": 1e9,
        "launch_seconds": 1e-6,
    }
    return describe_work(profile, **{**plain, **changes})


def operation(seconds: float, *, product: bool = False, traffic: float = 0.0, flops: float = 0.0) -> OperationTime:
    return OperationTime(is_product=product, seconds=seconds, traffic_bytes=traffic, flops=flops)


def profile_of(*operations: OperationTime, seconds: float = 1.0, on_gpu: bool = False) -> WorkProfile:
    return WorkProfile(operations, seconds=seconds, steps=1, calls=len(operations), host_syncs=0, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("name", "is_product"),
    [
        ("aten::addmm", True),
        ("aten::mm", True),
        ("aten::bmm", True),
        ("aten::mkldnn_convolution", True),
        ("aten::convolution_backward", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", True),
        ("aten::mkldnn_rnn_layer", True),
        ("aten::add_", False),
        ("aten::addcmul_", False),
        ("aten::native_layer_norm", False),
        ("aten::_fused_adamw_", False),
        ("aten::embedding_dense_backward", False),
        ("aten::max_pool2d_with_indices", False),
        ("aten::sum", False),
    ],
)
def test_operations_are_told_apart_by_name(name: str, is_product: bool) -> None:
    assert [one.is_product for one in read(event(name)).operations] == [is_product]


def test_what_is_no_operation_is_overhead() -> None:
    profile = read(event("AddmmBackward0", 400_000.0), event("Optimizer.step#SGD.step", 300_000.0))
    assert describe(profile).overhead_fraction == pytest.approx(1.0)


def test_bytes_are_those_of_inputs_and_output() -> None:
    shapes = {"input_shapes": [[100], [100], []], "input_dtypes": ["float", "c10::BFloat16", "Scalar"]}
    (added,) = read(event("aten::add", **shapes)).operations
    assert added.traffic_bytes == 400 + 200 + 400


def test_output_of_a_product_follows_from_its_shapes() -> None:
    (product,) = read(event("aten::mm", input_shapes=[[1000, 1], [1, 1000]], flops=2_000_000)).operations
    assert product.traffic_bytes == 4 * (1000 + 1000 + 1_000_000)


def test_lists_of_tensors_count_each() -> None:
    (fused,) = read(event("aten::_foreach_add_", input_shapes=[[[10], [20]], []])).operations
    assert fused.traffic_bytes == 4 * (30 + 20)


def test_loading_is_no_part_of_a_step() -> None:
    load = event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100.0, start=0.0, end=400_000.0)
    inside = event("aten::add", 200_000.0, start=100.0)
    outside = event("aten::mul", 300_000.0, start=500_000.0)
    profile = read(load, inside, outside, seconds=1.0)
    assert profile.seconds == pytest.approx(0.6)
    assert [one.seconds for one in profile.operations] == [pytest.approx(0.3)]
    assert describe(profile).traffic_fraction == pytest.approx(0.5, abs=1e-4)


def test_questions_of_the_host_are_counted_but_not_the_optimizers_own() -> None:
    stepping = event("Optimizer.step#Adam.step", 10.0, start=0.0, end=100.0)
    own = event("aten::_local_scalar_dense", 1.0, start=50.0)
    asked = event("aten::_local_scalar_dense", 1.0, start=200.0)
    searched = event("aten::nonzero", 1.0, start=300.0)
    assert read(stepping, own, asked, searched, steps=2).host_syncs == 2


def test_on_a_gpu_a_value_of_the_host_is_none_to_wait_for() -> None:
    used = event("aten::mm", self_device_time_total=10.0)
    index = event("aten::_local_scalar_dense", 1.0)
    copy = [SimpleNamespace(name="Memcpy DtoH (Device -> Pinned)")]
    loss = event("aten::_local_scalar_dense", 1.0, self_device_time_total=1.0, kernels=copy)
    assert read(used, index, index, loss, on_gpu=True).host_syncs == 1


@pytest.mark.parametrize(("target", "asked"), [("Pageable", 1), ("Pinned", 0)])
def test_a_copy_to_the_host_is_a_question_unless_it_is_to_pinned_memory(target: str, asked: int) -> None:
    kernels = [SimpleNamespace(name=f"Memcpy DtoH (Device -> {target})")]
    copied = event("aten::copy_", self_device_time_total=10.0, kernels=kernels)
    uploaded = event("aten::copy_", kernels=[SimpleNamespace(name="Memcpy HtoD (Pageable -> Device)")])
    assert read(copied, uploaded, on_gpu=True).host_syncs == asked


def test_calls_inside_of_calls_are_no_calls_of_their_own() -> None:
    outer = event("aten::linear", 1.0)
    assert read(outer, event("aten::addmm", 50.0, parent=outer), event("aten::relu", 2.0)).calls == 2


def test_compiled_code_on_a_cpu_hides_its_work() -> None:
    assert read_events([event("## Call CompiledFxGraph abc ##")], seconds=1.0, steps=1, on_gpu=False) is None
    kernel = event("triton_poi_fused_relu_0", self_device_time_total=100.0)
    compiled = [event("## Call CompiledFxGraph abc ##"), kernel]
    assert read_events(compiled, seconds=1.0, steps=1, on_gpu=True) is not None
    assert read_events([], seconds=1.0, steps=1, on_gpu=False) is None


def test_short_operations_are_nothing_but_a_call() -> None:
    many = [operation(1.5e-6) for _ in range(1000)]
    work = describe(profile_of(*many, seconds=0.003), launch_seconds=1e-6)
    assert (work.overhead_fraction, work.traffic_fraction) == (1.0, 0.0)


def test_of_a_longer_operation_one_call_is_overhead() -> None:
    work = describe(profile_of(operation(10e-6, product=True), seconds=10e-6), launch_seconds=1e-6)
    assert work.products_fraction == pytest.approx(0.9)


def test_shares_add_up_to_one_whatever_the_profiler_says() -> None:
    for seconds in (0.1, 1.0, 10.0):
        work = describe(profile_of(operation(0.6, product=True), operation(0.6), seconds=seconds))
        assert work.products_fraction + work.traffic_fraction + work.overhead_fraction == pytest.approx(1.0)


def test_thin_products_are_traffic() -> None:
    thin = operation(0.5, product=True, traffic=1e9, flops=1e6)
    thick = operation(0.25, product=True, traffic=1e6, flops=1e9)
    work = describe(profile_of(thin, thick))
    assert work.traffic_fraction == pytest.approx(0.5, abs=1e-4)
    assert work.products_fraction == pytest.approx(0.25, abs=1e-4)
    assert work.bytes_per_second == pytest.approx(2e9, rel=1e-4)
    unknown = describe(profile_of(thin, thick), bytes_per_second=None)
    assert unknown.products_fraction == pytest.approx(0.75, abs=1e-4)


def test_rate_of_next_to_no_traffic_says_nothing() -> None:
    assert describe(profile_of(operation(0.01, traffic=1e9))).bytes_per_second is None


def test_kernels_are_held_against_the_step_without_the_profiler() -> None:
    kernel = event("aten::mm", 5.0, self_device_time_total=300_000.0, input_shapes=MM)
    idle = event("aten::view", 5.0)
    profile = read(kernel, idle, seconds=3.0, on_gpu=True)
    work = describe(profile, step_seconds=0.6, enqueue_fraction=0.97)
    assert work.products_fraction == work.device_busy_fraction == pytest.approx(0.5)
    assert work.operations_per_step == 1  # a view launches no kernel
    assert work.enqueue_fraction == 0.97


def steps(model: nn.Module, rows: torch.Tensor, *, ask: bool = False) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def take() -> None:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ask:
            loss.item()

    take()
    return take


def profiled(take: Any) -> Any:
    profile = profile_steps(take, CPU, steps=2)
    assert profile is not None
    return describe(profile, flops_per_second=1e11, bytes_per_second=1e10, launch_seconds=3e-6)


def test_real_operations_are_overhead_when_tiny_and_products_when_large() -> None:
    tiny = profiled(steps(nn.Sequential(*[nn.Linear(8, 8) for _ in range(60)]), torch.randn(4, 8)))
    large = profiled(steps(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), torch.randn(1024, 1024)))
    assert tiny.operations_per_step > 200 > large.operations_per_step
    assert tiny.overhead_fraction > large.overhead_fraction + 0.3
    assert large.products_fraction > tiny.products_fraction + 0.3


def test_real_questions_are_counted_per_step() -> None:
    model = nn.Linear(8, 8)
    assert profiled(steps(model, torch.randn(4, 8), ask=True)).host_syncs_per_step == 1
    assert profiled(steps(model, torch.randn(4, 8))).host_syncs_per_step == 0


def test_what_is_done_after_the_steps_is_none_of_theirs() -> None:
    take = steps(nn.Linear(8, 8), torch.randn(4, 8))

    def profile(after: int) -> WorkProfile:
        profiler = StepProfiler(CPU)
        profiler.start()
        take()
        profiler.end_steps()
        for _ in range(after):
            torch.randn(64, 64).flip(0)
        found = profiler.stop(1)
        assert found is not None
        return found

    assert len(profile(after=100).operations) == len(profile(after=0).operations)


def test_another_profiler_at_work_is_left_alone() -> None:
    take = steps(nn.Linear(8, 8), torch.randn(4, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        assert profile_steps(take, CPU, steps=1) is None
    assert len(list(theirs.events())) > 0


def test_the_profilers_own_time_is_no_part_of_a_step() -> None:
    # Profiled it takes 4 ms, plain 2 ms, of which 1 ms are products.
    work = describe(profile_of(operation(0.001, product=True), seconds=0.004), step_seconds=0.002)
    assert work.products_fraction == pytest.approx(0.5, abs=0.01)
    disturbed = describe(profile_of(operation(0.001, product=True), seconds=0.004), step_seconds=9.0)
    assert disturbed.products_fraction == pytest.approx(0.25, abs=0.01)


def test_a_small_operation_that_was_held_up_is_no_memory_traffic() -> None:
    held_up = describe(profile_of(operation(0.5, traffic=1000.0)))
    assert held_up.traffic_fraction < 1e-3
    large = describe(profile_of(operation(0.5, traffic=1e6)))
    assert large.traffic_fraction == pytest.approx(0.5, abs=1e-3)


def test_kernels_that_belong_to_no_operation_leave_the_question_open() -> None:
    known = event("aten::mm", 5.0, self_device_time_total=100.0, input_shapes=MM)
    kernel = event("gemm", 0.0, start=0.0, end=100.0, device_type="DeviceType.CUDA")
    graph = event("graph_kernel", 0.0, start=0.0, end=900.0, device_type="DeviceType.CUDA")
    assert read_events([known, kernel], seconds=1.0, steps=1, on_gpu=True) is not None
    assert read_events([known, kernel, graph], seconds=1.0, steps=1, on_gpu=True) is None


def test_a_gpu_of_which_no_kernel_is_seen_is_not_called_idle() -> None:
    assert read_events([event("aten::mm", 5.0, input_shapes=MM)], seconds=1.0, steps=1, on_gpu=True) is None


def test_a_span_around_kernels_is_none_itself() -> None:
    known = event("aten::_foreach_add_", 5.0, self_device_time_total=100.0)
    kernel = event("add", 0.0, start=0.0, end=100.0, device_type="DeviceType.CUDA")
    span = event("Optimizer.step#SGD.step", 0.0, start=0.0, end=100.0, device_type="DeviceType.CUDA")
    span.is_user_annotation = True
    assert read_events([known, kernel, span], seconds=1.0, steps=1, on_gpu=True) is not None


@pytest.mark.parametrize(
    ("seconds", "calls", "steps"),
    [(0.1, 100, 2), (0.1, None, 2), (0.1, 5_000, 1), (1.0, 100, 1), (6.0, 100, 0), (0.1, 50_000, 0)],
)
def test_slow_steps_and_steps_of_too_many_calls_are_not_profiled(seconds: float, calls: int | None, steps: int) -> None:
    assert count_profiled_steps(seconds, calls) == steps


class RawEvent:
    """An event as the profiler keeps it: nanoseconds."""

    def __init__(self, name: str, start: int, end: int, thread: int = 1) -> None:
        self._name, self._start, self._end, self._thread = name, start, end, thread

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._end - self._start

    def start_thread_id(self) -> int:
        return self._thread

    def device_type(self) -> str:
        return "DeviceType.CPU"

    def is_async(self) -> bool:
        return False


def test_events_are_nested_by_time_and_thread() -> None:
    raw = [
        RawEvent("inner", 2_000, 4_000),
        RawEvent("outer", 1_000, 10_000),
        RawEvent("innermost", 2_500, 3_000),
        RawEvent("next", 10_000, 11_000),
        RawEvent("elsewhere", 2_000, 3_000, thread=2),
    ]
    found = {one.name: one for one in nest_events(raw)}
    assert found["outer"].self_cpu_time_total == pytest.approx(7.0)
    assert found["inner"].self_cpu_time_total == pytest.approx(1.5)
    assert found["inner"].cpu_parent is found["outer"]
    assert found["innermost"].cpu_parent is found["inner"]
    assert found["next"].cpu_parent is None
    assert found["elsewhere"].cpu_parent is None


def test_nesting_agrees_with_pytorchs_own() -> None:
    take = steps(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        take()
    ours = nest_events(theirs.profiler.kineto_results.events())
    own_times: dict[str, float] = {}
    for one in ours:
        own_times[one.name] = own_times.get(one.name, 0.0) + one.self_cpu_time_total
    expected: dict[str, float] = {}
    for other in theirs.events():
        expected[other.name] = expected.get(other.name, 0.0) + other.self_cpu_time_total
    for name in ("aten::addmm", "aten::tanh", "aten::mm"):
        assert own_times[name] == pytest.approx(expected[name], rel=0.01, abs=0.5)
