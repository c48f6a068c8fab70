from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_records import BASELINE, GPU_HOST, MIB, target, timing, work
from record_factory import make_hardware

from autotune.knobs import DATA_KNOBS, KNOBS
from autotune.probe.analysis.pipeline import COMPUTE_KNOBS, PipelinePlan, compute_knobs_gain_nothing, plan_pipeline
from autotune.probe.analysis.verdict import judge
from autotune.records import TargetFacts


def plan(facts: TargetFacts, machine: Any = None, **changes: Any) -> PipelinePlan:
    return plan_pipeline(facts, timing(**changes), machine or make_hardware())


@pytest.mark.parametrize(
    ("device", "per_sample", "compute_ms", "cpus", "matching", "workers", "step_ms"),
    [
        # 10 samples a step. On a GPU: 1.2 x load / compute, no more than the CPUs.
        pytest.param("cuda", 0.010, 50.0, 8, 3, 3, 50.0, id="1.2 x 100 / 50 = 2.4"),
        pytest.param("cuda", 0.010, 40.0, 8, 3, 3, 40.0, id="exactly 3"),
        pytest.param("cuda", 0.010, 39.9, 8, 4, 4, 39.9, id="just above 3"),
        pytest.param("cuda", 0.010, 10.0, 4, 12, 4, 25.0, id="12 would match, 4 CPUs load in 25 ms"),
        pytest.param("cuda", 0.010, 0.0, 4, None, 4, 25.0, id="no computation"),
        pytest.param("cuda", 0.0, 50.0, 8, 0, 0, 50.0, id="nothing to load"),
        # On a CPU with 4 threads in use, loading takes from the computation.
        pytest.param("cpu", 0.002, 50.0, 8, 1, 1, 50.0, id="20 ms beside 50 ms: 4 of 8 CPUs are free"),
        pytest.param("cpu", 0.030, 100.0, 8, 4, 4, 100.0, id="75 ms beside 100 ms on the other half"),
        pytest.param("cpu", 0.030, 100.0, 4, 4, 2, 175.0, id="300 ms and 4 x 100 ms of CPU time on 4 CPUs"),
        pytest.param("cpu", 0.030, 1.0, 4, 360, 4, 76.0, id="nearly all CPU time is loading"),
        pytest.param("cpu", 0.0001, 100.0, 4, 1, 1, 100.25, id="next to nothing to load"),
        pytest.param("cpu", 0.010, 50.0, 1, 3, 0, 150.0, id="one CPU loads and computes in turn"),
    ],
)
def test_workers(
    device: str, per_sample: float, compute_ms: float, cpus: int, matching: int | None, workers: int, step_ms: float
) -> None:
    facts = target(device=device, compute_ms=compute_ms, data={"seconds_per_sample": per_sample})
    found = plan(facts, make_hardware(usable_cpu_count=cpus), samples=10)
    assert (found.matching_workers, found.workers) == (matching, workers)
    assert found.load_seconds == pytest.approx(10 * per_sample)
    assert found.step_seconds == pytest.approx(step_ms / 1000)
    assert bool(found.workers_reason) == (matching is not None and workers != matching)


@pytest.mark.parametrize(
    ("own", "cpus", "loader_ms", "workers", "step_ms"),
    [
        # 10 samples in 10 ms, a step of 80 ms, of which 60 compute on all CPUs.
        pytest.param(0, 2, None, 1, 65.0, id="nobody knows what handing over takes"),
        pytest.param(8, 2, 20.0, 0, 55.0, id="40 ms of two CPUs: of the 60 that compute 15 were theirs"),
        pytest.param(8, 16, 2.5, 1, 60.3, id="20 ms of 16 CPUs: next to nothing"),
        pytest.param(1, 2, 10.0, 1, 61.3, id="one that takes no longer than it does itself"),
    ],
)
def test_workers_take_time_to_hand_over(
    own: int, cpus: int, loader_ms: float | None, workers: int, step_ms: float
) -> None:
    data = {"seconds_per_sample": 0.001, "loader_seconds_per_step": None if loader_ms is None else loader_ms / 1000}
    baseline = BASELINE.replace(micro_batch_size=10, num_workers=own, num_threads=None)
    found = plan(
        target(baseline=baseline, compute_ms=60.0, computed_beside_workers=own > 0, data=data),
        make_hardware(usable_cpu_count=cpus),
        step_ms=80.0,
    )
    assert (found.workers, found.step_seconds) == (workers, pytest.approx(step_ms / 1000, rel=0.02))


# 10 samples of 100 ms, a twentieth of it work: 1 s to load in one process.
WAITING = {"seconds_per_sample": 0.1, "cpu_fraction": 0.05}


@pytest.mark.parametrize(
    ("device", "compute_ms", "cpus", "workers", "step_ms"),
    [
        pytest.param("cpu", 100.0, 2, 10, 125.0, id="50 ms of work and 2 x 100 ms of computation on 2 CPUs"),
        pytest.param("cpu", 10.0, 2, 16, 62.5, id="as many as are tried"),
        pytest.param("cuda", 100.0, 2, 12, 100.0, id="beside a GPU"),
        pytest.param("cpu", 2000.0, 2, 1, 2025.0, id="the computation takes longer"),
    ],
)
def test_a_dataset_that_waits_has_use_for_more_workers_than_cpus(
    device: str, compute_ms: float, cpus: int, workers: int, step_ms: float
) -> None:
    own = BASELINE.replace(num_threads=cpus)
    facts = target(device=device, compute_ms=compute_ms, data=WAITING, baseline=own)
    found = plan(facts, make_hardware(usable_cpu_count=cpus), samples=10)
    assert found.workers == workers
    assert found.step_seconds == pytest.approx(step_ms / 1000)


def test_workers_that_wait_are_advised_with_what_they_gain() -> None:
    facts = target(compute_ms=100.0, data=WAITING, baseline=BASELINE.replace(num_threads=2, num_workers=2))
    machine = make_hardware(usable_cpu_count=2)
    _, advice = judge(facts, timing(step_ms=500.0, wait_ms=400.0), machine)
    found = {item.knob: item for item in advice}["num_workers"]
    assert advice[0] == found
    assert "95 % of it waiting, so that more workers than CPUs can wait at once" in found.reason
    assert found.gain is not None
    # 1 s of loading by 12 workers takes less than what the step does beside waiting.
    assert found.gain.high == pytest.approx(5.0)
    assert found.gain.low == pytest.approx(1 / (1 - 0.5 * 0.8))


def test_why_there_are_fewer_workers_than_would_match() -> None:
    slow = {"data": {"seconds_per_sample": 0.03}, "compute_ms": 100.0}
    assert plan(target(**slow)).workers_reason == "the computation needs 2 of the 4 usable CPUs"
    assert plan(target(device="cuda", **{**slow, "compute_ms": 10.0})).workers_reason == "4 CPUs are usable"
    assert plan(target(**{**slow, "compute_ms": 1.0})).workers_reason == "4 CPUs are usable"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"iterable": True, "seconds_per_sample": 0.1}}, "workers would each repeat an iterable dataset"),
        ({"fixed": {"num_workers": "its dataset holds a generator"}}, "its dataset holds a generator"),
    ],
)
def test_workers_that_must_stay(changes: dict[str, Any], reason: str) -> None:
    found = plan(target(baseline=BASELINE.replace(num_workers=3), **changes))
    assert (found.workers, found.workers_reason) == (3, reason)


@pytest.mark.parametrize(
    ("batch_bytes", "free", "total", "needed", "fits"),
    [
        # 3 workers x 2 batches x 10 MiB x 1.3
        (10 * MIB, 78 * MIB, None, 78 * MIB, True),
        (10 * MIB, 78 * MIB - 1, None, 78 * MIB, False),
        (10 * MIB, 0, 64 * MIB, 78 * MIB, False),
        (10 * MIB, 0, None, 78 * MIB, None),
        (None, 10**9, 10**9, None, None),
    ],
)
def test_shared_memory(
    batch_bytes: int | None, free: int, total: int | None, needed: int | None, fits: bool | None
) -> None:
    facts = target(device="cuda", compute_ms=50.0, data={"seconds_per_sample": 0.01, "batch_bytes": batch_bytes})
    machine = make_hardware(shared_memory_free_bytes=free, shared_memory_total_bytes=total)
    found = plan(facts, machine)
    assert (found.shared_memory_bytes, found.shared_memory_fits) == (needed, fits)


@pytest.mark.parametrize(
    ("workers", "start", "count", "expected"),
    [(2, 2.01, 10_000, True), (2, 1.99, 10_000, False), (0, 9.0, 10_000, None), (2, None, 10_000, None),
     (2, 9.0, None, None)],
)  # fmt: skip
def test_persistent_workers(workers: int, start: float | None, count: int | None, expected: bool | None) -> None:
    facts = target(
        baseline=BASELINE.replace(num_workers=workers), data={"epoch_start_seconds": start, "sample_count": count}
    )
    assert plan(facts).persistent_worthwhile is expected  # an epoch lasts 100 s


@pytest.mark.parametrize(("ratio", "expected"), [(2.01, True), (2.0, False), (None, None)])
def test_prefetching(ratio: float | None, expected: bool | None) -> None:
    assert plan(target(data={"slow_batch_ratio": ratio})).prefetch_worthwhile is expected


@pytest.mark.parametrize(("compute_ms", "is_limit"), [(24.0, True), (26.0, False)])
def test_the_data_side_is_the_limit(compute_ms: float, is_limit: bool) -> None:
    found = plan(target(compute_ms=compute_ms, data={"seconds_per_sample": 0.01})).data_is_limit
    assert found == (
        "the data side is the limit: loading a step's samples takes 25 ms even when shared by 4 CPUs, "
        "the computation 24 ms"
        if is_limit
        else ""
    )


# 10 samples x 100 ms: 1 s in one process, 250 ms on 4 CPUs; the computation's one host thread takes 20 ms.
SLOW = {"seconds_per_sample": 0.1, "loader_seconds_per_step": 1.0}


@pytest.mark.parametrize(
    ("changes", "wait_ms", "expected"),
    [
        pytest.param({}, 980.0, True, id="the data side is the limit"),
        pytest.param({}, 50.0, False, id="not input-bound now"),
        pytest.param({"compute_ms": 200.0, "work": work(0.6, 0.3, enqueue_fraction=0.1)}, 800.0, True, id="250 / 200"),
        pytest.param({"compute_ms": 210.0, "work": work(0.6, 0.3, enqueue_fraction=0.1)}, 800.0, False, id="250 / 210"),
        pytest.param({"compute_ms": 51.0}, 940.0, False, id="feeding the GPU takes 5 % of the CPU time of loading"),
        pytest.param({"data": {**SLOW, "loader_seconds_per_step": 1.99}}, 980.0, True, id="measured 1.99x"),
        pytest.param({"data": {**SLOW, "loader_seconds_per_step": 2.01}}, 980.0, False, id="measured 2.01x"),
        pytest.param({"data": {**SLOW, "loader_seconds_per_step": 0.49}}, 980.0, False, id="measured 0.49x"),
        pytest.param({"data": {**SLOW, "loader_seconds_per_step": None}}, 980.0, False, id="not measured"),
        pytest.param(
            {"baseline": BASELINE.replace(num_workers=2), "data": {**SLOW, "loader_seconds_per_step": 0.5}},
            480.0,
            True,
            id="two workers load twice as fast",
        ),
        pytest.param(
            {"baseline": BASELINE.replace(num_workers=2)},
            480.0,
            True,
            id="two workers load no faster than one, within 2x",
        ),
        pytest.param(
            {"baseline": BASELINE.replace(num_workers=64), "data": {**SLOW, "loader_seconds_per_step": 0.0157}},
            500.0,
            False,
            id="64 workers on 4 CPUs that wait: 16 ms",
        ),
        pytest.param({"data": {**SLOW, "iterable": True}}, 980.0, False, id="loading and computing take turns"),
        pytest.param({"fixed": {"num_workers": "fixed"}}, 980.0, False, id="and no worker can be added"),
        pytest.param({"device": "cpu"}, 980.0, False, id="four threads for 20 ms: 8 % of the CPU time of loading"),
        pytest.param({"device": "cpu", "compute_ms": 12.0}, 980.0, True, id="for 12 ms: 4.8 %"),
    ],
)
def test_compute_knobs_gain_nothing(changes: dict[str, Any], wait_ms: float, expected: bool) -> None:
    facts = target(**{"device": "cuda", "compute_ms": 20.0, "data": SLOW, **changes})
    reason = compute_knobs_gain_nothing(facts, timing(step_ms=1000.0, wait_ms=wait_ms), GPU_HOST)
    assert bool(reason) == expected
    if expected:
        assert reason.startswith(
            "the data side is the limit: loading a step's samples takes 250 ms even when shared by"
        )
        assert reason.endswith(" ms: compute knobs gain nothing")


def test_compute_knobs_are_knobs_of_no_other_kind() -> None:
    assert {knob.field for knob in KNOBS} > COMPUTE_KNOBS
    assert not COMPUTE_KNOBS & {*DATA_KNOBS, "num_threads", "host_allocator", "micro_batch_size"}


@given(
    device=st.sampled_from(["cpu", "cuda"]),
    per_sample=st.floats(0.0, 10.0),
    compute_ms=st.floats(0.0, 1e5),
    cpus=st.integers(1, 512),
    threads=st.none() | st.integers(1, 512),
    workers=st.integers(0, 64),
)
def test_a_plan_stays_inside_the_machine(
    device: str, per_sample: float, compute_ms: float, cpus: int, threads: int | None, workers: int
) -> None:
    baseline = BASELINE.replace(num_threads=threads, num_workers=workers)
    facts = target(device=device, baseline=baseline, compute_ms=compute_ms, data={"seconds_per_sample": per_sample})
    found = plan(facts, make_hardware(usable_cpu_count=cpus))
    assert 0 <= found.workers <= cpus
    assert found.matching_workers is None or found.workers <= found.matching_workers
    assert found.step_seconds <= found.load_seconds + facts.compute_seconds_per_step
    assert found.step_seconds >= max(facts.compute_seconds_per_step, found.load_seconds / max(1, found.workers)) - 1e-9
