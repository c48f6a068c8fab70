from __future__ import annotations

import math
from typing import Any

import pytest
from probe_records import BASELINE, GPU_HOST, MIB, RATES, ceilings, memory, phases, target, timing, work
from record_factory import make_hardware, make_optimizer

from autotune.probe.analysis.verdict import judge
from autotune.records import (
    Ceilings,
    GainRange,
    HardwareInfo,
    MatmulRate,
    Measurement,
    MemoryFacts,
    TargetFacts,
)
from autotune.records.facts import Switched


def advised(facts: TargetFacts, measured: Measurement, machine: HardwareInfo | None = None) -> dict[str, str]:
    _, advice = judge(facts, measured, machine or make_hardware())
    return {item.knob: item.reason for item in advice}


def expected_gain(facts: TargetFacts, measured: Measurement, knob: str, machine: HardwareInfo | None = None) -> Any:
    _, advice = judge(facts, measured, machine or make_hardware())
    found = {item.knob: item.gain for item in advice}[knob]
    return None if found is None else (pytest.approx(found.low, rel=1e-3), pytest.approx(found.high, rel=1e-3))


def test_input_bound_advice_starts_with_workers() -> None:
    facts = target(compute_ms=30.0, data={"seconds_per_sample": 0.0055}, phases=phases(wait=70.0, optimizer=30.0))
    verdict, advice = judge(facts, timing(wait_ms=70.0), make_hardware())
    assert verdict.limit == "input"
    assert advice[0].knob == "num_workers"
    # 1.2 x 55 ms / 30 ms = 2.2. Two load in 28 ms; with 4 x 30 ms of threads 4 CPUs need 44 ms, whatever more would do.
    assert advice[0].reason == (
        "70 % of a step waits for the loader; one process loads a step's samples in 55 ms, "
        "the computation takes 30 ms; workers that match it if they scale: 3; "
        "best as predicted: 2 (the computation needs 2 of the 4 usable CPUs); in use: 0; usable CPUs: 4"
    )


def test_workers_for_a_gpu_are_as_many_as_match_and_fit() -> None:
    facts = target(device="cuda", compute_ms=30.0, data={"seconds_per_sample": 0.0055, "batch_bytes": 100 * MIB})
    _, advice = judge(facts, timing(wait_ms=70.0), GPU_HOST)
    # 3 workers x 2 batches x 100 MiB x 1.3
    assert advice[0].reason.endswith("workers that match it if they scale: 3; in use: 0; usable CPUs: 4")
    crowded = GPU_HOST.replace(shared_memory_free_bytes=64 * MIB)
    _, advice = judge(facts, timing(wait_ms=70.0), crowded)
    assert advice[0].reason.endswith("; /dev/shm would need 780 MiB, 64 MiB are free")
    assert expected_gain(facts, timing(wait_ms=70.0), "num_workers", GPU_HOST) == (1 / (1 - 0.25 * 0.7), 1 / 0.3)


@pytest.mark.parametrize(
    ("facts", "machine"),
    [
        pytest.param(target(baseline=BASELINE.replace(num_workers=4)), make_hardware(), id="every CPU has a worker"),
        pytest.param(target(data={"iterable": True}), make_hardware(), id="workers would repeat an iterable dataset"),
    ],
)
def test_workers_are_not_advised(facts: TargetFacts, machine: HardwareInfo) -> None:
    assert "num_workers" not in advised(facts, timing(wait_ms=50.0), machine)


def test_fewer_workers_are_advised_where_they_take_much_of_the_cpus() -> None:
    """As of a training whose ten workers slice an array on two CPUs: by hand 3.3 times as fast without them."""
    facts = target(
        baseline=BASELINE.replace(micro_batch_size=32, num_workers=10, num_threads=None),
        compute_ms=3.19,
        computed_beside_workers=True,
        data={"seconds_per_sample": 25e-6, "loader_seconds_per_step": 2.09e-3},
    )
    measured, machine = timing(step_ms=5.66, wait_ms=2.47, samples=32), make_hardware(usable_cpu_count=2)
    assert advised(facts, measured, machine)["num_workers"] == (
        "10 workers and the computation share 2 CPUs; one process loads a step's samples in 800 us, "
        "10 workers alone in 2.09 ms; best as predicted: 0"
    )
    assert expected_gain(facts, measured, "num_workers", machine) == (0.9, 5.66 / 2.812)
    assert "num_workers" not in advised(facts.replace(device="cuda"), measured, machine)


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


def test_who_trains_with_emulated_arithmetic_is_told_to_leave_it() -> None:
    rates = (
        MatmulRate(dtype="fp32", flops_per_second=122e9),
        MatmulRate(dtype="bf16", flops_per_second=0.94e9, emulated=True),
    )
    own = target(baseline=BASELINE.replace(precision="bf16"), ceilings=Ceilings(matmul=rates), work=work(0.9, 0.05))
    reason = "bf16 is emulated here (940 MFLOP/s, 1/130 of fp32); products take 90 % of a step"
    assert advised(own, timing())["precision"] == reason
    plain = target(ceilings=Ceilings(matmul=rates), work=work(0.9, 0.05))
    assert "precision" not in advised(plain, timing())


def test_precision_reason_states_the_measured_rates() -> None:
    facts = target(ceilings=ceilings({"fp32": 400e9, "bf16": 1.2e12}))
    assert advised(facts, timing())["precision"] == (
        "bf16 matrix products ran 3x as fast as fp32 ones (1.2 TFLOP/s against 400 GFLOP/s); "
        "forward and backward take 95 % of a step"
    )


@pytest.mark.parametrize(
    ("calls_attention", "told"), [(False, "convolutions ran 2x"), (True, "matrix products ran 3x")]
)
def test_precision_of_a_model_of_convolutions_goes_by_these(calls_attention: bool, told: str) -> None:
    rates = (
        MatmulRate(dtype="fp32", flops_per_second=4e11, convolution_flops_per_second=8e11),
        MatmulRate(dtype="bf16", flops_per_second=1.2e12, convolution_flops_per_second=1.6e12),
    )
    model = {"has_4d_convolution": True, "calls_attention": calls_attention}
    facts = target(ceilings=Ceilings(matmul=rates), model=model)
    assert f"bf16 {told} as fast as fp32 ones" in advised(facts, timing())["precision"]


def test_fp16_only_where_bf16_is_no_faster() -> None:
    rates = {"fp32": 100e9, "bf16": 110e9, "fp16": 400e9}
    assert advised(target(device="cuda", ceilings=ceilings(rates)), timing(), GPU_HOST)["precision"].startswith("fp16 ")
    assert "precision" not in advised(target(ceilings=ceilings(rates)), timing())


def test_tf32_is_compared_with_what_is_in_use() -> None:
    rates = {"fp32": 100e9, "tf32": 400e9, "bf16": 450e9}
    facts = target(device="cuda", ceilings=ceilings(rates))
    assert "tf32 matrix products ran 4x as fast as fp32" in advised(facts, timing(), GPU_HOST)["matmul_precision"]
    allowed = target(device="cuda", baseline=BASELINE.replace(matmul_precision="high"), ceilings=ceilings(rates))
    assert not {"matmul_precision", "precision"} & set(advised(allowed, timing(), GPU_HOST))


def test_products_of_a_cpu_are_compared_with_those_in_use() -> None:
    rates = {"fp32": 100e9, "fp32-medium": 220e9}
    told = advised(target(ceilings=ceilings(rates)), timing())["matmul_precision"]
    assert "fp32-medium matrix products ran 2.2x as fast as fp32 ones" in told
    used = target(baseline=BASELINE.replace(matmul_precision="medium"), ceilings=ceilings(rates))
    assert "matmul_precision" not in advised(used, timing())


def test_what_was_tried_in_the_running_training_takes_the_place_of_what_rates_promise() -> None:
    rates, baseline = {"fp32": 100e9, "fp32-medium": 220e9}, BASELINE.replace(num_threads=4, num_workers=2)
    for medium, alone in ((0.2, 0.3), (-0.2, -0.3)):
        switched = (
            Switched(knob="matmul_precision", value="medium", log_speedup=medium, log_sd=0.05),
            Switched(knob="num_threads", value=1, log_speedup=alone, log_sd=0.05),
            Switched(knob="num_threads", value=2, log_speedup=alone - 0.1, log_sd=0.05),
        )
        facts = target(ceilings=ceilings(rates), baseline=baseline, switched=switched)
        found = advised(facts, timing())
        assert {"matmul_precision", "num_threads"} & set(found) == (
            {"matmul_precision", "num_threads"} if medium > 0 else set()
        )
    facts = facts.replace(switched=(switched[0].replace(log_speedup=0.2),))
    assert advised(facts, timing())["matmul_precision"] == (
        "medium, for some steps of the running training, ran 1.22x as fast"
    )
    low, high = expected_gain(facts, timing(), "matmul_precision")
    assert (low, high) == (math.exp(0.15), math.exp(0.25))


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
        optimizer=make_optimizer(name="Mine", implementations=implementations),
    )
    assert "optimizer_implementation" not in advised(facts, timing())


@pytest.mark.parametrize(
    ("flops", "changes", "machine", "expected"),
    [
        pytest.param(0.2e9, {}, make_hardware(), True, id="products fill 20 of 95 %"),
        pytest.param(0.7e9, {}, make_hardware(), False, id="products explain the step"),
        pytest.param(None, {}, make_hardware(), False, id="not countable"),
        pytest.param(0.2e9, {}, make_hardware(has_cpp_compiler=False), False, id="no compiler"),
        pytest.param(0.2e9, {"compile_mode": "default"}, make_hardware(), False, id="compiled already"),
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
    machine = make_hardware(host_allocators={"tcmalloc": "/lib/t.so", "jemalloc": "/lib/j.so"})
    reason = advised(target(), timing(), machine)["host_allocator"]
    assert "peak 1 GiB" in reason
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
    ("threads", "workers", "load_ms", "wait_ms", "expected"),
    [
        (4, 0, 20.0, 0.0, None),
        (4, 2, 20.0, 0.0, "threads: 4, loader workers: 2, usable CPUs to share: 4"),
        (4, 2, 0.5, 0.0, None),  # they take a twentieth of a CPU
        (8, 0, 20.0, 0.0, "threads: 8, loader workers: 0, usable CPUs to share: 4"),
        (2, 2, 20.0, 0.0, None),
        (None, 1, 20.0, 0.0, "threads: 4, loader workers: 1, usable CPUs to share: 4"),
        (4, 0, 20.0, 50.0, "threads: 4, loader workers: 0, usable CPUs to share: 4"),
    ],
)
def test_threads(threads: int | None, workers: int, load_ms: float, wait_ms: float, expected: str | None) -> None:
    data = {"seconds_per_sample": load_ms / 1000}
    facts = target(baseline=BASELINE.replace(num_threads=threads, num_workers=workers), data=data)
    assert advised(facts, timing(wait_ms=wait_ms)).get("num_threads") == expected


def middle(gain: GainRange | None) -> float:
    return 1.0 if gain is None else math.sqrt(gain.low * gain.high)


def test_advice_is_ranked_by_the_mean_gain() -> None:
    facts = target(
        baseline=BASELINE.replace(optimizer_implementation="for-loop"),
        phases=phases(forward=30.0, backward=30.0, optimizer=40.0),
        model={"flops_per_sample": 0.1e9, "has_4d_convolution": True},
        ceilings=ceilings({"fp32": 100e9, "bf16": 150e9}),
    )
    _, advice = judge(facts, timing(), make_hardware())
    # Saved at best: optimizer 40 %, a quarter of it sure; compile 2/3 of the 50 % that products do not explain; bf16 a
    # third of 60 %; malloc a quarter of 60 %; the layout a third of it, and it may cost time.
    assert [(item.knob, round(middle(item.gain), 2)) for item in advice] == [
        ("optimizer_implementation", 1.36),
        ("compile_mode", 1.16),
        ("precision", 1.12),
        ("host_allocator", 1.08),
        ("memory_format", 1.06),
    ]


@pytest.mark.parametrize(
    ("changes", "knob", "gain"),
    [
        # Products take 60 % of the computation, and bf16 saves two thirds of that; half of the traffic's bytes, too,
        # 30 % less the optimizer's 5 / 95: 0.4 + 0.5 x 0.247.
        ({"work": work(0.6, 0.3)}, "precision", (1 / (1 - 0.25 * 0.5237), 1 / (1 - 0.5237))),
        ({}, "precision", (1.0, 1 / (1 - 0.947 * 2 / 3))),
        # Casts are operations of their own, and calling is half of this step already.
        ({"work": work(0.4, 0.1)}, "precision", (0.9 / (1 - 0.25 * 0.2903), 1 / (1 - 0.2903))),
        # 2/3 of the model's traffic, 0.247, and 90 % of the overhead, 0.1.
        ({"work": work(0.6, 0.3)}, "compile_mode", (0.9, 1 / (1 - 0.2549))),
        ({"work": work(0.6, 0.3)}, "host_allocator", (1.0, 1 / (1 - 0.1237))),
        ({"model": {"has_4d_convolution": True}, "work": work(0.6, 0.3)}, "memory_format", (0.9, 1 / (1 - 0.2825))),
    ],
)
def test_gains_follow_from_the_share_a_knob_acts_on(
    changes: dict[str, Any], knob: str, gain: tuple[float, float]
) -> None:
    assert expected_gain(target(**changes), timing(), knob) == gain


def test_waiting_is_no_part_of_what_the_shares_are_of() -> None:
    facts = target(work=work(0.6, 0.3), ceilings=ceilings({"fp32": 100e9, "bf16": 1e15}))
    still = expected_gain(facts, timing(wait_ms=0.0), "precision")
    assert expected_gain(facts, timing(wait_ms=50.0), "precision")[1].expected < still[1].expected


def test_compilation_is_advised_by_the_measured_shares() -> None:
    facts = target(work=work(0.6, 0.3), model={"flops_per_sample": 0.9e9})
    assert advised(facts, timing())["compile_mode"] == (
        "memory traffic of the model takes 25 % of a step and calling its operations 10 %: "
        "compilation fuses the one and leaves out most of the other"
    )
    assert "compile_mode" not in advised(target(work=work(0.75, 0.2), model={"flops_per_sample": 1e6}), timing())


def test_no_gain_is_above_the_ceiling() -> None:
    # Products alone take 80 ms of the step's 100 at the fastest rate.
    own = BASELINE.replace(optimizer_implementation="for-loop")
    rates = ceilings({"fp32": 200e9, "bf16": 300e9})
    facts = target(model={"flops_per_sample": 2.4e9}, baseline=own, ceilings=rates)
    verdict, advice = judge(facts, timing(), make_hardware())
    assert verdict.speedup_ceiling == pytest.approx(1.25)
    assert max(item.gain.high for item in advice if item.gain) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("workers", "loader_ms", "high"),
    [
        pytest.param(2, 80.0, 1.25, id="the loader follows no further"),
        pytest.param(2, None, 2.71, id="not measured"),
        pytest.param(0, 80.0, 2.71, id="without workers it takes turns with the computation"),
    ],
)
def test_a_faster_computation_is_held_by_the_loader(workers: int, loader_ms: float | None, high: float) -> None:
    seconds = None if loader_ms is None else loader_ms / 1000
    facts = target(baseline=BASELINE.replace(num_workers=workers), data={"loader_seconds_per_step": seconds})
    assert expected_gain(facts, timing(), "precision")[1] == pytest.approx(high, rel=0.01)


def test_what_gains_next_to_nothing_at_its_best_is_not_named() -> None:
    slow_loader = target(baseline=BASELINE.replace(num_workers=2), data={"loader_seconds_per_step": 0.12})
    assert "precision" not in advised(slow_loader, timing())
    waiting = target(device="cuda", baseline=BASELINE.replace(num_workers=2))
    assert "precision" not in advised(waiting, timing(wait_ms=20.0), GPU_HOST)
    assert "micro_batch_size" not in advised(target(baseline=SPLIT, batch_elasticity=1.0), timing())


def test_knobs_of_the_computation_are_dropped_when_the_data_side_is_the_limit() -> None:
    # 10 samples x 100 ms in one process: 250 ms on 4 CPUs, against 20 ms.
    facts = target(
        device="cuda",
        compute_ms=20.0,
        data={"seconds_per_sample": 0.1, "loader_seconds_per_step": 1.0},
        model={"has_4d_convolution": True},
    )
    measured = timing(step_ms=1020.0, wait_ms=1000.0)
    assert list(advised(facts, measured, GPU_HOST)) == ["num_workers"]
    unproven = facts.replace(data=facts.data.replace(loader_seconds_per_step=None))
    assert {"precision", "memory_format"} <= set(advised(unproven, measured, GPU_HOST))


SPLIT = BASELINE.replace(gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("elasticity", "baseline", "gain"),
    [
        # Four times the samples a pass: a sample takes 4^-0.5 of the time, over the 95 % of forward and backward.
        (0.5, SPLIT, (1.0, 1 / (1 - 0.947 * 0.5))),
        (None, SPLIT, None),
        # Half the samples a pass: 2^-0.5.
        (1.5, BASELINE, (1.0, 1 / (1 - 0.947 * (1 - 2**-0.5)))),
    ],
)
def test_micro_batch_gain_is_by_elasticity(elasticity: float | None, baseline: Any, gain: Any) -> None:
    assert expected_gain(target(baseline=baseline, batch_elasticity=elasticity), timing(), "micro_batch_size") == gain


@pytest.mark.parametrize("elasticity", [None, 0.5, 1.04])
def test_whole_batches_are_not_split_without_evidence(elasticity: float | None) -> None:
    assert "micro_batch_size" not in advised(target(batch_elasticity=elasticity), timing())


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (memory({"off": 20}), "; 20 are predicted to take 2.25 GiB of 8 GiB"),
        (memory({"off": 64}), "; 40 are predicted to take 3.5 GiB of 8 GiB"),
        (memory({"off": None}), "; 40 are predicted to take 3.5 GiB of 8 GiB"),
        (memory({"off": 19}), None),
        (memory({"off": None}, limit=2 * 2**30), None),
        (memory({"full": 64}), ""),
        (None, ""),
    ],
)
def test_micro_batch_names_the_predicted_peak(facts: MemoryFacts | None, told: str | None) -> None:
    reason = advised(target(baseline=SPLIT, memory=facts), timing()).get("micro_batch_size")
    plain = "a step makes 4 passes over 10 samples each; larger passes make the same 40 samples"
    assert reason == (None if told is None else plain + told)


BLOCKS = {"checkpointable_blocks": 4}


@pytest.mark.parametrize(
    ("facts", "told", "low"),
    [
        (memory({"off": 10}), "; 10 are predicted to take 1.62 GiB of 8 GiB without", 1 / (1 - 0.25 * 0.316)),
        (memory({"off": 9}), None, None),
        (None, "; whether they fit without was not predicted", 1.0),
    ],
)
def test_checkpointing_that_memory_does_not_ask_for(facts: Any, told: str | None, low: float | None) -> None:
    baseline = BASELINE.replace(activation_checkpointing="full")
    checkpointed = target(baseline=baseline, model=BLOCKS, memory=facts)
    reasons = advised(checkpointed, timing())
    if told is None:
        assert "activation_checkpointing" not in reasons
        return
    first = "recomputed activations repeat up to a forward pass (32 % of a step)"
    assert reasons["activation_checkpointing"] == first + told
    assert expected_gain(checkpointed, timing(), "activation_checkpointing") == (
        low,
        pytest.approx(1 / 0.684, rel=1e-3),
    )


@pytest.mark.parametrize(
    ("elasticity", "largest", "expected"),
    [
        (0.2, {"off": 10, "full": 40}, True),
        (0.2, {"off": 40, "full": 40}, False),
        (0.2, {"off": 10, "full": 10}, False),
        (0.97, {"off": 10, "full": 40}, False),
        (None, {"off": 10, "full": 40}, False),
    ],
)
def test_checkpointing_for_larger_passes(
    elasticity: float | None, largest: dict[str, int | None], expected: bool
) -> None:
    facts = target(baseline=SPLIT, model=BLOCKS, memory=memory(largest), batch_elasticity=elasticity)
    reasons = advised(facts, timing())
    assert ("activation_checkpointing" in reasons) == expected
    if expected:
        assert reasons["activation_checkpointing"] == (
            "full checkpointing lets 40 samples a pass fit instead of 10; 40 are predicted to take 3.5 GiB of "
            "8 GiB; it repeats up to 32 % of a step"
        )
        # A sample takes 4^-0.8 of the time, and a forward pass more.
        low, high = 1 / 1.3158, 1 / (1 - 0.947 * (1 - 4**-0.8)) / 1.3158
        assert expected_gain(facts, timing(), "activation_checkpointing") == (low, pytest.approx(high, rel=1e-3))


def test_prefetch_by_the_loader_alone() -> None:
    baseline = BASELINE.replace(num_workers=2)
    uneven = target(baseline=baseline, data={"slow_batch_ratio": 3.2})
    assert advised(uneven, timing(wait_ms=50.0))["prefetch_factor"] == (
        "batches come unevenly: one in twenty takes 3.2x the median or more to load"
    )
    even = target(baseline=baseline, data={"slow_batch_ratio": 1.5})
    uneven_steps = (0.1,) * 36 + (0.3,) * 4
    assert "prefetch_factor" not in advised(even, timing(wait_ms=50.0, steps=uneven_steps))


@pytest.mark.parametrize(("start", "expected"), [(0.21, True), (0.19, False)])
def test_persistent_workers_by_the_start_of_an_epoch(start: float, expected: bool) -> None:
    facts = target(baseline=BASELINE.replace(num_workers=2), data={"sample_count": 1000, "epoch_start_seconds": start})
    reasons = advised(facts, timing())
    assert ("persistent_workers" in reasons) == expected
    if expected:
        told = "an epoch lasts 10s and starts its loader workers anew each time (2), which takes 0.21s"
        assert reasons["persistent_workers"] == told


def test_pinning_gains_by_the_measured_rates() -> None:
    rates = ceilings(RATES, upload=25e9, pageable_to_device_bytes_per_second=5e9)
    facts = target(device="cuda", phases=phases(copy=10.0), ceilings=rates)
    assert "25 GB/s here, pageable memory at 5 GB/s" in advised(facts, timing(), GPU_HOST)["pin_memory"]
    assert expected_gain(facts, timing(), "pin_memory", GPU_HOST) == (1.0, 1 / (1 - 0.8 * 10 / 105))
    unknown = facts.replace(ceilings=ceilings(RATES))
    assert expected_gain(unknown, timing(), "pin_memory", GPU_HOST) == (1.0, 1 / (1 - 2 / 3 * 10 / 105))
