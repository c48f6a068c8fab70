"""The line to a database that may go away: one thread that talks to it, and a search that never waits for long.

A connection that was cut off without a word hangs for many minutes, whatever the driver: a thread does, and after a
while another one with a connection of its own takes its place. While the database is away, nothing is asked of it but
whether it is back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from autotune.search.share.board import BEAT_SECONDS

PATIENCE_SECONDS = 8.0
"""That a search waits for an answer, once: from then on the database is away until it was seen again."""

OPENING_SECONDS = 20.0
"""The same at the start, where nothing is lost by waiting."""

STUCK_SECONDS = 30.0
"""After which a thread that waits for the database is left behind; twice as long each time that did not help."""

_Subject = TypeVar("_Subject")
_Answer = TypeVar("_Answer")
_Job = tuple[Callable[[Any], Any], "Future[Any]"]


class AwayError(Exception):
    """The database does not answer, and what was asked of it is not known to be done."""


@dataclass
class _Line:
    """One thread's side.

    Attributes:
        jobs: what it is to do; None to end.
        busy_since: when it began what it is doing now; None while it does nothing.
    """

    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    busy_since: float | None = None


class Link(Generic[_Subject]):
    """Calls into a database, one at a time, in a thread of their own.

    Args:
        open_subject: makes what the calls are about, in that thread, and again in each that takes its place.
        beat: called every so often, and told whether the database was away before; what it raises means that it is now.
        beat_seconds: between two of these.
        patience_seconds: that a call may take.
        stuck_seconds: after which a thread that hangs is left behind.

    Attributes:
        reason: why the database is away; None while it is there.
    """

    def __init__(
        self,
        open_subject: Callable[[], _Subject],
        beat: Callable[[_Subject, bool], object] = lambda _subject, _is_back: None,
        *,
        beat_seconds: float = BEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self.reason: BaseException | None = None
        self._open, self._beat = open_subject, beat
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._usual_stuck_seconds = self._stuck_seconds = stuck_seconds
        self._start()

    def call(self, do: Callable[[_Subject], _Answer], *, patience_seconds: float | None = None) -> _Answer:
        """Return what a call comes to.

        Args:
            do: the call.
            patience_seconds: that it may take; None for the usual.

        Raises:
            AwayError: the database is away, or the call took too long; its cause says what was wrong.
        """
        if self.reason is not None:
            self._replace_stuck()
            raise AwayError from self.reason
        answer: Future[_Answer] = Future()
        self._line.jobs.put((do, answer))
        wait([answer], self._patience_seconds if patience_seconds is None else patience_seconds)
        if answer.cancel() or not answer.done():
            self.reason = self.reason or TimeoutError("it does not answer")
            raise AwayError from self.reason
        try:
            return answer.result()
        except Exception as error:
            raise AwayError from error

    def close(self) -> None:
        """End the thread as soon as it is free; nobody waits for one that hangs."""
        self._line.jobs.put(None)
        self._thread.join(0.0 if self.reason is not None else self._patience_seconds)

    def _start(self) -> None:
        self._line = _Line()
        self._thread = threading.Thread(target=self._serve, args=(self._line,), name="autotune-storage", daemon=True)
        self._thread.start()

    def _replace_stuck(self) -> None:
        since = self._line.busy_since
        if since is not None and time.monotonic() - since > self._stuck_seconds:
            self._stuck_seconds *= 2
            self._line.jobs.put(None)  # where it should ever come back
            self._start()

    def _serve(self, line: _Line) -> None:
        subject: _Subject | None = None
        next_beat = time.monotonic() + self._beat_seconds
        while True:
            try:
                job = line.jobs.get(timeout=max(0.0, next_beat - time.monotonic()))
                if job is None:
                    return
            except queue.Empty:
                job = None
            line.busy_since = time.monotonic()
            try:
                subject = self._open() if subject is None else subject
            except Exception as error:
                self._fail(line, error, None if job is None else job[1])
            else:
                self._do(line, subject, job)
            line.busy_since = None
            if job is None:
                next_beat = time.monotonic() + self._beat_seconds

    def _do(self, line: _Line, subject: _Subject, job: _Job | None) -> None:
        """Do a job, or beat where there is none."""
        if job is None:
            was_away = self.reason is not None
            try:
                self._beat(subject, was_away)
            except Exception as error:
                self._fail(line, error, None)
            else:
                if was_away and line is self._line:
                    self.reason, self._stuck_seconds = None, self._usual_stuck_seconds
            return
        do, answer = job
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(do(subject))
            except Exception as error:
                self._fail(line, error, answer)

    def _fail(self, line: _Line, error: Exception, answer: Future[Any] | None) -> None:
        if line is self._line:
            self.reason = error
        if answer is not None and (answer.running() or answer.set_running_or_notify_cancel()):
            answer.set_exception(error)
