"""Fork servers of scripts: from the second launch on, torch is there already when a script imports it.

One server for each way to start a script: interpreter, environment (a malloc library is preloaded into the server),
working folder. None for a script that changes its environment before it imports torch, as libraries read that when they
are loaded, and none where a file beside the script has the name of a module that the server has imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autotune.isolation.warm.process import ForkServer, WarmProcess
from autotune.machine.cgroups import read_memory_headroom

_MOST_SERVERS = 2
_MOST_FAILURES = 3
_LEAST_FREE_BYTES = 4 * 2**30
"""Of memory, for each server: it takes about 300 MiB, and a training must not miss them."""
_MODULE_ENDINGS = frozenset({".py", ".pyc", ".so", ".pyd"})


@dataclass(frozen=True)
class ScriptProcess:
    """How a script's process is started.

    Attributes:
        python: the interpreter and its options.
        settings: added to our environment.
        cwd: working folder.
        beside: folder whose modules the script imports first.
        temporary: added likewise: where a runner has its temporary files, each its own.
    """

    python: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    cwd: str
    beside: Path
    temporary: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def environment(self) -> dict[str, str]:
        """All that is added to our environment."""
        return dict((*self.settings, *self.temporary))


@dataclass
class Starts:
    """What is known of a script's starts, by all runners of a search.

    Attributes:
        seen: how its processes were started so far.
        failures: servers that may still die before everything is started cold; 0 where nothing may be warm.
        is_shown: a trial that was started warm has come to its end.
    """

    seen: set[ScriptProcess] = field(default_factory=set)
    failures: int = _MOST_FAILURES
    is_shown: bool = False


class ScriptServers:
    """The servers of one runner.

    Args:
        take: told of each process that is started.
        should_stop: polled while one starts.
        starts: known so far.
    """

    def __init__(self, take: Callable[[int], None], should_stop: Callable[[], bool], starts: Starts) -> None:
        self._take, self._should_stop = take, should_stop
        self._starts = starts
        self._servers: dict[ScriptProcess, ForkServer] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the servers that run."""
        return tuple(server.pid for server in self._servers.values())

    def prepare(self, wanted: ScriptProcess) -> bool:
        """Open a server for a script's process where one was started before; it ends with this thread.

        A single launch is no faster for it. Returns whether there is one.
        """
        if not self._starts.failures:
            return False
        if wanted in self._servers:
            return True
        if wanted not in self._starts.seen or not _has_memory():
            return False
        while len(self._servers) >= _MOST_SERVERS:
            self._close(next(iter(self._servers)))
        server = ForkServer(wanted.environment, python=wanted.python, cwd=wanted.cwd, is_script=True)
        self._servers[wanted] = server
        self._take(server.pid)
        return True

    def start(self, wanted: ScriptProcess, folder: Path, log: int, *, warm: bool) -> WarmProcess | None:
        """Start a trial by a server; None where there is none for it.

        Args:
            wanted: how its process is to be started.
            folder: the trial's own.
            log: where it prints.
            warm: whether it may be.
        """
        self._starts.seen.add(wanted)
        server = self._servers.pop(wanted, None) if warm and self._starts.failures else None
        if server is None:
            return None
        self._servers[wanted] = server  # the one that was used last is the last one to be closed
        try:
            server.await_ready(self._should_stop)
            if (server.modules or frozenset()) & _list_modules(wanted.beside):
                self.forbid()
                return None
            return server.start(folder, log, should_stop=self._should_stop)
        except OSError:
            self.fail()
            return None

    def fail(self) -> None:
        """Close the server that was used last: it has died, or does not answer."""
        self._starts.failures = max(0, self._starts.failures - 1)
        for key in list(self._servers)[-1:]:
            self._close(key)

    def forbid(self) -> None:
        """Start everything cold from now on."""
        self._starts.failures = 0
        self.close()

    def close(self) -> None:
        """End all servers."""
        for key in list(self._servers):
            self._close(key)

    def _close(self, key: ScriptProcess) -> None:
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
