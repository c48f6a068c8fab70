"""Every fate of a trial becomes a result with a named cause, in time, and leaves no process."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from toy_workloads import ALLOCATED_BYTES, FLOOD_BYTES
from trial_world import World, make_spec, open_world

from autotune.format import format_bytes
from autotune.isolation import process
from autotune.isolation import runner as spawn
from autotune.isolation.runner import KILL_SECONDS, TrialRunner
from autotune.isolation.warm import process as warm_process
from autotune.lifeline import adopt_orphans
from autotune.records.codec import read_record
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus

SLACK_SECONDS = 6.0
"""A busy machine may take this much longer than the promise, or as much as a whole trial of the same world takes."""

CRASHED, OUT_OF_MEMORY = TrialStatus.CRASHED, TrialStatus.OUT_OF_MEMORY
COMPLETED = (TrialStatus.COMPLETED, "", "")

# toy -> status, cause, what the error says, what the log says
FATES = {
    "trains": (*COMPLETED, ""),
    "exits_silently": (CRASHED, "no-result", "without a result", ""),
    "exits_with_status": (CRASHED, "crash-exit", "exit status 3; last line: giving up now", "giving up now"),
    "segfaults": (CRASHED, "crash-signal", "SIGSEGV", "in meet_fate"),
    "aborts": (CRASHED, "crash-signal", "SIGABRT", "in meet_fate"),
    "kills_itself": (OUT_OF_MEMORY, "oom-killed", "SIGKILL", ""),
    "runs_out_of_device_memory": (OUT_OF_MEMORY, "oom-device", "Tried to allocate 20.00 GiB", "in meet_fate"),
    "runs_out_of_memory": (OUT_OF_MEMORY, "oom-host", "MemoryError", "in meet_fate"),
    "raises": (CRASHED, "user-error", "ValueError: the labels do not fit the images", "in meet_fate"),
    "raises_base_exception": (CRASHED, "user-error", "not an Exception", "in meet_fate"),
    "exits": (CRASHED, "user-error", "SystemExit: bye", "in meet_fate"),
    "writes_junk": (CRASHED, "protocol-error", "result.json", ""),
    "nothing_of_this_name": (CRASHED, "usage", "has no 'nothing_of_this_name'", ""),
    "no_such_file.py:workload": (CRASHED, "usage", "there is no file 'no_such_file.py'", ""),
    "starts_daemon": (*COMPLETED, ""),
    "starts_shell": (*COMPLETED, ""),
    "changes_process": (*COMPLETED, ""),
    "closes_output": (*COMPLETED, ""),
    "leaves_thread": (*COMPLETED, ""),
}
WORKER_FATES = {
    "trains": COMPLETED,
    "worker_dies": (CRASHED, "dataloader-worker-died", "DataLoader worker (pid"),
    "worker_raises": (CRASHED, "user-error", "KeyError: 'no such image' (in a loader worker)"),
}
ALSO_COLD = ("trains",)
HANGING = {"hangs": 0, "ignores_sigterm": 0, "worker_hangs": 1, "worker_escapes": 1}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    warm, cold = tmp_path_factory.mktemp("warm"), tmp_path_factory.mktemp("cold")
    with open_world(warm, warm=True) as first, open_world(cold, warm=False) as second:
        yield {"warm": first, "cold": second}


@pytest.fixture
def world(worlds: dict[str, World], request: pytest.FixtureRequest) -> Iterator[World]:
    found = worlds[getattr(request, "param", "warm")]
    yield found
    found.should_stop, found.on_poll = (lambda: False), (lambda: None)
    assert found.find_strays() == {}


@pytest.fixture
def warm_world(worlds: dict[str, World]) -> World:
    return worlds["warm"]


@pytest.fixture
def cold_world(worlds: dict[str, World]) -> World:
    return worlds["cold"]


BOTH = pytest.mark.parametrize("world", ["warm", pytest.param("cold", marks=pytest.mark.slow)], indirect=True)


def _over_fates(fates: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    rarely = pytest.mark.slow
    cases = [pytest.param("warm", fate, id=f"warm-{fate}") for fate in fates]
    cases += [
        pytest.param("cold", fate, id=f"cold-{fate}", marks=() if fate in ALSO_COLD else rarely) for fate in fates
    ]
    return pytest.mark.parametrize(("world", "fate"), cases, indirect=["world"])


@_over_fates(FATES)
@pytest.mark.fault(
    "1",
    injected="the loss raises torch.OutOfMemoryError",
    outcome="oom-device with the amount asked for; the next trial runs",
)
@pytest.mark.fault("2", injected="the loss raises MemoryError", outcome="oom-host; the next trial runs")
@pytest.mark.fault(
    "4",
    injected="ctypes reads address 0; abort; SIGKILL to itself",
    outcome="the signal is named; the stacks are in the log",
)
@pytest.mark.fault(
    "5",
    injected="os._exit(0) and os._exit(3) in the first step",
    outcome="no-result, or the exit status with the last line printed",
)
@pytest.mark.fault(
    "12",
    injected="a double fork, and a shell with children, each in a session of its own",
    outcome="the trial counts; every process is ended",
)
@pytest.mark.fault("14", injected="junk in place of result.json", outcome="protocol-error; the next trial runs")
@pytest.mark.fault("17", injected="a file and a name that are not there", outcome="cause usage, with the name")
@pytest.mark.fault(
    "50",
    injected="signals ignored, environment cleared, umask, hooks, closed streams, an exit handler that hangs",
    outcome="the trial counts",
)
def test_a_fate_becomes_its_result(world: World, fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "read_oom_kills", lambda: None)  # as on a machine whose counter cannot be read
    status, cause, error, printed = FATES[fate]
    result, log = world.run(fate)
    assert (result.status, result.cause) == (status, cause), (result.error, log)
    assert error in result.error
    assert printed in log
    assert world.find_strays() == {}
    file = world.folder / f"{result.spec.number:04d}" / "result.json"
    assert read_record(file, TrialResult) == result


def test_a_quality_run_returns_each_metric_by_name(warm_world: World) -> None:
    spec = make_spec("judged")
    plain, judged, probed = (
        warm_world.runner(one.replace(number=warm_world.trials + index))
        for index, one in enumerate(
            (spec, spec.replace(evaluate=True), spec.replace(purpose="probe", config=None, quality_steps=1))
        )
    )
    warm_world.trials += 3
    assert plain.curves[0].metrics == {}
    (curve,) = judged.curves
    assert list(curve.metrics) == ["weight", "undefined"]
    assert curve.metrics["undefined"] is None
    assert curve.metrics["weight"] is not None
    assert probed.facts is not None, probed.error
    assert probed.facts.metrics == {"weight": "maximize", "undefined": "minimize"}
    assert probed.facts.evaluate_seconds is not None


@pytest.mark.slow_cases("cold-trains")
@_over_fates(WORKER_FATES)
@pytest.mark.fault(
    "9",
    injected="SIGKILL to a loader worker; a dataset that raises",
    outcome="dataloader-worker-died, or the dataset's own error; nothing is left",
)
def test_a_fate_of_a_loader_worker_becomes_its_result(world: World, fate: str) -> None:
    status, cause, error = WORKER_FATES[fate]
    result, log = world.run(fate, num_workers=1)
    assert (result.status, result.cause) == (status, cause), (result.error, log)
    assert error in result.error
    assert world.find_strays() == {}


def test_the_daemon_was_really_there(warm_world: World) -> None:
    (warm_world.folder / "daemon").unlink(missing_ok=True)
    warm_world.run("starts_daemon")
    assert (warm_world.folder / "daemon").exists()


@BOTH
@pytest.mark.fault("15", injected="a loss of nan", outcome="non-finite, with the step")
def test_a_loss_that_is_not_finite_diverges(world: World) -> None:
    result, _ = world.run("diverges", purpose="measure")
    assert (result.status, result.cause) == (TrialStatus.DIVERGED, "non-finite")
    assert "optimizer step 0" in result.error


def time_limits(world: World, num_workers: int) -> tuple[float, float]:
    """Return a limit within which a hang is reached on this machine as it is now, and what may come on top of it."""
    world.run("trains", num_workers=num_workers)  # the server is up from here on
    whole = world.run("trains", num_workers=num_workers)[0].elapsed_seconds
    return 1.5 + 2 * whole, SLACK_SECONDS + 2 * whole


@pytest.mark.slow_cases("ignores_sigterm", "worker_hangs")
@pytest.mark.parametrize("fate", HANGING)
@pytest.mark.fault(
    "6",
    injected="an endless loop of sleeps in the loss",
    outcome="timeout within the kill ladder, stacks in the log, the next trial runs",
)
@pytest.mark.fault("7", injected="SIGTERM ignored, then the same", outcome="the same, by SIGKILL")
@pytest.mark.fault(
    "8",
    injected="a loader worker that never answers, also in a session of its own",
    outcome="timeout; no process is left",
)
def test_a_hang_is_killed_in_time_with_its_stacks_in_the_log(warm_world: World, fate: str) -> None:
    limit, slack = time_limits(warm_world, HANGING[fate])
    result, log = warm_world.run(fate, seconds=limit, num_workers=HANGING[fate])
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert warm_world.is_reached()
    assert "Current thread" in log
    assert ("hang_for_good" if HANGING[fate] == 0 else "next_window") in log
    assert limit <= result.elapsed_seconds < limit + KILL_SECONDS + slack
    assert warm_world.find_strays() == {}
    assert warm_world.run("trains")[0].status == TrialStatus.COMPLETED


@pytest.mark.parametrize("fate", ["ignores_sigterm", "worker_escapes"])
@pytest.mark.slow
def test_a_cold_hang_is_killed_in_time(cold_world: World, fate: str) -> None:
    limit, slack = time_limits(cold_world, HANGING[fate])
    result, _ = cold_world.run(fate, seconds=limit, num_workers=HANGING[fate])
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert result.elapsed_seconds < limit + KILL_SECONDS + slack
    assert cold_world.find_strays() == {}


@BOTH
def test_a_stop_ends_the_trial_as_interrupted(world: World) -> None:
    world.should_stop = world.is_reached
    result, _ = world.run("worker_hangs", num_workers=1)
    assert (result.status, result.cause) == (TrialStatus.INTERRUPTED, "interrupted")
    assert world.find_strays() == {}


@BOTH
def test_an_exception_while_a_trial_runs_leaves_no_process(world: World) -> None:
    def interrupt() -> None:
        if world.is_reached():
            raise KeyboardInterrupt

    world.on_poll = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.run("ignores_sigterm")
    assert world.find_strays() == {}
    world.on_poll = lambda: None
    assert world.run("trains")[0].status == TrialStatus.COMPLETED


@pytest.mark.fault("2", injected="900 MiB where less is allowed", outcome="oom-host with both figures")
def test_too_much_memory_is_killed(warm_world: World) -> None:
    result, _ = warm_world.run("allocates", host_memory_limit_bytes=ALLOCATED_BYTES)
    assert (result.status, result.cause) == (OUT_OF_MEMORY, "oom-host")
    assert result.error.endswith(f" of {format_bytes(ALLOCATED_BYTES)} allowed")


def test_a_memory_limit_that_is_kept_does_nothing(warm_world: World) -> None:
    result, _ = warm_world.run("trains", purpose="measure", host_memory_limit_bytes=64 * 2**30)
    assert result.status == TrialStatus.COMPLETED


@pytest.mark.fault(
    "13", injected="200 MiB printed", outcome="the log keeps head and tail; the supervisor's memory stays"
)
def test_a_flood_is_capped_and_keeps_its_ends(warm_world: World) -> None:
    before = psutil.Process().memory_info().rss
    result, log = warm_world.run("floods")
    grown = psutil.Process().memory_info().rss - before
    assert result.status == TrialStatus.COMPLETED
    assert len(log) < 2 * 2**20 < FLOOD_BYTES
    assert log.startswith("the first line\n")
    assert "bytes left out ..." in log
    assert log.rstrip().endswith("the last line")
    assert grown < FLOOD_BYTES / 2


@pytest.mark.fault("25", injected="a folder in place of the log", outcome="the trial counts")
def test_a_log_that_cannot_be_written_does_not_end_the_trial(warm_world: World) -> None:
    (warm_world.folder / f"{warm_world.trials:04d}" / "log.txt").mkdir(parents=True)
    spec = make_spec("floods", number=warm_world.trials)
    warm_world.trials += 1
    assert warm_world.runner(spec).status == TrialStatus.COMPLETED


def test_output_between_the_caps_is_kept_whole_and_once(tmp_path: Path) -> None:
    log = process.CappedLog(tmp_path / "log.txt")
    lines = b"".join(b"%07d\n" % i for i in range(100_000))  # 800 kB: longer than the head, shorter than both
    with os.fdopen(log.descriptor, "wb") as pipe:
        pipe.write(lines)
    tail = log.finish(30.0)
    assert (tmp_path / "log.txt").read_bytes() == lines
    assert tail.endswith("0099999\n")


def test_malloc_settings_reach_the_trial_and_no_other_one(tmp_path: Path) -> None:
    thresholds = "'MALLOC_MMAP_THRESHOLD_': '1073741824'"
    with open_world(tmp_path, warm=True) as world:
        for _ in range(2):
            assert thresholds in world.run("prints_environment", host_allocator="glibc-tuned")[1]
            log = world.run("prints_environment")[1]
            assert thresholds not in log
            assert "{" in log
        assert len(world.server_pids) == 2


@pytest.mark.slow
def test_what_the_user_preloads_reaches_the_trial_beside_a_malloc_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, library = "libm.so.6", str(tmp_path / "libtcmalloc.so.4")  # one that is not there is left out by the linker
    monkeypatch.setenv("LD_PRELOAD", own)
    monkeypatch.setenv("TOY_FOLDER", str(tmp_path))
    with TrialRunner(tmp_path, host_allocators={"tcmalloc": library}, warm=False) as runner:
        for number, (allocator, expected) in enumerate((("default", own), ("tcmalloc", f"{own}:{library}"))):
            runner(make_spec("prints_environment", number=number, host_allocator=allocator))
            log = (tmp_path / f"{number:04d}" / "log.txt").read_text()
            assert f"'LD_PRELOAD': '{expected}'" in log


def test_an_earlier_result_in_the_folder_is_not_taken_for_the_new_one(warm_world: World) -> None:
    result, _ = warm_world.run("trains")
    again = warm_world.runner(make_spec("exits_silently", number=result.spec.number))
    assert (again.status, again.cause) == (CRASHED, "no-result")


@pytest.mark.slow
def test_a_warm_start_is_much_faster_than_a_cold_one(warm_world: World, cold_world: World) -> None:
    warm_world.run("trains")
    warm = [warm_world.run("trains", purpose="measure")[0].startup_seconds for _ in range(3)]
    cold = [cold_world.run("trains", purpose="measure")[0].startup_seconds for _ in range(2)]
    assert 0.0 < statistics.median(warm) < 0.5 * min(cold)


def test_a_relative_folder_survives_a_change_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_world(Path("trials"), warm=False) as world:
        assert world.run("changes_process")[0].status == TrialStatus.COMPLETED


@pytest.mark.slow
@pytest.mark.fault("4", injected="SIGKILL to the fork server", outcome="a cold start, then a new server")
def test_a_dead_server_is_replaced_by_a_cold_start_and_then_by_another(tmp_path: Path) -> None:
    with open_world(tmp_path, warm=True) as world:
        assert world.run("trains")[0].status == TrialStatus.COMPLETED
        (server,) = world.server_pids
        os.kill(server, signal.SIGKILL)
        assert world.run("trains")[0].status == TrialStatus.COMPLETED
        assert world.server_pids == set()
        assert world.find_strays() == {}
        assert world.run("trains")[0].status == TrialStatus.COMPLETED
        assert len(world.server_pids - {server}) == 1
        assert world.find_strays() == {}


@pytest.mark.slow
@pytest.mark.fault(
    "4", injected="kill -9 of the fork server under a trial", outcome="repeated cold; then `server-died`"
)
def test_a_server_that_dies_under_a_trial_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "read_oom_kills", lambda: 0)
    killed = set()
    with open_world(tmp_path, warm=True) as world:

        def kill_server() -> None:
            if world.is_reached():
                killed.update(world.server_pids)
                for server in world.server_pids:
                    os.kill(server, signal.SIGKILL)

        world.on_poll = kill_server
        result, _ = world.run("worker_escapes", num_workers=1, seconds=40.0)
        assert (result.status, result.cause) == (CRASHED, "server-died")  # and not that it hangs, started cold
        assert len(killed) == 1
        assert world.find_strays() == {}
        world.on_poll = lambda: None
        assert world.run("trains")[0].status == TrialStatus.COMPLETED
        assert len(world.server_pids - killed) == 1


def test_a_stop_does_not_wait_for_a_server_that_does_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(warm_process.sys, "executable", str(stuck))
    monkeypatch.setattr(warm_process, "_SERVER_START_SECONDS", 300.0)
    stop = threading.Event()
    timer = threading.Timer(0.5, stop.set)
    with TrialRunner(tmp_path / "trials", should_stop=stop.is_set) as runner:
        timer.start()
        result = runner(make_spec("trains", seconds=500.0))
    timer.join()
    assert result.status == TrialStatus.INTERRUPTED
    assert result.elapsed_seconds < 300.0


@pytest.mark.parametrize("allowed", [10.0, 0.0])
def test_a_trial_loses_time_to_its_server_only_where_the_budget_has_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: float
) -> None:
    waited, lost = 0.2, list[float]()

    def complete(_self: TrialRunner, spec: TrialSpec, *, lost_seconds: float) -> TrialResult:
        lost.append(lost_seconds)
        return TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=0.0)

    monkeypatch.setattr(TrialRunner, "_prepare", lambda *_arguments: True)
    monkeypatch.setattr(TrialRunner, "_await_server", lambda *_arguments, **_options: time.sleep(waited))
    monkeypatch.setattr(TrialRunner, "_complete", complete)
    spec = make_spec("trains", seconds=30.0)
    with TrialRunner(tmp_path / "trials") as runner:
        runner(spec.replace(limits=spec.limits.replace(wait_seconds=allowed)))
    assert (lost == [0.0]) if allowed else (lost[0] >= waited)


def test_the_end_of_an_earlier_trial_is_not_taken_for_the_start_of_the_next(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, (tmp_path / "log").open("wb") as log:
        theirs.send(b'{"status": -9}')
        theirs.send(b'{"pid": 4321}')
        assert warm_process.WarmProcess(ours, tmp_path, log.fileno()).pid == 4321


def test_the_process_adopts_orphans_only_inside_the_runner(tmp_path: Path) -> None:
    before = adopt_orphans(False)
    try:
        with TrialRunner(tmp_path, warm=False):
            assert adopt_orphans(True)
        assert not adopt_orphans(False)
    finally:
        adopt_orphans(before)


@pytest.mark.slow
def test_a_probe_that_dies_while_it_looks_at_the_memory_has_found_the_rest(cold_world: World) -> None:
    result, _ = cold_world.run("dies_of_shapes", purpose="probe")
    assert result.status is TrialStatus.COMPLETED, result.error
    assert result.measurement is not None
    assert result.facts is not None
    assert result.facts.memory is None
    assert any("SIGSEGV" in warning for warning in result.facts.warnings)


def test_a_machine_is_probed_without_a_target(cold_world: World) -> None:
    result, _ = cold_world.run("nothing_of_this_name", purpose="machine")
    assert result.status is TrialStatus.COMPLETED, result.error
    assert result.ceilings is not None
    assert result.ceilings.device == "cpu"
    assert (result.ceilings.flops_per_second("fp32") or 0) > 0
