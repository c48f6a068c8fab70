from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from autotune.measure.student_t import student_t_cdf, student_t_quantile

PROBABILITIES = (0.5, 0.501, 0.55, 0.6, 0.75, 0.8, 0.9, 0.95, 0.975, 0.98, 0.99, 0.995, 0.999, 0.9999)


@pytest.mark.parametrize("probability", PROBABILITIES)
def test_quantile_agrees_with_scipy(probability: float) -> None:
    degrees = range(1, 201)
    ours = [student_t_quantile(probability, df) for df in degrees]
    assert ours == pytest.approx(list(special.stdtrit(degrees, probability)), rel=0, abs=1e-8)
    assert ours == pytest.approx(list(stats.t.ppf(probability, degrees)), rel=0, abs=1e-8)


@pytest.mark.parametrize(
    ("probability", "degrees", "printed"),
    [  # Student's t table, NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
        (0.90, 1, 3.078),
        (0.95, 1, 6.314),
        (0.975, 1, 12.706),
        (0.99, 1, 31.821),
        (0.999, 1, 318.313),
        (0.95, 4, 2.132),
        (0.99, 5, 3.365),
        (0.975, 10, 2.228),
        (0.99, 20, 2.528),
        (0.999, 30, 3.385),
        (0.95, 60, 1.671),
        (0.99, 100, 2.364),
    ],
)
def test_quantile_agrees_with_the_printed_table(probability: float, degrees: int, printed: float) -> None:
    # The table's own t.999,1 is rounded from 318.3088; every other entry is good to its last digit.
    assert student_t_quantile(probability, degrees) == pytest.approx(printed, abs=0.005 if degrees == 1 else 5.01e-4)


def test_quantile_of_one_and_two_degrees_is_the_closed_form() -> None:
    for probability in PROBABILITIES[1:]:
        assert student_t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-12)
        q = 2 * probability - 1
        assert student_t_quantile(probability, 2) == pytest.approx(q * math.sqrt(2 / (1 - q * q)), rel=1e-12)


@given(st.floats(1e-9, 1 - 1e-9), st.integers(1, 500))
def test_quantile_inverts_the_distribution_and_is_odd(probability: float, degrees: int) -> None:
    t = student_t_quantile(probability, degrees)
    assert special.stdtr(degrees, t) == pytest.approx(probability, rel=1e-9, abs=1e-13)
    assert student_t_quantile(1 - probability, degrees) == pytest.approx(-t, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("probability", "degrees"), [(0, 3), (1, 3), (1e-300, 3), (-0.1, 3), (0.9, 0), (0.9, math.inf)]
)
def test_quantile_refuses_what_has_none(probability: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="is"):
        student_t_quantile(probability, degrees)


def test_quantiles_asked_for_again_cost_nothing() -> None:
    student_t_quantile(0.99, 5)
    began = time.process_time()
    for _ in range(20_000):
        student_t_quantile(0.99, 5)
    assert time.process_time() - began < 0.5  # 20,000 inversions take seconds


@pytest.mark.parametrize("degrees", [1, 2, 2.5, 3, 5, 8, 30, 47.3, 200])
def test_distribution_agrees_with_scipy_in_both_tails(degrees: float) -> None:
    points = np.concatenate([-np.logspace(6, -6, 60), [0.0], np.logspace(-6, 6, 60)])
    ours = [student_t_cdf(float(t), degrees) for t in points]
    assert ours == pytest.approx(list(special.stdtr(degrees, points)), rel=1e-9, abs=1e-300)
    assert ours == sorted(ours)


def test_distribution_of_one_and_two_degrees_is_the_closed_form() -> None:
    for t in (-12.0, -1.0, -0.1, 0.3, 1.0, 31.8):
        assert student_t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=1e-12)
        assert student_t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), rel=1e-12)


@given(st.floats(1e-9, 1 - 1e-9), st.floats(1, 300))
def test_distribution_inverts_the_quantile(probability: float, degrees: float) -> None:
    assert student_t_cdf(student_t_quantile(probability, degrees), degrees) == pytest.approx(probability, rel=1e-9)


@given(st.floats(allow_nan=False), st.floats(1, 1e6))
def test_distribution_is_a_probability_and_symmetric(t: float, degrees: float) -> None:
    below, above = student_t_cdf(t, degrees), student_t_cdf(-t, degrees)
    assert 0.0 <= below <= 1.0
    assert below + above == pytest.approx(1.0, abs=1e-12)


def test_distribution_ends_at_zero_and_one() -> None:
    assert [student_t_cdf(t, 4) for t in (-math.inf, -1e200, 0.0, 1e200, math.inf)] == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("t", "degrees"), [(math.nan, 3), (1.0, 0.5), (1.0, math.inf), (1.0, math.nan)])
def test_distribution_refuses_what_has_none(t: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="is"):
        student_t_cdf(t, degrees)
