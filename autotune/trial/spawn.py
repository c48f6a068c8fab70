"""Run one trial in a process of its own and return its result, whatever becomes of the process.

    start ── poll: exit? stop asked? deadline? hopeless? memory? ── kill ladder if need be ── sweep ── result

The kill ladder: a stack dump into the log (SIGUSR2), SIGTERM, SIGKILL to the whole process group. The sweep then
ends every descendant that left the group, found by the marker in its environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from autotune.engine.allocator import launch_environment
from autotune.errors import AutotuneError
from autotune.lifeline import adopt_orphans
from autotune.measure.hopeless import Hopeless, find_overdue
from autotune.records.codec import make_folder, read_record, write_record
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus
from autotune.trial.causes import Outcome, describe_hopeless, explain_exit
from autotune.trial.files import LOG_FILE, PARTIAL_FILE, RESULT_FILE, SPEC_FILE
from autotune.trial.process import MARKER, CappedLog, ColdProcess, ForkServer, TrialProcess
from autotune.trial.progress import ProgressReader
from autotune.trial.scripts import ScriptStarter

KILL_SECONDS = 1.2
"""Longest time the kill ladder takes, from the stack dump to the last reaped process."""

_POLL_SECONDS = 0.05
_MEMORY_POLL_SECONDS = 0.5
_DUMP_SECONDS = 0.15
_TERM_SECONDS = 0.5
_SWEEPS = 25
_SWEEP_PAUSE_SECONDS = 0.01


class TrialRunner:
    """Runs trials one after another; a context manager that leaves no process behind.

    Args:
        trials_folder: each trial gets a numbered folder in it.
        host_allocators: preloadable malloc libraries by knob value.
        environment: added to the environment of every trial.
        should_stop: polled; True ends the running trial as interrupted.
        on_poll: called while a trial runs, for a live display.
        warm: use the fork server where the environment allows it.
    """

    def __init__(
        self,
        trials_folder: Path,
        *,
        host_allocators: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_poll: Callable[[], None] = lambda: None,
        warm: bool = True,
    ) -> None:
        self._folder = trials_folder.resolve()  # the trial may change its working folder
        self._host_allocators = dict(host_allocators or {})
        self._should_stop = should_stop
        self._on_poll = on_poll
        self._marker = f"{os.getpid()}-{time.monotonic_ns()}"
        self._environment = {**(environment or {}), MARKER: self._marker}
        self._children_before = {child.pid for child in psutil.Process().children()}
        self._server = ForkServer(self._environment) if warm else None
        self._scripts = ScriptStarter()
        self._adopted_before = False

    def __enter__(self) -> Self:
        self._adopted_before = adopt_orphans()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._sweep()
        self._scripts.discard()
        adopt_orphans(self._adopted_before)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        """Run one trial to its end, its deadline or a stop.

        Raises:
            OSError: the trial's folder cannot be written.
        """
        folder = self._folder / f"{spec.number:04d}"
        make_folder(folder)
        for name in (RESULT_FILE, PARTIAL_FILE):
            (folder / name).unlink(missing_ok=True)
        write_record(folder / SPEC_FILE, spec)
        with ProgressReader(folder) as progress:
            result = self._run(spec, folder, progress)
        write_record(folder / RESULT_FILE, result)
        return result

    def _run(self, spec: TrialSpec, folder: Path, progress: ProgressReader) -> TrialResult:
        log = CappedLog(folder / LOG_FILE)
        try:
            process = self._start(spec, folder, log.descriptor)
        finally:
            log.release()
        try:
            status, verdict = self._supervise(process, spec, folder, progress)
        finally:
            self._end_group(process.pid)
            self._sweep()
        tail = log.finish()
        result = self._scripts.finish(self._read_result(folder, spec, status, verdict, tail))
        return result.replace(elapsed_seconds=time.monotonic() - progress.began)

    def _start(self, spec: TrialSpec, folder: Path, log: int) -> TrialProcess:
        environment = launch_environment(spec.config, self._host_allocators) if spec.config else {}
        if spec.target.script is not None:
            return self._scripts.start(spec, folder, {**environment, **self._environment}, log)
        if self._server is not None and not environment:
            try:
                return self._server.start(folder, log, should_stop=self._should_stop)
            except OSError:
                self._server.close()
                self._server = None
        return ColdProcess(folder, {**environment, **self._environment}, log)

    def _supervise(
        self, process: TrialProcess, spec: TrialSpec, folder: Path, progress: ProgressReader
    ) -> tuple[int, Outcome | Hopeless | None]:
        limits, began = spec.limits, progress.began
        next_memory_poll = began + _MEMORY_POLL_SECONDS
        while True:
            status = process.wait(_POLL_SECONDS)
            if status is None and spec.target.script is not None and (folder / RESULT_FILE).exists():
                status = 0  # the leading process is done; the others of its launcher would wait for it
            if status is not None:
                return status, None
            self._on_poll()
            now = time.monotonic()
            if self._should_stop():
                return self._kill(process), (TrialStatus.INTERRUPTED, "interrupted", "stopped by the user")
            if now - began >= limits.time_limit_seconds:
                text = f"not done after {limits.time_limit_seconds:.0f} s; its stacks are in the log"
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
                    text = f"used {used / 2**30:.2f} GiB of {limits.host_memory_limit_bytes / 2**30:.2f} GiB allowed"
                    return self._kill(process), (TrialStatus.OUT_OF_MEMORY, "oom-host", text)

    def _kill(self, process: TrialProcess) -> int:
        _signal_process(process.pid, signal.SIGUSR2)
        status = process.wait(_DUMP_SECONDS)
        if status is None:
            _signal_process(process.pid, signal.SIGTERM)
            status = process.wait(_TERM_SECONDS)
        if status is None:
            self._end_group(process.pid)
            status = process.wait(KILL_SECONDS - _DUMP_SECONDS - _TERM_SECONDS)
        return -signal.SIGKILL if status is None else status

    def _end_group(self, pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def _sweep(self) -> None:
        """Kill the descendants that carry our marker, and reap the dead that were handed to us."""
        for _ in range(_SWEEPS):
            if not self._sweep_once():
                return
            time.sleep(_SWEEP_PAUSE_SECONDS)

    def _sweep_once(self) -> bool:
        spared = self._children_before | ({self._server.pid} if self._server is not None else set())
        remains = False
        for child in psutil.Process().children(recursive=True):
            if child.pid in spared:
                continue
            try:
                # A trial is the leader of a session, so what is in ours was started by somebody else in this process.
                is_foreign = os.getsid(child.pid) == os.getsid(0)
                if child.status() == psutil.STATUS_ZOMBIE:
                    if not is_foreign:
                        child.wait(0)
                    continue
                environment = child.environ()
                if environment.get(MARKER) == self._marker:
                    child.kill()
                    remains = True
                remains = remains or (not environment and not is_foreign)
            except (psutil.Error, OSError):
                # A process on its way out shows no environment any more, and is soon to be reaped.
                remains = remains or psutil.pid_exists(child.pid)
        return remains

    def _read_result(
        self, folder: Path, spec: TrialSpec, status: int, verdict: Outcome | Hopeless | None, tail: str
    ) -> TrialResult:
        if isinstance(verdict, Hopeless):
            return describe_hopeless(spec, verdict, elapsed_seconds=0.0)
        if verdict is None and (folder / RESULT_FILE).exists():
            try:
                return read_record(folder / RESULT_FILE, TrialResult)
            except AutotuneError as error:
                verdict = (TrialStatus.CRASHED, "protocol-error", error.message)
        end, cause, text = verdict or explain_exit(status, log_tail=tail)
        if end is not TrialStatus.INTERRUPTED and (folder / PARTIAL_FILE).exists():
            return _complete(folder / PARTIAL_FILE, text)
        return TrialResult(spec=spec, status=end, cause=cause, error=text, elapsed_seconds=0.0)


def _complete(partial: Path, error: str) -> TrialResult:
    """Return what a probe knew before its process ended, with a warning."""
    result = read_record(partial, TrialResult)
    if result.facts is None:
        return result
    warning = f"the probe was cut short while it looked at the memory: {error}"
    return result.replace(facts=result.facts.replace(warnings=(*result.facts.warnings, warning)))


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
