"""Whatever a trial starts bears its runner's mark, and is swept with it; nobody else's process is touched."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from trial_world import find_borne, is_alive, open_world, wait_until

from autotune.isolation import keeper as keeper_module
from autotune.isolation import runner as spawn
from autotune.isolation.keeper import Keeper, find_marked, is_dead
from autotune.records.trial import TrialStatus

_ESCAPE = """
import os, sys
os.setsid()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.execve("/bin/sleep", ["sleep", "1000"], {})
"""


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that is killed in the end."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow_cases("True")
@pytest.mark.fault("F6", injected="daemon with an empty environment, its own session", outcome="gone with its trial")
@pytest.mark.fault("12", injected="setsid, double fork, execve without environment", outcome="swept after the trial")
@pytest.mark.parametrize("warm", [True, False])
def test_a_daemon_without_environment_is_gone_after_its_trial(tmp_path: Path, warm: bool) -> None:
    with open_world(tmp_path, warm=warm) as world:
        assert world.run("escapes")[0].status == TrialStatus.COMPLETED
        assert not is_alive(int((tmp_path / "escapee").read_text()))
        # It had the log's pipe, for which a thread waits here.
        assert not any(thread.name == "autotune-log" for thread in threading.enumerate())
        assert world.find_strays() == {}


def test_a_mark_survives_a_new_session_and_an_empty_environment() -> None:
    with Keeper() as keeper, running(sys.executable, "-c", f"input()\n{_ESCAPE}") as first:
        keeper.take(first.pid)
        assert find_marked(keeper.mark) == [first.pid]


def test_a_sweep_ends_what_a_marked_process_has_started_and_nothing_else() -> None:
    code = f"import sys; sys.stdin.read(1)\n{_ESCAPE}"
    with (
        Keeper() as keeper,
        running("sleep", "1000") as users_own,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first,
    ):
        assert first.stdin is not None
        assert first.stdout is not None
        keeper.take(first.pid)
        first.stdin.write(b"x")
        first.stdin.close()
        escapee = int(first.stdout.readline())
        assert wait_until(lambda: find_borne(keeper.mark).get(escapee) == "sleep 1000")
        keeper.sweep()
        assert not is_alive(escapee)
        assert users_own.poll() is None


def test_a_spared_process_is_left_alone() -> None:
    with Keeper() as keeper, running("sleep", "1000") as server, running("sleep", "1000") as other:
        keeper.take(server.pid)
        keeper.take(other.pid)
        keeper.sweep((server.pid,))
        assert is_alive(server.pid)
        assert not is_alive(other.pid)


def test_a_process_that_does_not_bear_the_mark_when_it_is_to_be_killed_is_left_alone() -> None:
    with Keeper() as keeper, running("sleep", "1000") as foreign:  # it has the number that another one had
        assert not keeper_module._kill(foreign.pid, keeper.mark)
        assert foreign.poll() is None


def test_without_handles_for_processes_the_mark_is_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with Keeper() as keeper, running("sleep", "1000") as ours, running("sleep", "1000") as foreign:
        keeper.take(ours.pid)
        assert keeper_module._kill(ours.pid, keeper.mark)
        assert not keeper_module._kill(foreign.pid, keeper.mark)
        assert ours.wait() == -signal.SIGKILL
        assert foreign.poll() is None


def test_no_two_keepers_have_the_same_mark() -> None:
    with Keeper() as one, Keeper() as other:
        assert one.mark != other.mark


def test_a_keeper_inside_a_marked_process_leaves_it_to_both() -> None:
    code = """
import subprocess
from autotune.isolation.keeper import Keeper
with Keeper() as inner, subprocess.Popen(["sleep", "1000"]) as process:
    inner.take(process.pid)
    print(inner.mark, process.pid, flush=True)
    input()
    inner.sweep()
    process.wait()
"""
    with (
        Keeper() as outer,
        subprocess.Popen(
            [sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as middle,
    ):
        assert middle.stdin is not None
        assert middle.stdout is not None
        outer.take(middle.pid)
        print(file=middle.stdin, flush=True)
        mark, pid = map(int, middle.stdout.readline().split())
        assert find_marked(mark) == [pid]
        assert {middle.pid, pid} <= {*find_marked(outer.mark)}
        print(file=middle.stdin, flush=True)
        assert middle.wait() == 0
        assert not is_alive(pid)


def test_a_dead_process_that_is_not_reaped_yet_is_dead() -> None:
    with subprocess.Popen(["true"]) as process:
        assert wait_until(lambda: is_dead(process.pid))
    assert is_dead(process.pid)
    assert not is_dead(os.getpid())


def test_a_taken_process_that_is_gone_already_is_no_error() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with Keeper() as keeper:
        keeper.take(process.pid)
        assert find_marked(keeper.mark) == []


def test_the_limit_of_this_process_stays_what_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_RTTIME)
    with Keeper() as keeper, running("sleep", "1000") as process:
        keeper.take(process.pid)
    assert resource.getrlimit(resource.RLIMIT_RTTIME) == before


@pytest.mark.slow
@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("warm", [True, False])
def test_a_group_is_killed_while_its_number_is_still_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    leaders, killpg = [], os.killpg

    def look(pid: int, number: int) -> None:
        leaders.append((Path(f"/proc/{pid}/stat").exists(), is_dead(pid)))
        killpg(pid, number)

    with open_world(tmp_path, warm=warm) as world:
        world.run("trains")
        monkeypatch.setattr(spawn.os, "killpg", look)
        world.run("trains")
    assert leaders == [(True, True)]  # dead, but not reaped
