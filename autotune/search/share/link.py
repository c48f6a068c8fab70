"""The line to a database that may go away: one thread that talks to it, and a search that never waits for long.

A connection that was cut off without a word hangs for many minutes, whatever the driver. Here only the thread does.
While the database is away, nothing is asked of it but whether it is back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from autotune.search.share.board import BEAT_SECONDS

PATIENCE_SECONDS = 8.0
"""That a search waits for an answer, once: from then on the database is away until the thread has seen it again."""

OPENING_SECONDS = 20.0
"""The same at the start, where nothing is lost by waiting."""

_Subject = TypeVar("_Subject")
_Answer = TypeVar("_Answer")


class AwayError(Exception):
    """The database does not answer, and what was asked of it is not done."""


class Link(Generic[_Subject]):
    """Calls into a database, one at a time, in a thread of their own.

    Args:
        open_subject: makes what the calls are about, in that thread; it is not asked for again once it was made.
        beat: called every so often, and told whether the database was away before; what it raises means that it is now.
        beat_seconds: between two of these.
        patience_seconds: that a call may take.

    Attributes:
        reason: why the database is away; None while it is there.
        returns: how often it has come back.
    """

    def __init__(
        self,
        open_subject: Callable[[], _Subject],
        beat: Callable[[_Subject, bool], object] = lambda _subject, _is_back: None,
        *,
        beat_seconds: float = BEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.reason: BaseException | None = None
        self.returns = 0
        self._open, self._beat = open_subject, beat
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._subject: _Subject | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[_Subject], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="autotune-storage", daemon=True)
        self._thread.start()

    def call(self, do: Callable[[_Subject], _Answer], *, patience_seconds: float | None = None) -> _Answer:
        """Return what a call comes to.

        Args:
            do: the call.
            patience_seconds: that it may take; None for the usual.

        Raises:
            AwayError: the database is away, or the call took too long; its cause says what was wrong.
        """
        if self.reason is not None:
            raise AwayError from self.reason
        answer: Future[_Answer] = Future()
        self._jobs.put((do, answer))
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
        self._jobs.put(None)
        self._thread.join(0.0 if self.reason is not None else self._patience_seconds)

    def _serve(self) -> None:
        next_beat = time.monotonic() + self._beat_seconds
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, next_beat - time.monotonic()))
            except queue.Empty:
                self._pulse()
                next_beat = time.monotonic() + self._beat_seconds
                continue
            if job is None:
                return
            do, answer = job
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(do(self._ready()))
            except Exception as error:
                self.reason = error
                answer.set_exception(error)

    def _ready(self) -> _Subject:
        if self._subject is None:
            self._subject = self._open()
        return self._subject

    def _pulse(self) -> None:
        try:
            self._beat(self._ready(), self.reason is not None)
        except Exception as error:
            self.reason = error
            return
        if self.reason is not None:
            self.reason, self.returns = None, self.returns + 1
