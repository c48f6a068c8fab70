"""How fast the disk of a dataset reads: which files a training opens, and one of them read past the page cache.

Nothing is written, and only clean pages of the page cache are given up: reading them back is what is timed.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

LEAST_FILE_BYTES = 8 * 2**20
"""A smaller file is read before a disk has come up to speed."""

_PIECE_BYTES = 4 * 2**20
_MOST_BYTES = 64 * 2**20
_MOST_ENTRIES = 2000
_MOST_FILES = 10_000
_CHECKED_PAGES = 16
_MOST_CACHED = 0.1
_NO_DATA = ("/proc/", "/sys/", "/dev/")
_CODE = (".py", ".pyc", ".pyi", ".pth", ".so", ".pyd", ".dylib", ".dll")


class _Recorder:
    """Keeps the data files that are opened, each once.

    Attributes:
        files: those found so far.
    """

    def __init__(self) -> None:
        self.files: list[Path] = []
        self._seen: dict[str, object] = {}

    def record(self, path: Any, mode: Any, flags: Any) -> None:
        """Keep a file that is opened for reading.

        Args:
            path: as it was given to `open`: a path, or the number of a file that is open already.
            mode: as it was given to `open`; None for `os.open`.
            flags: as they are given to the system.
        """
        if isinstance(path, int) or len(self._seen) >= _MOST_FILES or not _reads(mode, flags):
            return
        name = os.path.abspath(os.fsdecode(path))
        mine = object()  # Two threads may open one file at once: setdefault lets one of them win.
        if self._seen.setdefault(name, mine) is mine and _is_data(name) and stat.S_ISREG(os.stat(name).st_mode):
            self.files.append(Path(name))


_recorders: list[_Recorder] = []


@contextmanager
def opened_files() -> Iterator[list[Path]]:
    """Yield a list that grows by every regular file this process opens for reading inside the context, each once.

    Python's own code, shared objects and files of /proc, /sys and /dev are left out, and so is what is opened without
    Python (HDF5, LMDB) or in another process (loader workers). The first use installs an audit hook, which cannot be
    removed: outside the context it costs each audited call about a tenth of a microsecond.

    Source: PEP 578.
    """
    _install_hook()
    recorder = _Recorder()
    _recorders.append(recorder)
    try:
        yield recorder.files
    finally:
        _recorders.remove(recorder)


def measure_disk_read(files: Sequence[Path], folder: Path, *, budget_seconds: float = 1.0) -> float | None:
    """Return bytes per second read from a data file whose pages were first dropped from the page cache.

    The disk may have a cache of its own, and so may the host of a virtual machine: this is what a first epoch meets at
    best. A file in memory (tmpfs) reads at the speed of memory.

    Source: posix_fadvise(2) (POSIX_FADV_DONTNEED), preadv2(2) (RWF_NOWAIT).

    Args:
        files: where to look first: the largest is read.
        folder: read its largest file when `files` has none of at least 8 MiB; of 2000 entries at most, hidden folders
            and links left out.
        budget_seconds: no further 4 MiB are read after so long.

    Returns:
        None when there is no file of at least 8 MiB, when the system cannot drop pages, when another user of the file
        keeps them (a memory map), or when it cannot be read.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    path = _find_largest(files) or _find_largest(_walk(folder))
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _time_reading(descriptor, budget_seconds)
        finally:
            os.close(descriptor)
    except OSError:
        return None


@cache
def _install_hook() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _recorders:
        return
    for recorder in tuple(_recorders):
        try:
            recorder.record(*arguments)
        except (OSError, ValueError, TypeError):
            pass  # What is raised here would be raised by the user's `open`, which says it better itself.


def _reads(mode: Any, flags: Any) -> bool:
    """Return whether a file is opened to read what is in it."""
    creates = isinstance(flags, int) and (flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_CREAT | os.O_TRUNC))
    return not creates and not set(mode or "") & set("wax")


def _is_data(name: str) -> bool:
    return not name.startswith(_NO_DATA) and not name.endswith(_CODE) and ".so." not in os.path.basename(name)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the regular files of a folder, the nearest first."""
    waiting, left = deque([str(folder)]), _MOST_ENTRIES
    while waiting:
        try:
            with os.scandir(waiting.popleft()) as entries:
                for entry in entries:
                    if left == 0:
                        return
                    left -= 1
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False) and _is_data(entry.path):
                        yield Path(entry.path)
        except OSError:
            continue


def _find_largest(paths: Iterable[Path]) -> Path | None:
    """Return the largest regular file; None when none is large enough."""
    largest, most = None, LEAST_FILE_BYTES - 1
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size > most:
            largest, most = path, status.st_size
    return largest


def _time_reading(descriptor: int, budget_seconds: float) -> float | None:
    """Return bytes per second over the beginning of a file; None when its pages stay in memory.

    Raises:
        OSError: it cannot be read.
    """
    size = min(os.fstat(descriptor).st_size, _MOST_BYTES)
    if _cached_fraction(descriptor, size) > _MOST_CACHED:
        return None
    # The whole range at once: page by page would throw away what the kernel has read ahead, as it does for a loader.
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    buffer = bytearray(_PIECE_BYTES)
    done, seconds, start = 0, 0.0, time.perf_counter()
    while done < size and seconds < budget_seconds:
        count = os.preadv(descriptor, [buffer], done)
        if count == 0:
            break
        done += count
        seconds = time.perf_counter() - start
    return done / seconds if seconds > 0 else None


def _cached_fraction(descriptor: int, size: int) -> float:
    """Return the share of a file's beginning that stays in the page cache when it is asked to go; 0 if not told."""
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # A look at one page shall not fetch those behind it.
    return sum(_is_cached(descriptor, size * i // _CHECKED_PAGES) for i in range(_CHECKED_PAGES)) / _CHECKED_PAGES


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        os.pread(descriptor, 1, offset)  # Asking has sent for the page: it shall be here before anything is timed.
    except (OSError, AttributeError):
        pass  # The system does not tell.
    return False
