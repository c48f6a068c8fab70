"""The log-additive model: what it learns from readings, what it takes from its prior, when it does not fit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autotune.search.explore.additive import Effect, Features, Prior, fit, misfit

VALUES = {"workers": (0, 1, 2), "bf16": ("off", "on"), "layout": ("plain", "last")}
BASELINE = {"workers": 0, "bf16": "off", "layout": "plain"}
NOTHING = Prior({}, {})
NOISE = 0.03


def rows_of(*configs: tuple[object, ...]) -> np.ndarray:
    return np.array(
        [[values.index(value) for values, value in zip(VALUES.values(), one, strict=True)] for one in configs]
    )


def predict(features: Features, readings: dict[tuple[object, ...], float], asked: tuple[object, ...]) -> float:
    rows, means = rows_of(*readings), np.array([*readings.values()])
    posterior = fit(features, rows, means, np.ones(len(rows)), NOISE)
    return float((features.encode(rows_of(asked)) @ posterior.mean)[0])


def test_the_baseline_has_no_columns_and_so_no_speed_up():
    features = Features(VALUES, BASELINE, NOTHING)
    assert not features.encode(rows_of((0, "off", "plain"))).any()
    assert features.encode(rows_of((2, "on", "last"))).sum() == 3
    assert list(features.count_changes(rows_of((0, "off", "plain"), (2, "on", "plain")))) == [0, 2]


def test_what_was_seen_apart_is_summed():
    features = Features(
        VALUES, BASELINE, Prior({("workers", None): Effect(0.0, 1.0), ("bf16", "on"): Effect(0, 1)}, {})
    )
    found = predict(features, {(0, "on", "plain"): 0.2, (2, "off", "plain"): 0.3}, (2, "on", "plain"))
    assert found == pytest.approx(0.5, abs=0.02)


def test_without_readings_the_prior_speaks_the_value_before_its_knob():
    prior = Prior({("workers", None): Effect(0.1), ("workers", 2): Effect(0.4)}, {})
    features = Features(VALUES, BASELINE, prior)
    assert predict(features, {}, (1, "off", "plain")) == pytest.approx(0.1)
    assert predict(features, {}, (2, "off", "plain")) == pytest.approx(0.4)
    assert predict(features, {}, (0, "on", "last")) == 0.0


def test_a_pair_that_interacts_is_learnt_as_one():
    pairs = {(("bf16", "on"), ("layout", None)): Effect(0.0, 0.3)}
    readings = {(0, "on", "plain"): -0.1, (0, "off", "last"): -0.1, (0, "on", "last"): 0.4}
    wide = {name: Effect(0.0, 0.3) for name in (("workers", None), ("bf16", None), ("layout", None))}
    paired, plain = (Features(VALUES, BASELINE, Prior(wide, known)) for known in (pairs, {}))
    assert predict(paired, readings, (0, "on", "last")) > 0.3
    assert predict(plain, readings, (0, "on", "last")) < 0.25


def test_neighbouring_values_of_an_ordered_knob_learn_from_each_other():
    features = Features(VALUES, BASELINE, NOTHING)
    assert predict(features, {(1, "off", "plain"): -0.2}, (2, "off", "plain")) < -0.08
    categories = Features({"x": ("a", "b", "c")}, {"x": "a"}, NOTHING)
    posterior = fit(categories, np.array([[1]]), np.array([-0.2]), np.ones(1), NOISE)
    assert float((categories.encode(np.array([[2]])) @ posterior.mean)[0]) == 0.0


def test_more_launches_weigh_more():
    features = Features(VALUES, BASELINE, NOTHING)
    rows, means = rows_of((0, "on", "plain")), np.array([0.3])
    once, often = (float(fit(features, rows, means, np.array([float(count)]), 0.2).mean[2]) for count in (1, 20))
    assert 0.0 < once < often < 0.3


def test_draws_scatter_as_the_covariance_says():
    posterior = fit(Features(VALUES, BASELINE, NOTHING), np.zeros((0, 3), dtype=int), np.array([]), np.array([]), NOISE)
    rng = np.random.default_rng(0)
    drawn = np.array([posterior.draw(rng) for _ in range(4000)])
    assert np.cov(drawn.T) == pytest.approx(posterior.covariance, abs=0.001)


def test_the_misfit_is_about_one_where_the_model_holds_and_large_where_it_does_not():
    rng = np.random.default_rng(1)
    configs = [*itertools.product(*VALUES.values())]
    effects = {1: 0.1, 2: 0.15, "on": 0.2, "last": -0.1}
    features = Features(VALUES, BASELINE, NOTHING)
    rows, launches = rows_of(*configs), np.ones(len(configs))
    sums = np.array([math.fsum(effects.get(value, 0.0) for value in one) for one in configs])
    assert misfit(features, rows, sums + rng.normal(0, NOISE, len(sums)), launches, NOISE, 5) < 1.7
    assert misfit(features, rows, rng.normal(0, 0.6, len(sums)), launches, NOISE, 5) > 3
    assert misfit(features, rows[:9], sums[:9], launches[:9], NOISE, 5) == 0.0
