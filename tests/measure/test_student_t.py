from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from autotune.measure.student_t import student_t_quantile

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


def test_a_quantile_asked_for_again_is_not_computed_again() -> None:
    first = student_t_quantile(0.987, 5.5)
    hits = student_t_quantile.cache_info().hits
    assert student_t_quantile(0.987, 5.5) == first
    assert student_t_quantile.cache_info().hits == hits + 1
