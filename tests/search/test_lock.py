"""One at a time in a folder, whatever becomes of the lock's file, of its holder and of what the holder has started."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune import lock
from autotune.errors import BusyError, MachineError
from autotune.lock import _read_ticks, hold_lock
from autotune.search.store.folder import find_search_at_work, lock_searches
from autotune.train.runs.folder import locked_run

HOLD = """
import sys
from pathlib import Path
from autotune.search.store.folder import lock_searches
with lock_searches(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[int]:
    """Have another process hold the lock of a folder's searches; yield its pid."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
        holder.communicate()


@pytest.mark.fault("31", injected="a second search in the folder", outcome="exit 6 at once, names pid, host and start")
def test_who_holds_it_is_named(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as pid, pytest.raises(BusyError) as caught, lock_searches(tmp_path):
        pass
    started = r"since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    caught.match(rf"another search is at work in .* \(process {pid} on {socket.gethostname()}, {started}\)")
    assert caught.value.exit_code == 6
    with lock_searches(tmp_path):
        pass
    assert not (tmp_path / ".autotune/holder.json").exists()


@pytest.mark.fault("F1", injected="the lock's file deleted by a trial", outcome="nobody gets in while its holder lives")
def test_a_deleted_lock_lets_nobody_in(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as pid:
        (tmp_path / ".autotune/lock").unlink()
        with pytest.raises(BusyError, match=f"process {pid} on"), lock_searches(tmp_path):
            pass
        assert f"process {pid}" in (find_search_at_work(tmp_path) or "")
    with lock_searches(tmp_path):
        pass


@pytest.mark.parametrize("leave", ["deleted", "replaced"])
def test_a_lock_that_is_deleted_while_it_is_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    path, plain, calls = tmp_path / "lock", fcntl.flock, []

    def delete_before_the_first(descriptor: int, how: int) -> None:
        if not calls:
            path.unlink()
            if leave == "replaced":
                path.touch()
        calls.append(how)
        plain(descriptor, how)

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": delete_before_the_first}))
    with hold_lock(path, "busy"):
        assert len(calls) == 2
        with pytest.raises(BusyError), hold_lock(path, "busy"):
            pass


@pytest.mark.parametrize("change", ["dead", "other start", "other host", "self", "nonsense", "huge"])
def test_a_holder_that_is_no_more_keeps_nobody_out(tmp_path: Path, change: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        plain: dict[str, Any] = {"pid": other.pid, "host": socket.gethostname(), "started": "2026-11-22 10:00:00"}
        plain["ticks"] = _read_ticks(other.pid)
        (tmp_path / "holder.json").write_text(json.dumps(plain))
        with pytest.raises(BusyError, match=f"process {other.pid} on"), hold_lock(tmp_path / "lock", "busy"):
            pass
        if change == "dead":
            other.kill()
            other.wait()
        changes = {
            "other start": {"ticks": 1},
            "other host": {"host": "elsewhere"},
            "self": {"pid": os.getpid(), "ticks": _read_ticks(os.getpid())},
            "nonsense": {"pid": [1]},
            "huge": {"pid": 10**39},
        }
        (tmp_path / "holder.json").write_text(json.dumps(plain | changes.get(change, {})))
        with hold_lock(tmp_path / "lock", "busy"):
            pass
        other.kill()


def _wait(connection: Any) -> None:
    connection.send("up")
    connection.recv()


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with hold_lock(tmp_path / "lock", "busy"):
        child = context.Process(target=_wait, args=(theirs,))
        child.start()
        assert ours.recv() == "up"
    with hold_lock(tmp_path / "lock", "busy"):
        pass
    ours.send("done")
    child.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.fault("34", injected="flock raises ENOLCK, ENOSYS, EOPNOTSUPP", outcome="exit 5, what to do")
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for hold in (lock_searches, locked_run):
        with (
            pytest.raises(MachineError, match=f"lock cannot be locked: {os.strerror(number)}") as caught,
            hold(tmp_path),
        ):
            pass
        assert "local disk" in caught.value.hint
    assert find_search_at_work(tmp_path) is None


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace")
@pytest.mark.fault("34", injected="the kernel's flock fails (strace)", outcome="exit 5 in two lines, no traceback")
def test_a_search_on_a_file_system_without_locks_ends_in_two_lines(tmp_path: Path) -> None:
    trace = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(tmp_path / "trace"),
        "-e",
        "trace=flock",
        "-e",
        "inject=flock:error=ENOLCK",
    ]
    words = [sys.executable, "-P", "-m", "autotune", "search", "demo", "--budget", "60s"]
    ended = subprocess.run([*trace, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    if "ptrace" in ended.stderr:
        pytest.skip("tracing is not permitted")
    assert ended.returncode == 5, ended.stderr
    assert ended.stderr.splitlines() == [
        f"error: {tmp_path}/.autotune/lock cannot be locked: No locks available",
        "  its file system has no locks, and two at work would spoil each other's timings: work in a folder of a local "
        "disk",
    ]


def test_who_is_at_work_is_asked_without_a_trace(tmp_path: Path) -> None:
    assert find_search_at_work(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with lock_searches(tmp_path):
        assert f"process {os.getpid()} on" in (find_search_at_work(tmp_path) or "")
        (tmp_path / ".autotune/holder.json").unlink()
        assert find_search_at_work(tmp_path) == "another process"
    assert find_search_at_work(tmp_path) is None


def test_two_trainings_of_one_run_are_kept_apart(tmp_path: Path) -> None:
    with locked_run(tmp_path), pytest.raises(BusyError, match="another training is at work in"), locked_run(tmp_path):
        pass
