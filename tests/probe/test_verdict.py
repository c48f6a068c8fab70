from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_records import BASELINE, GPU_HOST, RATES, ceilings, hardware, phases, target, timing

from autotune.knobs import KNOBS, Facts
from autotune.probe.figures import format_flops, format_step
from autotune.probe.verdict import judge
from autotune.records import Ceilings, OptimizerFacts, TrainConfig, get_knob


@pytest.mark.parametrize(
    ("step_ms", "wait_ms", "compute_ms", "limit"),
    [
        pytest.param(100.0, 10.2, 98.0, "input", id="waits more than a tenth"),
        pytest.param(100.0, 9.8, 98.0, "unknown", id="waits less, and computing explains the step"),
        pytest.param(100.0, 9.8, 85.0, "input", id="waiting is most of what computing does not explain"),
        pytest.param(100.0, 9.8, 80.0, "unknown", id="waiting is the smaller part of it"),
        pytest.param(100.0, 6.0, 92.0, "unknown", id="less than a tenth is unexplained"),
        pytest.param(100.0, 0.0, 20.0, "unknown", id="slower than computing, but never waits"),
    ],
)
def test_input_bound(step_ms: float, wait_ms: float, compute_ms: float, limit: str) -> None:
    verdict, _ = judge(target(compute_ms=compute_ms), timing(step_ms=step_ms, wait_ms=wait_ms), hardware())
    assert verdict.limit == limit


def test_input_sentence_has_the_numbers() -> None:
    verdict, _ = judge(target(compute_ms=20.0), timing(step_ms=55.0, wait_ms=34.1), hardware())
    assert verdict.sentence == (
        "input-bound: 62 % of a step waits for the loader; "
        "without the wait a step takes 20.9 ms instead of 55 ms (2.6x)"
    )


def test_input_sentence_says_when_no_number_of_cpus_loads_fast_enough() -> None:
    facts = target(compute_ms=20.0, data={"seconds_per_sample": 0.01})
    verdict, _ = judge(facts, timing(step_ms=120.0, wait_ms=100.0), hardware())
    assert verdict.sentence.endswith(
        "; loading a step's samples takes 25 ms even when shared evenly by 4 CPUs, more than the computation (20 ms)"
    )


def test_a_step_that_is_all_waiting() -> None:
    verdict, _ = judge(target(), timing(step_ms=100.0, wait_ms=150.0), hardware())
    assert (verdict.limit, verdict.sentence) == ("input", "input-bound: 100 % of a step waits for the loader")


@pytest.mark.parametrize(
    ("gigaflops", "limit"), [(510.0, "compute"), (490.0, "unknown"), (310.0, "unknown"), (10.0, "unknown")]
)
def test_compute_bound_above_half_the_measured_rate(gigaflops: float, limit: str) -> None:
    # 10 samples in 0.1 s against 100 GFLOP/s: utilisation = FLOPs a sample / 1e9.
    verdict, _ = judge(target(model={"flops_per_sample": gigaflops * 1e6}), timing(), hardware())
    assert verdict.limit == limit


def test_compute_sentence_has_the_numbers() -> None:
    verdict, _ = judge(target(model={"flops_per_sample": 0.63e9}), timing(), hardware())
    assert verdict.sentence == (
        "compute-bound: matrix products reach 63 % of the measured fp32 rate (63 GFLOP/s of 100 GFLOP/s)"
    )


@pytest.mark.parametrize(
    ("device", "changes", "convolution", "arithmetic"),
    [
        ("cpu", {}, True, "fp32"),
        ("cpu", {"precision": "bf16"}, False, "bf16"),
        ("cuda", {}, False, "fp32"),
        ("cuda", {"allow_tf32": True}, False, "tf32"),
        ("cuda", {}, True, "tf32"),
        ("cuda", {"precision": "fp16", "allow_tf32": True}, True, "fp16"),
    ],
)
def test_utilisation_is_against_the_arithmetic_in_use(
    device: str, changes: dict[str, Any], convolution: bool, arithmetic: str
) -> None:
    rates = {"fp32": 10e9, "tf32": 11e9, "bf16": 12e9, "fp16": 13e9}
    model = {"flops_per_sample": 0.09e9, "has_4d_convolution": convolution}
    facts = target(device=device, baseline=BASELINE.replace(**changes), model=model, ceilings=ceilings(rates))
    verdict, _ = judge(facts, timing(), GPU_HOST)
    assert verdict.limit == "compute"
    assert f"measured {arithmetic} rate" in verdict.sentence
    assert f"of {rates[arithmetic] / 1e9:.0f} GFLOP/s" in verdict.sentence


def test_a_gpu_without_tf32_is_held_against_fp32() -> None:
    facts = target(device="cuda", baseline=BASELINE.replace(allow_tf32=True), model={"flops_per_sample": 0.9e9})
    assert "measured fp32 rate" in judge(facts, timing(), GPU_HOST)[0].sentence


# 2 GB of parameters, three passes over them: 6 GB in 0.4 s is 15 GB/s of 20.
HEAVY = {
    "parameter_bytes": 2 * 10**9,
    "flops_per_sample": 1e9,
}


@pytest.mark.parametrize(
    ("optimizer", "name", "flops", "memory", "limit"),
    [
        pytest.param(400.0, "SGD", 1e9, 20e9, "bandwidth", id="15 of 20 GB/s"),
        pytest.param(400.0, "AdamW", 1e9, 46e9, "bandwidth", id="Adam makes seven passes: 35 of 46 GB/s"),
        pytest.param(400.0, "SGD", 1e9, 46e9, "unknown", id="too little traffic"),
        pytest.param(400.0, "SGD", 1e9, 11e9, "unknown", id="more than memory can: it stayed in the caches"),
        pytest.param(400.0, "SGD", 8e9, 20e9, "unknown", id="products take a part worth naming"),
        pytest.param(400.0, "SGD", None, 20e9, "unknown", id="operations unknown"),
        pytest.param(400.0, "SGD", 1e9, None, "unknown", id="memory rate unknown"),
        pytest.param(80.0, "SGD", 1e9, 100e9, "unknown", id="the optimizer is the smaller part"),
        pytest.param(0.0, "SGD", 1e9, 20e9, "unknown", id="no optimizer time"),
    ],
)
def test_bandwidth_bound_needs_evidence(
    optimizer: float, name: str, flops: float | None, memory: float | None, limit: str
) -> None:
    facts = target(
        compute_ms=500.0,
        model={**HEAVY, "flops_per_sample": flops},
        phases=phases(optimizer=optimizer),
        optimizer=OptimizerFacts(name=name, implementations=("for-loop",)),
        ceilings=ceilings(RATES, memory=memory),
    )
    verdict, _ = judge(facts, timing(step_ms=500.0, samples=2), hardware())
    assert verdict.limit == limit


def test_bandwidth_sentence_has_the_numbers() -> None:
    facts = target(compute_ms=500.0, model=HEAVY, phases=phases(optimizer=400.0))
    verdict, _ = judge(facts, timing(step_ms=500.0), hardware())
    assert verdict.sentence == (
        "bandwidth-bound: the optimizer takes 82 % of a step and moves at least 15 of the measured 20 GB/s; "
        "matrix products reach 20 % of the measured fp32 rate (20 GFLOP/s of 100 GFLOP/s)"
    )


def test_unknown_says_what_was_measured() -> None:
    facts = target(phases=phases(wait=5.0, copy=0.0, forward=30.0, backward=55.0, optimizer=10.0))
    verdict, _ = judge(facts, timing(wait_ms=5.0), hardware())
    assert verdict.sentence == (
        "unknown: a step takes 100 ms and waits 5 % of it for the loader; its operations could not be counted; "
        "forward and backward take 85 %, the optimizer 10 %, copies 0 %; "
        "launches and memory traffic were not told apart"
    )


@pytest.mark.parametrize(
    ("per_sample", "flops", "cpus", "ceiling"),
    [
        # 10 samples x 0.6e9 FLOPs at the fastest rate, 300 GFLOP/s: 20 ms of a 100 ms step.
        pytest.param(0.0001, 0.6e9, 4, 5.0, id="products bind"),
        pytest.param(0.01, 0.6e9, 4, 4.0, id="loading binds: 10 x 10 ms on 4 CPUs"),
        pytest.param(0.01, 0.6e9, 2, 2.0, id="fewer CPUs"),
        pytest.param(0.0001, None, 4, None, id="operations unknown"),
        pytest.param(0.1, 0.6e9, 4, None, id="the measurement contradicts the bound"),
    ],
)
def test_speedup_ceiling(per_sample: float, flops: float | None, cpus: int, ceiling: float | None) -> None:
    facts = target(model={"flops_per_sample": flops}, data={"seconds_per_sample": per_sample})
    verdict, _ = judge(facts, timing(), hardware(usable_cpu_count=cpus))
    assert verdict.speedup_ceiling == (None if ceiling is None else pytest.approx(ceiling))


def test_no_ceiling_without_rates() -> None:
    facts = target(model={"flops_per_sample": 0.6e9}, ceilings=Ceilings())
    assert judge(facts, timing(), hardware())[0].speedup_ceiling is None


@given(
    baseline=st.builds(
        TrainConfig,
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        compile_mode=st.sampled_from(["off", "default"]),
        num_workers=st.integers(0, 8),
        gradient_accumulation_steps=st.sampled_from([1, 3]),
        num_threads=st.none() | st.integers(1, 16),
        pin_memory=st.booleans(),
        optimizer_implementation=st.sampled_from([None, "for-loop", "fused"]),
    ),
    device=st.sampled_from(["cpu", "cuda"]),
    times=st.lists(st.floats(0.0, 1e4), min_size=5, max_size=5),
    compute_ms=st.floats(0.0, 1e4),
    step_ms=st.floats(1e-3, 1e4),
    wait_ms=st.floats(0.0, 1e4),
    per_sample=st.floats(0.0, 10.0),
    flops=st.none() | st.floats(0.0, 1e15),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_whatever_was_measured_the_verdict_holds_together(  # noqa: PLR0913 - one argument per drawn fact
    baseline: TrainConfig,
    device: str,
    times: list[float],
    compute_ms: float,
    step_ms: float,
    wait_ms: float,
    per_sample: float,
    flops: float | None,
    flags: tuple[bool, bool, bool],
) -> None:
    names = ("has_4d_convolution", "calls_attention", "has_batch_norm")
    facts = target(
        baseline=baseline,
        device=device,
        phases=phases(*times),
        compute_ms=compute_ms,
        data={"seconds_per_sample": per_sample},
        model={"flops_per_sample": flops, **dict(zip(names, flags, strict=True))},
    )
    machine = GPU_HOST if device == "cuda" else hardware()
    verdict, advice = judge(facts, timing(step_ms=step_ms, wait_ms=wait_ms), machine)
    assert verdict.sentence.startswith(verdict.limit)
    assert "nan" not in verdict.sentence
    assert verdict.limit != "launch"
    assert verdict.speedup_ceiling is None or verdict.speedup_ceiling >= 1.0
    knobs = [item.knob for item in advice]
    assert len(set(knobs)) == len(knobs)
    table = {knob.field: knob.choices(Facts(target=facts, hardware=machine))[0] for knob in KNOBS}
    for item in advice:
        assert item.knob in TrainConfig.model_fields
        assert set(table[item.knob]) - {get_knob(baseline, item.knob)}
        assert any(character.isdigit() for character in item.reason)
    if verdict.limit == "input" and "num_workers" in knobs:
        assert knobs[0] == "num_workers"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0209, "20.9 ms"), (0.0000123, "0.0123 ms"), (0.9996, "1s"), (0.123456, "123 ms"), (61.0, "1m01s")],
)
def test_step_times_for_people(seconds: float, text: str) -> None:
    assert format_step(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(432.2e9, "432 GFLOP/s"), (1.577e12, "1.58 TFLOP/s"), (6.7e6, "6.7 MFLOP/s"), (800.0, "800 FLOP/s")],
)
def test_rates_for_people(rate: float, text: str) -> None:
    assert format_flops(rate) == text
