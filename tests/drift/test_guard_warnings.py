"""What the drift guard makes of a rising loss, of noise of the workload's own, and of settings that were changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from guarded_workloads import BATCH, Fit, HiddenNoise, OwnNoise, run, start

from autotune.drift.guard.gradient_watch import ROUND_EVERY, WINDOWS
from autotune.drift.guard.guard import DriftGuard


def rise(guard: DriftGuard, *, first: int = 10, after: int = 800, last: int = 2000) -> Any:
    """Tell a guard of losses that are twice as high after a step; return its alarm."""
    for step in range(first, last, 10):
        level = 1.0 if step <= after else 2.0
        losses = [level + 0.01 * math.sin(step + number) for number in range(10)]
        alarm = guard.record_losses(losses, step=step, samples=BATCH * step, learning_rate=0.1)
        assert (alarm is None and not guard.warnings) or step > after
        if alarm is not None:
            return alarm
    return None


@pytest.mark.parametrize(("looked", "other"), [(False, {}), (True, {"optimizer_implementation": "foreach"})])
def test_a_loss_that_rises_is_an_alarm_where_gradients_do_not_show_all_that_differs(looked, other):
    training, guard = start(Fit(), precision="bf16", **other)
    run(training, guard, last=8 if looked else 3)
    alarm = rise(guard)
    assert alarm.cause == "drift-loss"
    assert alarm.clean_step <= 800
    assert guard.take_warning() is None


def test_a_loss_that_rises_while_all_gradients_are_right_is_a_warning_and_they_are_looked_at_again():
    training, guard = start(Fit(), precision="bf16")
    assert run(training, guard, last=8)[0] is None
    assert rise(guard) is None
    warning = guard.take_warning()
    assert "its gradients are the baseline's" in warning
    assert guard.take_warning() is None  # however long it lasts, it is said once
    assert guard._schedule.next_step <= 15
    assert run(training, guard, first=15, last=15)[0] is None
    assert guard.words == "a closer look at the gradients (2 checks)"
    assert run(training, guard, first=16, last=40)[0] is None
    assert guard.summarize().last.windows == WINDOWS


@pytest.mark.slow
def test_a_rise_that_a_closer_look_explains_is_an_alarm_after_all():
    """What one micro batch does not show is found at once, not at the next planned round."""
    workload = Fit()
    training, guard = start(workload, precision="bf16")
    source = torch.Generator().manual_seed(1)
    pushes = [0.003 * torch.randn(p.shape, generator=source) for p in training.model.parameters()]
    workload.spoil = lambda loss, model: (
        loss + sum((p * push).sum() for p, push in zip(model.parameters(), pushes, strict=True))
    )
    assert run(training, guard, last=8)[0] is None
    assert rise(guard) is None
    alarm, losses = run(training, guard, first=9, last=150)
    assert alarm.cause == "drift-gradients"
    assert len(losses) < 10 * (ROUND_EVERY - 1)


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_a_guard_of_other_settings_keeps_what_does_not_depend_on_them(same):
    training, guard = start(Fit(), precision="bf16")
    assert run(training, guard, last=60)[0] is None
    rise(guard, first=70, last=600)
    guard._off = "of these settings"
    state = guard.capture()
    other_training, other = start(Fit(), matmul_precision="high")
    other.restore(state, same_settings=same)
    assert other.capture()["losses"] == state["losses"]
    assert other.summarize().last_clean_step == guard.summarize().last_clean_step > 0
    assert other._schedule.spent_seconds == guard._schedule.spent_seconds
    assert other._off == (guard._off if same else "")
    assert (other.summarize().gradient_checks > 0) == same
    alarm = rise(other, first=600)
    assert alarm.cause == "drift-loss"  # the lowest level was seen under the other settings
    assert alarm.clean_step > 100
    if not same:
        assert run(other_training, other, first=61, last=75)[0] is None
        assert other.summarize().gradient_checks > 0


@pytest.mark.parametrize("workload", [OwnNoise, HiddenNoise])
def test_noise_from_a_generator_of_the_workloads_own_is_no_drift(workload):
    training, guard = start(workload(), precision="bf16")
    assert run(training, guard, last=100)[0] is None
    summary = guard.summarize()
    assert (summary.gradient_checks > 5) == (workload is OwnNoise)
    assert ("cannot be put back" in summary.reason) == (workload is HiddenNoise)
