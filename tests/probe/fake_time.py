"""A clock that only planted work moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest


class FakeTime:
    """Seconds that pass only when somebody spends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now = 0.0
        self.looks = 0
        for module in modules:
            monkeypatch.setattr(module, "perf_counter", self._look)

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def spending(self, durations: Iterator[float]) -> Callable[[], None]:
        """Return a run that takes the next duration each time."""
        return lambda: self.spend(next(durations))

    def _look(self) -> float:
        self.looks += 1
        return self.now
