"""Two trials that are timed in turns: one runs a block while the other one rests, its workers and threads stopped.

    conductor    ── go ──▶ A ── warms up      ▓▓▓▓        ▓▓▓▓ ── at rest ──▶    what the machine does in these
                 ── go ──▶ B       warms up ──     ▓▓▓▓▓▓▓▓      ...             seconds, both of them meet

A shared machine's speed wanders within seconds: of two launches one after the other each meets a speed of its own, of
two in turns both meet the same. Both start at a time, which one core each does for most of it, unless that is seen to
take longer than one after the other: then the second one is held. From their first steps on, compiling included, one
is at rest while the other goes on, so neither disturbs the other.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

TURNS_FILES = ("turn", "rest")
"""Named pipes in the folder of a trial that takes turns: from the conductor to it, and back."""

_CHILDREN = Path("/proc/thread-self/children")
"""Not every kernel has it (proc(5): CONFIG_PROC_CHILDREN)."""

_Result = TypeVar("_Result")

_GO, _FREE, _AT_REST = b"g", b"f", b"r"
_POLL_SECONDS = 0.2
_SPIN_SECONDS = 0.25
"""Longest that threads are waited for: Intel's OpenMP spins for 0.2 s (KMP_BLOCKTIME), GNU's for some milliseconds."""
_SPIN_POLL_SECONDS = 0.001
_START_POLL_SECONDS = 0.05


class Turns:
    """The trial's end of the pipes.

    Args:
        word: pipe from the conductor.
        at_rest: pipe to it.
        holds_threads: threads of this process stand still at rest, or one that loads ahead would do so uncounted; not
            where the conductor is one of them.
    """

    def __init__(self, word: int, at_rest: int, *, holds_threads: bool) -> None:
        self._word, self._at_rest, self._free = word, at_rest, False
        self._read = _read_alone if holds_threads else _read
        self._stopped: list[int] = []

    def halt(self) -> None:
        """Stop what this process has started: loader workers would get ahead while nothing is timed."""
        if not self._free:
            self._stopped += [child for child in _list_children() if _signal(child, signal.SIGSTOP)]

    def rest(self) -> float:
        """Let the other trial go on, and return after how many seconds; what is stopped stays so."""
        if self._free:
            return 0.0
        began = time.monotonic()
        _wait_for_threads()
        os.write(self._at_rest, _AT_REST)
        self._free = self._read(self._word) == _FREE
        return time.monotonic() - began

    def go_on(self) -> None:
        """Let what was stopped go on."""
        for child in self._stopped:
            _signal(child, signal.SIGCONT)
        self._stopped.clear()


def open_turns(folder: Path, *, holds_threads: bool = True) -> Turns | None:
    """Return the trial's end of the pipes; None for a trial that takes no turns; arguments as of `Turns`."""
    descriptors: list[int] = []
    try:
        for name in TURNS_FILES:
            # Open at both ends, a pipe never says that the other side is gone: whoever is left is killed, or let go.
            descriptors.append(os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError:
        for one in descriptors:
            os.close(one)
        return None
    return Turns(*descriptors, holds_threads=holds_threads)


def can_take_turns(folder: Path) -> bool:
    """Return whether trials can be run in turns: on Linux, where their folder can hold named pipes.

    Args:
        folder: in which trials get theirs.
    """
    if sys.platform != "linux":
        return False
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="turns-") as place:
            os.mkfifo(Path(place) / TURNS_FILES[0])
    except OSError:
        return False
    return True


class Conductor:
    """Gives two trials their turns, in a thread of its own; a context manager.

    The first turn of each is its warm-up. Blocks come in the order 0 1 1 0, so that a machine that becomes slower all
    the time favours neither. Where one has ended, the other goes on without rests.

    Args:
        folders: of the two trials; the first one warms up first.
        patience_seconds: when neither has started after them, their threads are in each other's way: the second one is
            held until the first has started, or for as long again, for the first may wait for what the second has.
        hold: stops what the second one runs (True), or lets it go on.
    """

    def __init__(self, folders: tuple[Path, Path], patience_seconds: float, hold: Callable[[bool], None]) -> None:
        self._paths = [[folder / name for name in TURNS_FILES] for folder in folders]
        self._pipes: list[tuple[int, int]] = []
        self._resting, self._ended = {0: False, 1: False}, {0: False, 1: False}
        self._order = itertools.chain((0, 1), itertools.cycle((0, 1, 1, 0)))
        self._patience_seconds, self._hold = patience_seconds, hold
        self._may_hold, self._holds, self._since = True, False, 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._conduct, name="autotune-turns", daemon=True)

    def __enter__(self) -> Conductor:
        for paths in self._paths:
            for path in paths:
                path.unlink(missing_ok=True)
                os.mkfifo(path, 0o600)
            word, at_rest = (os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for path in paths)
            self._pipes.append((word, at_rest))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()
        for pipes in self._pipes:
            for one in pipes:
                os.close(one)
        for paths in self._paths:
            for path in paths:
                with suppress(OSError):
                    path.unlink()

    def end(self, place: int) -> None:
        """Hear that a trial has ended.

        Args:
            place: 0 for the first one.
        """
        self._ended[place] = True

    def await_start(self, place: int) -> None:
        """Wait until a trial is at rest before its first step, or has ended.

        Args:
            place: 0 for the first one.
        """
        while not (self._resting[place] or self._ended[place]):
            time.sleep(_START_POLL_SECONDS)

    def _conduct(self) -> None:
        by_pipe = {at_rest: place for place, (_, at_rest) in enumerate(self._pipes)}
        self._since = time.monotonic()
        while not self._closed:
            for pipe in select.select(list(by_pipe), [], [], _POLL_SECONDS)[0]:
                if os.read(pipe, 1) == _AT_REST:
                    self._resting[by_pipe[pipe]] = True
            self._part()
            if any(self._ended.values()):
                for place in (0, 1):
                    self._tell(place, _FREE)
            elif all(self._resting.values()):
                self._tell(next(self._order), _GO)
        self._let_go()

    def _part(self) -> None:
        """Hold the second trial while the first one starts, where both at a time have taken so long."""
        is_long = time.monotonic() - self._since > self._patience_seconds
        if any(self._resting.values()) or any(self._ended.values()) or (self._holds and is_long):
            self._may_hold = False
            self._let_go()
        elif self._may_hold and not self._holds and is_long:
            self._holds, self._since = True, time.monotonic()
            self._hold(True)

    def _let_go(self) -> None:
        if self._holds:
            self._holds = False
            self._hold(False)

    def _tell(self, place: int, word: bytes) -> None:
        if self._resting[place]:
            self._resting[place] = False
            os.write(self._pipes[place][0], word)


def run_in_turns(
    folders: tuple[Path, Path],
    first: Callable[[], _Result],
    second: Callable[[], _Result],
    *,
    patience_seconds: float = math.inf,
    hold: Callable[[bool], None] = lambda _is_held: None,
) -> tuple[_Result, _Result]:
    """Run two trials in turns and return what came of them.

    Args:
        folders: of the two, each other's.
        first: runs the one that warms up first, in this thread.
        second: runs the other one, in a thread of its own.
        patience_seconds: longest that both may start at a time; 0 where the second one is not started before the first
            is at its first step.
        hold: stops what the second one runs (True), or lets it go on; from another thread.

    Raises:
        Exception: what one of them raised, once both have ended.
    """
    found: list[_Result] = []
    failed: list[BaseException] = []
    is_over = threading.Event()  # the first one could not be run at all
    with Conductor(folders, patience_seconds, hold) as conductor:

        def follow() -> None:
            try:
                if not patience_seconds:
                    conductor.await_start(0)
                if not is_over.is_set():
                    found.append(second())
            except BaseException as error:  # it is raised in the thread that waits for this one
                failed.append(error)
            finally:
                conductor.end(1)

        thread = threading.Thread(target=follow, name="autotune-second", daemon=True)
        thread.start()
        try:
            result = first()
        except BaseException:
            is_over.set()
            raise
        finally:
            conductor.end(0)
            thread.join()
    if failed:
        raise failed[0]
    return result, found[0]


def _read(pipe: int) -> bytes:
    return os.read(pipe, 1)


def _read_alone(pipe: int) -> bytes:
    """Wait for a byte with the interpreter's lock held: no other thread gets further than to its next line of Python.

    Threads that never run Python, as those of a loader in C++, go on.
    """
    read = ctypes.PyDLL(None, use_errno=True).read
    byte = ctypes.create_string_buffer(1)
    while (count := read(pipe, byte, ctypes.c_size_t(1))) != 1:
        if count == 0 or ctypes.get_errno() != errno.EINTR:  # between two calls signals are handled
            raise OSError(ctypes.get_errno(), "the conductor of two trials in turns cannot be heard")
    return byte.raw


def _wait_for_threads() -> None:
    """Wait until no other thread of this process runs: those of OpenMP spin for a while before they sleep.

    Threads of Python are not waited for: they have something to do.
    """
    # Of a forked process the number that Python remembers of its main thread is that of the process before.
    python = {str(threading.get_native_id()), *(str(one.native_id) for one in threading.enumerate())}
    until = time.monotonic() + _SPIN_SECONDS
    while time.monotonic() < until and any(_runs(thread) for thread in _list_threads() if thread.name not in python):
        time.sleep(_SPIN_POLL_SECONDS)


def _list_threads() -> list[Path]:
    try:
        return [*Path("/proc/self/task").iterdir()]
    except OSError:
        return []


def _runs(thread: Path) -> bool:
    try:
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"R"]
    except OSError:
        return False  # it has ended


def _list_children() -> list[int]:
    """Return what this process and its children have started; quickly, for loader workers go on in the meantime."""
    if _CHILDREN.exists():
        return [*_walk("self")]
    with suppress(psutil.Error):
        return [one.pid for one in psutil.Process().children(recursive=True)]
    return []


def _walk(pid: str) -> Iterator[int]:
    with suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                yield int(child)
                yield from _walk(child)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
