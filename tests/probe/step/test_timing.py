from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from autotune.engine.loop import StepOutcome
from autotune.engine.windows import Window, Windows
from autotune.probe.step.timing import measure_elasticity, time_phases, time_resident_steps

PHASES = {"data": 0.5, "copy": 0.125, "forward": 1.0, "backward": 2.0, "optimizer": 0.25}


class FakeClock:
    """Counts host seconds and device seconds; a mark is read at the device's time."""

    def __init__(self) -> None:
        self.host = self.device = 100.0
        self.waits = 0
        self._marks: list[float] = []

    def now(self) -> float:
        return self.host

    def synchronize(self) -> None:
        self.waits += 1
        self.host = max(self.host, self.device)

    def mark(self) -> None:
        self._marks.append(self.device)

    def take_intervals(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [late - early for early, late in pairwise(marks)]


class FakeTraining:
    """Steps of given phases; a pass takes `fixed` seconds and `each` for a sample."""

    def __init__(
        self, clock: FakeClock, *, launch: float = 1.0, fixed: float = 0.0, each: float = 0.0, passes: int = 1
    ) -> None:
        self.clock, self.launch, self.fixed, self.each, self.passes = clock, launch, fixed, each, passes
        self.windows: Any = _Windows()
        self.steps = 0

    def place(self, batch: Any) -> Any:
        return batch

    def step(self, mark: Callable[[str], None] | None = None) -> StepOutcome:
        self.steps += 1
        samples = sum(self.windows.next_window().counts)
        names = ["data", *["copy", "forward", "backward"] * self.passes, "optimizer"]
        for name in names:
            seconds = PHASES[name]
            if self.each or self.fixed:
                seconds = (self.fixed + self.each * samples) / 2 if name in ("forward", "backward") else seconds
            self.clock.host += seconds * self.launch
            self.clock.device = max(self.clock.device, self.clock.host) if self.launch == 1.0 else self.clock.device
            if self.launch != 1.0:
                self.clock.device += seconds
            if mark is not None:
                mark(name)
        return StepOutcome(samples=samples, loss=torch.zeros(()), ends_epoch=False)


class _Windows(Windows):
    def __init__(self) -> None:
        pass

    def next_window(self) -> Window:
        return Window(batches=["batch"], counts=[8], ends_epoch=False)


def test_each_phase_has_its_own_time() -> None:
    clock = FakeClock()
    phases = time_phases(FakeTraining(clock), clock)  # type: ignore[arg-type]
    assert phases.data_wait_seconds == 0.5
    assert (phases.copy_seconds, phases.forward_seconds, phases.backward_seconds) == (0.125, 1.0, 2.0)
    assert phases.optimizer_seconds == 0.25


def test_passes_of_an_accumulating_step_are_added_up() -> None:
    clock = FakeClock()
    phases = time_phases(FakeTraining(clock, passes=3), clock)  # type: ignore[arg-type]
    assert (phases.forward_seconds, phases.backward_seconds, phases.optimizer_seconds) == (3.0, 6.0, 0.25)


def test_phases_of_a_device_are_its_own_and_nothing_waits_for_it() -> None:
    clock = FakeClock()
    training = FakeTraining(clock, launch=0.125)
    phases = time_phases(training, clock)  # type: ignore[arg-type]
    assert (phases.forward_seconds, phases.backward_seconds) == (1.0, 2.0)
    assert training.steps == 1  # slow: the warm-up is all there is
    assert clock.waits == 2  # before the first step and after the last one


def test_fast_steps_are_timed_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in PHASES.items():
        monkeypatch.setitem(PHASES, name, seconds / 16)
    clock = FakeClock()
    training = FakeTraining(clock, launch=0.125)
    phases = time_phases(training, clock)  # type: ignore[arg-type]
    assert (phases.forward_seconds, phases.backward_seconds) == pytest.approx((1 / 16, 2 / 16))
    assert training.steps > 3
    assert clock.waits == 4
    fresh = FakeTraining(clock)
    assert time_resident_steps(fresh, clock).seconds == pytest.approx(3.875 / 16)  # type: ignore[arg-type]
    assert fresh.steps > 3


def test_slow_steps_are_timed_once() -> None:
    clock = FakeClock()
    training = FakeTraining(clock)
    assert time_resident_steps(training, clock).seconds == pytest.approx(3.875)  # type: ignore[arg-type]
    assert training.steps == 1


def test_resident_steps_of_a_busy_device() -> None:
    clock = FakeClock()
    resident = time_resident_steps(FakeTraining(clock, launch=0.25), clock)  # type: ignore[arg-type]
    assert resident.seconds == pytest.approx(3.875)
    assert resident.enqueue_fraction == pytest.approx(0.25)


def test_resident_steps_of_a_host_are_handed_over_as_they_run() -> None:
    clock = FakeClock()
    assert time_resident_steps(FakeTraining(clock), clock).enqueue_fraction == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("fixed", "each", "expected"), [(0.0, 0.001, 1.0), (0.01, 0.0, 0.0), (0.008, 0.001, 0.585)])
def test_elasticity_is_what_twice_the_samples_cost(fixed: float, each: float, expected: float) -> None:
    clock = FakeClock()
    training = FakeTraining(clock, fixed=fixed, each=each)
    samples = [torch.zeros(1)] * 3  # fewer than asked for: they are repeated
    found = measure_elasticity(training, samples, 8, clock)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, abs=1e-3)


def test_elasticity_ends_after_a_slow_pass() -> None:
    clock = FakeClock()
    training = FakeTraining(clock, each=1.0)
    assert measure_elasticity(training, [torch.zeros(1)], 8, clock) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert training.steps == 2


def test_elasticity_needs_samples() -> None:
    clock = FakeClock()
    assert measure_elasticity(FakeTraining(clock), [], 8, clock) is None  # type: ignore[arg-type]
