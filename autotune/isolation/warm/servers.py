"""Fork servers of one runner: trials find torch imported.

One server for each way to start a process: interpreter, environment (a malloc library is preloaded into the server),
working folder. It has imported what a trial started anew would import as well, so the first trial comes no later for
it, and all are alike. None where a script changes what libraries read when they are loaded, or where a file beside it
has the name of a module that the server has imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autotune.isolation.warm.process import ForkServer, WarmProcess
from autotune.machine.cgroups import read_memory_headroom

TEMPORARY = "TMPDIR"
"""The environment's name for the folder of temporary files."""

_MOST_SERVERS = 3
_MOST_FAILURES = 3
_LEAST_FREE_BYTES = 4 * 2**30
"""Of memory, for each server but the first of a workload: it takes about 300 MiB, which a training must not miss."""
_MODULE_ENDINGS = frozenset({".py", ".pyc", ".so", ".pyd"})


@dataclass(frozen=True)
class ProcessKind:
    """How a trial's process is started.

    Attributes:
        settings: added to our environment.
        python: the interpreter and its options; ours without.
        cwd: working folder; None for ours.
        beside: folder whose modules a script imports first; None for a workload.
        temporary: added to our environment too: where a runner has its temporary files, each its own.
    """

    settings: tuple[tuple[str, str], ...] = ()
    python: tuple[str, ...] = ()
    cwd: str | None = None
    beside: Path | None = None
    temporary: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def environment(self) -> dict[str, str]:
        """All that is added to our environment."""
        return dict((*self.settings, *self.temporary))


@dataclass
class Starts:
    """What is known of the starts of a target's processes, by both runners of a pair.

    Attributes:
        failures: servers that may still die before everything is started cold; 0 where nothing may be warm.
        shown: purposes and settings of which warm trials failed no more than cold ones would have.
    """

    failures: int = _MOST_FAILURES
    shown: set[tuple[str, str]] = field(default_factory=set)


class Servers:
    """The servers of one runner.

    Args:
        take: told of each process that is started.
        should_stop: polled while one starts.
        starts: what is known so far.

    Attributes:
        starts: the same.
    """

    def __init__(self, take: Callable[[int], None], should_stop: Callable[[], bool], starts: Starts) -> None:
        self.starts = starts
        self._take, self._should_stop = take, should_stop
        self._servers: dict[ProcessKind, ForkServer] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the servers that run."""
        return tuple(server.pid for server in self._servers.values())

    def has(self, wanted: ProcessKind) -> bool:
        """Return whether a server runs for a process."""
        return wanted in self._servers

    def prepare(self, wanted: ProcessKind) -> bool:
        """Open a server for a process, where none runs; it ends with this thread.

        Returns whether there is one.
        """
        if wanted in self._servers and not self._servers[wanted].is_alive():
            self._lose(wanted)
        if not self.starts.failures:
            self.close()
            return False
        if wanted in self._servers:
            return True
        is_script = wanted.beside is not None
        if (is_script or self._servers) and not _has_memory():
            if is_script:
                self.forbid()  # from here on all are alike again
            return False
        while len(self._servers) >= _MOST_SERVERS:
            self._close(next(iter(self._servers)))
        server = ForkServer(wanted.environment, python=wanted.python, cwd=wanted.cwd, is_script=is_script)
        self._servers[wanted] = server
        self._take(server.pid)
        return True

    def await_ready(self, wanted: ProcessKind, *, until: float) -> None:
        """Wait until the server for a process has started up, where there is one.

        Args:
            wanted: how the process is to be started.
            until: `time.monotonic()` until which it may take.
        """
        if wanted in self._servers:
            try:
                self._servers[wanted].await_ready(lambda: self._should_stop() or time.monotonic() >= until)
            except OSError:
                self._lose(wanted)

    def start(self, wanted: ProcessKind, folder: Path, log: int) -> WarmProcess | None:
        """Start a trial by a server that is ready (`await_ready`); None where there is none for it.

        Args:
            wanted: how its process is to be started.
            folder: the trial's own.
            log: where it prints.
        """
        server = self._servers.pop(wanted, None) if self.starts.failures else None
        if server is None:
            return None
        self._servers[wanted] = server  # the one that was used last is the last one to be closed
        try:
            if wanted.beside is not None and (server.modules or frozenset()) & _list_modules(wanted.beside):
                self.forbid()
                return None
            return server.start(folder, log)
        except OSError:
            self._lose(wanted)
            return None

    def fail(self) -> None:
        """Close the server that was used last: it has died, or does not answer."""
        for key in list(self._servers)[-1:]:
            self._lose(key)

    def forbid(self) -> None:
        """Start everything cold from now on."""
        self.starts.failures = 0
        self.close()

    def close(self) -> None:
        """End all servers."""
        for key in list(self._servers):
            self._close(key)

    def _lose(self, key: ProcessKind) -> None:
        self.starts.failures = max(0, self.starts.failures - 1)
        self._close(key)

    def _close(self, key: ProcessKind) -> None:
        self._servers.pop(key).close()


def _list_modules(folder: Path) -> frozenset[str]:
    """Return the names of the modules and packages in a folder."""
    found: set[str] = set()
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in _MODULE_ENDINGS or (path / "__init__.py").exists():
                found.add(path.name.partition(".")[0])
    return frozenset(found)


def _has_memory() -> bool:
    available, headroom = psutil.virtual_memory().available, read_memory_headroom(Path("/"))
    return (available if headroom is None else min(available, headroom)) >= _LEAST_FREE_BYTES
