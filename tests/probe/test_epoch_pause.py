"""What a script does between its epochs is seen where the first one's end is near, and never waited for in vain."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_time import FakeTime

from autotune.measure.throughput import TrainingEndedError
from autotune.probe.sources.epoch_pause import EpochPause
from autotune.probe.time_shares import OutOfTimeError, ProbePolicy, TimeShares

STEP = 0.1
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch, time)


class Uncountable(list[None]):
    """A loader whose sampler has no length."""

    def __len__(self) -> int:
        raise NotImplementedError


class Script:
    """A script of fifty steps an epoch, two batches each, that has taken some; its workers start in a second."""

    def __init__(self, clock: FakeTime, taken: int, *, loader: Any = (None,) * 100) -> None:
        self.loaders = SimpleNamespace(training_loader=loader, restarted_at=None)
        self.hooks: Any = SimpleNamespace(steps=taken, loaders=self.loaders)
        self.pause, self.clock, self.restarts = EpochPause(self.hooks), clock, True

    def go_on(self, *, limit: float = 2.0, ends_after: int = 1000, error: type[BaseException] | None = None) -> int:
        """Take the steps that are asked for, and return how many these were."""
        run = self.pause.see(CPU, STEP, micro_batches=2, limit=limit)
        first = self.hooks.steps
        try:
            next(run)
            while True:
                if self.hooks.steps - first == ends_after:
                    run.throw(error or TrainingEndedError())
                if self.hooks.steps == 50 and self.restarts:
                    self.clock.spend(3.0)
                    self.loaders.restarted_at = self.clock.now
                    self.clock.spend(1.0)
                self.clock.spend(STEP)
                self.hooks.steps += 1
                run.send(None)
        except StopIteration:
            return int(self.hooks.steps - first)


@pytest.mark.parametrize(("taken", "steps", "fraction"), [(40, 11, 3 / 8), (49, 2, 3 / 8), (29, 0, 0.0), (50, 0, 0.0)])
def test_the_pause_is_seen_where_the_end_of_the_epoch_is_near(
    clock: FakeTime, taken: int, steps: int, fraction: float
) -> None:
    script = Script(clock, taken)
    assert script.go_on() == steps
    assert script.pause.fraction == pytest.approx(fraction)
    assert not script.pause.is_awaited


def test_what_ended_while_steps_were_timed_is_in_their_times(clock: FakeTime) -> None:
    script = Script(clock, 40)
    script.loaders.restarted_at = 1.0
    assert script.go_on() == 0


@pytest.mark.parametrize("loader", [None, object(), [], Uncountable()])
def test_an_epoch_whose_length_is_not_known_is_not_waited_for(clock: FakeTime, loader: Any) -> None:
    script = Script(clock, 40, loader=loader)
    assert script.go_on() == 0
    assert script.pause.fraction == 0.0


@pytest.mark.parametrize("error", [TrainingEndedError, OutOfTimeError])
def test_a_training_that_ends_before_has_shown_no_pause(clock: FakeTime, error: type[BaseException]) -> None:
    script = Script(clock, 40)
    assert script.go_on(ends_after=4, error=error) == 4
    script.pause.give_up()
    assert script.pause.fraction == script.pause.exceeded_seconds == 0.0
    assert not script.pause.is_awaited


def test_an_epoch_that_goes_on_is_not_waited_for_much_longer(clock: FakeTime) -> None:
    script = Script(clock, 40)
    script.restarts = False
    assert script.go_on() == 12
    assert script.pause.fraction == 0.0


def test_of_a_pause_that_does_not_end_the_least_is_known(clock: FakeTime) -> None:
    script = Script(clock, 50 - 1)
    run = script.pause.see(CPU, STEP, micro_batches=2, limit=2.0)
    next(run)
    script.hooks.steps = 50
    run.send(None)
    assert script.pause.is_awaited
    clock.spend(5.0)
    script.pause.give_up()
    assert script.pause.exceeded_seconds == pytest.approx(5.0)
    assert script.pause.fraction == pytest.approx(5.0 / (5.0 + 50 * STEP))


@pytest.mark.parametrize(("elapsed", "seconds"), [(0.0, 5.0), (33.0, 1.0), (36.0, 0.0), (50.0, 0.0)])
def test_it_takes_no_more_than_leaves_time_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, seconds: float
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: elapsed)
    assert TimeShares(0.0, 60.0, ProbePolicy()).grant_pause() == pytest.approx(seconds)
