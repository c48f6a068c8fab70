from __future__ import annotations

import math
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe_records import BASELINE, ceilings, memory, phases, target, timing, work
from record_factory import make_gpu, make_hardware

from autotune.knobs import KNOBS, Facts
from autotune.probe.analysis.issues.find import find_issues
from autotune.probe.analysis.pipeline import compute_knobs_gain_nothing, plan_pipeline
from autotune.probe.analysis.verdict import judge
from autotune.records import HardwareInfo, Measurement, TargetFacts, TrainConfig, get_knob
from autotune.records.measurement import Interference

seconds = st.just(0.0) | st.floats(1e-9, 1e6)
rates = st.just(0.0) | st.floats(1e-3, 1e21)
sizes = st.integers(0, 2**60)
fractions = st.floats(0.0, 1.0)


def maybe(strategy: Any) -> Any:
    return st.none() | strategy


configs = st.builds(
    TrainConfig,
    micro_batch_size=st.sampled_from([1, 10, 64]),
    gradient_accumulation_steps=st.sampled_from([1, 3, 8]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    compile_mode=st.sampled_from(["off", "default"]),
    activation_checkpointing=st.sampled_from(["off", "selective", "full"]),
    num_workers=st.integers(0, 8),
    prefetch_factor=st.integers(1, 8),
    num_threads=maybe(st.integers(1, 16)),
    pin_memory=st.booleans(),
    optimizer_implementation=st.sampled_from([None, "for-loop", "fused"]),
)

works = st.builds(
    lambda products, traffic, changes: work(products, (1.0 - products) * traffic, **changes),
    fractions,
    fractions,
    st.fixed_dictionaries(
        {
            "operations_per_step": rates,
            "host_syncs_per_step": rates,
            "bytes_per_second": maybe(rates),
            "device_busy_fraction": maybe(fractions),
            "enqueue_fraction": maybe(fractions),
        }
    ),
)

limits = st.builds(
    lambda speeds, memory_rate, changes: ceilings(speeds, memory=memory_rate, **changes),
    st.dictionaries(st.sampled_from(["fp32", "tf32", "bf16", "fp16"]), rates),
    maybe(rates),
    st.fixed_dictionaries(
        {
            "triad_bytes_per_second": maybe(rates),
            "upload": maybe(rates),
            "pageable_to_device_bytes_per_second": maybe(rates),
            "launch_seconds": maybe(seconds),
            "all_reduce_bytes_per_second": maybe(rates),
            "ranks": st.integers(1, 64),
        }
    ),
)

targets = st.builds(
    lambda **drawn: target(**drawn),
    baseline=configs,
    device=st.sampled_from(["cpu", "cuda"]),
    compute_ms=seconds,
    phases=st.builds(phases, seconds, seconds, seconds, seconds, seconds),
    data=st.fixed_dictionaries(
        {
            "sample_count": maybe(st.integers(0, 10**9)),
            "seconds_per_sample": seconds,
            "iterable": st.booleans(),
            "batch_bytes": maybe(sizes),
            "loader_seconds_per_step": maybe(seconds),
            "epoch_start_seconds": maybe(seconds),
            "slow_batch_ratio": maybe(rates),
        }
    ),
    model=st.fixed_dictionaries(
        {
            "flops_per_sample": maybe(rates),
            "parameter_bytes": sizes,
            "has_4d_convolution": st.booleans(),
            "calls_attention": st.booleans(),
            "has_batch_norm": st.booleans(),
            "checkpointable_blocks": st.integers(0, 3),
        }
    ),
    ceilings=limits,
    work=maybe(works),
    batch_elasticity=maybe(st.floats(-1e6, 1e6)),
    memory=maybe(
        st.builds(
            memory,
            st.dictionaries(st.sampled_from(["off", "selective", "full"]), maybe(st.integers(0, 100))),
            limit=sizes,
        )
    ),
    hazards=st.sampled_from([(), ("launch-blocking",)]),
    fixed=st.sampled_from([{}, {"num_workers": "it stays"}]),
)

interferences = maybe(st.builds(Interference, steal_fraction=maybe(fractions), foreign_cpu_fraction=maybe(fractions)))

measurements = st.builds(
    timing,
    step_ms=st.floats(1e-6, 1e9),
    wait_ms=seconds,
    samples=st.integers(1, 10**6),
    steps=st.just(()) | st.lists(seconds, min_size=20, max_size=21).map(tuple),
    seen=st.tuples(interferences, interferences),
)

machines = st.builds(
    lambda **drawn: make_hardware(**drawn),
    usable_cpu_count=st.integers(1, 256),
    shared_memory_free_bytes=sizes,
    shared_memory_total_bytes=maybe(sizes),
    last_level_cache_bytes=maybe(sizes),
    cpu_quota=maybe(st.floats(0.01, 300.0)),
    affinity_cpu_count=maybe(st.integers(1, 256)),
    swap_used_bytes=sizes,
    gpus=st.lists(
        st.builds(
            make_gpu, memory_total_bytes=sizes, memory_free_bytes=sizes, mig=st.sampled_from([None, "on", "slice"])
        ),
        max_size=2,
    ).map(tuple),
)


def check_words(*texts: str) -> None:
    for text in texts:
        words = {word.strip("(),;:").lower() for word in text.split()}
        assert not words & {"nan", "inf", "-inf", "none", "infx", "nanx"}, text
        assert text
        assert text.strip() == text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(facts=targets, measurement=measurements, machine=machines)
def test_whatever_was_measured_the_verdict_holds_together(
    facts: TargetFacts, measurement: Measurement, machine: HardwareInfo
) -> None:
    verdict, advice = judge(facts, measurement, machine)
    assert verdict.sentence.startswith("not reliable" if verdict.limit == "unreliable" else verdict.limit)
    check_words(verdict.sentence, *verdict.evidence)
    assert len(set(verdict.evidence)) == len(verdict.evidence)
    assert verdict.speedup_ceiling is None or verdict.speedup_ceiling >= 1.0
    assert verdict.speedup_ceiling is None or verdict.ceiling_reason
    knobs = [item.knob for item in advice]
    assert len(set(knobs)) == len(knobs)
    table = {knob.field: knob.choices(Facts(target=facts, hardware=machine))[0] for knob in KNOBS}
    middles = []
    for item in advice:
        assert set(table[item.knob]) - {get_knob(facts.baseline, item.knob)}
        assert any(character.isdigit() for character in item.reason)
        check_words(item.reason)
        middles.append(1.0 if item.gain is None else math.sqrt(item.gain.low * item.gain.high))
        if item.gain is not None:
            assert 0 < item.gain.low <= item.gain.high <= (verdict.speedup_ceiling or math.inf)
    assert middles == sorted(middles, reverse=True)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(facts=maybe(targets), measurement=measurements, machine=machines)
def test_whatever_was_measured_troubles_and_plans_are_sentences(
    facts: TargetFacts | None, measurement: Measurement, machine: HardwareInfo
) -> None:
    for trouble in find_issues(machine, facts=facts, measurement=measurement if facts else None):
        check_words(trouble.name, trouble.sentence, trouble.remedy)
    if facts is None:
        return
    plan = plan_pipeline(facts, measurement, machine)
    assert plan.workers >= 0
    assert math.isfinite(plan.step_seconds)
    told = compute_knobs_gain_nothing(facts, measurement, machine)
    if told:
        assert told.startswith(plan.data_is_limit)
        assert judge(facts, measurement, machine)[0].limit == "input"


def test_a_baseline_of_one_is_judged() -> None:
    facts = target(baseline=BASELINE.replace(micro_batch_size=1))
    assert judge(facts, timing(samples=1), make_hardware())[0].limit == "unknown"
