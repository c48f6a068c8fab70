"""The supervisor's end of a fork server (`forkserver`), and the trials that it has forked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.isolation.process import open_stdin

_SERVER_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_MESSAGE_BYTES = 65536


class ServerDiedError(ConnectionError):
    """The fork server has died, and nobody can tell how its trial has ended."""


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
        python: the interpreter and its options; ours without.
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
        python: Sequence[str] = (),
        cwd: str | None = None,
        is_script: bool = False,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self.modules: frozenset[str] | None = None
        with theirs:
            words = [str(theirs.fileno()), str(os.getpid()), *(["script"] if is_script else [])]
            self._process = subprocess.Popen(
                [*(python or (sys.executable,)), "-P", "-m", "autotune.isolation.warm.forkserver", *words],
                cwd=cwd,
                stdin=open_stdin(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.pid = self._process.pid

    def start(self, folder: Path, log: int) -> WarmProcess:
        """Fork a trial; the server is ready (`await_ready`).

        Args:
            folder: the trial's own folder.
            log: where it prints.

        Raises:
            OSError: the server has died or does not answer; start the trial cold.
        """
        return WarmProcess(self._channel, folder, log)

    def is_alive(self) -> bool:
        """Return whether its process has not ended."""
        return self._process.poll() is None

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


def _receive(channel: socket.socket) -> dict[str, Any]:
    message = channel.recv(_MESSAGE_BYTES)
    if not message:
        raise ConnectionError("the fork server has ended")
    answer: dict[str, Any] = json.loads(message)
    return answer
