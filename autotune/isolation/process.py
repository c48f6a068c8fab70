"""A trial's process as its supervisor sees it, started warm by the fork server or cold by exec."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_SERVER_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_SHORTEST_PAUSE_SECONDS = 0.0005
_RELEASE_SECONDS = 0.3
_LOG_HEAD_BYTES = 512 * 1024
_LOG_TAIL_BYTES = 512 * 1024
_LAST_BYTES = 16 * 1024  # room for the stacks of a trial that was killed
_MESSAGE_BYTES = 65536


class ServerDiedError(ConnectionError):
    """The fork server has died, and nobody can tell how its trial has ended."""


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
        python: Sequence[str] = (sys.executable,),
        cwd: str | None = None,
    ) -> None:
        """Start the trial.

        Args:
            folder: the trial's own folder.
            environment: added to ours.
            log: where it prints.
            python: the interpreter and its options.
            cwd: working folder; None for ours.
        """
        arguments = [str(folder), str(time.monotonic()), str(os.getpid())]
        self._process = subprocess.Popen(
            [*python, "-P", "-m", "autotune.isolation.entry", *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
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


class WarmProcess:
    """A trial forked from the server."""

    def __init__(self, channel: socket.socket, folder: Path, log: int) -> None:
        request = {"folder": str(folder), "started": time.monotonic()}
        self._channel = channel
        channel.settimeout(10.0)
        socket.send_fds(channel, [json.dumps(request).encode()], [log])
        answer = _receive(channel)
        while "pid" not in answer:
            # The end of an earlier trial that outlived its kill for a while.
            answer = _receive(channel)
        self.pid = int(answer["pid"])

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None while it runs.

        Raises:
            ServerDiedError: the server has died, and the kernel has ended the trial with it.
        """
        self._channel.settimeout(max(seconds, 0.001))
        try:
            return int(_receive(self._channel)["status"])
        except TimeoutError:
            return None
        except OSError as error:
            raise ServerDiedError(str(error)) from None

    def release(self) -> None:
        """Do nothing: the server reaps it before it starts the next one."""


class ForkServer:
    """Starts trials warm for as long as it lives, which is no longer than the thread that made it.

    Args:
        environment: added to ours.
        python: the interpreter and its options.
        cwd: working folder; None for ours.
        is_script: its trials are a script's.

    Attributes:
        pid: of the server's process.
        modules: top-level modules that it has imported, once it has told so.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        python: Sequence[str] = (sys.executable,),
        cwd: str | None = None,
        is_script: bool = False,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self.modules: frozenset[str] | None = None
        with theirs:
            words = [str(theirs.fileno()), str(os.getpid()), *(["script"] if is_script else [])]
            self._process = subprocess.Popen(
                [*python, "-P", "-m", "autotune.isolation.warm.forkserver", *words],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.pid = self._process.pid

    def start(self, folder: Path, log: int, *, should_stop: Callable[[], bool]) -> WarmProcess:
        """Fork a trial.

        Args:
            folder: the trial's own folder.
            log: where it prints.
            should_stop: polled while the server starts up.

        Raises:
            OSError: the server has died, does not answer or is no longer wanted; start the trial cold.
        """
        self.await_ready(should_stop)
        return WarmProcess(self._channel, folder, log)

    def close(self) -> None:
        """End the server."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def await_ready(self, should_stop: Callable[[], bool]) -> None:
        """Wait until it has imported what it keeps ready.

        Args:
            should_stop: polled; True ends the wait.

        Raises:
            OSError: it has died, does not answer or is no longer wanted.
        """
        deadline = time.monotonic() + _SERVER_START_SECONDS
        self._channel.settimeout(_POLL_SECONDS)
        while self.modules is None:
            try:
                self.modules = frozenset(_receive(self._channel)["modules"])
            except TimeoutError:
                if should_stop() or time.monotonic() > deadline:
                    raise


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


def _receive(channel: socket.socket) -> dict[str, Any]:
    message = channel.recv(_MESSAGE_BYTES)
    if not message:
        raise ConnectionError("the fork server has ended")
    answer: dict[str, Any] = json.loads(message)
    return answer
