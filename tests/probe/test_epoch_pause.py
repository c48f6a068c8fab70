"""What a script does between its epochs is seen where the first one's end is near, and never waited for in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import autotune.probe.sources.epoch_pause as subject
from autotune.measure.throughput import TrainingEndedError
from autotune.probe.sources.epoch_pause import EpochPause

STEP = 0.1


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        pass


class Script:
    """A script of fifty steps an epoch, two batches each, that was stopped after some."""

    def __init__(self, taken: int, *, batches: int | None = 100, seconds_between: float = 3.0) -> None:
        loader: Any = SimpleNamespace() if batches is None else [None] * batches
        self.hooks: Any = SimpleNamespace(steps=taken, loaders=SimpleNamespace(training_loader=loader, restarts=0))
        self.pause, self.clock, self.seconds_between = EpochPause(self.hooks), Clock(), seconds_between
        self.ended, self.restarts = 0, 1

    def end(self) -> None:
        self.ended += 1

    def go_on(self, *, limit: float = 2.0, ends_after: int = 1000) -> int:
        """Take the steps that are asked for, and return how many these were."""
        run = self.pause.see(self.clock, STEP, micro_batches=2, limit=limit, end=self.end)
        first = self.hooks.steps
        try:
            next(run)
            while True:
                if self.hooks.steps - first == ends_after:
                    run.throw(TrainingEndedError())
                if self.hooks.steps == 50:
                    self.clock.seconds += self.seconds_between
                    self.hooks.loaders.restarts += self.restarts
                self.clock.seconds += STEP
                self.hooks.steps += 1
                run.send(None)
        except StopIteration:
            return int(self.hooks.steps - first)


@pytest.mark.parametrize(("taken", "steps", "fraction"), [(40, 11, 3 / 8), (49, 2, 3 / 8), (29, 0, 0.0), (50, 0, 0.0)])
def test_the_pause_is_seen_where_the_end_of_the_epoch_is_near(taken: int, steps: int, fraction: float) -> None:
    script = Script(taken)
    assert script.go_on() == steps
    assert script.pause.fraction == pytest.approx(fraction)
    assert script.pause.is_awaited == (steps > 0)


def test_what_ended_while_steps_were_timed_is_in_their_times() -> None:
    script = Script(40)
    script.hooks.loaders.restarts = 1
    assert script.go_on() == 0


@pytest.mark.parametrize("script", [Script(40, batches=None), Script(40, batches=0)])
def test_an_epoch_whose_length_is_not_known_is_not_waited_for(script: Script) -> None:
    assert script.go_on() == 0
    assert script.pause.fraction == 0.0


def test_a_training_that_ends_before_has_shown_no_pause() -> None:
    script = Script(40)
    assert script.go_on(ends_after=4) == 4
    assert script.pause.fraction == 0.0


def test_an_epoch_that_goes_on_is_not_waited_for_much_longer() -> None:
    script = Script(40)
    script.restarts = 0
    assert script.go_on() == 12
    assert script.pause.fraction == 0.0


@pytest.mark.parametrize(("steps", "exceeded"), [(50, 2.0), (45, 0.0)])
def test_when_the_time_is_up_the_probe_ends(monkeypatch: pytest.MonkeyPatch, steps: int, exceeded: float) -> None:
    asked: list[tuple[float, Callable[[], object]]] = []

    @contextmanager
    def time_limit(seconds: float, then: Callable[[], object]) -> Iterator[None]:
        asked.append((seconds, then))
        yield

    monkeypatch.setattr(subject, "time_limit", time_limit)
    script = Script(40)
    next(script.pause.see(script.clock, STEP, micro_batches=2, limit=2.0, end=script.end))
    ((seconds, then),) = asked
    assert seconds == pytest.approx(10 * STEP + 2.0)
    script.hooks.steps = steps
    then()
    assert script.ended == 1
    assert script.pause.exceeded_seconds == exceeded
