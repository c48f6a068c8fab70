from __future__ import annotations

import pytest
from record_factory import make_hardware, make_profile

from autotune.adapters.pace import PaceGuard, PacePolicy, find_promised_rate

POLICY = PacePolicy(warmup_steps=2, window_steps=4, windows=2, least_share=0.7)


class Steps:
    """A training whose steps take as long as they are told."""

    def __init__(self, promised: float | None) -> None:
        self.now = 0.0
        self.guard = PaceGuard(promised, policy=POLICY, clock=lambda: self.now)

    def take(self, number: int, seconds: float, samples: int = 10) -> list[str]:
        told = []
        for _ in range(number):
            self.now += seconds
            told.append(self.guard.count(samples))
        return [warning for warning in told if warning]


def test_a_pace_far_below_the_promised_is_told_once() -> None:
    steps = Steps(promised=100.0)
    assert steps.take(3, 5.0) == []  # the first begins the count, two warm up
    assert steps.take(7, 0.2) == []
    (warning,) = steps.take(1, 0.2)
    assert "50 samples/s, 50 % of the 100 samples/s that were measured" in warning
    assert steps.take(50, 0.2) == []
    assert steps.guard.samples_per_second == pytest.approx(50.0)


@pytest.mark.parametrize(("promised", "seconds"), [(100.0, 0.13), (None, 10.0)])
def test_a_little_slower_or_nothing_promised_is_told_of_nothing(promised: float | None, seconds: float) -> None:
    assert Steps(promised).take(60, seconds) == []


def test_a_short_disturbance_is_none() -> None:
    steps = Steps(promised=100.0)
    steps.take(3, 0.1)
    for _ in range(5):
        assert steps.take(4, 1.0) == []
        assert steps.take(4, 0.1) == []


def test_an_evaluation_does_not_count() -> None:
    steps = Steps(promised=100.0)
    steps.take(3, 0.1)
    for _ in range(20):
        assert steps.take(1, 0.1) == []
        steps.now += 100.0
        steps.guard.pause()
        assert steps.take(1, 0.1) == []
    assert steps.guard.samples_per_second == pytest.approx(100.0)


def test_another_machine_has_promised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = make_profile()
    monkeypatch.setattr("autotune.adapters.pace.read_hardware", lambda: profile.hardware)
    assert find_promised_rate(profile) == 1300.0
    assert find_promised_rate(profile.replace(verdict="keep")) == 1000.0
    monkeypatch.setattr("autotune.adapters.pace.read_hardware", lambda: make_hardware(cpu_name="other"))
    assert find_promised_rate(profile) is None
