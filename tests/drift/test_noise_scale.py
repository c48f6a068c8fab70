from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import RowLayout
from autotune.drift.compare.noise_scale import gradient_noise_scale, predicted_samples_ratio

COLUMNS = 50
LAYERS = RowLayout(("weight",), np.array([COLUMNS]), np.array([COLUMNS]))


def _windows(seed: int, *, squared_gradient: float, batch_size: int, windows: int = 16) -> NDArray[np.float64]:
    """Rows whose samples have a total variance of 1, so that B_noise = 1 / squared_gradient."""
    generator = np.random.default_rng(seed)
    gradient = np.full(COLUMNS, math.sqrt(squared_gradient / COLUMNS))
    return gradient + generator.normal(size=(windows, COLUMNS)) / math.sqrt(COLUMNS * batch_size)


def test_it_is_the_formula_of_mccandlish_and_others() -> None:
    rows, small = _windows(1, squared_gradient=0.1, batch_size=8, windows=5), 8
    big = 5 * small
    small_square, big_square = np.mean(np.sum(rows**2, axis=1)), np.sum(rows.mean(axis=0) ** 2)
    squared_gradient = (big * big_square - small * small_square) / (big - small)
    variance = (small_square - big_square) / (1 / small - 1 / big)
    assert gradient_noise_scale(rows, LAYERS, batch_size=small) == pytest.approx(variance / squared_gradient)


@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize("truth", [5.0, 80.0])
def test_it_finds_a_known_noise_scale_whatever_the_batch(truth: float, batch_size: int) -> None:
    found = [
        gradient_noise_scale(
            _windows(seed, squared_gradient=1.0 / truth, batch_size=batch_size), LAYERS, batch_size=batch_size
        )
        for seed in range(200)
    ]
    assert None not in found
    # Numerator and denominator are unbiased, so that the harmonic mean is nearly so.
    inverses = [1.0 / scale for scale in found if scale is not None]
    error = np.std(inverses) / math.sqrt(len(inverses))
    assert np.mean(inverses) == pytest.approx(1.0 / truth, abs=4.0 * error + 0.01 / truth)
    assert 0.0 < error < 0.1 / truth


def test_signal_and_noise_are_each_unbiased() -> None:
    """S / B_noise is |G|²: the mean of its estimates is the truth, far below the noise of the mean row."""
    squared_gradient, batch_size, windows = 0.02, 4, 4
    signals, noises = [], []
    for seed in range(2000):
        rows = _windows(seed, squared_gradient=squared_gradient, batch_size=batch_size, windows=windows)
        noises.append(batch_size * rows.var(axis=0, ddof=1).sum())
        scale = gradient_noise_scale(rows, LAYERS, batch_size=batch_size)
        naive = float(np.sum(rows.mean(axis=0) ** 2))
        signals.append(naive - noises[-1] / (batch_size * windows) if scale is None else noises[-1] / scale)
    assert np.mean(noises) == pytest.approx(1.0, abs=4.0 * np.std(noises) / math.sqrt(2000))
    assert np.mean(signals) == pytest.approx(squared_gradient, abs=4.0 * np.std(signals) / math.sqrt(2000))
    assert 4.0 * np.std(signals) / math.sqrt(2000) < 0.25 * squared_gradient  # the noise in |mean|² is three times it


def test_a_sampled_column_weighs_the_elements_it_stands_for() -> None:
    rows = np.random.default_rng(2).normal(size=(6, 2)) + 2.0
    sampled = RowLayout(("a", "b"), np.array([1, 1]), np.array([1, 3]))
    everything = RowLayout(("a", "b"), np.array([1, 3]), np.array([1, 3]))
    expected = gradient_noise_scale(rows[:, [0, 1, 1, 1]], everything, batch_size=8)
    assert expected is not None
    assert gradient_noise_scale(rows, sampled, batch_size=8) == pytest.approx(expected)


def test_a_gradient_without_noise_has_a_scale_of_zero() -> None:
    assert gradient_noise_scale(np.ones((4, COLUMNS)), LAYERS, batch_size=8) == 0.0


def test_there_is_none_where_it_cannot_be_told() -> None:
    rows = _windows(3, squared_gradient=1.0, batch_size=8)
    assert gradient_noise_scale(rows, LAYERS, batch_size=8) is not None
    assert gradient_noise_scale(rows[:3], LAYERS, batch_size=8) is None
    assert gradient_noise_scale(rows - rows.mean(axis=0), LAYERS, batch_size=8) is None  # all noise
    assert gradient_noise_scale(0.0 * rows, LAYERS, batch_size=8) is None
    rows[0, 0] = math.nan
    assert gradient_noise_scale(rows, LAYERS, batch_size=8) is None


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        gradient_noise_scale(np.ones((4, COLUMNS)), LAYERS, batch_size=0)
    with pytest.raises(ValueError, match="do not have the layers' 50 columns"):
        gradient_noise_scale(np.ones((4, 3)), LAYERS, batch_size=8)
    for noise_scale in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="noise_scale is"):
            predicted_samples_ratio(noise_scale, batch_size=8, factor=2.0)
    for batch_size, factor in ((0, 2.0), (8, 0.0), (8, math.inf), (8, math.nan)):
        with pytest.raises(ValueError, match="both must be positive"):
            predicted_samples_ratio(100.0, batch_size=batch_size, factor=factor)


@pytest.mark.parametrize(
    ("noise_scale", "factor", "ratio"), [(0.0, 4.0, 4.0), (32.0, 2.0, 1.5), (96.0, 5.0, 2.0), (32.0, 0.5, 0.75)]
)
def test_predicted_samples_ratio(noise_scale: float, factor: float, ratio: float) -> None:
    assert predicted_samples_ratio(noise_scale, batch_size=32, factor=factor) == pytest.approx(ratio)


@given(st.floats(0.0, 1e9), st.integers(1, 10**6), st.floats(1.0, 100.0))
def test_a_larger_batch_never_needs_fewer_samples_nor_more_than_in_proportion(
    noise_scale: float, batch_size: int, factor: float
) -> None:
    ratio = predicted_samples_ratio(noise_scale, batch_size=batch_size, factor=factor)
    assert 1.0 <= ratio <= factor * (1.0 + 1e-12)
