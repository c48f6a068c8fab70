"""The drift guard: quiet beside a healthy training and without a trace in it, loud beside a sick one."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from guarded_workloads import (
    BATCH,
    CPU,
    SAMPLES,
    Fit,
    Fragile,
    Guarded,
    Halted,
    Hungry,
    Scaled,
    load,
    run,
    start,
)

from autotune.drift.compare.loss_band import calibrate_band
from autotune.drift.guard import gradient_watch
from autotune.drift.guard.check_schedule import CheckPace, LookSchedule
from autotune.drift.guard.gradient_watch import ROUND_EVERY, WINDOWS, GradientWatch, rounds_needed
from autotune.drift.guard.guard import DriftGuard
from autotune.drift.guard.skipped_steps import SkipWatch
from autotune.drift.record.numerics import GradientPair
from autotune.records.measurement import Interval
from autotune.records.quality import GradientEquivalence
from autotune.records.trial import LossCurve


def end_state(training: Any) -> dict[str, Any]:
    parts = [training.model.state_dict(), {"random": torch.rand(4)}]
    parts.append(
        {f"state {i} {k}": v for i, s in training.optimizer.state_dict()["state"].items() for k, v in s.items()}
    )
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_guarded_training_ends_bit_for_bit_as_one_without_a_guard(precision):
    plain, guard = start(Fit(), precision=precision)
    _, losses = run(plain, None, last=120)
    expected = end_state(plain)
    guarded, guard = start(Fit(), precision=precision)
    alarm, guarded_losses = run(guarded, guard, last=120)
    assert alarm is None
    assert guard.summarize().gradient_checks >= 10
    assert guarded_losses == losses
    for name, value in end_state(guarded).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_a_healthy_training_is_let_alone_and_summed_up():
    training, guard = start(Fit(), precision="bf16")
    assert guard.words == "first look at the gradients at step 5"
    alarm, _ = run(training, guard, last=(ROUND_EVERY + 4) * 10)
    assert alarm is None
    summary = guard.summarize()
    assert summary.is_on
    assert summary.reason == ""
    assert summary.gradient_checks >= ROUND_EVERY + WINDOWS - 1
    assert summary.last.windows >= WINDOWS
    assert summary.last.verdict != "inferior"
    assert 0.0 < summary.largest_error < 0.05
    assert summary.last_clean_step >= ROUND_EVERY * 10
    assert guard.words == f"gradients as the baseline's ({summary.gradient_checks} checks)"


@pytest.mark.parametrize(("workload", "found"), [(Scaled, "bias"), (Halted, "has a bias of 100 %")])
def test_numerics_that_are_wrong_are_found(workload, found):
    training, guard = start(workload(), precision="bf16")
    alarm, losses = run(training, guard, last=150)
    assert alarm.cause == "drift-gradients"
    assert found in alarm.sentence
    assert alarm.clean_step == 0
    assert len(losses) < 5 + 3 * WINDOWS + 10


def test_a_gradient_that_is_not_a_number_needs_no_second_look():
    workload = Fit()
    training, guard = start(workload, precision="bf16")
    assert run(training, guard, last=14)[0] is None
    workload.spoil = lambda loss, model: loss + torch.sqrt(0.0 * model[-1].weight.square()).sum()
    alarm = guard.check_step(15)
    assert (alarm.cause, alarm.clean_step) == ("drift-gradients", 5)
    assert "not finite" in alarm.sentence


@pytest.mark.slow
def test_numerics_that_go_wrong_later_are_clean_until_then():
    workload = Fit()
    training, guard = start(workload, precision="bf16")
    assert run(training, guard, last=60)[0] is None
    workload.spoil = lambda loss, _model: 1.3 * loss
    alarm, _ = run(training, guard, first=61, last=200)
    assert alarm.cause == "drift-gradients"
    assert 50 <= alarm.clean_step <= 60


@pytest.mark.slow
def test_a_mistake_that_one_micro_batch_does_not_show_is_found_by_a_planned_round():
    """A small constant is added to the gradient: next to the noise of a micro batch it is nothing."""
    workload = Fit()
    training, guard = start(workload, precision="bf16")
    source = torch.Generator().manual_seed(1)
    pushes = [0.003 * torch.randn(p.shape, generator=source) for p in training.model.parameters()]
    workload.spoil = lambda loss, model: (
        loss + sum((p * push).sum() for p, push in zip(model.parameters(), pushes, strict=True))
    )
    alarm, losses = run(training, guard, last=400)
    assert alarm.cause == "drift-gradients"
    assert len(losses) >= 5 + 10 * (ROUND_EVERY - 1) + WINDOWS
    assert alarm.clean_step >= 10 * (ROUND_EVERY - 2)


class Vanishing:
    """Gradients whose mean vanishes, as near a minimum, and a difference that is always the same one."""

    layers = [("weight", 400, 400)]

    def __init__(self, share: float) -> None:
        source = torch.Generator().manual_seed(2)
        self.gradient, self.difference = torch.randn(2, 400, generator=source)
        self.difference *= share * self.gradient.norm() / self.difference.norm()

    def compute(self, number: int, *, repeats: bool) -> GradientPair:
        gradient = (-1.0) ** number * self.gradient
        return GradientPair(gradient + self.difference, gradient)


@pytest.mark.parametrize(("share", "state", "verdict"), [(0.006, "fine", "inconclusive"), (0.06, "shown", "inferior")])
def test_rounding_near_a_minimum_is_no_drift_and_more_than_rounding_is(share, state, verdict):
    watch = GradientWatch(Vanishing(share), samples_per_step=BATCH, scales_loss=False)
    seen = [watch.look(step, step=step).state for step in range(1, ROUND_EVERY + 2 * WINDOWS)]
    assert seen[: ROUND_EVERY - 1] == ["fine"] * (ROUND_EVERY - 1)
    assert seen[ROUND_EVERY - 1] == "open"
    assert watch.last.verdict == verdict
    assert watch.last.bias.low > 0.05  # as a share of the mean gradient either is large
    assert (state == "shown") == ("shown" in seen)


class OneLayerWrong(Vanishing):
    """Gradients whose mean vanishes, and whose difference is all in a small layer."""

    layers = [("weight", 380, 380), ("bias", 20, 20)]

    def __init__(self) -> None:
        super().__init__(0.0)
        self.difference[380:] = 0.6 * self.gradient[380:]
        self.difference[:380] = 0.0

    def compute(self, number: int, *, repeats: bool) -> GradientPair:
        gradient = (-1.0) ** number * self.gradient
        return GradientPair(gradient + (-1.0) ** number * self.difference, gradient)


def test_the_alarm_does_not_hang_on_how_a_comparison_words_its_reason(monkeypatch):
    compare = gradient_watch.compare
    monkeypatch.setattr(gradient_watch, "compare", lambda *arms, **told: compare(*arms, **told).replace(reason="so"))
    watch = GradientWatch(OneLayerWrong(), samples_per_step=BATCH, scales_loss=False)
    seen = [watch.look(step, step=step) for step in range(1, ROUND_EVERY + 10 * WINDOWS)]
    assert ("shown", "so") in seen
    assert watch.last.worst_layer == "bias"


def test_a_gradient_that_overflows_half_precision_is_the_scalers_business():
    training, guard = start(Fit(), precision="fp16")
    training.model[-1].weight.register_hook(lambda gradient: gradient * math.inf)
    assert run(training, guard, last=40)[0] is None
    assert guard.summarize().gradient_checks == 0


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "reason"), [(Hungry, "not enough memory"), (Fragile, "takes no float32")])
def test_a_look_that_fails_ends_the_looks_and_not_the_training(workload, reason):
    training, guard = start(workload(), precision="bf16")
    alarm, losses = run(training, guard, last=60)
    assert (alarm, len(losses)) == (None, 60)
    summary = guard.summarize()
    assert summary.is_on
    assert summary.gradient_checks == 0
    assert reason in summary.reason
    assert guard.words == "losses watched, gradients not compared"


@pytest.mark.parametrize("changes", [{}, {"num_workers": 2, "prefetch_factor": 4}, {"pin_memory": True}])
def test_without_anything_to_fall_back_to_it_is_off(changes):
    _, guard = start(Fit(), **{**changes, "num_workers": 0})
    assert not guard.is_on
    assert guard.words == ""
    assert guard.check_step(20) is None
    assert guard.record_losses([1e9] * 10, step=20, samples=160, learning_rate=1.0) is None
    assert not guard.summarize().is_on


def test_what_cannot_be_switched_is_named():
    split = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
    _, guard = start(Fit(), **split, optimizer_implementation="foreach", precision="bf16")
    reason = guard.summarize().reason
    assert all(name in reason for name in ("micro_batch", "accumulation", "optimizer"))
    assert "precision" not in reason
    _, guard = start(Fit(), optimizer_implementation="foreach")
    assert guard.words == "losses watched, gradients not compared"


@pytest.mark.parametrize("is_transient", [False, True])
def test_gradients_that_the_search_accepted_as_they_are_are_not_compared_unless_they_come_right(is_transient):
    interval = Interval(estimate=0.3, low=0.2, high=0.4, confidence_level=0.9, method="jackknife")
    found = GradientEquivalence(
        subject="gradients",
        point="initial weights",
        windows=16,
        noise=interval,
        verdict="non-inferior" if is_transient else "inconclusive",
        is_transient=is_transient,
    )
    loaded = load(Fit())
    config = loaded.baseline.replace(precision="bf16")
    training, _ = start(Fit(), precision="bf16")
    guard = DriftGuard(loaded, training, config, loaded.baseline, device=CPU, accepted=[found])
    assert ("accepted" in guard.summarize().reason) is not is_transient


def learn_band(seeds: int = 5, steps: int = 96) -> Any:
    curves = []
    for seed in range(seeds):
        training, _ = start(Fit())
        torch.manual_seed(seed + 1)
        losses = tuple(float(training.step().loss) for _ in range(steps))
        curves.append(LossCurve(seed=seed, losses=losses, samples=steps * BATCH))
    return calibrate_band(curves)


@pytest.mark.slow
def test_a_loss_above_the_band_is_found():
    band = learn_band()
    training, guard = start(Fit(), band=band, optimizer_implementation="foreach")
    assert run(training, guard, last=110)[0] is None
    training, guard = start(Fit(), band=band, optimizer_implementation="foreach")
    for group in training.optimizer.param_groups:
        group["lr"] = 0.3
    alarm, _ = run(training, guard, last=110)
    assert alarm.cause == "drift-loss"
    assert "above the baseline's" in alarm.sentence


@pytest.mark.slow
def test_the_band_of_another_training_is_not_used():
    training, guard = start(Fit(), band=learn_band(), micro_batch_size=2 * BATCH)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.3
    assert run(training, guard, last=60)[0] is None


def test_skipped_steps_are_an_alarm_only_where_they_are_many():
    healthy = SkipWatch()
    scale, found = 65536.0, []
    for step in range(10, 6010, 10):
        skipped = 4 if step == 10 else 1 if step % 2000 == 0 else 0
        scale /= 2.0**skipped
        found.append(healthy.record(scale, step=step, skipped=skipped, steps=10))
    assert found == [None] * 600
    assert healthy.skipped == 7
    stormy = SkipWatch()
    storm = [stormy.record(65536.0, step=step, skipped=2, steps=10) for step in range(10, 210, 10)]
    assert next(i for i, one in enumerate(storm) if one) == 11 - 1
    assert "12 of the last" in storm[10]
    assert SkipWatch().record(0.5, step=10, skipped=3, steps=10).startswith("the loss scale has fallen to 0.5")


def test_skipped_steps_reach_the_guard():
    _, guard = start(Fit(), precision="fp16")
    alarm = guard.record_scale(0.25, step=400, skipped=1, steps=10)
    assert (alarm.cause, alarm.clean_step) == ("skipped-steps", 300)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_looks_wait_until_they_are_paid_for():
    clock = Clock()
    schedule = LookSchedule(CheckPace(first_step=20, least_steps=500, most_cost=0.005), clock=clock)
    step_seconds, look_seconds, looks = 0.01, 0.1, []
    for step in range(1, 20_001):
        clock.now += step_seconds
        if schedule.is_due(step):
            clock.now += look_seconds
            schedule.record(step, seconds=look_seconds, is_open=False)
            looks.append(step)
    assert looks[0] == 20
    assert all(late - early in (2000, 2001) for early, late in pairwise(looks))
    assert schedule.cost_fraction == pytest.approx(0.005, rel=0.1)


def test_cheap_looks_come_every_500_steps_and_a_row_of_them_is_paid_for_together():
    clock = Clock()
    schedule = LookSchedule(CheckPace(first_step=20, least_steps=500, most_cost=0.005), clock=clock)
    looks = []
    for step in range(1, 6001):
        clock.now += 0.01
        if schedule.is_due(step):
            clock.now += 0.001
            looks.append(step)
            schedule.record(step, seconds=0.02 if 1000 < step < 1040 else 0.001, is_open=1000 < step < 1030)
    assert looks[:3] == [20, 520, 1020]
    assert looks[3:13] == [*range(1021, 1031)]
    assert looks[13] == pytest.approx(1030 + 11 * 400, abs=2)


def test_what_is_owed_is_still_owed_after_a_pause():
    clock = Clock()
    pace = CheckPace(first_step=20, least_steps=500, most_cost=0.005)
    schedule, other = (LookSchedule(pace, clock=clock) for _ in range(2))
    schedule.record(20, seconds=1.0, is_open=False)
    clock.now += 150.0  # three quarters of the 200 seconds that pay for it
    state = schedule.capture()
    clock.now += 1e6
    other.restore(state)
    clock.now += 40.0
    assert not other.is_due(600)
    clock.now += 20.0
    assert other.is_due(other.next_step)
    other.start_anew()
    assert other.next_step <= 40


def test_more_judgements_need_more_rounds_that_agree():
    assert [rounds_needed(number) for number in (1, 5, 50, 1000)] == [2, 3, 5, 7]
    assert sum(0.05 ** rounds_needed(number) for number in range(1, 10_000)) <= 0.01


@pytest.mark.parametrize("cut", [3, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (27, 90))])
def test_a_captured_guard_goes_on(cut):
    workload = Scaled() if cut == 27 else Fit()
    training, guard = start(workload, precision="bf16")
    assert run(training, guard, last=cut)[0] is None
    buffer = io.BytesIO()
    torch.save(guard.capture(), buffer)
    buffer.seek(0)
    loaded = load(workload)
    other = Guarded(loaded, training, training.config, loaded.baseline, device=CPU)
    other.restore(torch.load(buffer, weights_only=True))
    before, after = guard.summarize(), other.summarize()
    assert after.replace(cost_fraction=0.0) == before.replace(cost_fraction=0.0)
    alarm, _ = run(training, other, first=cut + 1, last=cut + 60)
    assert (alarm is not None) == (cut == 27)
    assert other.summarize().gradient_checks > before.gradient_checks


def test_batches_are_looked_at_without_being_taken():
    training, _ = start(Fit(), precision="bf16")
    batches = math.ceil(SAMPLES / BATCH)
    for number in range(1, batches + 1):
        training.step()
        ahead = training.windows.peek()
        assert (ahead is None) == (number == batches)
        assert training.windows.peek() is ahead
    assert (training.windows.epoch, training.windows.batches_done) == (1, 0)
