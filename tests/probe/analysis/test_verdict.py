from __future__ import annotations

from typing import Any

import pytest
from probe_records import BASELINE, GPU_HOST, MIB, RATES, ceilings, phases, target, timing, work
from record_factory import make_hardware, make_optimizer

from autotune.format import format_flops, format_share, format_time
from autotune.probe.analysis.bounds import least_load_seconds
from autotune.probe.analysis.figures import derive_figures
from autotune.probe.analysis.verdict import judge
from autotune.records import Ceilings, StepWork


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
    verdict, _ = judge(target(compute_ms=compute_ms), timing(step_ms=step_ms, wait_ms=wait_ms), make_hardware())
    assert verdict.limit == limit


def test_input_sentence_has_the_numbers() -> None:
    verdict, _ = judge(target(compute_ms=20.0), timing(step_ms=55.0, wait_ms=34.1), make_hardware())
    assert verdict.sentence == (
        "input-bound: 62 % of a step waits for the loader, without which it takes 20.9 ms instead of 55 ms (2.6x); "
        "MFU not known: its operations could not be counted"
    )


def test_input_evidence_says_when_no_number_of_cpus_loads_fast_enough() -> None:
    facts = target(
        compute_ms=20.0,
        data={"seconds_per_sample": 0.01, "loader_seconds_per_step": 0.11},
        work=work(0.5, 0.3),
    )
    verdict, _ = judge(facts, timing(step_ms=120.0, wait_ms=100.0), make_hardware())
    assert verdict.evidence[:2] == (
        "loading takes 25 ms a step even when 4 CPUs share it, more than the computation",
        "one process loads a step's samples in 100 ms, the computation takes 20 ms; "
        "the loader alone, without workers, takes 110 ms",
    )


def test_a_step_that_is_all_waiting() -> None:
    verdict, _ = judge(target(), timing(step_ms=100.0, wait_ms=150.0), make_hardware())
    assert verdict.limit == "input"
    assert verdict.sentence.startswith("input-bound: 100 % of a step waits for the loader; MFU not known")


@pytest.mark.parametrize(
    ("gigaflops", "limit"), [(510.0, "compute"), (490.0, "unknown"), (310.0, "unknown"), (10.0, "unknown")]
)
def test_compute_bound_above_half_the_measured_rate(gigaflops: float, limit: str) -> None:
    # 10 samples in 0.1 s against 100 GFLOP/s: utilisation = FLOPs a sample / 1e9.
    verdict, _ = judge(target(model={"flops_per_sample": gigaflops * 1e6}), timing(), make_hardware())
    assert verdict.limit == limit


def test_compute_sentence_has_the_numbers() -> None:
    verdict, _ = judge(target(model={"flops_per_sample": 0.63e9}), timing(), make_hardware())
    assert verdict.sentence == ("compute-bound: MFU 63 % of the measured fp32 rate (63 GFLOP/s of 100 GFLOP/s)")


@pytest.mark.parametrize(
    ("device", "changes", "convolution", "arithmetic"),
    [
        ("cpu", {}, True, "fp32"),
        ("cpu", {"precision": "bf16"}, False, "bf16"),
        ("cpu", {"matmul_precision": "medium"}, False, "fp32-medium"),
        ("cuda", {}, False, "fp32"),
        ("cuda", {"matmul_precision": "high"}, False, "tf32"),
        ("cuda", {}, True, "tf32"),
        ("cuda", {"precision": "fp16", "matmul_precision": "high"}, True, "fp16"),
    ],
)
def test_utilisation_is_against_the_arithmetic_in_use(
    device: str, changes: dict[str, Any], convolution: bool, arithmetic: str
) -> None:
    rates = {"fp32": 10e9, "tf32": 11e9, "fp32-medium": 11e9, "bf16": 12e9, "fp16": 13e9}
    model = {"flops_per_sample": 0.09e9, "has_4d_convolution": convolution}
    facts = target(device=device, baseline=BASELINE.replace(**changes), model=model, ceilings=ceilings(rates))
    verdict, _ = judge(facts, timing(), GPU_HOST)
    assert verdict.limit == "compute"
    assert f"measured {arithmetic} rate" in verdict.sentence
    assert f"of {rates[arithmetic] / 1e9:.0f} GFLOP/s" in verdict.sentence


def test_a_gpu_without_tf32_is_held_against_fp32() -> None:
    facts = target(device="cuda", baseline=BASELINE.replace(matmul_precision="high"), model={"flops_per_sample": 0.9e9})
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
        optimizer=make_optimizer(name=name, implementations=("for-loop",)),
        ceilings=ceilings(RATES, memory=memory),
    )
    verdict, _ = judge(facts, timing(step_ms=500.0, samples=2), make_hardware())
    assert verdict.limit == limit


def test_bandwidth_sentence_has_the_numbers() -> None:
    facts = target(compute_ms=500.0, model=HEAVY, phases=phases(optimizer=400.0))
    verdict, _ = judge(facts, timing(step_ms=500.0), make_hardware())
    assert verdict.sentence == (
        "bandwidth-bound: the optimizer takes 82 % of a step and moves at least 15 GB/s of 20 GB/s measured; "
        "MFU 20 % of the measured fp32 rate (20 GFLOP/s of 100 GFLOP/s)"
    )


def test_unknown_says_what_was_measured() -> None:
    facts = target(phases=phases(wait=5.0, copy=0.0, forward=30.0, backward=55.0, optimizer=10.0))
    verdict, _ = judge(facts, timing(wait_ms=5.0), make_hardware())
    assert verdict.sentence == (
        "unknown: a step takes 100 ms and waits 5 % of it for the loader; "
        "forward and backward take 85 %, the optimizer 10 %, copies 0 %; "
        "launches and memory traffic were not told apart; MFU not known: its operations could not be counted"
    )


@pytest.mark.parametrize(
    ("shares", "limit"),
    [
        pytest.param((0.60, 0.30), "compute", id="products lead"),
        pytest.param((0.50, 0.40), "compute", id="by ten points"),
        pytest.param((0.50, 0.41), "unknown", id="by nine"),
        pytest.param((0.20, 0.60), "bandwidth", id="traffic leads"),
        pytest.param((0.30, 0.29), "launch", id="overhead leads, 41 %"),
        pytest.param((0.30, 0.30), "unknown", id="overhead leads, but is no more than 40 %"),
        pytest.param((0.10, 0.42), "unknown", id="overhead and traffic are nearly the same"),
    ],
)
@pytest.mark.parametrize("flops", [None, 0.9e9])
def test_the_largest_share_of_the_work_decides(shares: tuple[float, float], limit: str, flops: float | None) -> None:
    facts = target(work=work(*shares), model={"flops_per_sample": flops})
    assert judge(facts, timing(), make_hardware())[0].limit == limit


@pytest.mark.parametrize(
    ("shares", "changes", "sentence"),
    [
        (
            work(0.72, 0.2),
            {"ceilings": ceilings({"fp32": 126e9})},
            "compute-bound: matrix products take 72 % of the computation",
        ),
        (
            work(0.2, 0.64, bytes_per_second=15e9),
            {"phases": phases(forward=20.0, backward=40.0, optimizer=40.0)},
            "bandwidth-bound: memory traffic takes 64 % of the computation at 15 GB/s of 20 GB/s measured, "
            "and the optimizer is most of it (40 %)",
        ),
        (
            work(0.2, 0.64, bytes_per_second=26e9),
            {"phases": phases(forward=20.0, backward=40.0, optimizer=40.0)},
            "bandwidth-bound: memory traffic takes 64 % of the computation at 26 GB/s of 20 GB/s measured (a part of "
            "it stays in the caches), and the optimizer is most of it (40 %)",
        ),
        (
            work(0.2, 0.64),
            {"ceilings": ceilings(RATES, memory=None)},
            "bandwidth-bound: memory traffic takes 64 % of the computation",
        ),
        (work(0.2, 0.2), {}, "launch-bound: calling operations, not what they do, takes 60 % of the computation"),
        (
            work(0.4, 0.45),
            {},
            "unknown: memory traffic (45 %) and matrix products (40 %) take about as much of the computation",
        ),
        (
            work(0.3, 0.3),
            {},
            "unknown: no share of the computation stands out: overhead 40 %, matrix products 30 %, memory traffic 30 %",
        ),
    ],
)
def test_sentences_have_the_deciding_figure_and_the_mfu(
    shares: StepWork, changes: dict[str, Any], sentence: str
) -> None:
    facts = target(work=shares, model={"flops_per_sample": 0.63e9}, **changes)
    told = judge(facts, timing(), make_hardware())[0].sentence
    assert told.startswith(f"{sentence}; MFU ")
    assert told.endswith("GFLOP/s)")


@pytest.mark.parametrize(
    ("busy", "enqueue", "elasticity", "device", "limit"),
    [
        pytest.param(0.79, 0.90, None, "cuda", "launch", id="idle, and handing over takes it all"),
        pytest.param(0.79, 0.89, 0.29, "cuda", "launch", id="idle, and samples are free"),
        pytest.param(0.79, 0.89, 0.30, "cuda", "compute", id="idle for another reason"),
        pytest.param(0.79, None, None, "cuda", "compute", id="idle, no reason known"),
        pytest.param(0.80, 0.99, 0.0, "cuda", "compute", id="busy"),
        pytest.param(None, 0.99, 0.0, "cuda", "compute", id="not known"),
        pytest.param(0.10, 0.99, 0.0, "cpu", "compute", id="a CPU enqueues nothing"),
    ],
)
def test_launch_bound_on_a_gpu(
    busy: float | None, enqueue: float | None, elasticity: float | None, device: str, limit: str
) -> None:
    seen = work(0.6, 0.3, device_busy_fraction=busy, enqueue_fraction=enqueue)
    facts = target(device=device, work=seen, batch_elasticity=elasticity)
    assert judge(facts, timing(), GPU_HOST)[0].limit == limit


@pytest.mark.parametrize(
    ("ranks", "gigabytes", "rate", "limit"),
    [
        # 2 x 3/4 x 0.4 GB at 10 GB/s: 60 ms of a step of 100 ms.
        pytest.param(4, 0.4, 10e9, "communication", id="60 %"),
        pytest.param(4, 0.33, 10e9, "compute", id="49.5 %"),
        pytest.param(4, 0.9, 10e9, "compute", id="135 %: more than was measured"),
        pytest.param(1, 0.4, 10e9, "compute", id="one rank"),
        pytest.param(4, 0.4, None, "compute", id="no rate"),
    ],
)
def test_communication_bound(ranks: int, gigabytes: float, rate: float | None, limit: str) -> None:
    limits = ceilings(RATES, ranks=ranks, all_reduce_bytes_per_second=rate)
    facts = target(
        device="cuda", work=work(0.6, 0.3), ceilings=limits, model={"parameter_bytes": int(gigabytes * 10**9)}
    )
    verdict, _ = judge(facts, timing(), GPU_HOST)
    assert verdict.limit == limit
    told = [sentence for sentence in verdict.evidence if "all-reduce" in sentence]
    assert len(told) == (ranks > 1 and rate is not None)
    if limit == "communication":
        assert verdict.sentence.startswith(
            "communication-bound: an all-reduce of the gradients between 4 ranks would fill 60 % of a step"
        )
        assert verdict.evidence[0] == told[0]


def test_an_input_bound_step_is_not_judged_by_its_work() -> None:
    verdict, _ = judge(target(work=work(0.8, 0.1)), timing(wait_ms=50.0), make_hardware())
    assert verdict.limit == "input"


def test_mfu_is_against_what_the_hardware_keeps_up() -> None:
    rates = ceilings({"fp32": 100e9})
    rates = rates.replace(matmul=(rates.matmul[0].replace(sustained_flops_per_second=80e9),))
    facts = target(ceilings=rates, model={"flops_per_sample": 0.6e9}, work=work(0.8, 0.1))
    verdict, _ = judge(facts, timing(), make_hardware())
    assert verdict.sentence.endswith("MFU 75 % of the measured fp32 rate (60 GFLOP/s of 80 GFLOP/s)")
    assert verdict.evidence[:2] == (
        "MFU 60 % of the best rate for a moment (100 GFLOP/s)",
        "while matrix products run they reach 94 % of that rate",
    )


def test_a_model_of_convolutions_is_held_against_their_rate() -> None:
    rates = ceilings({"fp32": 100e9})
    rates = rates.replace(
        matmul=(rates.matmul[0].replace(sustained_flops_per_second=80e9, convolution_flops_per_second=150e9),)
    )
    model = {"flops_per_sample": 0.6e9, "has_4d_convolution": True}
    verdict, _ = judge(target(ceilings=rates, model=model, work=work(0.8, 0.1)), timing(), make_hardware())
    assert verdict.sentence.endswith("MFU 50 % of the measured fp32 rate (60 GFLOP/s of 120 GFLOP/s)")
    assert verdict.evidence[0] == "MFU 40 % of the best rate for a moment (150 GFLOP/s)"
    assert verdict.speedup_ceiling == pytest.approx(2.5)


def test_evidence_of_a_launch_bound_step() -> None:
    seen = work(
        0.2, 0.2, operations_per_step=4000.0, host_syncs_per_step=3.0, device_busy_fraction=0.5, enqueue_fraction=0.97
    )
    limits = ceilings(RATES, launch_seconds=6e-6)
    facts = target(device="cuda", compute_ms=60.0, work=seen, batch_elasticity=0.2, ceilings=limits)
    verdict, _ = judge(facts, timing(step_ms=60.0), GPU_HOST)
    assert verdict.sentence.startswith(
        "launch-bound: kernels run in 50 % of a step, and the host needs 97 % of it to hand it over; MFU "
    )
    assert verdict.evidence[:5] == (
        "kernels run in 50 % of a step",
        "the host needs 97 % of a step to hand it over",
        "4,000 kernels a step at 6 us a call: 40 % of the computation",
        "a pass over twice the samples takes 1.15x the time",
        "the host asks for a value 3 times a step and waits for the GPU",
    )


@pytest.mark.parametrize(("achieved", "cached"), [(24e9, ""), (26e9, " (a part of it stays in the caches)")])
def test_evidence_of_memory_traffic(achieved: float, cached: str) -> None:
    verdict, _ = judge(target(work=work(0.1, 0.8, bytes_per_second=achieved)), timing(), make_hardware())
    assert verdict.evidence[0] == f"memory traffic runs at {achieved / 1e9:.0f} GB/s of 20 GB/s measured{cached}"


@pytest.mark.parametrize(
    ("per_sample", "flops", "cpus", "ceiling"),
    [
        # 10 samples x 0.6e9 FLOPs at the fastest rate, 300 GFLOP/s: 20 ms of a 100 ms step.
        pytest.param(0.0001, 0.6e9, 4, 5.0, id="products bind"),
        pytest.param(0.01, 0.6e9, 4, 4.0, id="loading binds: 10 x 10 ms on 4 CPUs"),
        pytest.param(0.01, 0.6e9, 2, 2.0, id="fewer CPUs"),
        pytest.param(0.0001, None, 4, None, id="operations unknown"),
        pytest.param(0.1, 0.6e9, 4, None, id="the measurement contradicts the bound"),
        pytest.param(0.0, 0.02e9, 4, None, id="next to nothing of a step"),
    ],
)
def test_speedup_ceiling(per_sample: float, flops: float | None, cpus: int, ceiling: float | None) -> None:
    facts = target(model={"flops_per_sample": flops}, data={"seconds_per_sample": per_sample})
    verdict, _ = judge(facts, timing(), make_hardware(usable_cpu_count=cpus))
    assert verdict.speedup_ceiling == (None if ceiling is None else pytest.approx(ceiling))


@pytest.mark.parametrize(
    ("changes", "ceiling", "reason"),
    [
        pytest.param(
            {},
            5.0,
            "matrix products take 20 ms of a step at the fastest measured rate (bf16, 300 GFLOP/s)",
            id="products",
        ),
        pytest.param(
            {"data": {"seconds_per_sample": 0.01}},
            4.0,
            "loading a step's samples takes 25 ms even when 4 CPUs share it",
            id="loading",
        ),
        pytest.param(
            {"data": {"seconds_per_sample": 0.01, "loader_seconds_per_step": 0.0125}},
            5.0,
            "matrix products take 20 ms of a step at the fastest measured rate (bf16, 300 GFLOP/s)",
            id="the loader was faster than its samples one by one",
        ),
        pytest.param(
            {"data": {"seconds_per_sample": 0.01}, "baseline": BASELINE.replace(num_workers=8)},
            5.0,
            "matrix products take 20 ms of a step at the fastest measured rate (bf16, 300 GFLOP/s)",
            id="more workers than CPUs share the loading of what may only wait",
        ),
        # 3 x 320 MB, less 2 x 64 MiB that the cache may hold, at 20 GB/s: 41 ms.
        pytest.param(
            {"model": {"parameter_bytes": 320 * 10**6}, "phases": phases(optimizer=60.0)},
            100 / 41.29,
            "the optimizer's passes over parameters and state take 41.3 ms at the measured memory rate (20 GB/s)",
            id="memory",
        ),
        pytest.param(
            {"model": {"parameter_bytes": 320 * 10**6}, "phases": phases(optimizer=30.0)},
            100 / 30,
            "the optimizer's passes over parameters and state take 30 ms at the measured memory rate (20 GB/s)",
            id="an optimizer that was faster makes fewer passes",
        ),
        pytest.param(
            {"model": {"parameter_bytes": 40 * 10**6}, "phases": phases(optimizer=60.0)},
            5.0,
            "matrix products take 20 ms of a step at the fastest measured rate (bf16, 300 GFLOP/s)",
            id="parameters and gradients may stay in the cache",
        ),
    ],
)
def test_what_sets_the_ceiling(changes: dict[str, Any], ceiling: float, reason: str) -> None:
    facts = target(**{**changes, "model": {"flops_per_sample": 0.6e9, **changes.get("model", {})}})
    verdict, _ = judge(facts, timing(), make_hardware(last_level_cache_bytes=64 * MIB))
    assert verdict.speedup_ceiling == pytest.approx(ceiling, rel=1e-3)
    assert verdict.ceiling_reason == reason


def test_a_cache_of_unknown_size_may_hold_everything() -> None:
    facts = target(model={"flops_per_sample": 0.6e9, "parameter_bytes": 10**9}, phases=phases(optimizer=90.0))
    assert judge(facts, timing(), make_hardware())[0].speedup_ceiling == pytest.approx(5.0)


def test_no_ceiling_without_rates() -> None:
    facts = target(model={"flops_per_sample": 0.6e9}, ceilings=Ceilings())
    assert judge(facts, timing(), make_hardware())[0].speedup_ceiling is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0209, "20.9 ms"), (0.0000123, "12.3 us"), (0.9996, "1s"), (0.123456, "123 ms"), (61.0, "1m01s")],
)
def test_step_times_for_people(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(("share", "text"), [(0.0, "0 %"), (0.004, "<1 %"), (0.006, "1 %"), (1.234, "123 %")])
def test_shares_for_people(share: float, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(432.2e9, "432 GFLOP/s"), (1.577e12, "1.58 TFLOP/s"), (6.7e6, "6.7 MFLOP/s"), (800.0, "800 FLOP/s")],
)
def test_rates_for_people(rate: float, text: str) -> None:
    assert format_flops(rate) == text


@pytest.mark.parametrize(
    ("wait_ms", "workers", "limit"),
    [
        pytest.param(13.0, 0, "compute", id="its turn is a small one"),
        pytest.param(60.0, 0, "input", id="its turn is the largest"),
        pytest.param(13.0, 2, "input", id="workers load meanwhile, and are waited for all the same"),
    ],
)
def test_without_workers_loading_has_to_be_the_largest_share(wait_ms: float, workers: int, limit: str) -> None:
    shares = StepWork(
        products_fraction=0.9,
        traffic_fraction=0.08,
        overhead_fraction=0.02,
        operations_per_step=40,
        host_syncs_per_step=0,
    )
    facts = target(work=shares, baseline=BASELINE.replace(num_workers=workers), compute_ms=100.0 - wait_ms)
    verdict, advice = judge(facts, timing(wait_ms=wait_ms), make_hardware())
    assert verdict.limit == limit
    assert "num_workers" in [item.knob for item in advice]
    assert any("waits for the loader" in told for told in (verdict.sentence, *verdict.evidence))


@pytest.mark.parametrize(
    ("cpu_fraction", "loader_ms", "least_ms"),
    [
        pytest.param(None, None, 250.0, id="10 samples of 100 ms on 4 CPUs"),
        pytest.param(0.1, None, 25.0, id="what a sample waits for can be waited for at once"),
        pytest.param(None, 400.0, 100.0, id="one process was seen to be faster, and 4 may load"),
    ],
)
def test_loading_takes_no_less_than_its_cpu_time(
    cpu_fraction: float | None, loader_ms: float | None, least_ms: float
) -> None:
    data = {
        "seconds_per_sample": 0.1,
        "cpu_fraction": cpu_fraction,
        "loader_seconds_per_step": None if loader_ms is None else loader_ms / 1000,
    }
    facts = target(data=data)
    assert least_load_seconds(facts, derive_figures(facts, timing()), make_hardware()) == pytest.approx(least_ms / 1000)
