"""What ties a training to the terminal and to the process it was started anew as."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from autotune.cli import training_session
from autotune.cli.stopping import StopFlag

MISSING = {"LD_PRELOAD": "/lib/t.so"}


class View:
    """A page that keeps its warnings and shows nothing."""

    def __init__(self) -> None:
        """Begin without any."""
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Keep a warning."""
        self.warnings.append(text)

    def close(self) -> None:
        """Close it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_shown: None


def start_anew(monkeypatch: pytest.MonkeyPatch, view: View | None = None) -> list[Any]:
    """Ask for a fresh process with a variable, and return what it was started with."""
    started: list[Any] = []
    monkeypatch.setattr(training_session, "relaunch", lambda *told: started.append(told))
    callbacks = training_session.make_callbacks(StopFlag(), cast("Any", view or View()), None)
    callbacks.relaunch(MISSING, None)
    return started


def test_the_first_process_starts_itself_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_RELAUNCHED", raising=False)
    assert start_anew(monkeypatch) == [(MISSING, None)]


def test_the_second_does_not_and_the_users_code_is_not_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_RELAUNCHED", "1")
    assert start_anew(monkeypatch) == []
    assert "AUTOTUNE_RELAUNCHED" not in os.environ


def test_a_malloc_library_of_the_users_own_that_gives_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_RELAUNCHED", raising=False)
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so.2")
    view = View()
    start_anew(monkeypatch, view)
    assert view.warnings == ["your own LD_PRELOAD names libjemalloc.so.2: t.so serves malloc instead"]
