"""Run one trial in a process of its own and return its result, whatever becomes of the process.

    start ── poll: exit? stop asked? deadline? hopeless? memory? ── kill ladder if need be ── sweep ── result

The kill ladder: a stack dump into the log (SIGUSR2), SIGTERM, SIGKILL to the whole process group. The sweep then
ends everything else that the trial has started, found by the mark it bears.

Two trials can be run in turns (`turns`): a second runner, made for the first such pair, has the second one.

A trial that a signal of nobody's ended, or that this process or the machine slept through, is run once more if its time
allows it.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from autotune.engine.allocator import launch_environment
from autotune.format import format_bytes
from autotune.isolation.causes import Outcome
from autotune.isolation.channel.progress import ProgressReader
from autotune.isolation.channel.turns import can_take_turns, run_in_turns
from autotune.isolation.endings import Ending, describe_disturbance, read_result, why_again
from autotune.isolation.keeper import Keeper
from autotune.isolation.process import CappedLog, ColdProcess, TrialProcess
from autotune.isolation.script_starter import ScriptStarter, find_kind
from autotune.isolation.warm.process import ServerDiedError
from autotune.isolation.warm.servers import TEMPORARY, ProcessKind, Servers, Starts
from autotune.lifeline import adopt_orphans
from autotune.machine.cgroups import count_between, read_oom_kills
from autotune.measure.hopeless import Hopeless, find_overdue
from autotune.records.codec import make_folder, write_record
from autotune.records.layout import LOG_FILE, PARTIAL_FILE, RESULT_FILE, SPEC_FILE, trial_name
from autotune.records.objective import Objective
from autotune.records.trial import Target, TrialResult, TrialSpec, TrialStatus
from autotune.scratch import make_scratch, remove_scratch

KILL_SECONDS = 1.2
"""Longest time the kill ladder takes, from the stack dump to the last reaped process."""
LEAST_SLEEP_SECONDS = 5.0
"""A shorter gap may be a busy machine's."""

_POLL_SECONDS = 0.05
_MEMORY_POLL_SECONDS = 0.5
_DUMP_SECONDS = 0.15
_TERM_SECONDS = 0.5
_LONGEST_SOCKET = 107
"""Characters of a UNIX socket's path (unix(7): 108 with the closing NUL)."""
_SOCKET_CHARACTERS = len("/pymp-01234567/listener-01234567")
"""What multiprocessing adds to the temporary folder."""
_PATIENCE = 1.5
"""Times the start of one alone: until then two at a time may be done soon."""
_CROWDED = 1.2
"""Times the starts of two trials one after the other: where two at a time take longer, their threads are in each
other's way (seen: 17 s each, where one alone took 5 s)."""
_LEAST_START_SECONDS = 1.0
"""A shorter start is not worth it."""


class TrialRunner:
    """Runs trials one after another; a context manager that leaves no process behind.

    Args:
        trials_folder: each trial gets a numbered folder in it.
        host_allocators: preloadable malloc libraries by knob value.
        environment: added to the environment of every trial.
        should_stop: polled; True ends the running trial as interrupted.
        on_poll: called while a trial runs, for a live display.
        say: told what the user should know at once, one sentence.
        warm: start trials from fork servers, where that makes it faster.
        starts: known from another runner; None for the first one.
    """

    def __init__(
        self,
        trials_folder: Path,
        *,
        host_allocators: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_poll: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _sentence: None,
        warm: bool = True,
        starts: Starts | None = None,
    ) -> None:
        self._folder = trials_folder.resolve()  # the trial may change its working folder
        self._host_allocators = dict(host_allocators or {})
        self._should_stop = should_stop
        self._on_poll = on_poll
        self._say = say
        self._temporary = _make_temporary_folder()
        own = {} if self._temporary is None else {TEMPORARY: str(self._temporary)}
        self._environment = {**own, **(environment or {})}
        self._keeper = Keeper()
        starts = (starts or Starts()) if warm else Starts(failures=0)
        self._servers = Servers(self._keeper.take, should_stop, starts)
        self._scripts = ScriptStarter(self._servers, self._keeper.take, should_stop)
        self._starts_warm = True
        self._start_seconds, self._start_apart = dict[bool, float](), False
        self._adopted_before = False
        self._make_second = partial(
            TrialRunner,
            trials_folder,
            host_allocators=host_allocators,
            environment=environment,
            should_stop=should_stop,
            warm=warm,
            starts=starts,
        )
        self._second: TrialRunner | None = None
        self._running: int | None = None
        self._signalling = threading.Lock()

    def __enter__(self) -> Self:
        self._adopted_before = adopt_orphans()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()
        adopt_orphans(self._adopted_before)

    def _close(self) -> None:
        if self._second is not None:
            self._second._close()
        self._servers.close()
        self._keeper.sweep()
        self._keeper.close()
        self._scripts.discard()
        if self._temporary is not None:
            with suppress(OSError):  # what cannot be removed is left to the next sweep
                remove_scratch(self._temporary)

    def takes_turns(self) -> bool:
        """Return whether `run_in_turns` can be used here."""
        make_folder(self._folder)
        return can_take_turns(self._folder)

    def run_in_turns(self, first: TrialSpec, second: TrialSpec) -> tuple[TrialResult, TrialResult]:
        """Run two trials at a time, their blocks in turns: a machine whose speed wanders does both the same.

        Both have ended when the longer of their limits has passed. None is run once more, whatever it died of: the
        other one would have lost its turns.

        Args:
            first: warms up first; a reference is kept with the other one's result.
            second: its number is another one.

        Raises:
            OSError: a trial's folder cannot be written.
        """
        second_runner = self._second = self._second or self._make_second()
        folders = self._folder / trial_name(first.number), self._folder / trial_name(second.number)
        for folder in folders:
            make_folder(folder)
        until = time.monotonic() + max(one.limits.time_limit_seconds for one in (first, second))
        ours, theirs, is_alike = self._run_both(second_runner, first, second, until)
        if not is_alike and time.monotonic() < until and not self._should_stop():
            ours, theirs, _ = self._run_both(second_runner, first, second, until)
        if first.purpose == "reference":
            theirs = theirs.with_reference(ours)
            write_record(folders[1] / RESULT_FILE, theirs)
        return ours, theirs

    def _run_both(
        self, other: TrialRunner, first: TrialSpec, second: TrialSpec, until: float
    ) -> tuple[TrialResult, TrialResult, bool]:
        """Return the results of two trials in turns, and whether both were started as they are to be: alike."""
        runners = (self, other) if self._suits(other, first, second) else (other, self)
        # A script that was forked and one that was not would not be the same.
        are_warm = [runner._prepare(spec) for runner, spec in zip(runners, (first, second), strict=True)]
        began, free_seconds = time.monotonic(), min(one.limits.wait_seconds for one in (first, second))
        for runner, spec in zip(runners, (first, second), strict=True):
            runner._starts_warm = all(are_warm)
            runner._await_server(spec, until=until)
        until += min(time.monotonic() - began, free_seconds)
        folders = self._folder / trial_name(first.number), self._folder / trial_name(second.number)
        complete = [partial(one._complete, spec, until) for one, spec in zip(runners, (first, second), strict=True)]
        alone = max(_LEAST_START_SECONDS, self._start_seconds.get(all(are_warm), math.inf))
        patience_seconds = 0.0 if self._start_apart else _PATIENCE * alone
        ours, theirs = run_in_turns(folders, *complete, patience_seconds=patience_seconds, hold=runners[1]._hold)
        is_crowded = max(one.startup_seconds or 0.0 for one in (ours, theirs)) > _CROWDED * 2 * alone
        starters = [runner._scripts for runner in runners]
        is_alike = starters[0].is_warm == starters[1].is_warm and not any(one.is_misled for one in starters)
        is_alike = is_alike or first.target.script is None
        self._start_apart |= is_alike and is_crowded
        return ours, theirs, is_alike

    def __call__(self, spec: TrialSpec) -> TrialResult:
        """Run one trial to its end, its deadline or a stop.

        Raises:
            OSError: the trial's folder cannot be written.
        """
        self._starts_warm = True
        began = time.monotonic()
        is_warm = self._prepare(spec)
        self._await_server(spec, until=began + spec.limits.time_limit_seconds)
        waited_seconds = time.monotonic() - began
        result = self._complete(spec, lost_seconds=max(0.0, waited_seconds - spec.limits.wait_seconds))
        if result.status is TrialStatus.COMPLETED and result.startup_seconds:
            self._start_seconds[is_warm] = result.startup_seconds
        return result

    def _prepare(self, spec: TrialSpec) -> bool:
        """Have the fork server start that a trial asks for, in this thread: it ends with the one that starts it.

        Returns whether there is one.
        """
        kind = self._find_kind(spec)
        return kind is not None and self._servers.prepare(kind)

    def _await_server(self, spec: TrialSpec, *, until: float) -> None:
        """Wait for a server that was just opened."""
        kind = self._find_kind(spec)
        if kind is not None:
            self._servers.await_ready(kind, until=until)

    def _suits(self, other: TrialRunner, ours: TrialSpec, theirs: TrialSpec) -> bool:
        """Return whether another runner and this have no more servers for two trials the other way round."""
        return self._has_server(ours) + other._has_server(theirs) >= self._has_server(theirs) + other._has_server(ours)

    def _has_server(self, spec: TrialSpec) -> bool:
        kind = self._find_kind(spec)
        return kind is not None and self._servers.has(kind)

    def _find_kind(self, spec: TrialSpec) -> ProcessKind | None:
        """Return how a trial's process is started; None where it is a launcher's to start others."""
        environment = self._find_environment(spec)
        if spec.target.script is not None:
            return find_kind(spec, environment)
        settings = sorted((name, value) for name, value in environment.items() if name != TEMPORARY)
        temporary = [(name, value) for name, value in environment.items() if name == TEMPORARY]
        return ProcessKind(settings=tuple(settings), temporary=tuple(temporary))

    def _find_environment(self, spec: TrialSpec) -> dict[str, str]:
        """Return what a trial that is started cold has in its environment beside ours."""
        own = launch_environment(spec.config, self._host_allocators) if spec.config else {}
        return own | self._environment

    def _complete(self, spec: TrialSpec, until: float | None = None, *, lost_seconds: float = 0.0) -> TrialResult:
        """Run one trial; until when says that it takes turns with another one. What is lost is off its time."""
        folder = self._folder / trial_name(spec.number)
        make_folder(folder)
        write_record(folder / SPEC_FILE, spec)
        if until is not None and (self._should_stop() or time.monotonic() >= until):
            result = _leave_out(spec)
            write_record(folder / RESULT_FILE, result)
            return result
        seconds = spec.limits.time_limit_seconds - lost_seconds
        if until is not None:
            seconds = min(seconds, until - time.monotonic())
        result, asleep = self._attempt(spec, folder, seconds)
        if self._scripts.may_blame_warmth(result) and until is None and not self._should_stop():
            seconds -= result.elapsed_seconds
            result, asleep = self._attempt_cold(spec, folder, seconds, result)
        why, left = why_again(result, asleep), seconds - result.elapsed_seconds
        if until is None and why and left >= result.elapsed_seconds and not self._should_stop():
            self._say(f"{why}; it is run once more")
            again, asleep_again = self._attempt(spec, folder, left)
            if again.status is not TrialStatus.TIMED_OUT:  # of that it had less than it deserves
                result, asleep = again, asleep_again
                why = why_again(result, asleep)
        result = describe_disturbance(result, why) if asleep and why else result
        write_record(folder / RESULT_FILE, result)
        return result

    def _attempt_cold(
        self, spec: TrialSpec, folder: Path, seconds: float, warm: TrialResult
    ) -> tuple[TrialResult, float]:
        """Run a trial once more, cold, that may have gone wrong because it was forked."""
        self._starts_warm = False
        result, asleep = self._attempt(spec, folder, seconds)
        self._starts_warm = True
        if result.status is TrialStatus.TIMED_OUT and warm.status is TrialStatus.CRASHED:
            return warm, asleep  # it had less time than it deserves
        self._scripts.clear_warmth(result)
        return result, asleep

    def _attempt(self, spec: TrialSpec, folder: Path, seconds: float) -> tuple[TrialResult, float]:
        """Return the result of one run of at most some seconds, and how much of it this process slept through."""
        for name in (RESULT_FILE, PARTIAL_FILE):
            (folder / name).unlink(missing_ok=True)
        with ProgressReader(folder) as progress:
            ending, verdict = self._run(spec, folder, progress, seconds)
            result = self._scripts.finish(read_result(folder, spec, ending, verdict))
            return result.replace(elapsed_seconds=time.monotonic() - progress.began), ending.asleep_seconds

    def _run(
        self, spec: TrialSpec, folder: Path, progress: ProgressReader, seconds: float
    ) -> tuple[Ending, Outcome | Hopeless | None]:
        log = CappedLog(folder / LOG_FILE)
        kills_before = read_oom_kills()
        try:
            process = self._start(spec, folder, log.descriptor)
        finally:
            log.release()
        watch, until = SleepWatch(), progress.began + seconds
        status, verdict = None, None
        self._running = process.pid
        try:
            status, verdict = self._supervise(process, spec, folder, progress, until=until, watch=watch)
        except ServerDiedError:
            self._servers.fail()
        finally:
            with self._signalling:
                self._running = None
            # What is left of it; its leader is not reaped yet, so the number is still its own.
            _signal_group(process.pid, signal.SIGKILL)
            process.release()
            self._keeper.sweep(self._servers.pids)
        return Ending(status, log.finish(), count_between(kills_before, read_oom_kills()), watch.seconds), verdict

    def _hold(self, is_held: bool) -> None:
        """Stop every process of the running trial, or let them go on; called in another thread than its own."""
        with self._signalling:
            if self._running is not None:
                _signal_group(self._running, signal.SIGSTOP if is_held else signal.SIGCONT)

    def _start(self, spec: TrialSpec, folder: Path, log: int) -> TrialProcess:
        environment = self._find_environment(spec)
        if spec.target.script is not None:
            process = self._scripts.start(spec, folder, environment, log, warm=self._starts_warm)
        else:
            kind = self._find_kind(spec)
            assert kind is not None
            process = self._servers.start(kind, folder, log) or ColdProcess(folder, environment, log)
        self._keeper.take(process.pid)
        return process

    def _supervise(
        self,
        process: TrialProcess,
        spec: TrialSpec,
        folder: Path,
        progress: ProgressReader,
        *,
        until: float,
        watch: SleepWatch,
    ) -> tuple[int, Outcome | Hopeless | None]:
        limits = spec.limits
        next_memory_poll = progress.began + _MEMORY_POLL_SECONDS
        while True:
            status = process.wait(_POLL_SECONDS)
            watch.look()
            if status is None and spec.target.script is not None and (folder / RESULT_FILE).exists():
                status = 0  # the leading process is done; the others of its launcher would wait for it
            if status is not None:
                return status, None
            self._on_poll()
            now = time.monotonic()
            if self._should_stop():
                return self._kill(process), (TrialStatus.INTERRUPTED, "interrupted", "stopped by the user")
            if now >= until:
                text = f"not done after {until - progress.began:.0f} s; its stacks are in its log"
                if limits.ends_with_stage:
                    return self._kill(process), (TrialStatus.INTERRUPTED, "budget", text)
                return self._kill(process), (TrialStatus.TIMED_OUT, "timeout", text)
            hopeless = find_overdue(limits, progress.read(), now)
            if hopeless is not None:
                return self._kill(process), hopeless
            if limits.host_memory_limit_bytes is not None and now >= next_memory_poll:
                next_memory_poll = now + _MEMORY_POLL_SECONDS
                used = _resident_bytes(process.pid, limits.host_memory_limit_bytes)
                if used > limits.host_memory_limit_bytes:
                    text = f"used {format_bytes(used)} of {format_bytes(limits.host_memory_limit_bytes)} allowed"
                    return self._kill(process), (TrialStatus.OUT_OF_MEMORY, "oom-host", text)

    def _kill(self, process: TrialProcess) -> int:
        with self._signalling:  # one that is held tells of nothing
            self._running = None
            _signal_group(process.pid, signal.SIGCONT)
        _signal_process(process.pid, signal.SIGUSR2)
        status = process.wait(_DUMP_SECONDS)
        if status is None:
            _signal_process(process.pid, signal.SIGTERM)
            status = process.wait(_TERM_SECONDS)
        if status is None:
            _signal_group(process.pid, signal.SIGKILL)
            status = process.wait(KILL_SECONDS - _DUMP_SECONDS - _TERM_SECONDS)
        return -signal.SIGKILL if status is None else status


def starts_warm(target: Target, objective: Objective = Objective.THROUGHPUT) -> bool:
    """Return whether trials may be forked: a forked script holds less, as what its server has is not its own.

    Args:
        target: of the trials.
        objective: that they are measured for.
    """
    return target.script is None or objective is not Objective.MEMORY


def _make_temporary_folder() -> Path | None:
    """Return a temporary folder for the trials: a killed compiler or loader worker leaves its files there.

    None where it cannot be made, or where its path would be too long for the sockets in it.
    """
    try:
        folder = make_scratch()
    except OSError:
        return None
    if len(str(folder)) + _SOCKET_CHARACTERS <= _LONGEST_SOCKET:
        return folder
    remove_scratch(folder)
    return None


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _signal_process(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _resident_bytes(pid: int, limit: int) -> int:
    """Return what a trial holds: the quick sum that counts shared pages twice, checked only when it is too high."""
    try:
        leader = psutil.Process(pid)
        tree = [leader, *leader.children(recursive=True)]
        quick = sum(process.memory_info().rss for process in tree)
        return quick if quick <= limit else sum(process.memory_full_info().pss for process in tree)
    except (psutil.Error, OSError):
        return 0


def _leave_out(spec: TrialSpec) -> TrialResult:
    """Return the result of a trial that was not started any more: the other one of its pair took all of their time."""
    return TrialResult(
        spec=spec,
        status=TrialStatus.INTERRUPTED,
        cause="interrupted",
        error="not started any more",
        elapsed_seconds=0.0,
    )


def read_clock() -> float:
    """Return seconds on a clock that goes on while the machine is suspended, which `time.monotonic()` does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SleepWatch:
    """Counts the time between looks that should come many times a second.

    Args:
        clock: in seconds.

    Attributes:
        seconds: that were slept so far.
    """

    def __init__(self, clock: Callable[[], float] = read_clock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._last = clock()

    def look(self) -> None:
        """Take notice of the time."""
        now = self._clock()
        if now - self._last >= LEAST_SLEEP_SECONDS:
            self.seconds += now - self._last
        self._last = now
