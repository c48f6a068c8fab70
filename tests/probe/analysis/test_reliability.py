"""The verdict asks first whether the step could be measured."""

from __future__ import annotations

from typing import Any

import pytest
from probe_records import BASELINE, GPU_HOST, ceilings, target, timing, work
from record_factory import make_hardware

from autotune.probe.analysis.verdict import judge
from autotune.records import Measurement
from autotune.records.measurement import Interference, SpeedReference

# What a fresh look at a busy machine saw.
SLOW_TRAFFIC = work(0.33, 0.66, bytes_per_second=0.0611e9)
RATES = ceilings({"fp32": 100e9}, memory=26.9e9)


def beside(foreign: float | None = None, *more: float | None, steal: float | None = None) -> Measurement:
    """Two blocks, each with what others used of the CPUs."""
    second = more[0] if more else foreign
    seen = [Interference(foreign_cpu_fraction=share, steal_fraction=steal) for share in (foreign, second)]
    return timing(seen=(seen[0], seen[1]))


def test_a_busy_machine_gets_no_verdict_and_no_bound() -> None:
    facts = target(work=SLOW_TRAFFIC, ceilings=RATES, model={"flops_per_sample": 0.1e9})
    verdict, _ = judge(facts, beside(0.78, 0.80), make_hardware())
    assert verdict.limit == "unreliable"
    assert verdict.sentence == (
        "not reliable: other processes used up to 80 % of the CPU time in 2 of 2 timed blocks; "
        "probe again when the machine is quieter"
    )
    assert (verdict.speedup_ceiling, verdict.ceiling_reason) == (None, "")


@pytest.mark.parametrize("with_profiler", [True, False])
@pytest.mark.parametrize(
    ("seen", "is_reliable"),
    [
        pytest.param(beside(0.25), True, id="a quarter of the CPUs"),
        pytest.param(beside(0.26), False, id="more than that"),
        pytest.param(beside(0.9, 0.1), True, id="for half of the time"),
        pytest.param(beside(0.9, 0.26), False, id="all of the time"),
        pytest.param(beside(None), True, id="not known"),
        pytest.param(timing(), True, id="not watched"),
        pytest.param(beside(0.2, steal=0.1), False, id="the hypervisor takes the rest"),
        pytest.param(beside(0.0, steal=0.3), False, id="the hypervisor alone"),
    ],
)
def test_a_mildly_disturbed_machine_keeps_its_verdict(
    seen: Measurement, is_reliable: bool, with_profiler: bool
) -> None:
    facts = target(work=work(0.72, 0.2) if with_profiler else None, model={"flops_per_sample": 0.63e9})
    verdict, _ = judge(facts, seen, make_hardware())
    assert verdict.limit == ("compute" if is_reliable else "unreliable")
    assert (verdict.speedup_ceiling is not None) is is_reliable


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"baseline": BASELINE.replace(num_threads=2)}, "compute"),
        ({"baseline": BASELINE.replace(num_threads=2, num_workers=2)}, "unreliable"),
        ({"baseline": BASELINE.replace(num_threads=None)}, "unreliable"),
    ],
)
def test_cpus_that_the_training_does_not_want_may_be_used_by_others(changes: dict[str, Any], limit: str) -> None:
    facts = target(work=work(0.72, 0.2), **changes)
    assert judge(facts, beside(0.5), make_hardware())[0].limit == limit


def test_a_gpu_wants_one_cpu_and_one_for_each_worker() -> None:
    quiet = target(device="cuda", work=work(0.72, 0.2))
    assert judge(quiet, beside(0.7), GPU_HOST)[0].limit == "compute"
    loading = quiet.replace(baseline=BASELINE.replace(num_workers=3))
    assert judge(loading, beside(0.7), GPU_HOST)[0].limit == "unreliable"


@pytest.mark.parametrize(("after", "limit"), [(0.019, "compute"), (0.021, "unreliable"), (0.0049, "unreliable")])
def test_a_machine_that_changed_its_speed_gets_no_verdict(after: float, limit: str) -> None:
    seen = timing().replace(canary=SpeedReference(before_seconds=0.01, after_seconds=after))
    verdict, _ = judge(target(work=work(0.72, 0.2)), seen, make_hardware())
    assert verdict.limit == limit
    assert ("changed its speed" in verdict.sentence) is (limit == "unreliable")


@pytest.mark.parametrize("foreign", [None, 0.0])
def test_traffic_that_no_memory_explains_is_not_bandwidth(foreign: float | None) -> None:
    facts = target(work=SLOW_TRAFFIC, ceilings=RATES)
    verdict, _ = judge(facts, beside(foreign), make_hardware())
    assert verdict.limit == "unknown"
    assert verdict.sentence.startswith(
        "unknown: memory traffic takes 66 % of the computation at 61.1 MB/s of 26.9 GB/s measured: "
        "far less than the memory can, so something else holds it up"
    )


def test_beside_others_it_is_no_figure_at_all() -> None:
    facts = target(work=SLOW_TRAFFIC, ceilings=RATES, model={"flops_per_sample": 0.1e9})
    verdict, _ = judge(facts, beside(0.15), make_hardware())
    assert verdict.limit == "unreliable"
    assert "61.1 MB/s of 26.9 GB/s measured" in verdict.sentence
    assert "other processes used up to 15 % of the CPU time in 2 of 2 timed blocks" in verdict.sentence
    assert verdict.speedup_ceiling is None


@pytest.mark.parametrize(("rate", "limit"), [(5.5e9, "bandwidth"), (5.3e9, "unknown"), (None, "bandwidth")])
def test_a_fifth_of_the_memory_rate_is_bandwidth(rate: float | None, limit: str) -> None:
    facts = target(work=work(0.2, 0.7, bytes_per_second=rate), ceilings=RATES)
    assert judge(facts, timing(), make_hardware())[0].limit == limit


@pytest.mark.parametrize("with_profiler", [True, False])
@pytest.mark.parametrize(
    ("gigaflops", "convolution", "limit"),
    [(124.0, False, "compute"), (126.0, False, "unreliable"), (126.0, True, "compute")],
)
def test_products_faster_than_possible_show_that_the_limits_are_wrong(
    gigaflops: float, convolution: bool, limit: str, with_profiler: bool
) -> None:
    model = {"flops_per_sample": gigaflops * 1e7, "has_4d_convolution": convolution}
    facts = target(work=work(0.72, 0.2) if with_profiler else None, model=model, ceilings=RATES)
    verdict, _ = judge(facts, timing(), make_hardware())
    assert verdict.limit == limit
    assert ("contradict each other" in verdict.sentence) is (limit == "unreliable")
