"""Knows every process that a search has started, and ends them all when the search itself is killed.

Each bears a mark: a random number as its limit on realtime CPU time, which no training comes near. Unlike its
environment, session or parent, a process does not lose a limit by itself: fork and exec hand it on, and anybody may
read it.

    supervisor ── marks ──▶ trial ──▶ whatever that starts, in whatever session and environment
        │ pipe                                   ▲
        ▼                                        │ kills, when the pipe closes
      keeper ────────────────────────────────────┘

What another service starts for a process (systemd, a container's engine) is not its descendant, and bears no mark.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from types import TracebackType
from typing import Self

_CEILING = 2**62  # microseconds: more than 100,000 years
_LIMIT = b"Max realtime timeout"
_SWEEPS = 25
_SWEEP_PAUSE_SECONDS = 0.01
_LAST_SECONDS = 10.0
_QUIET_SWEEPS = 3


class Keeper:
    """Marks the processes of a search, and sweeps them up; a context manager that leaves none behind.

    Attributes:
        mark: the number that they bear; no other process has it.
    """

    def __init__(self) -> None:
        self.mark = _make_mark()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.isolation.keeper", str(self.mark)],
            stdin=subprocess.PIPE,  # closed by the kernel, however we end
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def take(self, pid: int) -> None:
        """Mark a process that was just started, and with it all that it will start."""
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)
            # Inside a process that is marked already, e.g. a training that compares its profile first, the outer mark
            # stays as the hard limit.
            outer = self.mark if hard == resource.RLIM_INFINITY else hard
            resource.prlimit(pid, resource.RLIMIT_RTTIME, (self.mark, outer))
        except (OSError, ValueError):
            return  # it has ended already, or a sandbox has no such limit: its group and its parent's death remain

    def sweep(self, spared: Collection[int] = ()) -> None:
        """Kill what bears the mark, and reap what of it was handed to us.

        Args:
            spared: processes to leave alone.
        """
        for _ in range(_SWEEPS):
            if not _sweep_once(self.mark, spared):
                return
            time.sleep(_SWEEP_PAUSE_SECONDS)

    def close(self) -> None:
        """Let the keeper go; what bears the mark is left alone from now on."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def find_marked(mark: int) -> list[int]:
    """Return the processes that bear a mark, the dead ones that were not reaped yet among them."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _bears(int(name), mark)]


def is_dead(pid: int) -> bool:
    """Return whether a process has ended, all its threads with it."""
    state = _read_state(pid)
    return not state or (state[0] in "ZX" and int(state[17]) <= 1)


def reap(pid: int) -> None:
    """Reap a child that has ended, if nobody else has."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def main(mark: int) -> None:
    """Wait for the supervisor's end, then kill what bears the mark until nothing does.

    Args:
        mark: of the supervisor's search.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        continue
    deadline = time.monotonic() + _LAST_SECONDS
    quiet = 0
    while quiet < _QUIET_SWEEPS and time.monotonic() < deadline:  # one that forks all the time hides from a single look
        quiet = 0 if _sweep_once(mark, ()) else quiet + 1
        time.sleep(_SWEEP_PAUSE_SECONDS)


def _make_mark() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    ceiling = _CEILING if hard == resource.RLIM_INFINITY else max(2, hard)
    return ceiling // 2 + secrets.randbelow(ceiling // 2)


def _sweep_once(mark: int, spared: Collection[int]) -> bool:
    """Return whether something had to be killed."""
    killed = False
    for pid in find_marked(mark):
        if pid in spared:
            continue
        if not is_dead(pid):
            killed = _kill(pid, mark) or killed
        elif _read_state(pid)[1:2] == [str(os.getpid())]:
            reap(pid)
    return killed


def _kill(pid: int, mark: int) -> bool:
    """Kill a process that bears the mark; its number may be another's by now, who is left alone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        handle = -1  # a kernel older than 5.3, or no descriptor left
    try:
        if not _bears(pid, mark):
            return False
        if handle == -1:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except (ProcessLookupError, PermissionError):  # e.g. a program of another user's that sudo has started
        return False
    finally:
        if handle != -1:
            os.close(handle)


def _bears(pid: int, mark: int) -> bool:
    _, _, rest = _read(pid, "limits").partition(_LIMIT)
    return b" %d " % mark in rest.partition(b"\n")[0]


def _read_state(pid: int) -> list[str]:
    """Return a process's state, its parent and what follows in its `stat`; empty when there is none."""
    return _read(pid, "stat").decode("ascii", "replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
