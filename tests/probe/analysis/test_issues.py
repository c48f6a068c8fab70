from __future__ import annotations

from typing import Any

import pytest
from probe_records import BASELINE, GIB, GPU_HOST, MIB, ceilings, target, timing, work
from record_factory import make_gpu, make_hardware, make_measurement

from autotune.probe.analysis.issues.find import find_issues
from autotune.records import HardwareInfo, PeakMemory
from autotune.records.measurement import GpuState, Interference


def names(machine: HardwareInfo, **known: Any) -> list[str]:
    return [trouble.name for trouble in find_issues(machine, **known)]


def only(machine: HardwareInfo, **known: Any) -> str:
    (trouble,) = find_issues(machine, **known)
    assert trouble.remedy
    return trouble.sentence


def test_a_healthy_machine_and_training_have_none() -> None:
    assert find_issues(make_hardware()) == ()
    assert find_issues(GPU_HOST, facts=target(device="cuda"), measurement=timing()) == ()
    assert find_issues(make_hardware(), facts=target(), measurement=timing(), ceilings=ceilings({"fp32": 1e11})) == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        # Of 16 GiB: 5 % are 819.2 MiB, 10 % are 1.6 GiB.
        ({"swap_used_bytes": 820 * MIB, "swap_total_bytes": 2 * GIB}, ["swap"]),
        ({"swap_used_bytes": 819 * MIB, "swap_total_bytes": 2 * GIB}, []),
        ({"memory_available_bytes": 1638 * MIB}, ["memory"]),
        ({"memory_available_bytes": 1639 * MIB}, []),
        ({"cpu_quota": 2.0, "affinity_cpu_count": 64}, ["cpu-quota"]),
        ({"cpu_quota": 64.0, "affinity_cpu_count": 64}, []),
        ({"cpu_quota": 2.0}, []),
    ],
)
def test_the_machine_alone(changes: dict[str, Any], found: list[str]) -> None:
    assert names(make_hardware(**changes)) == found


def test_sentences_of_the_machine() -> None:
    swapping = make_hardware(swap_used_bytes=GIB, swap_total_bytes=2 * GIB)
    assert only(swapping).startswith("1 GiB of 2 GiB swap are in use")
    full = make_hardware(memory_available_bytes=GIB)
    assert only(full) == "memory is nearly full: 1 GiB of 16 GiB are available"
    held = make_hardware(cpu_quota=2.5, affinity_cpu_count=64)
    assert only(held).startswith("the control group grants the time of 2.5 CPUs, 64 CPUs are visible")


@pytest.mark.parametrize(
    ("workers", "batch", "free", "total", "found"),
    [
        # 2 workers x 2 batches x 10 MiB x 1.3 = 52 MiB.
        pytest.param(2, 10 * MIB, 52 * MIB, None, [], id="fits"),
        pytest.param(2, 10 * MIB, 52 * MIB - 1, None, ["shared-memory"], id="does not fit"),
        pytest.param(0, 10 * MIB, MIB, None, [], id="no workers"),
        pytest.param(2, None, 60 * MIB, 64 * MIB, ["shared-memory"], id="a container's default"),
        pytest.param(2, None, 60 * MIB, 64 * MIB + 1, [], id="more than that"),
        pytest.param(0, None, 60 * MIB, 64 * MIB, [], id="a container's default, no workers"),
        pytest.param(2, 10**3, 60 * MIB, 64 * MIB, [], id="batches known to be small"),
        pytest.param(2, 10 * MIB, 0, None, [], id="no /dev/shm known"),
    ],
)
def test_shared_memory(workers: int, batch: int | None, free: int, total: int | None, found: list[str]) -> None:
    facts = target(baseline=BASELINE.replace(num_workers=workers, num_threads=1), data={"batch_bytes": batch})
    machine = make_hardware(shared_memory_free_bytes=free, shared_memory_total_bytes=total)
    assert names(machine, facts=facts) == found


def test_shared_memory_for_the_workers_a_search_will_try() -> None:
    facts = target(device="cuda", compute_ms=30.0, data={"seconds_per_sample": 0.0055, "batch_bytes": 10 * MIB})
    machine = GPU_HOST.replace(shared_memory_free_bytes=64 * MIB)
    (trouble,) = find_issues(machine, facts=facts, measurement=timing(wait_ms=70.0))
    assert trouble.sentence == (
        "3 loader workers would need 78 MiB of /dev/shm for their batches, 64 MiB are free: they end with a bus error"
    )
    assert "--shm-size" in trouble.remedy
    assert "emptyDir" in trouble.remedy


@pytest.mark.parametrize("hazard", ["anomaly-detection", "deterministic-algorithms", "launch-blocking"])
def test_hazards(hazard: str) -> None:
    assert names(make_hardware(), facts=target(hazards=(hazard,))) == [hazard]


@pytest.mark.parametrize(
    ("threads", "workers", "changes", "found"),
    [
        (4, 0, {}, []),
        (4, 1, {}, ["oversubscribed"]),
        (2, 2, {}, []),
        (8, 0, {}, ["oversubscribed"]),
        (1, 5, {}, ["workers"]),
        (None, 0, {}, []),
        (None, 0, {"affinity_cpu_count": 8}, ["oversubscribed"]),
        # A quota of 2 of 8 CPUs: two are usable.
        (4, 0, {"usable_cpu_count": 2, "affinity_cpu_count": 8, "cpu_quota": 2.0}, ["cpu-quota"]),
        (1, 1, {"usable_cpu_count": 2, "affinity_cpu_count": 8, "cpu_quota": 2.0}, []),
        (1, 3, {"usable_cpu_count": 2, "affinity_cpu_count": 8, "cpu_quota": 2.0}, ["cpu-quota", "workers"]),
    ],
)
def test_cpus_asked_for_twice(threads: int | None, workers: int, changes: dict[str, Any], found: list[str]) -> None:
    facts = target(baseline=BASELINE.replace(num_threads=threads, num_workers=workers))
    assert names(make_hardware(**changes), facts=facts) == found


def test_a_gpu_needs_one_thread() -> None:
    facts = target(device="cuda", baseline=BASELINE.replace(num_workers=4, num_threads=None))
    assert names(GPU_HOST, facts=facts) == ["oversubscribed"]
    assert names(GPU_HOST, facts=facts.replace(baseline=BASELINE.replace(num_workers=3))) == []


@pytest.mark.parametrize(("syncs", "found"), [(1.0, ["host-syncs"]), (0.9, [])])
def test_host_syncs(syncs: float, found: list[str]) -> None:
    seen = work(0.6, 0.3, host_syncs_per_step=syncs)
    assert names(GPU_HOST, facts=target(device="cuda", work=seen)) == found


def test_host_syncs_are_named_by_their_lines() -> None:
    seen = work(0.6, 0.3, host_syncs_per_step=3.0, host_sync_places=("train.py:82", "model.py:7"))
    told = only(GPU_HOST, facts=target(device="cuda", work=seen))
    assert told == ".item() or the like runs 3 times a step, at train.py:82, model.py:7: each waits for the GPU"


@pytest.mark.parametrize(("waiting", "found"), [(0.4, ["slow-samples"]), (0.05, [])])
def test_what_makes_samples_expensive_is_named_where_a_step_waits_for_them(waiting: float, found: list[str]) -> None:
    facts = target()
    data = facts.data.replace(hot_call="Rotation.__call__ (train.py:41)", hot_call_fraction=0.82)
    measured = make_measurement(data_wait_seconds=2.0 * waiting)  # of two blocks of a second
    told = [
        [one for one in find_issues(make_hardware(), facts=known, measurement=measured) if one.name == "slow-samples"]
        for known in (facts, facts.replace(data=data))
    ]
    assert [[one.name for one in issues] for issues in told] == [[], found]
    for one in told[1]:
        assert one.sentence.startswith("82 % of the time of a sample (")
        assert one.sentence.endswith("goes into Rotation.__call__ (train.py:41), and 40 % of a step waits for samples")


@pytest.mark.parametrize(
    ("other", "device", "found"), [(0.8, "cpu", ["own-code"]), (0.42, "cpu", []), (0.0, "cpu", []), (0.8, "cuda", [])]
)
def test_much_code_of_the_trainings_own_is_told(other: float, device: str, found: list[str]) -> None:
    facts = target()
    phases = facts.phases.replace(other_seconds=other * facts.phases.seconds)
    issues = find_issues(make_hardware(), facts=facts.replace(phases=phases, device=device))
    assert [one.name for one in issues if one.name == "own-code"] == found
    assert all("44 % of a step" in one.sentence for one in issues if one.name == "own-code")


def test_host_syncs_are_counted() -> None:
    seen = work(0.6, 0.3, host_syncs_per_step=12.0)
    told = only(GPU_HOST, facts=target(device="cuda", work=seen))
    assert told == ".item() or the like runs 12 times a step: each waits for the GPU"
    assert only(make_hardware(), facts=target(work=seen)).endswith("on a GPU each would wait for it")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"slowdowns": ("thermal",)}, ["thermal"]),
        ({"slowdowns": ("hardware", "power-cap")}, ["hardware-slowdown", "power-cap"]),
        ({"other_processes": 2, "memory_free_bytes": 60 * GIB}, ["gpu-shared"]),
        ({"memory_free_bytes": 75 * GIB}, ["gpu-memory"]),
        ({"memory_free_bytes": 76 * GIB}, []),
        ({"memory_total_bytes": 0, "memory_free_bytes": 0}, []),
        ({"utilization_fraction": 0.11}, ["gpu-busy"]),
        ({"utilization_fraction": 0.10}, []),
        ({"mig": "on"}, ["mig"]),
        ({"mig": "slice"}, ["mig"]),
        ({"mig": "off"}, []),
    ],
)
def test_gpus(changes: dict[str, Any], found: list[str]) -> None:
    machine = make_hardware(gpus=(make_gpu(**changes),))
    assert names(machine) == found
    assert names(machine, facts=target(device="cuda"), measurement=timing()) == found
    assert names(machine, facts=target()) == []  # it trains on the CPU


def test_sentences_of_gpus() -> None:
    shared = make_hardware(gpus=(make_gpu(), make_gpu(other_processes=1, memory_free_bytes=60 * GIB)))
    assert only(shared) == ("1 other process on GPU 1 (20 GiB of its memory in use): timings depend on what they do")
    unlike = make_hardware(gpus=(make_gpu(name="A"), make_gpu(name="B"), make_gpu(name="A")))
    assert only(unlike) == "the GPUs are unlike (A, B): ranks that work in step wait for the slowest"


def test_clocks_before_and_in_the_training_are_told_once() -> None:
    hot = Interference(gpu=GpuState(slowdowns=("thermal",)))
    machine = make_hardware(gpus=(make_gpu(slowdowns=("thermal",)),))
    told = only(machine, facts=target(device="cuda"), measurement=timing(seen=(hot, Interference(gpu=GpuState()))))
    assert told == (
        "the clock is held down because it is too hot: on GPU 0 before the training and in 1 of 2 timed blocks"
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"steal_fraction": 0.06}, ["steal"]),
        ({"steal_fraction": 0.05}, []),
        ({"throttled_fraction": 0.06}, ["throttled"]),
        ({"foreign_cpu_fraction": 0.11}, ["other-processes"]),
        ({"foreign_cpu_fraction": 0.10}, []),
        ({"io_pressure_fraction": 0.11, "memory_pressure_fraction": 0.11}, ["disk-pressure", "memory-pressure"]),
        ({}, []),
    ],
)
def test_disturbed_blocks(changes: dict[str, float], found: list[str]) -> None:
    measured = timing(seen=(None, Interference(**changes)))
    assert names(make_hardware(), facts=target(), measurement=measured) == found


def test_sentence_of_disturbed_blocks() -> None:
    measured = timing(seen=(Interference(steal_fraction=0.3), Interference(steal_fraction=0.1)))
    told = only(make_hardware(), facts=target(), measurement=measured)
    assert told == "the hypervisor gave up to 30 % of the CPU time to somebody else in 2 of 2 timed blocks"


def test_recompiled_blocks() -> None:
    measured = timing()
    measured = measured.replace(blocks=(measured.blocks[0].replace(recompiled=True), measured.blocks[1]))
    assert only(make_hardware(), facts=target(), measurement=measured).startswith(
        "a graph was compiled in 1 of 2 timed"
    )


@pytest.mark.parametrize(
    ("host", "device", "found"),
    [(15, None, ["host-peak"]), (14, None, []), (1, 73, ["device-peak"]), (1, 71, [])],
)
def test_peaks_near_the_limit(host: int, device: int | None, found: list[str]) -> None:
    peak = PeakMemory(host_bytes=host * GIB, device_bytes=None if device is None else device * GIB)
    facts = target(device="cpu" if device is None else "cuda")
    assert names(GPU_HOST, facts=facts, measurement=timing().replace(peak_memory=peak)) == found


@pytest.mark.parametrize(("sustained", "found"), [(79e9, ["sustained-rate"]), (81e9, []), (None, [])])
def test_a_rate_that_is_not_kept_up(sustained: float | None, found: list[str]) -> None:
    rates = ceilings({"fp32": 100e9})
    rates = rates.replace(matmul=(rates.matmul[0].replace(sustained_flops_per_second=sustained),))
    assert names(make_hardware(), ceilings=rates) == found
    assert names(make_hardware(), facts=target(ceilings=rates)) == found
