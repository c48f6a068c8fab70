"""What workers and threads are expected to bring where the loader is waited for."""

from __future__ import annotations

import math
from typing import Any

import pytest
from simulated import Machine, make_report

from autotune.records import Advice, GainRange, ProbeReport
from autotune.records.measurement import Interference
from autotune.search.explore.additive import Prior
from autotune.search.explore.loading import SHARED_CPUS, THREADS, TOGETHER, WORKERS
from autotune.search.explore.prior import USUAL, make_prior

LOAD, COMPUTE = 60e-3, 8e-3
ADVICE = Advice(knob="num_workers", reason="the loader waits", gain=GainRange(low=0.9, high=2.4))


def report_of(*, step: float = LOAD + COMPUTE, waits: float = LOAD, device: str = "cpu", **own: Any) -> ProbeReport:
    """Return the report of a training whose samples take longer to load than to compute, on two CPUs."""
    report = make_report(Machine())
    target, measured = report.target, report.measurement
    steps = sum(block.optimizer_steps for block in measured.blocks)
    samples = measured.samples / steps
    blocks = tuple(block.replace(seconds=step * block.optimizer_steps) for block in measured.blocks)
    return report.replace(
        advice=(ADVICE,),
        hardware=report.hardware.replace(usable_cpu_count=2),
        measurement=measured.replace(blocks=blocks, data_wait_seconds=waits * steps),
        target=target.replace(
            device=device,
            baseline=target.baseline.replace(**{"num_threads": 2, "num_workers": 0} | own),
            compute_seconds_per_step=COMPUTE,
            data=target.data.replace(seconds_per_sample=LOAD / samples, cpu_fraction=1.0),
        ),
    )


def expect(prior: Prior, workers: int, *, threads: bool) -> float:
    """Return the speed-up that some workers are expected to bring, with fewer threads or without."""
    alone = prior.find("num_workers", workers).mean
    pair = prior.pairs[("num_workers", workers), THREADS].mean + prior.find("num_threads", 1).mean
    return math.exp(alone + (pair if threads else 0.0))


def test_workers_bring_what_they_can_once_threads_leave_them_the_cpus() -> None:
    prior = make_prior(report_of())
    assert expect(prior, 1, threads=True) == pytest.approx((LOAD + COMPUTE) / LOAD, rel=0.05)
    assert expect(prior, 2, threads=True) == pytest.approx(2 * (LOAD + COMPUTE) / (LOAD + 2 * COMPUTE), rel=0.05)
    assert 1.0 < expect(prior, 1, threads=False) < expect(prior, 2, threads=False) < expect(prior, 2, threads=True)
    assert (WORKERS, THREADS) not in prior.pairs


def test_fewer_threads_cost_no_more_than_the_share_of_a_step_that_they_compute_in() -> None:
    usual = USUAL[THREADS].mean
    share = COMPUTE / (LOAD + COMPUTE)
    assert make_prior(report_of()).find("num_threads", 1).mean == pytest.approx(share * usual, rel=0.01)


def test_fewer_threads_bring_what_a_step_with_workers_takes_longer_than_it_has_to() -> None:
    best = (LOAD + 2 * COMPUTE) / 2
    slow, fast = (make_prior(report_of(num_workers=2, step=step, waits=0.4 * step)) for step in (60e-3, best))
    assert slow.find("num_threads", 1).mean > 0.1 > 0.0 > fast.find("num_threads", 1).mean


def test_workers_that_wait_for_a_disk_need_no_fewer_threads() -> None:
    report = report_of()
    data = report.target.data.replace(cpu_fraction=0.05)
    prior = make_prior(report.replace(target=report.target.replace(data=data)))
    assert prior.pairs[WORKERS, THREADS] == TOGETHER
    assert (("num_workers", 2), THREADS) not in prior.pairs
    assert prior.find("num_workers", 2).mean < prior.find("num_workers", 4).mean


@pytest.mark.parametrize("processes", [1, 4])
def test_more_workers_are_expected_to_win_where_each_of_several_processes_has_a_loader(processes: int) -> None:
    prior = make_prior(report_of(num_workers=1, step=LOAD / processes, waits=0.8 * LOAD / processes))
    assert prior.find("num_workers", 2).mean > 0.0


def test_on_a_gpu_fewer_workers_are_expected_to_lose() -> None:
    prior = make_prior(report_of(device="cuda", num_workers=2, step=LOAD / 2, waits=LOAD / 2 - COMPUTE))
    assert prior.find("num_workers", 1).mean == pytest.approx(-math.log(2), abs=0.01)
    assert prior.find("num_workers", 0).mean < prior.find("num_workers", 1).mean
    assert prior.pairs[WORKERS, THREADS] == SHARED_CPUS


def test_a_compute_knob_acts_on_the_share_of_a_step_that_computes_once_workers_load() -> None:
    plain = make_prior(make_report(Machine())).find("memory_format", "channels_last")
    assert plain == USUAL["memory_format", None]
    report = report_of()
    share = COMPUTE / ((LOAD + 2 * COMPUTE) / 2)
    assert make_prior(report).find("memory_format", "channels_last").mean == pytest.approx(share * plain.mean, rel=0.01)
    fixed = report.replace(target=report.target.replace(fixed={"num_workers": "they are the script's own"}))
    share = COMPUTE / (LOAD + COMPUTE)
    assert make_prior(fixed).find("memory_format", "channels_last").mean == pytest.approx(share * plain.mean, rel=0.01)
    assert make_prior(report).find("host_allocator", "tcmalloc") == USUAL["host_allocator", "tcmalloc"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fewer_threads_may_win_where_others_have_a_share_of_the_cpus(device: str) -> None:
    quiet = make_report(Machine())
    quiet = quiet.replace(target=quiet.target.replace(device=device))
    blocks = (block.replace(interference=Interference(foreign_cpu_fraction=0.5)) for block in quiet.measurement.blocks)
    busy = quiet.replace(measurement=quiet.measurement.replace(blocks=tuple(blocks)))
    alone, beside = (make_prior(one).find("num_threads", 1) for one in (quiet, busy))
    assert alone.mean < 0.0
    assert (beside == alone) if device == "cuda" else (beside.mean > 0.2 and beside.sd > alone.sd)
