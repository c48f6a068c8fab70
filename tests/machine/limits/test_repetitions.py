from __future__ import annotations

from itertools import chain, repeat

import pytest
import torch
from fake_time import FakeTime

from autotune.machine.limits import repetitions
from autotune.machine.limits.repetitions import best_seconds, sustained_seconds, time_repetition

CPU = torch.device("cpu")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch, repetitions)


def test_the_best_repetition_counts(time: FakeTime) -> None:
    durations = iter([4.0, 3.0, 2.0, 5.0])
    assert best_seconds(time.spending(durations), CPU, 14.0) == 2.0
    assert next(durations, None) is None


def test_a_few_repetitions_are_made_without_time(time: FakeTime) -> None:
    assert best_seconds(time.spending(iter([4.0, 3.0, 2.0])), CPU, -1.0) == 2.0


@pytest.mark.parametrize(("device", "factor"), [("cpu", 2), ("cuda", 50)])
def test_short_runs_are_timed_many_at_once(
    monkeypatch: pytest.MonkeyPatch, time: FakeTime, device: str, factor: int
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    runs = 0

    def run() -> None:
        nonlocal runs
        time.spend(1e-5 if runs else 2e-5)
        runs += 1

    assert best_seconds(run, torch.device(device), 0.1) == pytest.approx(1e-5)
    assert runs > factor * time.looks


def test_what_is_sustained_is_what_the_last_half_of_the_window_has(time: FakeTime) -> None:
    # A chip that slows down after half a second, and is held up once later.
    durations = chain(repeat(0.1, 5), repeat(0.2, 5), [9.0], repeat(0.2))
    assert sustained_seconds(time.spending(durations), CPU, 4.0) == pytest.approx(0.2)
    assert time.now < 20.0


def test_a_run_longer_than_the_window_is_still_timed(time: FakeTime) -> None:
    assert sustained_seconds(time.spending(repeat(3.0)), CPU, 1.0) == pytest.approx(3.0)
    assert time.now == pytest.approx(6.0)


def test_a_cpu_quota_is_part_of_what_is_sustained(time: FakeTime) -> None:
    # Held for 25 ms after each 75 ms of work: only a repetition that spans a whole period has its share of the pauses.
    worked = 0.0

    def run() -> None:
        nonlocal worked
        worked += 0.005
        time.spend(0.005)
        if worked >= 0.0749:
            worked = 0.0
            time.spend(0.025)

    assert sustained_seconds(run, CPU, 4.0) == pytest.approx(0.005 * 100 / 75, rel=0.15)


def test_a_repetition_holds_all_its_runs(time: FakeTime) -> None:
    assert time_repetition(time.spending(iter([1.0, 2.0, 3.0])), CPU, 3) == 6.0


def test_a_gpu_is_waited_for_before_and_after_but_not_between(monkeypatch: pytest.MonkeyPatch, time: FakeTime) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append("wait"))
    time_repetition(lambda: events.append("run"), torch.device("cuda"), 3)
    assert events == ["wait", "run", "run", "run", "wait"]
