from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from autotune.measure.confidence import (
    mean_interval,
    minimum_detectable_speedup,
    paired_ratio,
    pairs_needed,
    student_t_quantile,
)

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


def test_mean_interval_is_the_textbook_one() -> None:
    values = [9.8, 10.2, 10.4, 9.8, 10.0, 10.2, 9.6]
    interval = mean_interval(values, confidence_level=0.95, method="example")
    low, high = stats.t.interval(0.95, 6, loc=statistics.fmean(values), scale=stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-10)
    assert interval.estimate == pytest.approx(10.0)
    assert (interval.confidence_level, interval.method) == (0.95, "example")


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_mean_interval_refuses_too_little(values: list[float]) -> None:
    with pytest.raises(ValueError, match="an interval needs"):
        mean_interval(values, confidence_level=0.9, method="")


def test_paired_ratio_is_exact_for_a_constant_ratio() -> None:
    interval = paired_ratio([200.0, 300.0, 500.0], [100.0, 150.0, 250.0])
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))
    assert interval.confidence_level == 0.98
    assert interval.method == "Student t on 3 paired log ratios"


def test_paired_ratio_is_the_exponential_of_the_log_interval() -> None:
    candidate, baseline = [110.0, 130.0, 118.0, 125.0], [100.0, 104.0, 99.0, 101.0]
    logs = [math.log(a / b) for a, b in zip(candidate, baseline, strict=True)]
    low, high = stats.t.interval(0.98, 3, loc=statistics.fmean(logs), scale=stats.sem(logs))
    interval = paired_ratio(candidate, baseline)
    assert (interval.low, interval.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    assert interval.estimate == pytest.approx(
        math.prod(a / b for a, b in zip(candidate, baseline, strict=True)) ** 0.25
    )


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=2, max_size=8))
def test_paired_ratio_turns_over_when_the_arms_are_swapped(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    forth, back = paired_ratio(first, second), paired_ratio(second, first)
    assert forth.low <= forth.estimate <= forth.high
    assert math.log(forth.estimate) == pytest.approx(-math.log(back.estimate), abs=1e-9)
    assert math.log(forth.low) == pytest.approx(-math.log(back.high), abs=1e-9)


def test_paired_ratio_stays_finite_when_two_pairs_disagree_wildly() -> None:
    interval = paired_ratio([1e300, 1e-300], [1.0, 1.0])
    assert 0.0 < interval.low < interval.estimate < interval.high < math.inf


@pytest.mark.parametrize(
    ("candidate", "baseline", "message"),
    [
        ([], [], "at least 2 pairs, got 0"),
        ([1.0], [1.0], "at least 2 pairs, got 1"),
        ([1.0, 2.0], [1.0], "cannot be paired"),
        ([1.0, 0.0], [1.0, 1.0], "positive finite values, got 0.0"),
        ([1.0, 2.0], [1.0, -1.0], "positive finite values, got -1.0"),
        ([1.0, math.inf], [1.0, 1.0], "positive finite values, got inf"),
        ([1.0, math.nan], [1.0, 1.0], "positive finite values, got nan"),
    ],
)
def test_paired_ratio_refuses(candidate: list[float], baseline: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_ratio(candidate, baseline)


def test_nominal_98_percent_intervals_cover_97_percent_with_launch_noise() -> None:
    rng, true_speedup, covered = random.Random(1), 1.07, 0
    for _ in range(4000):
        interval = paired_ratio(*_simulate_pairs(rng, true_speedup, pairs=6, launch_sd=0.03))
        covered += interval.low <= true_speedup <= interval.high
    assert covered / 4000 >= 0.97


@pytest.mark.parametrize(("launch_sd", "seed"), [(0.01, 2), (0.03, 3)])
def test_identical_configs_are_claimed_faster_less_than_once_in_200(launch_sd: float, seed: int) -> None:
    rng = random.Random(seed)
    intervals = [paired_ratio(*_simulate_pairs(rng, 1.0, pairs=6, launch_sd=launch_sd)) for _ in range(4000)]
    assert sum(interval.low > 1.01 for interval in intervals) / 4000 < 0.005


def test_pairs_needed_gives_the_power_it_promises() -> None:
    rng, sd, speedup = random.Random(4), 0.02, 1.05
    pairs = pairs_needed(sd, math.log(speedup), most=100)
    won = sum(
        paired_ratio(*_simulate_pairs(rng, speedup, pairs=pairs, launch_sd=sd / math.sqrt(2))).low > 1.01
        for _ in range(2000)
    )
    assert 0.78 < won / 2000 < 0.95


def _simulate_pairs(
    rng: random.Random, speedup: float, *, pairs: int, launch_sd: float
) -> tuple[list[float], list[float]]:
    """Launches with noise of their own, on a machine that drifts by 1 % from pair to pair."""
    candidate, baseline, drift = [], [], 0.0
    for _ in range(pairs):
        drift += rng.gauss(0.0, 0.01)
        candidate.append(100.0 * speedup * math.exp(drift + rng.gauss(0.0, launch_sd)))
        baseline.append(100.0 * math.exp(drift + rng.gauss(0.0, launch_sd)))
    return candidate, baseline


@pytest.mark.parametrize(("sd", "effect"), [(0.01, 0.0175), (0.10, 0.175)])
def test_six_pairs_detect_one_and_three_quarter_sd(sd: float, effect: float) -> None:
    assert math.log(minimum_detectable_speedup(sd, 6)) == pytest.approx(effect, abs=5e-4 * sd / 0.01)


def test_detectable_effect_shrinks_with_pairs_and_grows_with_noise_and_demands() -> None:
    by_pairs = [minimum_detectable_speedup(0.02, pairs) for pairs in range(2, 40)]
    assert by_pairs == sorted(by_pairs, reverse=True)
    assert minimum_detectable_speedup(0.0, 6) == 1.0
    assert minimum_detectable_speedup(0.02, 6, power=0.9) > minimum_detectable_speedup(0.02, 6)
    assert minimum_detectable_speedup(0.02, 6, confidence=0.95) < minimum_detectable_speedup(0.02, 6)


@pytest.mark.parametrize(("sd", "pairs"), [(0.01, 1), (0.01, 0), (-0.01, 6)])
def test_detectable_effect_refuses(sd: float, pairs: int) -> None:
    with pytest.raises(ValueError, match="it must"):
        minimum_detectable_speedup(sd, pairs)


@given(st.floats(0.0, 0.2), st.floats(-0.1, 0.5), st.integers(2, 10), st.integers(0, 40))
def test_pairs_needed_is_the_smallest_number_that_detects_the_effect(
    sd: float, log_effect: float, fewest: int, extra: int
) -> None:
    most, threshold = fewest + extra, math.log(1.01)
    pairs = pairs_needed(sd, log_effect, most=most, fewest=fewest)
    assert fewest <= pairs <= most

    def suffices(count: int) -> bool:
        return math.log(minimum_detectable_speedup(sd, count)) <= log_effect - threshold + 1e-12

    assert pairs == most or suffices(pairs)
    assert all(not suffices(count) or pairs == count for count in range(fewest, pairs))


def test_pairs_needed_follows_noise_and_effect() -> None:
    assert pairs_needed(0.001, math.log(1.30), most=50) == 6
    assert pairs_needed(0.03, math.log(1.05), most=50) > pairs_needed(0.03, math.log(1.10), most=50)
    assert pairs_needed(0.03, math.log(1.01), most=50) == 50  # no number of pairs proves what equals the threshold
    assert pairs_needed(0.03, math.log(1.05), most=4) == 4  # the budget wins
    for fewest, most in ((1, 9), (6, 1)):
        with pytest.raises(ValueError, match="at least 2"):
            pairs_needed(0.03, 0.1, fewest=fewest, most=most)
