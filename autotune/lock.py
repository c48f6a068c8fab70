"""A lock file that the kernel gives back when its holder dies, and beside it who that is.

Whoever deletes the file makes room for a second one of its name, which is free. So the holder is known by its process
too, and while that one lives nobody gets in.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import AutotuneError, BusyError, MachineError
from autotune.records.codec import Record, read_record, write_record

HOLDER_FILE = "holder.json"
_MOST_HOLDER_BYTES = 4096
_MOST_REPLACEMENTS = 100
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_held: set[int] = set()


def _forget_held() -> None:
    """Close what a forked child has inherited: a lock belongs to the process that took it, and ends with it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_held)


class Holder(Record):
    """Who holds a lock."""

    pid: int
    """Of the process."""
    host: str
    """It runs on."""
    started: str
    """When it took the lock, local time."""
    ticks: int
    """When the process was started, in the kernel's ticks since boot: a pid is given again, both together are not."""

    def is_alive_here(self) -> bool:
        """Return whether it is another process of this machine that still runs."""
        return self.host == socket.gethostname() and self.pid != os.getpid() and self.ticks == _read_ticks(self.pid)


@contextmanager
def hold_lock(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file, which stays when it is given back; `holder.json` beside it does not.

    Args:
        path: of the file.
        busy: what to say when somebody else holds it.

    Raises:
        BusyError: somebody else holds it.
        MachineError: the file system has no locks.
        OSError: the files cannot be written.
    """
    holder_file = path.with_name(HOLDER_FILE)
    descriptor, holder = _take(path), _read_holder(holder_file)
    if descriptor is None or (holder is not None and holder.is_alive_here()):
        if descriptor is not None:
            os.close(descriptor)
        raise BusyError(f"{busy} ({_describe(holder)})", hint="wait for it, or stop it")
    _held.add(descriptor)
    try:
        write_record(holder_file, _describe_this_process())
        yield
    finally:
        if descriptor in _held:  # a forked child has closed it
            _remove(holder_file)
            _held.discard(descriptor)
            os.close(descriptor)


def find_holder(path: Path) -> str | None:
    """Return in words who holds a lock file now; None when nobody does, or it cannot be told. Nothing is written."""
    holder = _read_holder(path.with_name(HOLDER_FILE))
    if holder is not None and holder.is_alive_here():
        return _describe(holder)
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _describe(holder) if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return None


def _describe(holder: Holder | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder.pid} on {holder.host}, since {holder.started}"


def _read_holder(file: Path) -> Holder | None:
    try:
        return read_record(file, Holder, max_bytes=_MOST_HOLDER_BYTES)
    except AutotuneError:
        return None


def _take(path: Path) -> int | None:
    """Return a descriptor that holds a lock file; None when somebody else does."""
    for _ in range(_MOST_REPLACEMENTS):
        descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise MachineError(
                f"{path} cannot be locked: {error.strerror}",
                hint="its file system has no locks, and two at work would spoil each other's timings: "
                "work in a folder of a local disk",
            ) from None
        if _is_named(descriptor, path):
            return descriptor
        os.close(descriptor)  # deleted or replaced since it was opened: the lock would keep nobody out
    return None


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _describe_this_process() -> Holder:
    pid = os.getpid()
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return Holder(pid=pid, host=socket.gethostname(), started=started, ticks=_read_ticks(pid) or 0)


def _read_ticks(pid: int) -> int | None:
    """Return when a process was started, in ticks since boot; None where there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        pass  # a disk that cannot be written any more: its process is known to be gone soon
