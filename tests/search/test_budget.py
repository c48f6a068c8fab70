from __future__ import annotations

import pytest
from simulated import Machine

from autotune.search.budget import CLOSING_SECONDS, DRIFT_SHARE, FINALS_SHARE, Budget, measure_seconds_for
from autotune.search.drift import GOOD_STEPS, LEAST_STEPS, MOST_STEPS, SEEDS, DriftPlan, plan_drift


def at(elapsed: float) -> Budget:
    return Budget(seconds=100.0, started=50.0, now=lambda: 50.0 + elapsed)


def test_the_finals_and_the_drift_checks_are_reserved_first():
    assert at(0).remaining_seconds == 100.0 - CLOSING_SECONDS
    assert at(0).search_remaining_seconds == pytest.approx(99.0 - 100 * (FINALS_SHARE + DRIFT_SHARE))
    assert at(0).drift_remaining_seconds == pytest.approx(99.0 - 100 * FINALS_SHARE)


@pytest.mark.parametrize("elapsed", [0.0, 30.0, 60.0, 99.0, 100.0, 500.0])
def test_no_share_is_negative_and_each_ends_before_the_next(elapsed):
    budget = at(elapsed)
    shares = (budget.search_remaining_seconds, budget.drift_remaining_seconds, budget.remaining_seconds)
    assert 0 <= shares[0] <= shares[1] <= shares[2] <= 100


@pytest.mark.parametrize(("budget", "seconds"), [(60, 1.5), (120, 2.0), (600, 10.0), (86400, 12.0)])
def test_a_launch_measures_a_sixtieth_of_the_budget_within_bounds(budget, seconds):
    assert measure_seconds_for(budget) == pytest.approx(seconds)


FACTS = Machine().find_facts()
WITH_METRIC = FACTS.replace(metrics={"error": "minimize"}, evaluate_seconds=0.5)


def arm_seconds(plan: DriftPlan, evaluation: float = 0.0) -> float:
    return SEEDS * (plan.steps * 0.05 + evaluation)


@pytest.mark.parametrize(("seconds", "candidates"), [(20, 2), (30, 1), (60, 2), (900, 2)])
def test_drift_steps_fill_the_time_and_no_more(seconds, candidates):
    plan = plan_drift(seconds, FACTS, seconds_per_step=0.05, candidates=candidates)
    assert plan is not None
    total = (1 + plan.candidates) * arm_seconds(plan)
    assert total <= seconds
    assert plan.steps == MOST_STEPS or total > 0.5 * seconds


def test_the_metric_comes_before_a_second_candidate():
    plan = plan_drift(40.0, WITH_METRIC, seconds_per_step=0.05, candidates=2)
    assert plan is not None
    assert plan.evaluate
    assert plan.candidates == 1
    assert plan.steps >= GOOD_STEPS
    assert 2 * arm_seconds(plan, 0.5) <= 40.0


def test_the_metric_comes_before_more_steps() -> None:
    plan = plan_drift(12.0, WITH_METRIC, seconds_per_step=0.05, candidates=1)
    assert plan is not None
    assert plan.evaluate
    assert LEAST_STEPS <= plan.steps < GOOD_STEPS


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
    assert least.steps == MOST_STEPS
    few = plan_drift(2 * (SEEDS * LEAST_STEPS * 1.0 + 1) / 0.85 + 0.1, FACTS, seconds_per_step=1.0, candidates=2)
    assert few == DriftPlan(steps=LEAST_STEPS, evaluate=False, candidates=1)
