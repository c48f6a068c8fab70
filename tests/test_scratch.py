"""Temporary folders: ours alone, gone in the end, and swept when whoever made them was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autotune import scratch
from autotune.scratch import make_scratch, remove_scratch, scratch_folder, sweep_scratch

OWNER = """
import sys
from pathlib import Path
from autotune.scratch import make_scratch
print(make_scratch("view", Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def owner(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process and the scratch folder that it has made; the process is killed in the end."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().rstrip("\n"))
        finally:
            process.kill()


def leave_behind(parent: Path, fill: Callable[[Path], object] = lambda _folder: None) -> Path:
    """Return the scratch folder of a process that was killed."""
    with owner(parent) as (process, folder):
        fill(folder)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert folder.is_dir()
    return folder


def fill_badly(folder: Path) -> None:
    """Make what is hard to remove: closed folders, a depth beyond the longest path, odd names, a pipe, links."""
    deep = folder / "closed"
    deep.mkdir()
    (deep / "file").write_text("x")
    (folder / "link").symlink_to(folder.parent)
    (folder / os.fsdecode(b"\xff\n")).mkdir()
    os.mkfifo(folder / "pipe")
    before = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(25):
            os.mkdir("n" * 200)
            os.chdir("n" * 200)
        os.chmod(".", 0)
    finally:
        os.chdir(before)
    deep.chmod(0)
    folder.chmod(0o500)


def test_a_scratch_folder_is_ours_alone_and_gone_in_the_end(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        fill_badly(folder)
    assert list(temporary.iterdir()) == []
    with scratch_folder() as folder:
        folder.rmdir()  # somebody else clears the temporary folder


@pytest.mark.fault("F8", injected="kill -9 of the owner of a scratch folder", outcome="the next command removes it")
@pytest.mark.parametrize("fill", [lambda _folder: None, fill_badly], ids=["empty", "badly filled"])
def test_what_a_dead_process_left_is_swept(temporary: Path, fill: Callable[[Path], object]) -> None:
    leave_behind(temporary, fill)
    sweep_scratch()
    assert list(temporary.iterdir()) == []


@pytest.mark.fault("F8", injected="a sweep beside a living owner", outcome="the living one's folder is untouched")
def test_a_living_neighbours_folder_is_untouched(temporary: Path) -> None:
    with owner(temporary) as (_, theirs), scratch_folder() as ours:
        (theirs / "file").write_text("x")
        dead = leave_behind(temporary)
        before = theirs.stat()
        sweep_scratch()
        assert {*temporary.iterdir()} == {theirs, ours}
        assert theirs.stat() == before
        assert (theirs / "file").read_text() == "x"
        assert not dead.exists()


def test_what_is_not_ours_stays(temporary: Path) -> None:
    hexadecimal = "0123456789abcdef"
    others = [f"autotune-view-{hexadecimal}0", "autotune-view-examples", "autotune-profiles", f"view-{hexadecimal}"]
    for name in others:
        (temporary / name).mkdir(mode=0o700)
    (temporary / f"autotune-view-{hexadecimal}").symlink_to(temporary / others[0])
    (temporary / f"autotune-scratch-{hexadecimal}").write_text("a file")
    if os.geteuid() == 0:
        foreign = temporary / f"autotune-view-{hexadecimal[::-1]}"
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)
    before = {path: path.lstat() for path in temporary.iterdir()}
    sweep_scratch()
    assert {path: path.lstat() for path in temporary.iterdir()} == before


@pytest.mark.fault("F8", injected="a folder swapped for a link while it is removed", outcome="nothing outside changes")
def test_removal_is_never_led_outside(temporary: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("x")
    victim.chmod(0o750)
    before = victim.stat()
    folder = make_scratch()
    (folder / "inner").mkdir()
    listed = scratch._list

    def list_and_swap(descriptor: int) -> list[Any]:
        entries = listed(descriptor)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
                path.symlink_to(victim)
        return entries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "_list", list_and_swap)
        with pytest.raises(NotADirectoryError):
            remove_scratch(folder)
    assert victim.stat() == before
    sweep_scratch()  # what could not be removed was let go of
    assert list(temporary.iterdir()) == []
    assert (victim / "file").read_text() == "x"


def test_a_sweep_that_is_faster_than_the_lock_takes_nobodys_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, []

    def sweep_first(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(descriptor)
            sweep_scratch()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    folder = make_scratch()
    assert taken
    assert list(temporary.iterdir()) == [folder]
    sweep_scratch()
    assert folder.is_dir()
    remove_scratch(folder)


def test_where_nothing_can_be_locked_nothing_is_swept(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_folder() as folder:
        sweep_scratch()
        assert folder.is_dir()
    assert list(temporary.iterdir()) == []


def test_a_sweep_ends_in_time_and_without_a_word(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = leave_behind(temporary)
    monkeypatch.setattr(scratch, "_SWEEP_SECONDS", -1.0)
    sweep_scratch()
    assert dead.is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "nowhere"))
    sweep_scratch()
