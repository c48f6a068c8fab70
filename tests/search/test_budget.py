from __future__ import annotations

import pytest
from simulated import Machine

from autotune.drift.gate.loss_check import DriftPlan, plan_drift
from autotune.drift.policy import USUAL_LOSS_CHECK
from autotune.search.launch.budget import CLOSING_SECONDS, Budget, measure_seconds_for


def at(elapsed: float) -> Budget:
    return Budget(seconds=100.0, started=50.0, now=lambda: 50.0 + elapsed)


@pytest.mark.parametrize("elapsed", [0.0, 30.0, 60.0, 99.0, 100.0, 500.0])
def test_what_remains_is_never_negative_and_leaves_time_to_close(elapsed):
    assert at(elapsed).remaining_seconds == max(0.0, 100.0 - CLOSING_SECONDS - elapsed)


@pytest.mark.parametrize("budget", [121, 600, 86400])
def test_a_launch_measures_two_seconds_however_long_the_search_is(budget):
    assert measure_seconds_for(60) < measure_seconds_for(budget) == 2.0


FACTS = Machine().find_facts()
WITH_METRIC = FACTS.replace(metrics={"error": "minimize"}, evaluate_seconds=0.5)


def arm_seconds(plan: DriftPlan, evaluation: float = 0.0) -> float:
    return USUAL_LOSS_CHECK.seeds * (plan.steps * 0.05 + evaluation)


@pytest.mark.parametrize(("seconds", "candidates"), [(20, 2), (30, 1), (60, 2), (900, 2)])
def test_drift_steps_fill_the_time_and_no_more(seconds, candidates):
    plan = plan_drift(seconds, FACTS, seconds_per_step=0.05, candidates=candidates)
    assert plan is not None
    total = (1 + plan.candidates) * arm_seconds(plan)
    assert total <= seconds
    assert plan.steps == USUAL_LOSS_CHECK.most_steps or total > 0.5 * seconds


def test_the_metric_comes_before_a_second_candidate():
    plan = plan_drift(40.0, WITH_METRIC, seconds_per_step=0.05, candidates=2)
    assert plan is not None
    assert plan.evaluate
    assert plan.candidates == 1
    assert plan.steps >= USUAL_LOSS_CHECK.good_steps
    assert 2 * arm_seconds(plan, 0.5) <= 40.0


def test_the_metric_comes_before_more_steps() -> None:
    plan = plan_drift(12.0, WITH_METRIC, seconds_per_step=0.05, candidates=1)
    assert plan is not None
    assert plan.evaluate
    assert USUAL_LOSS_CHECK.least_steps <= plan.steps < USUAL_LOSS_CHECK.good_steps


def test_a_metric_that_takes_too_long_is_left_out():
    dear = WITH_METRIC.replace(evaluate_seconds=30.0)
    plan = plan_drift(25.0, dear, seconds_per_step=0.05, candidates=2)
    assert plan is not None
    assert not plan.evaluate
    endless = WITH_METRIC.replace(evaluate_seconds=None)
    plan = plan_drift(25.0, endless, seconds_per_step=0.05, candidates=2)
    assert plan is not None
    assert not plan.evaluate


def test_too_few_drift_steps_are_none_at_all():
    assert plan_drift(3.0, FACTS, seconds_per_step=0.5, candidates=2) is None
    least = plan_drift(1e6, FACTS, seconds_per_step=1.0, candidates=2)
    assert least is not None
    assert least.steps == USUAL_LOSS_CHECK.most_steps
    few = plan_drift(
        2 * (USUAL_LOSS_CHECK.seeds * USUAL_LOSS_CHECK.least_steps * 1.0 + 1) / 0.85 + 0.1,
        FACTS,
        seconds_per_step=1.0,
        candidates=2,
    )
    assert few == DriftPlan(steps=USUAL_LOSS_CHECK.least_steps, evaluate=False, candidates=1)
