from __future__ import annotations

import errno
import io
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.machine import disk
from autotune.machine.disk import LEAST_FILE_BYTES, measure_disk_read, opened_files

MIB = 2**20
LARGE = LEAST_FILE_BYTES


def is_timed_in_the_end(path: Path) -> bool:
    """Return whether a file is read from the disk once the kernel has let go of its pages, which may take a while."""
    for _ in range(50):
        if measure_disk_read([path], path.parent) is not None:
            return True
        time.sleep(0.1)
    return False


def plant(path: Path, size: int = LARGE) -> Path:
    """Write a file and have it on the disk, so that its pages are clean."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
    return path


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Say which files are opened by path instead of timing them."""
    paths: list[str] = []

    def time_reading(descriptor: int, _budget_seconds: float) -> float:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return 1.0

    monkeypatch.setattr(disk, "_time_reading", time_reading)
    return paths


def test_files_opened_for_reading_are_kept_once_and_in_order(tmp_path: Path) -> None:
    first, second, third = (plant(tmp_path / name, 10) for name in ("a.bin", "b.bin", "c.bin"))
    plant(tmp_path / "before.bin", 10).read_bytes()
    with opened_files() as files:
        first.read_bytes()
        with open(os.fsencode(second), "rb"):
            pass
        first.read_text()
        os.close(os.open(third, os.O_RDONLY))
        with io.FileIO(str(first)):  # the same file once more, without `open`
            pass
    plant(tmp_path / "after.bin", 10).read_bytes()
    assert files == [first, second, third]


def test_a_file_that_is_read_and_written_is_kept_and_one_that_is_made_is_not(tmp_path: Path) -> None:
    both = plant(tmp_path / "both.bin", 10)
    with opened_files() as files:
        for mode in ("wb", "ab", "w+b", "a+b"):
            with open(tmp_path / f"{mode}.bin", mode):
                pass
        with open(tmp_path / "new.bin", "xb"):
            pass
        os.close(os.open(tmp_path / "made.bin", os.O_RDWR | os.O_CREAT))
        os.close(os.open(both, os.O_WRONLY))
        assert files == []
        with open(both, "r+b"):
            pass
    assert files == [both]


def test_code_pseudo_files_folders_and_descriptors_are_no_data(tmp_path: Path) -> None:
    data = plant(tmp_path / "data.bin", 10)
    names = ("module.py", "module.pyc", "extension.so", "library.so.6.1", "types.pyi")
    planted = [plant(tmp_path / name, 10) for name in names]
    descriptor = os.open(data, os.O_RDONLY)
    with opened_files() as files:
        for path in planted:
            path.read_bytes()
        Path("/proc/self/status").read_bytes()
        Path("/dev/null").read_bytes()
        os.close(os.open(tmp_path, os.O_RDONLY))
        with open(descriptor, "rb"):
            pass
    assert files == []


def test_an_open_that_fails_fails_as_it_would_without_us(tmp_path: Path) -> None:
    class Broken:
        def __fspath__(self) -> str:
            raise LookupError("the user's own")

    with opened_files() as files:
        with pytest.raises(FileNotFoundError):
            io.FileIO(str(tmp_path / "missing"))
        with pytest.raises(ValueError, match="null"):
            io.FileIO("a\0b")
        with pytest.raises(TypeError):
            io.FileIO(1.5)  # type: ignore[arg-type]
        with pytest.raises(LookupError, match="the user's own"):
            io.FileIO(Broken())  # type: ignore[arg-type]
    assert files == []


def test_a_name_stays_the_files_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = plant(tmp_path / "inner/data.bin", 10)
    monkeypatch.chdir(tmp_path / "inner")
    with opened_files() as files:
        Path("data.bin").read_bytes()
        monkeypatch.chdir(tmp_path)
        Path("inner/data.bin").read_bytes()
    assert files == [inner]


def test_each_context_has_its_own_files(tmp_path: Path) -> None:
    first, second = plant(tmp_path / "a.bin", 10), plant(tmp_path / "b.bin", 10)
    with opened_files() as outer:
        first.read_bytes()
        with opened_files() as inner:
            second.read_bytes()
        first.read_bytes()
    second.read_bytes()
    assert (outer, inner) == ([first, second], [second])


def test_a_training_that_fails_ends_the_listening(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_files():
        (tmp_path / "missing").read_bytes()
    assert disk._recorders == []


def test_threads_that_open_the_same_files_at_once(tmp_path: Path) -> None:
    planted = [plant(tmp_path / f"{i}.bin", 10) for i in range(50)]
    barrier = threading.Barrier(4)

    def read_all() -> None:
        barrier.wait(timeout=10)
        for path in planted:
            path.read_bytes()

    with opened_files() as files:
        threads = [threading.Thread(target=read_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
    assert sorted(files) == sorted(planted)


def test_so_many_files_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_MOST_FILES", 3)
    planted = [plant(tmp_path / f"{i}.bin", 10) for i in range(5)]
    with opened_files() as files:
        for path in planted:
            path.read_bytes()
    assert files == planted[:3]


def test_one_hook_serves_every_context() -> None:
    program = (
        "import sys\nadded = []\n"
        "sys.addaudithook(lambda event, _: added.append(event) if event == 'sys.addaudithook' else None)\n"
        "from autotune.machine.disk import opened_files\nprint(len(added))\n"
        "for _ in range(3):\n    with opened_files(): pass\nprint(len(added))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "1"]


def test_a_file_is_read_from_its_disk_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_cached_fraction", lambda _descriptor, _size: 0.0)  # a busy kernel still writes it back
    path = plant(tmp_path / "data.bin")
    before = path.stat()
    speed = measure_disk_read([path], tmp_path)
    assert speed is not None
    assert speed > 0
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    assert sorted(tmp_path.iterdir()) == [path]


def test_pages_are_dropped_before_the_clock_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_cached_fraction", lambda _descriptor, _size: 0.0)  # a busy kernel still writes it back
    path = plant(tmp_path / "data.bin")
    calls: list[tuple[Any, ...]] = []
    advise, read = os.posix_fadvise, os.preadv

    def spy_advise(descriptor: int, start: int, length: int, advice: int) -> None:
        calls.append((advice, start, length))
        advise(descriptor, start, length, advice)

    def spy_read(descriptor: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        calls.append(("read" if len(buffers[0]) > 1 else "look", offset))
        return read(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "posix_fadvise", spy_advise)
    monkeypatch.setattr(os, "preadv", spy_read)
    assert measure_disk_read([path], tmp_path) is not None
    first_read = next(i for i, call in enumerate(calls) if call[0] == "read")
    assert calls[first_read - 2 : first_read] == [(os.POSIX_FADV_DONTNEED, 0, LARGE), (os.POSIX_FADV_NORMAL, 0, 0)]
    assert calls[first_read:] == [("read", 0), ("read", 4 * MIB)]


@pytest.mark.parametrize(("budget", "pieces"), [(0.5, 1), (1.0, 1), (2.5, 3), (100.0, 4)])
def test_the_budget_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float, pieces: int
) -> None:
    path = plant(tmp_path / "data.bin", 16 * MIB)
    ticks = iter(range(100))
    monkeypatch.setattr(disk.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(disk, "_cached_fraction", lambda _descriptor, _size: 0.0)
    assert measure_disk_read([path], tmp_path, budget_seconds=budget) == 4 * MIB
    assert next(ticks) == 1 + pieces


def test_no_more_than_the_beginning_of_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plant(tmp_path / "data.bin", 2 * LARGE)
    monkeypatch.setattr(disk, "_MOST_BYTES", LARGE)
    ticks = iter(range(100))
    monkeypatch.setattr(disk.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(disk, "_cached_fraction", lambda _descriptor, _size: 0.0)
    assert measure_disk_read([path], tmp_path, budget_seconds=50) == LARGE / 2
    assert next(ticks) == 3


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plant(tmp_path / "data.bin")
    monkeypatch.setattr(disk, "_cached_fraction", lambda _descriptor, _size: os.truncate(path, 0) or 0.0)
    assert measure_disk_read([path], tmp_path) is None


def test_a_file_that_is_mapped_stays_in_memory_and_is_not_timed(tmp_path: Path) -> None:
    path = plant(tmp_path / "data.bin")
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError as reason:
            pytest.skip(f"this file system does not tell what is cached: {errno.errorcode[reason.errno or 0]}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[i] for i in range(0, len(mapped), mmap.PAGESIZE)) == 0
            assert measure_disk_read([path], tmp_path) is None
    assert is_timed_in_the_end(path)


@pytest.mark.parametrize("reason", [OSError(errno.EOPNOTSUPP, "x"), AttributeError("RWF_NOWAIT")])
def test_a_file_system_that_does_not_tell_what_is_cached_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception
) -> None:
    read = os.preadv

    def refuse(descriptor: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if flags:
            raise reason
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert measure_disk_read([plant(tmp_path / "data.bin")], tmp_path) is not None


def test_the_largest_of_the_files_is_read(tmp_path: Path, read_paths: list[str]) -> None:
    small, large = plant(tmp_path / "small.bin", LARGE), plant(tmp_path / "large.bin", LARGE + 1)
    plant(tmp_path / "folder/largest.bin", LARGE + 2)
    assert measure_disk_read([small, tmp_path / "gone", large, tmp_path], tmp_path / "folder") == 1.0
    assert read_paths == ["large.bin"]


def test_the_folder_is_searched_when_the_files_are_too_small(tmp_path: Path, read_paths: list[str]) -> None:
    small = plant(tmp_path / "small.bin", LARGE - 1)
    plant(tmp_path / "data/deep/er/large.bin")
    plant(tmp_path / "data/.git/objects.bin", LARGE + 1)
    plant(tmp_path / "data/venv/libtorch.so", LARGE + 1)
    plant(tmp_path / "elsewhere/linked.bin", LARGE + 1)
    (tmp_path / "data/link.bin").symlink_to(tmp_path / "elsewhere/linked.bin")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    os.mkfifo(tmp_path / "data/pipe")
    assert measure_disk_read([small], tmp_path / "data") == 1.0
    assert measure_disk_read([], tmp_path / "data") == 1.0
    assert read_paths == ["large.bin", "large.bin"]


def test_the_search_ends_after_so_many_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_paths: list[str]
) -> None:
    plant(tmp_path / "a/b/c/large.bin")
    monkeypatch.setattr(disk, "_MOST_ENTRIES", 3)
    assert measure_disk_read([], tmp_path) is None
    monkeypatch.setattr(disk, "_MOST_ENTRIES", 4)
    assert measure_disk_read([], tmp_path) == 1.0


@pytest.mark.parametrize("folder", ["empty", "missing", "file.bin"])
def test_nothing_large_enough_is_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    plant(tmp_path / "file.bin", 10)
    assert measure_disk_read([], tmp_path / folder) is None


def test_a_system_that_cannot_drop_pages_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plant(tmp_path / "data.bin")
    monkeypatch.delattr(os, "posix_fadvise")
    assert measure_disk_read([path], tmp_path) is None


@pytest.mark.parametrize("call", ["open", "fstat", "posix_fadvise", "preadv"])
def test_a_file_that_cannot_be_read_is_none_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = plant(tmp_path / "data.bin")
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        speed = measure_disk_read([path], tmp_path)
    assert speed is None
    assert len(os.listdir("/proc/self/fd")) == descriptors
