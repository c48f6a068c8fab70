"""A trial by two processes: what it finds out is that of one, and whatever becomes of either is a result in time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from record_factory import make_target

from autotune.drift.record.trace_file import WEIGHTS_FILE, read_trace
from autotune.isolation.keeper import find_marked, is_dead
from autotune.isolation.runner import TrialRunner
from autotune.records.config import TrainConfig
from autotune.records.measurement import PeakMemory
from autotune.records.trial import DataTrace, GradientPlan, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.runs.rank_source import add_memory, join_tapes

HERE = Path(__file__).parent
EACH = {"micro_batch_size": 6, "gradient_accumulation_steps": 2, "num_threads": 1}
LIMITS = TrialLimits(time_limit_seconds=120.0, warmup_cap_seconds=2.0, measure_seconds=0.6)


class Runner:
    """Runs trials one after another.

    Args:
        folder: of the trials.
        environment: of theirs.
    """

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.runner = TrialRunner(folder, environment={"OMP_NUM_THREADS": "1", **(environment or {})})
        self._number = 0

    def run(
        self, name: str, purpose: Any, *, ranks: int = 2, limits: TrialLimits = LIMITS, **asked: Any
    ) -> TrialResult:
        """Return the result of a trial of one of the workloads that several processes may share."""
        spec = TrialSpec(
            number=self._number,
            purpose=purpose,
            target=make_target(f"shared_workloads.py:{name}", HERE),
            config=TrainConfig(**(EACH | asked.pop("changes", {}))),
            device="cpu",
            world_size=ranks,
            limits=limits,
            **asked,
        )
        self._number += 1
        result = self.runner(spec)
        assert [pid for pid in self._find_left() if not is_dead(pid)] == []
        return result

    def _find_left(self) -> list[int]:
        kept = self.runner._servers.pids
        return [pid for pid in find_marked(self.runner._keeper.mark) if pid not in kept]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    found = Runner(tmp_path_factory.mktemp("trials"))
    with found.runner:
        yield found


@pytest.mark.slow
def test_the_losses_are_those_of_one_process(runner: Runner) -> None:
    asked: dict[str, Any] = {"quality_steps": 9, "seeds": (0, 3), "evaluate": True}
    one, two = (runner.run("counted", "quality", ranks=ranks, **asked) for ranks in (1, 2))
    assert two.status is TrialStatus.COMPLETED, two.error
    for alone, shared in zip(one.curves, two.curves, strict=True):
        assert shared.losses == pytest.approx(alone.losses, rel=1e-4)
        assert (shared.seed, shared.samples) == (alone.seed, alone.samples)
        assert shared.metrics == pytest.approx(alone.metrics, rel=1e-3)


@pytest.mark.slow
def test_throughput_is_that_of_all_processes_and_of_the_slowest(runner: Runner) -> None:
    result = runner.run("lagging", "measure")
    measured = result.measurement
    assert measured is not None, result.error
    assert all(len(block.rank_seconds) == 2 for block in measured.blocks)
    assert measured.rank_skew is not None
    assert measured.rank_skew > 1.1  # three to one: the slower over the mean of both is 1.5
    slower = [max(block.rank_seconds) for block in measured.blocks]
    assert all(block.seconds > seconds for block, seconds in zip(measured.blocks, slower, strict=True))
    # The effective batch is that of all: an epoch's four steps have its 37 samples.
    steps = sum(block.optimizer_steps for block in measured.blocks)
    assert measured.samples == pytest.approx(37 / 4 * steps, abs=12)
    assert measured.peak_memory.host_bytes > 1.5 * _read_resident()


def _read_resident() -> int:
    """Return what a process with torch holds at least: this one has it too."""
    return min(psutil.Process().memory_info().rss, 200 * 2**20)


@pytest.mark.slow
def test_gradients_are_those_of_one_process(runner: Runner) -> None:
    plan = GradientPlan(windows=4, later_steps=2)
    results = [runner.run("counted", "fidelity", ranks=ranks, fidelity=plan) for ranks in (1, 2)]
    found = []
    for result in results:
        assert result.captures is not None, result.error
        trace = read_trace(result.captures)
        assert trace is not None
        found.append(trace.points)
    assert len(found[0]) == 2
    for one, two in zip(*found, strict=True):
        assert [*two.gradients.keys] == [*one.gradients.keys]
        np.testing.assert_allclose(two.gradients.rows, one.gradients.rows, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_sharded_trial_finds_what_one_process_finds(runner: Runner) -> None:
    asked: dict[str, Any] = {"quality_steps": 9, "seeds": (0, 3), "evaluate": True}
    sharded = {"distributed_strategy": "fsdp"}
    one = runner.run("stacked", "quality", ranks=1, **asked)
    two = runner.run("stacked", "quality", changes=sharded, **asked)
    assert two.status is TrialStatus.COMPLETED, two.error
    for alone, shared in zip(one.curves, two.curves, strict=True):
        assert shared.losses == pytest.approx(alone.losses, rel=1e-4)
        assert shared.metrics == pytest.approx(alone.metrics, rel=1e-3)
        assert shared.metrics
    timed = runner.run("stacked", "measure", changes=sharded)
    assert timed.measurement is not None, timed.error
    assert all(len(block.rank_seconds) == 2 for block in timed.measurement.blocks)
    assert timed.measurement.peak_memory.host_bytes > 1.5 * _read_resident()


@pytest.mark.slow
def test_gradients_of_a_sharded_trial_are_those_of_one_process(runner: Runner) -> None:
    """At the weights that a baseline of whole models has written, and the other way round."""
    plan, sharded = GradientPlan(windows=4, later_steps=2), {"distributed_strategy": "fsdp"}
    arms = [runner.run("stacked", "fidelity", ranks=1, fidelity=plan)]
    for changes in ({}, sharded):
        first = runner.run("stacked", "fidelity", changes=changes, fidelity=plan)
        assert first.captures is not None, first.error
        weights = str(Path(first.captures).with_name(WEIGHTS_FILE))
        other = {} if changes else sharded
        arms += [first, runner.run("stacked", "fidelity", changes=other, fidelity=plan.replace(weights=weights))]
    rows = []
    for arm in arms:
        assert arm.captures is not None, arm.error
        trace = read_trace(arm.captures)
        assert trace is not None
        rows.append([point.gradients.rows for point in trace.points])
    for found in rows[1:]:
        for one, two in zip(rows[0], found, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4)
    reference = runner.run("stacked", "fidelity", changes=sharded, fidelity=GradientPlan(windows=2, reference=True))
    assert reference.status is TrialStatus.COMPLETED, reference.error


@pytest.mark.slow
@pytest.mark.fault(
    "41", injected="SIGKILL to one process with a shard, in a trial", outcome="named; the trial has failed"
)
def test_a_killed_process_with_a_shard_ends_the_trial(tmp_path: Path) -> None:
    runner = Runner(tmp_path, {"KILLS": "1:loss:6"})
    with runner.runner:
        result = runner.run("stopping", "measure", changes={"distributed_strategy": "fsdp"})
    assert result.status in (TrialStatus.CRASHED, TrialStatus.OUT_OF_MEMORY)
    assert "process 1 of 2 was killed by SIGKILL" in result.error


@pytest.mark.slow
def test_the_reference_is_computed_in_float64_by_all(runner: Runner) -> None:
    plan = GradientPlan(windows=2, reference=True)
    result = runner.run("counted", "fidelity", fidelity=plan)
    assert result.status is TrialStatus.COMPLETED, result.error


@pytest.mark.slow
def test_the_data_of_all_processes_are_compared(runner: Runner) -> None:
    one, two = (runner.run("counted", "tape", changes={"num_workers": workers}) for workers in (0, 1))
    assert one.tape is not None
    assert one.tape == two.tape
    assert one.tape.samples == 38  # the last step has one sample: a process without one computes a filler
    assert " | " in one.tape.shapes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "cause", "told"),
    [
        ("large", TrialStatus.OUT_OF_MEMORY, "oom-device", "process 1 of 2: OutOfMemoryError: CUDA out of memory"),
        ("mistaken", TrialStatus.CRASHED, "user-error", "process 1 of 2: ValueError: no such word"),
        ("normed", TrialStatus.CRASHED, "usage", "BatchNorm (2) takes its statistics from the samples of one process"),
    ],
)
@pytest.mark.fault("41", injected="one of two processes of a trial fails", outcome="one verdict for all of them")
def test_what_fails_on_one_process_is_the_result_of_all(
    runner: Runner, name: str, status: TrialStatus, cause: str, told: str
) -> None:
    result = runner.run(name, "measure")
    assert (result.status, result.cause) == (status, cause)
    assert told in result.error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault("41", injected="SIGKILL to one of two processes of a trial", outcome="named; the trial has failed")
def test_a_killed_process_is_named(tmp_path: Path, rank: int) -> None:
    runner = Runner(tmp_path, {"KILLS": f"{rank}:loss:6"})
    with runner.runner:
        result = runner.run("stopping", "measure")
    assert result.status in (TrialStatus.CRASHED, TrialStatus.OUT_OF_MEMORY)  # who has killed it is not always told
    assert result.cause in ("crash-signal", "oom-killed")
    assert f"process {rank} of 2 was killed by SIGKILL" in result.error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault("41", injected="one of two processes of a trial is stopped", outcome="named, within the limit")
def test_a_hanging_process_is_named_within_the_limit(tmp_path: Path, rank: int) -> None:
    runner = Runner(tmp_path, {"STOPS": f"{rank}:loss:6"})
    began = time.monotonic()
    with runner.runner:
        result = runner.run("stopping", "measure", limits=LIMITS.replace(time_limit_seconds=40.0))
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert f"process {rank} of 2 has not answered within 20 s" in result.error
    assert time.monotonic() - began < 60.0


@pytest.mark.slow
def test_the_limit_ends_all_processes_and_their_stacks_are_told(tmp_path: Path) -> None:
    runner = Runner(tmp_path, {"HANGS": "loss:6"})  # none waits for another
    with runner.runner:
        result = runner.run("stopping", "measure", limits=LIMITS.replace(time_limit_seconds=25.0))
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert re.search(r"not done after 2\d s; its stacks are in its log", result.error)  # its server took some of 25
    assert "(most recent call first)" in (tmp_path / "0000" / "log.txt").read_text()


def test_memory_is_of_all_processes_on_the_host_and_of_the_fullest_device() -> None:
    peaks = [PeakMemory(host_bytes=3, device_bytes=10), PeakMemory(host_bytes=4, device_bytes=12)]
    assert add_memory(peaks) == PeakMemory(host_bytes=7, device_bytes=12)
    assert add_memory([PeakMemory(host_bytes=3)] * 2) == PeakMemory(host_bytes=6)


def test_another_batch_of_any_process_is_another_tape() -> None:
    tape = DataTrace(batches=("a", "b"), shapes=("float32[2]",) * 2, order="c", samples=2)
    other = tape.replace(batches=("a", "x"))
    joined = join_tapes([tape, tape])
    assert joined.samples == 4
    assert join_tapes([tape, other]).batches[0] == joined.batches[0]
    assert join_tapes([tape, other]).batches[1] != joined.batches[1]
    assert join_tapes([other, tape]).batches[1] != join_tapes([tape, other]).batches[1]
