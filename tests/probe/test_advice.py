from __future__ import annotations

from typing import Any

import pytest
from probe_records import BASELINE, GPU_HOST, RATES, ceilings, hardware, phases, target, timing

from autotune.probe.verdict import judge
from autotune.records import HardwareInfo, Measurement, OptimizerFacts, TargetFacts


def advised(facts: TargetFacts, measured: Measurement, machine: HardwareInfo | None = None) -> dict[str, str]:
    _, advice = judge(facts, measured, machine or hardware())
    return {item.knob: item.reason for item in advice}


def test_input_bound_advice_starts_with_workers() -> None:
    facts = target(compute_ms=30.0, data={"seconds_per_sample": 0.0055}, phases=phases(wait=70.0, optimizer=30.0))
    verdict, advice = judge(facts, timing(wait_ms=70.0), hardware())
    assert verdict.limit == "input"
    assert advice[0].knob == "num_workers"
    # 1.2 x 55 ms / 30 ms = 2.2
    assert advice[0].reason == (
        "70 % of a step waits for the loader; one process loads a step's samples in 55 ms, "
        "the computation takes 30 ms; workers that match it if they scale: 3; in use: 0; usable CPUs: 4"
    )


@pytest.mark.parametrize(
    ("facts", "machine"),
    [
        pytest.param(target(baseline=BASELINE.replace(num_workers=4)), hardware(), id="every CPU has a worker"),
        pytest.param(target(data={"iterable": True}), hardware(), id="workers would repeat an iterable dataset"),
    ],
)
def test_workers_are_not_advised(facts: TargetFacts, machine: HardwareInfo) -> None:
    assert "num_workers" not in advised(facts, timing(wait_ms=50.0), machine)


def test_workers_are_not_advised_when_nothing_waits() -> None:
    assert "num_workers" not in advised(target(), timing())


@pytest.mark.parametrize(("slow_ms", "prefetch", "expected"), [(210.0, 2, True), (190.0, 2, False), (210.0, 4, False)])
def test_prefetch_is_advised_for_uneven_steps(slow_ms: float, prefetch: int, expected: bool) -> None:
    facts = target(baseline=BASELINE.replace(num_workers=2, prefetch_factor=prefetch))
    steps = (0.1,) * 36 + (slow_ms / 1000,) * 4
    assert ("prefetch_factor" in advised(facts, timing(wait_ms=50.0, steps=steps))) == expected


@pytest.mark.parametrize(
    ("samples", "changes", "expected"),
    [
        (1000, {"num_workers": 2}, "an epoch lasts 10s and starts its loader workers anew each time (2)"),
        (7000, {"num_workers": 2}, None),
        (1000, {}, None),
        (1000, {"num_workers": 2, "persistent_workers": True}, None),
        (None, {"num_workers": 2}, None),
    ],
)
def test_persistent_workers(samples: int | None, changes: dict[str, Any], expected: str | None) -> None:
    facts = target(baseline=BASELINE.replace(**changes), data={"sample_count": samples})
    assert advised(facts, timing()).get("persistent_workers") == expected


@pytest.mark.parametrize(
    ("rates", "changes", "expected"),
    [
        pytest.param({"fp32": 100e9, "bf16": 131e9}, {}, True, id="1.31x"),
        pytest.param({"fp32": 100e9, "bf16": 129e9}, {}, False, id="1.29x"),
        pytest.param({"fp32": 100e9}, {}, False, id="not measured"),
        pytest.param({"bf16": 100e9}, {}, False, id="nothing to compare with"),
        pytest.param({"fp32": 100e9, "bf16": 300e9}, {"supports_bf16": False}, False, id="autocast does not run"),
        pytest.param(
            {"fp32": 100e9, "bf16": 300e9},
            {"baseline": BASELINE.replace(precision="bf16")},
            False,
            id="in use already",
        ),
    ],
)
def test_precision(rates: dict[str, float], changes: dict[str, Any], expected: bool) -> None:
    reasons = advised(target(ceilings=ceilings(rates), **changes), timing())
    assert ("precision" in reasons) == expected


def test_precision_reason_states_the_measured_rates() -> None:
    facts = target(ceilings=ceilings({"fp32": 400e9, "bf16": 1.2e12}))
    assert advised(facts, timing())["precision"] == (
        "bf16 matrix products ran 3x as fast as fp32 ones (1.2 TFLOP/s against 400 GFLOP/s); "
        "forward and backward take 95 % of a step"
    )


def test_fp16_only_where_bf16_is_no_faster() -> None:
    rates = {"fp32": 100e9, "bf16": 110e9, "fp16": 400e9}
    assert advised(target(device="cuda", ceilings=ceilings(rates)), timing(), GPU_HOST)["precision"].startswith("fp16 ")
    assert "precision" not in advised(target(ceilings=ceilings(rates)), timing())


def test_tf32_is_compared_with_what_is_in_use() -> None:
    rates = {"fp32": 100e9, "tf32": 400e9, "bf16": 450e9}
    facts = target(device="cuda", ceilings=ceilings(rates))
    assert "tf32 matrix products ran 4x as fast as fp32" in advised(facts, timing(), GPU_HOST)["allow_tf32"]
    allowed = target(device="cuda", baseline=BASELINE.replace(allow_tf32=True), ceilings=ceilings(rates))
    assert not {"allow_tf32", "precision"} & set(advised(allowed, timing(), GPU_HOST))


@pytest.mark.parametrize(("optimizer_ms", "expected"), [(11.0, True), (9.0, False)])
def test_optimizer_above_a_tenth(optimizer_ms: float, expected: bool) -> None:
    facts = target(
        baseline=BASELINE.replace(optimizer_implementation="for-loop"),
        phases=phases(forward=30.0, backward=70.0 - optimizer_ms, optimizer=optimizer_ms),
    )
    reasons = advised(facts, timing())
    assert ("optimizer_implementation" in reasons) == expected
    if expected:
        reason = "the optimizer takes 11 % of a step (11 ms); SGD also has foreach, fused"
        assert reasons["optimizer_implementation"] == reason


@pytest.mark.parametrize("implementations", [(), ("for-loop",)])
def test_an_optimizer_without_another_implementation(implementations: tuple[str, ...]) -> None:
    facts = target(
        baseline=BASELINE.replace(optimizer_implementation="for-loop"),
        phases=phases(optimizer=90.0),
        optimizer=OptimizerFacts(name="Mine", implementations=implementations),
    )
    assert "optimizer_implementation" not in advised(facts, timing())


@pytest.mark.parametrize(
    ("flops", "changes", "machine", "expected"),
    [
        pytest.param(0.2e9, {}, hardware(), True, id="products fill 20 of 95 %"),
        pytest.param(0.7e9, {}, hardware(), False, id="products explain the step"),
        pytest.param(None, {}, hardware(), False, id="not countable"),
        pytest.param(0.2e9, {}, hardware(has_cpp_compiler=False), False, id="no compiler"),
        pytest.param(0.2e9, {"compile_mode": "default"}, hardware(), False, id="compiled already"),
    ],
)
def test_compilation(flops: float | None, changes: dict[str, Any], machine: HardwareInfo, expected: bool) -> None:
    facts = target(baseline=BASELINE.replace(**changes), model={"flops_per_sample": flops})
    reasons = advised(facts, timing(), machine)
    assert ("compile_mode" in reasons) == expected
    if expected:
        assert "95 % of a step" in reasons["compile_mode"]
        assert "would fill 20 %" in reasons["compile_mode"]


def test_copies_are_worth_pinning_only_on_a_gpu_and_only_when_they_take_time() -> None:
    rates = ceilings(RATES, upload=25e9)
    slow = target(device="cuda", phases=phases(copy=10.0), ceilings=rates)
    assert advised(slow, timing(), GPU_HOST)["pin_memory"] == (
        "copies to the device take 10 % of a step from pageable memory; page-locked memory copies at 25 GB/s here"
    )
    fast = target(device="cuda", phases=phases(copy=2.0), ceilings=rates)
    assert "pin_memory" not in advised(fast, timing(), GPU_HOST)
    assert "pin_memory" not in advised(target(phases=phases(copy=10.0)), timing())
    pinned = target(device="cuda", phases=phases(copy=10.0), baseline=BASELINE.replace(pin_memory=True))
    reasons = advised(pinned, timing(), GPU_HOST)
    assert "pin_memory" not in reasons
    assert "10 % of a step" in reasons["non_blocking"]
    both = target(device="cuda", phases=phases(copy=10.0), baseline=pinned.baseline.replace(non_blocking=True))
    assert "non_blocking" not in advised(both, timing(), GPU_HOST)


@pytest.mark.parametrize(
    ("knob", "device", "model", "in_use"),
    [
        ("memory_format", "cpu", "has_4d_convolution", {"memory_format": "channels_last"}),
        ("memory_format", "cuda", "has_4d_convolution", {"memory_format": "channels_last"}),
        ("cudnn_benchmark", "cuda", "has_4d_convolution", {"cudnn_benchmark": True}),
        ("attention_backend", "cuda", "calls_attention", {"attention_backend": "flash"}),
    ],
)
def test_knobs_of_a_kind_of_model(knob: str, device: str, model: str, in_use: dict[str, Any]) -> None:
    assert knob in advised(target(device=device, model={model: True}), timing(), GPU_HOST)
    assert knob not in advised(target(device=device), timing(), GPU_HOST)
    used = target(device=device, model={model: True}, baseline=BASELINE.replace(**in_use))
    assert knob not in advised(used, timing(), GPU_HOST)


def test_host_allocator_names_what_is_installed_and_only_on_a_cpu() -> None:
    machine = hardware(host_allocators={"tcmalloc": "/lib/t.so", "jemalloc": "/lib/j.so"})
    reason = advised(target(), timing(), machine)["host_allocator"]
    assert "peak 1.00 GiB" in reason
    assert reason.endswith(": glibc-tuned, jemalloc, tcmalloc")
    assert "host_allocator" not in advised(target(device="cuda"), timing(), GPU_HOST)
    tuned = target(baseline=BASELINE.replace(host_allocator="glibc-tuned"))
    assert "host_allocator" not in advised(tuned, timing(), machine)


@pytest.mark.parametrize(("passes", "batch_norm", "expected"), [(4, False, True), (1, False, False), (4, True, False)])
def test_micro_batch(passes: int, batch_norm: bool, expected: bool) -> None:
    baseline = BASELINE.replace(gradient_accumulation_steps=passes)
    reasons = advised(target(baseline=baseline, model={"has_batch_norm": batch_norm}), timing())
    assert ("micro_batch_size" in reasons) == expected
    if expected:
        assert reasons["micro_batch_size"] == (
            "a step makes 4 passes over 10 samples each; larger passes make the same 40 samples"
        )


@pytest.mark.parametrize(
    ("threads", "workers", "wait_ms", "expected"),
    [
        (4, 0, 0.0, None),
        (4, 2, 0.0, "threads: 4, loader workers: 2, usable CPUs to share: 4"),
        (8, 0, 0.0, "threads: 8, loader workers: 0, usable CPUs to share: 4"),
        (2, 2, 0.0, None),
        (None, 1, 0.0, "threads: 4, loader workers: 1, usable CPUs to share: 4"),
        (4, 0, 50.0, "threads: 4, loader workers: 0, usable CPUs to share: 4"),
    ],
)
def test_threads(threads: int | None, workers: int, wait_ms: float, expected: str | None) -> None:
    facts = target(baseline=BASELINE.replace(num_threads=threads, num_workers=workers))
    assert advised(facts, timing(wait_ms=wait_ms)).get("num_threads") == expected


def test_advice_is_ranked_by_the_share_of_a_step_it_acts_on() -> None:
    facts = target(
        baseline=BASELINE.replace(optimizer_implementation="for-loop"),
        phases=phases(forward=30.0, backward=30.0, optimizer=40.0),
        model={"flops_per_sample": 0.1e9, "has_4d_convolution": True},
        ceilings=ceilings({"fp32": 100e9, "bf16": 150e9}),
    )
    # compile 60 % - 10 % = 50 %; optimizer 40 %; bf16 60 % x (1 - 1/1.5) = 20 %; then those without a share.
    assert list(advised(facts, timing())) == [
        "compile_mode",
        "optimizer_implementation",
        "precision",
        "memory_format",
        "host_allocator",
    ]
