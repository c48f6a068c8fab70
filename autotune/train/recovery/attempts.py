"""The processes of a final training, one after another, under a light parent that passes all else through.

    parent ── starts ──▶ training        the terminal, its process group and all streams are shared
           ── signals ─▶                 each once: what the training reports to have got itself is not sent again
           ◀─ exit ────                  its status, or 128 + N after signal N; then maybe another attempt

The kernel ends the training when the parent dies, and a keeper what else the training has started; the parent waits for
nothing else than the training's end. What is left when it ends in order is the user's own.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import UsageError
from autotune.isolation.causes import explain_exit
from autotune.isolation.keeper import Keeper
from autotune.machine.cgroups import read_oom_kills
from autotune.records.trial import Cause
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.child import PARENT_VARIABLE

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What somebody may send to the parent and mean the training."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Of these, what asks a process to end."""

_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class Start:
    """How to start a training's process.

    Attributes:
        words: the command.
        environment: all of it.
        folder: where it runs; None for here.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: Path | None = None


@dataclass(frozen=True)
class Ended:
    """How a training's process ended.

    Attributes:
        attempt: which one it was, counted from 0.
        status: its exit status, or minus the number of the signal that killed it.
        was_asked: somebody asked it to end, through the parent.
        oom_kills: kills for want of memory that the kernel counted meanwhile; None when that cannot be read.
        seconds: it ran.
    """

    attempt: int
    status: int
    was_asked: bool
    oom_kills: int | None
    seconds: float

    @property
    def exit_status(self) -> int:
        """What a shell would call it: 128 + N after signal N."""
        return self.status if self.status >= 0 else 128 - self.status

    def explain(self, *, has_workers: bool = True) -> tuple[Cause, str]:
        """Return the cause and one sentence, for a process that left no word itself.

        Args:
            has_workers: loader workers may have handed it batches through /dev/shm.
        """
        if self.status >= 0 and self.oom_kills:
            return "oom-killed", "the kernel killed one of its processes for want of memory"
        if self.status >= 0:
            return "crash-exit", f"it ended with exit status {self.status}"
        if self.status == -signal.SIGBUS and not has_workers:
            return "crash-signal", "it was killed by SIGBUS"
        _, cause, sentence = explain_exit(self.status, log_tail=None, oom_kills=self.oom_kills)
        return cause, f"it was {sentence}"


def run_attempts(
    start: Callable[[int], Start],
    *,
    next_attempt: Callable[[Ended], bool],
    stopping: tuple[int, ...] = STOPPING,
    kills_on_ctrl_c: bool = False,
    policy: TrainPolicy = TRAIN_POLICY,
) -> Ended:
    """Run a training's process to its end, and again for as long as that is wanted.

    Args:
        start: how to start an attempt, counted from 0.
        next_attempt: is given how one ended that nobody asked to end; returns whether to start another.
        stopping: signals that ask the training to end, so that none of these is followed by another attempt.
        kills_on_ctrl_c: a while after a Ctrl-C that is not the first request to end the process is killed.
        policy: the training's thresholds.

    Returns:
        How the last one ended.

    Raises:
        UsageError: a process cannot be started.
    """
    kill_after = policy.kill_after_seconds if kills_on_ctrl_c else math.inf
    with _inbox(stopping, policy.echo_seconds, kill_after) as inbox, Keeper() as keeper:
        attempt = 0
        while True:
            ended = _run_attempt(start(attempt), attempt, inbox, keeper)
            if ended.was_asked or not next_attempt(ended):
                return ended
            inbox.drain(time.monotonic())
            if inbox.stops:  # asked for between two attempts
                return ended
            attempt += 1


@dataclass
class _Inbox:
    """The signals that the parent got, with the time of each.

    Attributes:
        descriptor: readable when there is one, or when a child has ended.
        stopping: those that ask the training to end.
        echo_seconds: how long the training may take to report one that it got as well.
        kill_after_seconds: from another Ctrl-C until the process is killed; infinite to leave it alone.
        stops: how many of these there were.
        is_urgent: the last of these was another Ctrl-C.
        numbers: every one there was.
    """

    descriptor: int
    stopping: tuple[int, ...]
    echo_seconds: float
    kill_after_seconds: float
    stops: int = 0
    is_urgent: bool = False
    numbers: set[int] = field(default_factory=set)

    def drain(self, now: float) -> list[tuple[int, float]]:
        """Return those that came since."""
        found = [(number, now) for number in _read_numbers(self.descriptor) if number in FORWARDED]
        for number, _ in found:
            self.is_urgent = self.is_urgent or (number == signal.SIGINT and self.stops > 0)
            self.stops += number in self.stopping
            self.numbers.add(number)
        return found


@dataclass
class _Echoes:
    """What the parent got against what the training reports.

    Attributes:
        descriptor: of the pipe that the training writes the signals to that it gets.
        echo_seconds: how long that may take.
        due: signals that it has not reported yet, with the time of each.
        reported: a moment ago, with the time of each.
    """

    descriptor: int
    echo_seconds: float
    due: list[tuple[int, float]] = field(default_factory=list)
    reported: list[tuple[int, float]] = field(default_factory=list)

    def match(self, received: list[tuple[int, float]], now: float) -> list[int]:
        """Return the signals that are to be sent on now."""
        self.due += received
        self.reported = [(n, at) for n, at in self.reported if now - at < 2 * self.echo_seconds]
        self.reported += [(number, now) for number in _read_numbers(self.descriptor)]
        waiting = []
        for number, at in self.due:
            match = next((one for one in self.reported if one[0] == number), None)
            if match is None:
                waiting.append((number, at))
            else:
                self.reported.remove(match)
        late = [number for number, at in waiting if now - at >= self.echo_seconds]
        self.due = [(number, at) for number, at in waiting if now - at < self.echo_seconds]
        return late

    def seconds_left(self, now: float) -> float:
        """Return how long to wait until a signal is to be sent on; infinite when none is due."""
        return min((max(0.0, at + self.echo_seconds - now) for _, at in self.due), default=math.inf)


def _run_attempt(start: Start, attempt: int, inbox: _Inbox, keeper: Keeper) -> Ended:
    began, kills_before = time.monotonic(), read_oom_kills()
    read_end, write_end = _open_pipe()
    process = None
    try:
        process = _start_process(start, write_end)
        keeper.take(process.pid)
        status = _await_end(process, inbox, _Echoes(read_end, inbox.echo_seconds))
    finally:
        for end in (read_end, write_end):  # ours for writing too: without it the other would be readable for ever
            os.close(end)
        if process is not None and process.returncode is None:  # an error of ours: nothing watches over it any more
            process.kill()
            process.wait()
    kills = read_oom_kills()
    counted = None if kills is None or kills_before is None else max(0, kills - kills_before)
    was_asked = inbox.stops > 0 or -status in inbox.numbers
    return Ended(attempt, status, was_asked, counted, time.monotonic() - began)


def _start_process(start: Start, write_end: int) -> subprocess.Popen[bytes]:
    environment = {**start.environment, PARENT_VARIABLE: f"{os.getpid()}:{write_end}"}
    try:
        return subprocess.Popen([*start.words], cwd=start.folder, env=environment, pass_fds=(write_end,))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{start.words[0]} cannot be started: {reason}", hint="check the command") from None


def _await_end(process: subprocess.Popen[bytes], inbox: _Inbox, echoes: _Echoes) -> int:
    kill_at = math.inf
    while True:
        now = time.monotonic()
        for number in echoes.match(inbox.drain(now), now):
            process.send_signal(number)  # only while it has not been waited for: no other can have its number
        status = process.poll()
        if status is not None:
            return status
        if inbox.is_urgent:
            kill_at = min(kill_at, now + inbox.kill_after_seconds)
        if now >= kill_at:
            process.kill()
            return process.wait()
        seconds = min(echoes.seconds_left(now), kill_at - now)
        select.select([inbox.descriptor, echoes.descriptor], [], [], None if seconds == math.inf else seconds)


@contextmanager
def _inbox(stopping: tuple[int, ...], echo_seconds: float, kill_after_seconds: float) -> Iterator[_Inbox]:
    """Collect signals, and the ends of children; what was ignored stays ignored, here and in the training.

    Args:
        stopping: see `_Inbox`, as the others.
        echo_seconds: see there.
        kill_after_seconds: see there.
    """
    read_end, write_end = _open_pipe()
    before_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    numbers = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _collect) for number in (*numbers, signal.SIGCHLD)}
    try:
        yield _Inbox(read_end, stopping, echo_seconds, kill_after_seconds)
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by a library, from C
                signal.signal(number, handler)
        signal.set_wakeup_fd(before_descriptor)
        os.close(read_end)
        os.close(write_end)


def _collect(_number: int, _frame: object) -> None:
    """Do nothing: Python itself writes the number into the inbox."""


def _open_pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_NONBLOCK)
    return read_end, write_end


def _read_numbers(descriptor: int) -> bytes:
    found = b""
    while True:
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return found
        if not chunk:
            return found
        found += chunk
