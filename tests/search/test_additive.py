"""The log-additive model: what it learns from readings, what it takes from its prior, when it does not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest

from autotune.search.explore.additive import Effect, Features, LogAdditiveModel, Prior, sum_weights

VALUES = {"workers": (0, 1, 2), "bf16": ("off", "on"), "layout": ("plain", "last")}
BASELINE = {"workers": 0, "bf16": "off", "layout": "plain"}
NOTHING = Prior({}, {})
NOISE = 0.03


def rows_of(*configs: tuple[object, ...]) -> np.ndarray:
    return np.array(
        [[values.index(value) for values, value in zip(VALUES.values(), one, strict=True)] for one in configs]
    )


def learn(features: Features, rows: np.ndarray, values: Iterable[float], noise: float = NOISE) -> LogAdditiveModel:
    model = LogAdditiveModel(features, noise)
    for row, value in zip(rows.tolist(), values, strict=True):
        model.add(row, value)
    return model


def predict(features: Features, readings: dict[tuple[object, ...], float], asked: tuple[object, ...]) -> float:
    rows = rows_of(*readings) if readings else np.zeros((0, 3), dtype=int)
    model = learn(features, rows, [*readings.values()])
    return float(sum_weights(model.mean, features.encode(rows_of(asked)))[0])


def test_the_baseline_has_no_columns_and_so_no_speed_up():
    features = Features(VALUES, BASELINE, NOTHING)
    assert features.encode(rows_of((0, "off", "plain"))).tolist() == [[]]
    assert features.encode(rows_of((2, "on", "last"), (0, "off", "plain"))).tolist() == [[3, 2, 1], [4, 4, 4]]
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
    assert list(learn(categories, np.array([[1]]), [-0.2]).mean)[1] == 0.0


def test_more_launches_weigh_more():
    features, row = Features(VALUES, BASELINE, NOTHING), rows_of((0, "on", "plain"))
    once, often = (
        float(learn(features, np.repeat(row, count, axis=0), [0.3] * count, 0.2).mean[2]) for count in (1, 20)
    )
    assert 0.0 < once < often < 0.3


def test_reading_by_reading_it_is_the_regression_on_all_of_them():
    """Bishop (2006), eq. 3.50, solved at once; several launches of a config are one reading of their mean."""
    rng = np.random.default_rng(2)
    prior = Prior({("workers", None): Effect(0.1, 0.3)}, {(("bf16", "on"), ("workers", None)): Effect(0.05, 0.2)})
    features, configs = Features(VALUES, BASELINE, prior), rows_of(*itertools.product(*VALUES.values()))
    rows = configs[rng.integers(len(configs), size=40)]
    values = rng.normal(0.0, 0.3, size=len(rows))
    model = learn(features, rows, values)
    unique, group = np.unique(rows, axis=0, return_inverse=True)
    launches = np.bincount(group)
    means = np.bincount(group, weights=values) / launches
    design = np.array([[column in row for column in range(features.count)] for row in features.encode(unique)], float)
    spread = model.spread  # tuned: the regression is that with what was found
    own = np.where(features.count_changes(unique) > 0, spread.own_sd**2, 0.0)
    weights = 1.0 / (spread.noise_sd**2 / launches + own)
    precision = np.linalg.inv(features.make_prior_covariance())
    covariance = np.linalg.inv(precision + design.T @ (design * weights[:, None]))
    mean = covariance @ (precision @ features.prior_mean + design.T @ (weights * means))
    assert model.covariance == pytest.approx(covariance, abs=1e-9)
    assert model.mean == pytest.approx(mean, abs=1e-9)
    foretold, sds = model.foretell(features.encode(configs))
    wide = np.array([[column in row for column in range(features.count)] for row in features.encode(configs)], float)
    assert foretold == pytest.approx(wide @ mean, abs=1e-9)
    assert sds**2 == pytest.approx(np.einsum("ri,ij,rj->r", wide, covariance, wide), abs=1e-9)
    drawn = np.array([model.draw(rng) for _ in range(4000)])
    assert drawn.mean(axis=0) == pytest.approx(mean, abs=0.01)
    assert np.cov(drawn.T) == pytest.approx(covariance, abs=0.003)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.10])
def test_the_noise_and_what_is_a_configs_own_are_found(noise):
    rng = np.random.default_rng(5)
    values = {name: (0, 1) for name in "abcdef"}
    features = Features(values, dict.fromkeys(values, 0), NOTHING)
    rows = np.array([*itertools.product((0, 1), repeat=6)])[1:41]
    for own in (0.01, 0.15):
        sums = rows @ np.array([0.2, -0.1, 0.05, 0.0, 0.1, -0.2]) + rng.normal(0, own, len(rows)) * (rows.sum(1) > 1)
        twice = np.repeat(rows, 2, axis=0)
        model = learn(features, twice, np.repeat(sums, 2) + rng.normal(0, noise, len(twice)), noise=0.05)
        assert noise / 1.6 < model.spread.noise_sd < noise * 1.6
        assert (model.spread.own_sd > 0.06) == (own > 0.06)


def test_a_reading_counts_as_far_as_it_is_the_configs_own():
    """One that agrees with the others moves little; one that does not is believed where configs differ from sums."""
    features = Features(VALUES, BASELINE, NOTHING)
    singles = rows_of((1, "off", "plain"), (0, "on", "plain"))
    model = learn(features, np.repeat(singles, 8, axis=0), [0.1] * 8 + [0.2] * 8)
    model.add(rows_of((1, "on", "plain"))[0].tolist(), 0.5)
    (_, one), (_, other), (_, both) = model.list_estimates()
    assert (one, other) == (pytest.approx(0.1, abs=0.03), pytest.approx(0.2, abs=0.03))
    assert 0.3 < both < 0.5


@pytest.mark.slow
def test_a_knob_of_thousands_of_values_is_one_of_a_few():
    """What a proposal costs grows with the readings and the rows, not with the cube of the values."""
    values = {"n": tuple(range(2000)), "x": ("a", "b")}
    features = Features(values, {"n": 0, "x": "a"}, NOTHING)
    model = learn(features, np.array([[5, 0], [7, 1]]), [0.2, 0.3])
    means, sds = model.foretell(features.encode(np.array([[6, 0], [1000, 0]])))
    assert means[0] > 0.1 > abs(means[1])
    assert sds[0] < 0.09 < sds[1]


def test_the_misfit_is_about_one_where_the_model_holds_and_large_where_it_does_not():
    rng = np.random.default_rng(1)
    configs = [*itertools.product(*VALUES.values())]
    effects = {1: 0.1, 2: 0.15, "on": 0.2, "last": -0.1}
    features, rows = Features(VALUES, BASELINE, NOTHING), rows_of(*configs)
    sums = np.array([math.fsum(effects.get(value, 0.0) for value in one) for one in configs])
    assert 0.0 < learn(features, rows, sums + rng.normal(0, NOISE, len(sums))).misfit < 1.7
    assert learn(features, rows, rng.normal(0, 0.6, len(sums))).misfit > 1.8
    assert learn(features, rows[:9], sums[:9]).misfit == 0.0
