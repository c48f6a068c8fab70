from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from autotune.measure.confidence import (
    NO_PILOT,
    Pilot,
    effective_count,
    hodges_lehmann,
    mean_interval,
    paired_ratio,
    pooled_sd,
    quiet_sd,
    relative_half_width,
    shrink,
    spread_variance,
)
from autotune.measure.sample_size import conditional_power, minimum_detectable_speedup, pairs_needed
from autotune.measure.student_t import student_t_quantile


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


def test_what_is_known_of_the_noise_counts_by_its_degrees() -> None:
    values, pilot = [0.30, 0.50, 0.40], Pilot(sd=0.2, degrees=4.0)
    sd = math.sqrt((4.0 * 0.2**2 + 2 * statistics.variance(values)) / 6)
    assert pilot.pool(values) == (pytest.approx(sd), 6.0)
    interval = mean_interval(values, confidence_level=0.98, method="", pilot=pilot)
    assert interval.low == pytest.approx(0.40 - stats.t.ppf(0.99, 6) * sd / math.sqrt(3))
    assert Pilot(sd=0.04, degrees=6.0).pool(values) == (pytest.approx(statistics.stdev(values)), 2.0)  # another noise
    assert Pilot(sd=0.2).pool(values) == (pytest.approx(statistics.stdev(values)), 2.0)


@pytest.mark.parametrize("pairs", [3, 4, 6])
@pytest.mark.parametrize("degrees", [2, 6, 12])
def test_half_of_the_degrees_seen_keeps_a_claim_in_a_thousand(pairs: int, degrees: int) -> None:
    # The pilot is as uncertain as the search's own figure: its variance is drawn with the degrees that were seen.
    rng = np.random.default_rng(10 * pairs + degrees)
    drawn = rng.normal(0.0, 0.1, (200_000, pairs))
    seen = 0.1**2 * rng.chisquare(degrees, 200_000) / degrees
    half = degrees / 2
    variance = (half * seen + (pairs - 1) * drawn.var(axis=1, ddof=1)) / (half + pairs - 1)
    t = drawn.mean(axis=1) / np.sqrt(variance / pairs)
    claimed = (t > student_t_quantile(0.999, half + pairs - 1)).mean()
    print(f"A/A, {pairs} pairs, {degrees} degrees seen: {claimed:.4%} claimed")
    assert claimed <= 0.0012


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
    assert minimum_detectable_speedup(0.02, 4, pilot_degrees=6) < minimum_detectable_speedup(0.02, 4)
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


@pytest.mark.parametrize(("log_effect", "sd"), [(math.nan, 0.03), (math.inf, 0.03), (0.1, -0.03), (0.1, math.nan)])
def test_pairs_needed_refuses_what_is_no_number(log_effect: float, sd: float) -> None:
    with pytest.raises(ValueError, match=r"finite|negative"):
        pairs_needed(sd, log_effect, most=6)


def _intervals(values: NDArray[np.float64], level: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`mean_interval` of each row of `values`, and the check that it is."""
    count = values.shape[1]
    half = student_t_quantile((1 + level) / 2, count - 1) * values.std(axis=1, ddof=1) / math.sqrt(count)
    low, high = values.mean(axis=1) - half, values.mean(axis=1) + half
    for row in range(20):
        interval = mean_interval(values[row].tolist(), confidence_level=level, method="")
        assert (interval.low, interval.high) == pytest.approx((low[row], high[row]), rel=1e-9, abs=1e-12)
    return low, high


@pytest.mark.parametrize("count", [4, 6, 8, 12])
def test_95_percent_intervals_of_normal_values_cover_95_percent(count: int) -> None:
    low, high = _intervals(np.random.default_rng(count).normal(3.0, 0.2, (20_000, count)), 0.95)
    covered = ((low <= 3.0) & (high >= 3.0)).mean()
    print(f"{count} normal values: {covered:.2%} covered")
    assert covered == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("count", [4, 6, 8, 12])
def test_95_percent_intervals_of_pairs_with_launch_noise_and_spikes_cover_93_percent(count: int) -> None:
    rng, shape = np.random.default_rng(count), (20_000, count)
    arms = [rng.normal(0.0, 0.014, shape) + (rng.random(shape) < 0.03) * rng.exponential(0.2, shape) for _ in "AB"]
    low, high = _intervals(0.05 + arms[0] - arms[1], 0.95)
    covered = ((low <= 0.05) & (high >= 0.05)).mean()
    print(f"{count} pairs with 3 % spikes: {covered:.2%} covered")
    assert covered >= 0.93


@pytest.mark.parametrize("sd", [0.01, 0.05, 0.20])
@pytest.mark.parametrize("pairs", [4, 6, 12])
def test_a_config_against_itself_is_claimed_at_most_once_in_100(sd: float, pairs: int) -> None:
    low, _ = _intervals(np.random.default_rng(pairs).normal(0.0, sd * math.sqrt(2), (20_000, pairs)), 0.98)
    claimed = (low > math.log(1.01)).mean()
    print(f"A/A, launch sd {sd:.0%}, {pairs} pairs: {claimed:.3%} claimed")
    assert claimed <= 0.01


def test_conditional_power_worked_by_hand() -> None:
    # critical = 0.01 + t(0.99, 5) 0.1 / sqrt(6); the 3 pairs to come need 2 critical - 0.2, of sd 0.1 / sqrt(3)
    critical = 0.01 + stats.t.ppf(0.99, 5) * 0.1 / math.sqrt(6)
    expected = stats.norm.sf(2 * critical - 0.2, loc=0.2, scale=0.1 / math.sqrt(3))
    power = conditional_power([0.1, 0.2, 0.3], 6, sd=0.1, threshold=0.01, confidence=0.99)
    assert power == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seen", [[0.02, 0.05, 0.03], [0.05], [0.0, 0.01, -0.02, 0.03], [0.09, 0.08, 0.1, 0.07, 0.09]])
def test_conditional_power_agrees_with_simulation(seen: list[float]) -> None:
    sd, rounds = 0.04, 8
    to_come = np.random.default_rng(9).normal(statistics.fmean(seen), sd, (50_000, rounds - len(seen)))
    means = (sum(seen) + to_come.sum(axis=1)) / rounds
    claimed = (means > 0.01 + student_t_quantile(0.99, rounds - 1) * sd / math.sqrt(rounds)).mean()
    power = conditional_power(seen, rounds, sd=sd, threshold=0.01, confidence=0.99)
    assert power == pytest.approx(claimed, abs=0.01)


def test_conditional_power_is_sure_when_nothing_is_left_to_chance() -> None:
    for pairs, rounds, sd in (([0.5, 0.5], 2, 0.01), ([0.5], 6, 0.0)):
        assert conditional_power(pairs, rounds, sd=sd, threshold=0.01, confidence=0.99) == 1.0
        assert conditional_power(pairs, rounds, sd=sd, threshold=0.60, confidence=0.99) == 0.0


@pytest.mark.parametrize(
    ("seen", "rounds", "sd"), [([], 4, 0.1), ([0.1] * 5, 4, 0.1), ([0.1], 1, 0.1), ([0.1], 4, -1), ([math.nan], 4, 0.1)]
)
def test_conditional_power_refuses(seen: list[float], rounds: int, sd: float) -> None:
    with pytest.raises(ValueError, match=r"rounds|negative|finite"):
        conditional_power(seen, rounds, sd=sd, threshold=0.0, confidence=0.99)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 2.4),  # deviations -1.5 -.5 .5 1.5: r = 1.25 / 5
        ([1.0, 1.0, 1.0, 5.0, 5.0, 5.0], 2.0),  # deviations -2 -2 -2 2 2 2: r = (4 + 4 - 4 + 4 + 4) / 24
        ([1.0, -1.0, 1.0, -1.0], 4.0),  # negative: counts as 0
        ([0.1] * 7, 7.0),
        ([3.0], 1.0),
        ([3.0, 4.0], 2.0),
    ],
)
def test_effective_count_worked_by_hand(values: list[float], expected: float) -> None:
    assert effective_count(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6, 0.8])
def test_effective_count_of_an_ar1_series_is_the_theoretical_one(phi: float) -> None:
    rng, count = np.random.default_rng(11), 600
    series = rng.normal(0.0, 1.0, (100, count))
    for at in range(1, count):
        series[:, at] = phi * series[:, at - 1] + math.sqrt(1 - phi * phi) * series[:, at]
    found = statistics.fmean(effective_count(one.tolist()) for one in series)
    assert found == pytest.approx(count * (1 - phi) / (1 + phi), rel=0.06)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_effective_count_lies_between_one_and_the_count(values: list[float]) -> None:
    assert 1.0 <= effective_count(values) <= len(values)


def test_relative_half_width_uses_the_effective_count() -> None:
    values = [10.0, 11.0, 9.0, 10.0]  # deviations 0 1 -1 0: r = -1/2 counts as 0
    assert relative_half_width(values) == pytest.approx(1.96 * np.std(values, ddof=1) / 2 / 10)
    rising = [1.0, 2.0, 3.0, 4.0]
    assert relative_half_width(rising) == pytest.approx(1.96 * np.std(rising, ddof=1) / math.sqrt(2.4) / 2.5)
    assert relative_half_width([2.0, 2.0]) == 0.0
    assert relative_half_width([]) == relative_half_width([3.0]) == math.inf


def test_hodges_lehmann_of_the_published_example() -> None:
    # Hollander & Wolfe, Nonparametric Statistical Methods: depression scores of nine patients, before and after
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    assert hodges_lehmann([b - a for a, b in zip(before, after, strict=True)]) == pytest.approx(-0.46, abs=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=25))
def test_hodges_lehmann_is_the_median_of_all_walsh_averages(values: list[float]) -> None:
    array = np.array(values)
    averages = ((array[:, None] + array[None, :]) / 2)[np.triu_indices(len(values))]
    assert hodges_lehmann(values) == pytest.approx(np.median(averages), abs=1e-9)


def test_pooled_sd_is_the_formula_and_nearly_the_truth() -> None:
    groups = [[1.0, 2.0, 4.0], [10.0, 11.0], [5.0], []]
    squares = sum(np.var(group) * len(group) for group in groups[:2])
    sd, degrees = pooled_sd(groups, prior_sd=0.5, prior_degrees=4.0)
    assert (sd, degrees) == pytest.approx((math.sqrt((4 * 0.25 + squares) / 7), 7.0))
    assert pooled_sd(groups, prior_sd=9.0, prior_degrees=0.0) == pytest.approx((math.sqrt(squares / 3), 3.0))
    assert pooled_sd([], prior_sd=0.05, prior_degrees=3.0) == pytest.approx((0.05, 3.0))
    rng = np.random.default_rng(12)
    drawn = [rng.normal(rng.normal(0, 5), 0.03, int(rng.integers(1, 6))).tolist() for _ in range(2000)]
    assert pooled_sd(iter(drawn), prior_sd=1.0, prior_degrees=0.0)[0] == pytest.approx(0.03, rel=0.04)


def test_spread_variance_takes_the_noise_off() -> None:
    values, noise = [0.1, 0.3, 0.2, 0.6], [0.01, 0.02, 0.0, 0.03]
    assert spread_variance(values, noise) == pytest.approx(np.var(values, ddof=1) - 0.015)
    assert spread_variance(values, [1.0] * 4) == 0.0
    assert spread_variance([], []) == spread_variance([0.4], [0.1]) == 0.0
    rng = np.random.default_rng(13)
    sds = rng.uniform(0.01, 0.05, 20_000)
    noisy = rng.normal(0.0, 0.03, 20_000) + rng.normal(0.0, sds)
    assert spread_variance(noisy.tolist(), (sds**2).tolist()) == pytest.approx(0.03**2, rel=0.06)


@pytest.mark.parametrize(
    ("noise", "spread", "expected"), [(1.0, 3.0, 2.5), (1.0, 0.0, 1.0), (0.0, 2.0, 3.0), (0.0, 0.0, 3.0)]
)
def test_shrink_moves_the_noisy_share_of_the_way(noise: float, spread: float, expected: float) -> None:
    assert shrink(3.0, towards=1.0, noise_variance=noise, spread_variance=spread) == pytest.approx(expected)


@pytest.mark.parametrize(("true_sd", "curse"), [(0.0, 0.055), (0.01, 0.05), (0.03, 0.035), (0.06, 0.02)])
def test_shrink_takes_off_the_winners_curse_of_40_configs(true_sd: float, curse: float) -> None:
    rng, noise_sd, raw, shrunk = np.random.default_rng(14), 0.03, [], []
    for _ in range(1000):
        truth = rng.normal(0.1, true_sd, 40)
        seen = truth + rng.normal(0.0, noise_sd, 40)
        best, spread = int(seen.argmax()), spread_variance(seen.tolist(), [noise_sd**2] * 40)
        towards = float(seen.mean())
        estimate = shrink(float(seen[best]), towards=towards, noise_variance=noise_sd**2, spread_variance=spread)
        raw.append(seen[best] - truth[best])
        shrunk.append(estimate - truth[best])
    print(f"true sd {true_sd:.0%}: winner's curse {np.mean(raw):+.2%}, shrunk {np.mean(shrunk):+.2%}")
    assert np.mean(raw) > curse
    assert abs(np.mean(shrunk)) < 0.007


def test_estimators_refuse_impossible_input() -> None:
    for call in (
        lambda: effective_count([]),
        lambda: effective_count([1.0, math.nan]),
        lambda: relative_half_width([1.0, 0.0]),
        lambda: relative_half_width([math.inf]),
        lambda: hodges_lehmann([]),
        lambda: hodges_lehmann([math.inf]),
        lambda: pooled_sd([], prior_sd=0.1, prior_degrees=0.0),
        lambda: pooled_sd([[1.0, math.nan]], prior_sd=0.1, prior_degrees=1.0),
        lambda: pooled_sd([], prior_sd=-0.1, prior_degrees=1.0),
        lambda: spread_variance([1.0], []),
        lambda: spread_variance([1.0], [-1.0]),
        lambda: spread_variance([math.nan], [1.0]),
        lambda: shrink(math.nan, towards=0.0, noise_variance=1.0, spread_variance=1.0),
        lambda: shrink(1.0, towards=0.0, noise_variance=-1.0, spread_variance=1.0),
        lambda: shrink(1.0, towards=0.0, noise_variance=1.0, spread_variance=math.inf),
    ):
        with pytest.raises(ValueError, match=r"needs|is|cannot"):
            call()


def test_a_doubtful_pilot_widens_an_interval_by_no_more_than_half_of_the_risk_does() -> None:
    quiet, loud = [0.20, 0.21, 0.19, 0.20, 0.20], [0.30, 0.10, 0.25, 0.15, 0.20]
    for values in (quiet, loud):
        pilot = Pilot(0.08, 6.0)
        at_half = [mean_interval(values, confidence_level=0.99, method="", pilot=one) for one in (pilot, NO_PILOT)]
        found = mean_interval(values, confidence_level=0.98, method="", pilot=replace(pilot, is_doubtful=True))
        assert found.low == max(one.low for one in at_half)
        assert found.confidence_level == 0.98


def test_a_doubtful_pilot_is_no_help_to_nothing() -> None:
    generator, claims = random.Random(0), 0
    for _ in range(4000):
        seen = Pilot(math.sqrt(sum(generator.gauss(0.0, 0.05) ** 2 for _ in range(6)) / 6), 6.0, is_doubtful=True)
        sd = generator.choice((0.01, 0.05))
        values = [generator.gauss(0.0, sd) for _ in range(4)]
        claims += mean_interval(values, confidence_level=0.9, method="", pilot=seen).low > 0.0
    assert claims / 4000 < 0.05


def test_an_outlier_is_no_part_of_a_quiet_noise() -> None:
    groups = [[0.0, 0.05], [0.1, 0.06], [0.2, 0.23], [0.0, 1.35]]
    sd, degrees = quiet_sd(groups, prior_sd=0.03, prior_degrees=2.0)
    assert (sd, degrees) == pooled_sd(groups[:3], prior_sd=0.03, prior_degrees=2.0)
    assert pooled_sd(groups, prior_sd=0.03, prior_degrees=2.0)[0] > 5 * sd


@given(st.lists(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=4), max_size=5))
def test_a_quiet_noise_is_hardly_more_than_that_of_all(groups: list[list[float]]) -> None:
    quiet, usual = (of(groups, prior_sd=0.03, prior_degrees=2.0) for of in (quiet_sd, pooled_sd))
    assert quiet[1] <= usual[1]
    if quiet[1] == usual[1]:
        assert quiet[0] == pytest.approx(usual[0])
