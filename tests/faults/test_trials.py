"""Fates of single trials that tests/isolation leaves out: each a result with a cause, in time, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench import can_mount, in_namespace, wait_until
from fault_toys import LINE_BYTES
from trial_world import IMPORT_PATH, World, open_world

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.trial import TrialStatus

pytestmark = pytest.mark.slow

SLACK_SECONDS = 8.0
"""A busy machine may take this much longer than the promise."""

GROUP_BYTES = 700 * 2**20

TOYS = Path(__file__).with_name("fault_toys.py")


@pytest.fixture(scope="module")
def whole_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("world"), warm=True) as world:
        yield world


@pytest.fixture
def world(whole_world: World) -> Iterator[World]:
    yield whole_world
    assert whole_world.find_strays() == {}
    result, log = whole_world.run("trains")
    assert result.status is TrialStatus.COMPLETED, (result.error, log)


def toy(name: str) -> str:
    return f"{TOYS}:{name}"


def seconds_of_one(world: World, num_workers: int = 0) -> float:
    """Return what a trial takes on this machine as it is now."""
    return world.run("trains", num_workers=num_workers)[0].elapsed_seconds


@pytest.mark.fault("13", injected="100 MiB printed without a line end", outcome="the log is capped; memory stays")
def test_a_line_without_an_end_is_capped(world: World) -> None:
    before = psutil.Process().memory_info().rss
    result, log = world.run(toy("floods_in_one_line"))
    assert result.status is TrialStatus.COMPLETED, result.error
    assert len(log) < 2 * 2**20
    assert "bytes left out ..." in log
    assert log.endswith("the last line\n")
    assert psutil.Process().memory_info().rss - before < LINE_BYTES / 2


@pytest.mark.fault(
    "11",
    injected="a dataset whose lock another thread holds when workers are forked",
    outcome="timeout with stacks; no worker is left",
)
def test_a_dataset_that_cannot_be_forked_is_a_timeout(world: World) -> None:
    limit = 2.0 + 2 * seconds_of_one(world, num_workers=1)
    result, log = world.run(toy("cannot_be_forked"), seconds=limit, num_workers=1)
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert world.is_reached()
    assert "Current thread" in log
    assert result.elapsed_seconds < limit + KILL_SECONDS + SLACK_SECONDS
    assert world.run(toy("cannot_be_forked"))[0].status is TrialStatus.COMPLETED  # without workers nothing is forked


@pytest.mark.fault("23", injected="SIGSTOP to a trial", outcome="timeout; it is killed although it is stopped")
def test_a_trial_that_is_stopped_is_killed_in_time(world: World) -> None:
    limit = 2.0 + 2 * seconds_of_one(world)
    result, _ = world.run(toy("stops_itself"), seconds=limit)
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert world.is_reached()
    assert result.elapsed_seconds < limit + KILL_SECONDS + SLACK_SECONDS


@pytest.mark.fault(
    "50",
    injected="default dtype, seeds, start method, environment, working folder and torch itself changed",
    outcome="the next trial learns what it learned before",
)
def test_no_trial_feels_what_another_has_changed(world: World) -> None:
    before = world.run("trains")[0].curves
    world.run(toy("changes_defaults"))
    after, _ = world.run("trains")
    assert before
    assert after.curves == before


_TRIALS = """
import sys
from pathlib import Path
from trial_world import open_world
with open_world(Path(sys.argv[1]), warm=True) as world:
    for toy, workers in zip(sys.argv[2::2], map(int, sys.argv[3::2])):
        result, _ = world.run(toy, num_workers=workers)
        print(result.status, result.cause or "-", result.error)
"""


def make_command(folder: Path, *trials: tuple[str, int]) -> list[str]:
    """Return a command that runs some trials, each a toy and its loader workers, and prints what came of each."""
    words = [word for name, workers in trials for word in (name, str(workers))]
    return [sys.executable, "-c", _TRIALS, str(folder), *words]


def run_trials(command: list[str], **options: object) -> list[str]:
    """Return what a supervisor in a process of its own printed of its trials."""
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(  # type: ignore[call-overload]
        command, env=environment, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout).splitlines()


@pytest.mark.skipif(not can_mount(), reason="no tmpfs can be mounted in a namespace here")
@pytest.mark.fault(
    "10", injected="a tmpfs of 1 MiB on /dev/shm", outcome="cause shm, with what to do; works without workers"
)
def test_shared_memory_that_is_too_small_is_named(tmp_path: Path) -> None:
    wide = toy("has_wide_samples")
    command = make_command(tmp_path, (wide, 1), (wide, 0), ("trains", 1))
    small, without, other = run_trials(in_namespace("-t tmpfs -o size=1m tmpfs /dev/shm", command))
    assert small.startswith("crashed shm "), small
    assert "/dev/shm" in small
    assert without.startswith("completed - ")
    assert other.startswith("completed - ")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Yield a memory control group of 700 MiB."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    group = Path("/sys/fs/cgroup/memory") / own.rpartition(":")[2].lstrip("/") / f"autotune-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error.strerror}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), seconds=30)
        group.rmdir()


@pytest.mark.fault(
    "3", injected="a memory control group of 700 MiB", outcome="oom-killed; the supervisor and the next trial live"
)
def test_a_trial_that_the_kernel_kills_is_named(tmp_path: Path, small_group: Path) -> None:
    def join() -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))

    command = make_command(tmp_path, (toy("needs_more_than_there_is"), 0), ("trains", 0))
    killed, following = run_trials(command, preexec_fn=join)
    assert killed.startswith("out_of_memory oom-killed "), killed
    assert following.startswith("completed - ")
