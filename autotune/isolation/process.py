"""A trial's process as its supervisor sees it, and what it prints; one that is started cold, by exec."""

from __future__ import annotations

import fcntl
import functools
import io
import os
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

_POLL_SECONDS = 0.05
_SHORTEST_PAUSE_SECONDS = 0.0005
_RELEASE_SECONDS = 0.3
_LOG_HEAD_BYTES = 512 * 1024
_LOG_TAIL_BYTES = 512 * 1024
_LAST_BYTES = 16 * 1024  # room for the stacks of a trial that was killed


class TrialProcess(Protocol):
    """A running trial, the leader of its own process group.

    Its number stays its own until `release`: nobody else is hit by a signal that comes too late.
    """

    pid: int

    def wait(self, seconds: float) -> int | None:
        """Return the exit status (minus the signal's number for a death by signal), or None while it runs."""
        ...

    def release(self) -> None:
        """Let its number go."""
        ...


class ColdProcess:
    """A trial started by exec: its environment may differ from ours."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        log: int,
        *,
        python: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        """Start the trial.

        Args:
            folder: the trial's own folder.
            environment: added to ours.
            log: where it prints.
            python: the interpreter and its options; ours without.
            cwd: working folder; None for ours.
        """
        arguments = [str(folder), str(time.monotonic()), str(os.getpid())]
        self._process = subprocess.Popen(
            [*(python or (sys.executable,)), "-P", "-m", "autotune.isolation.entry", *arguments],
            cwd=cwd,
            stdin=open_stdin(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None while it runs."""
        deadline = time.monotonic() + seconds
        pause = _SHORTEST_PAUSE_SECONDS
        while (status := find_exit_status(self.pid, block=False)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _POLL_SECONDS)
        return status

    def release(self) -> None:
        """Reap it, if it has ended or is about to."""
        try:
            self._process.wait(_RELEASE_SECONDS)
        except subprocess.TimeoutExpired:
            return  # it will bear the mark until a later sweep


@functools.cache
def open_stdin() -> int:
    """Return what trials read from, a file descriptor that stays open: nothing is ever there to be read.

    Where our own is a terminal it is one too, as wide as ours: scripts ask it for its size (`stty size`).
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    if not os.isatty(0):
        return nothing
    try:
        _, terminal = os.openpty()  # our end stays open: a terminal that was hung up has no size
        tty.setraw(terminal)
        attributes = termios.tcgetattr(terminal)
        attributes[tty.CC][termios.VMIN] = attributes[tty.CC][termios.VTIME] = 0  # a read ends at once, as a file's end
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    except (OSError, termios.error):
        return nothing  # this system has no more of them
    return terminal


def find_exit_status(pid: int, *, block: bool) -> int | None:
    """Return how a child ended (minus the signal's number for a death by signal), and leave it to be reaped.

    Args:
        pid: of the child.
        block: wait for its end; else None is returned while it runs.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG))
    except ChildProcessError:
        return 0  # whoever started us has SIGCHLD ignored, so the kernel keeps no status
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class CappedLog:
    """Copies what a trial prints into a file, keeping the head and the tail of a flood.

    Attributes:
        descriptor: where the trial writes; closed by `release` once the trial has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = bytearray()
        self._dropped = 0
        self._room = _LOG_HEAD_BYTES
        self._source, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="autotune-log", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Close our end for writing, so that the log ends when the trial's processes do."""
        os.close(self.descriptor)

    def finish(self, seconds: float = 1.0) -> str:
        """Wait for the end of the output and return its last part."""
        self._thread.join(seconds)
        return bytes(self._tail[-_LAST_BYTES:]).decode("utf-8", "replace")

    def _copy(self) -> None:
        with os.fdopen(self._source, "rb", buffering=0) as source:
            try:
                with self._path.open("wb", buffering=0) as file:
                    for chunk in self._chunks(source):
                        file.write(chunk)
            except OSError:
                # A full disk must not take the trial with it, which it would if nobody read what it prints.
                for _ in self._chunks(source):
                    continue

    def _chunks(self, source: io.RawIOBase) -> Iterator[bytes]:
        while chunk := source.read(65536):
            self._tail += chunk
            if len(self._tail) > 2 * _LOG_TAIL_BYTES:
                del self._tail[:-_LOG_TAIL_BYTES]
            yield chunk[: self._room]
            self._dropped += max(0, len(chunk) - self._room)
            self._room = max(0, self._room - len(chunk))
        if self._dropped:
            left_out = self._dropped - _LOG_TAIL_BYTES
            yield b"\n... %d bytes left out ...\n" % left_out if left_out > 0 else b""
            yield bytes(self._tail[-min(self._dropped, _LOG_TAIL_BYTES) :])
