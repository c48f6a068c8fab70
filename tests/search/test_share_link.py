"""A database that hangs, fails and comes back, and a search that does not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from autotune.search.share.link import AwayError, Link

SOON = 20.0
"""Seconds within which something that happens at once has happened, on a busy machine too."""


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


class Database:
    """Answers, fails, or hangs until it is let go.

    Attributes:
        opened: connections made.
        fails: calls raise.
        gate: closed, calls hang.
    """

    def __init__(self) -> None:
        self.opened, self.fails = 0, False
        self.gate = threading.Event()
        self.gate.set()

    def open(self) -> Database:
        self.opened += 1
        return self

    def ask(self) -> str:
        self.gate.wait()
        if self.fails:
            raise OSError("connection refused")
        return "answer"


def beat(database: Database, _is_back: bool) -> None:
    database.ask()


def test_a_call_that_fails_means_away_until_a_beat_has_succeeded() -> None:
    database = Database()
    link = Link(database.open, beat, beat_seconds=0.02)
    assert link.call(Database.ask) == "answer"
    database.fails = True
    with pytest.raises(AwayError) as error:
        link.call(Database.ask)
    assert str(error.value.__cause__) == "connection refused"
    database.fails = False
    wait_until(lambda: link.reason is None)
    assert link.call(Database.ask) == "answer"
    assert database.opened == 1
    link.close()


def test_a_call_that_hangs_is_given_up_and_nothing_is_asked_until_then() -> None:
    database = Database()
    link = Link(database.open, beat, beat_seconds=0.02, patience_seconds=0.05)
    link.call(Database.ask, patience_seconds=SOON)
    database.gate.clear()
    for _ in range(3):
        with pytest.raises(AwayError):
            link.call(Database.ask)
    database.gate.set()
    wait_until(lambda: link.reason is None)
    assert link.call(Database.ask, patience_seconds=SOON) == "answer"
    link.close()


@pytest.mark.fault("F20", injected="a connection that never answers", outcome="another one in its place")
def test_a_thread_that_hangs_for_good_is_left_behind() -> None:
    databases = [Database(), Database()]
    first, second = databases
    waiting = iter(databases)
    link = Link(lambda: next(waiting).open(), beat, beat_seconds=0.02, patience_seconds=0.05, stuck_seconds=0.1)
    link.call(Database.ask, patience_seconds=SOON)
    first.gate.clear()

    def is_back() -> bool:
        try:
            return link.call(Database.ask) == "answer"
        except AwayError:
            return False

    wait_until(is_back)
    assert (first.opened, second.opened) == (1, 1)
    first.fails = True
    first.gate.set()  # what the first thread comes to is nobody's business any more
    assert link.call(Database.ask, patience_seconds=SOON) == "answer"
    link.close()


def test_a_database_that_cannot_be_opened_is_asked_again() -> None:
    attempts = []

    def open_late() -> str:
        attempts.append(None)
        if len(attempts) < 3:
            raise OSError("not yet")
        return "subject"

    link = Link(open_late, beat_seconds=0.02)
    with pytest.raises(AwayError):
        link.call(str)
    wait_until(lambda: link.reason is None)
    assert link.call(str) == "subject"
    link.close()
