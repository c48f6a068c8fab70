from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from autotune.drift.compare.additivity import check_additivity, relative_error, typical_error
from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.compare.gradients import LAYER_BIAS_IN_DOUBT, compare, judge, may_tell
from autotune.drift.gate.comparisons import compare_points, is_lost_in_noise, is_noise_alone, may_pass_later
from autotune.drift.record.trace_file import GradientTrace, Point
from autotune.records.measurement import Interval
from autotune.records.quality import GradientEquivalence

Rows = NDArray[np.floating]

WINDOWS = 16
WIDTHS = (40, 8, 200)
NAMES = ("layers.0.weight", "layers.0.bias", "layers.1.weight")
SMALL = slice(40, 48)  # columns of layers.0.bias
LAYERS = RowLayout(NAMES, np.array(WIDTHS), np.array(WIDTHS))


def _arm(rows: Rows, *, first_key: int = 32) -> GradientRows:
    return GradientRows(first_key + 32 * np.arange(len(rows), dtype=np.int64), rows)


def _compare(
    candidate: Rows, baseline: Rows, *, layers: RowLayout = LAYERS, reference: Rows | None = None
) -> GradientEquivalence:
    exact = None if reference is None else _arm(reference)
    return compare(
        _arm(candidate), _arm(baseline), layers, subject="gradients", point="initial weights", reference=exact
    )


def _one_layer(columns: int) -> RowLayout:
    return RowLayout(("weight",), np.array([columns]), np.array([columns]))


def _direction(generator: np.random.Generator, columns: int, size: float) -> NDArray[np.float64]:
    values = generator.normal(size=columns)
    return values * size / np.linalg.norm(values)


def _gradients(
    generator: np.random.Generator, *, signal_to_noise: float = 1.0, windows: int = WINDOWS, decay: float = 0.0
) -> NDArray[np.float64]:
    """Windows with |G|² = signal_to_noise x their total variance in every layer; decay makes few directions noisy."""
    parts = []
    for width in WIDTHS:
        scales = np.arange(1.0, width + 1.0) ** -decay
        noise = generator.normal(size=(windows, width)) * scales / np.linalg.norm(scales)
        parts.append(math.sqrt(width) * (_direction(generator, width, math.sqrt(signal_to_noise)) + noise))
    return np.concatenate(parts, axis=1)


def _noise_of(generator: np.random.Generator, share: float, *, decay: float = 0.0) -> NDArray[np.float64]:
    return math.sqrt(share) * _gradients(generator, signal_to_noise=0.0, decay=decay)


def _round_to_bfloat16(rows: Rows) -> NDArray[np.float32]:
    bits = rows.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _textbook(candidate: Rows, baseline: Rows) -> tuple[float, float]:
    """Noise, and bias squared without a wrong factor, straight from their definitions."""
    windows, difference = len(baseline), candidate - baseline
    variance, own = difference.var(axis=0, ddof=1).sum(), baseline.var(axis=0, ddof=1).sum()
    mean_square = float(np.sum(baseline.mean(axis=0) ** 2))
    size = max(mean_square - own / windows, 0.05 * mean_square, 0.05 * own / windows)
    return float(variance / own), float((np.sum(difference.mean(axis=0) ** 2) - variance / windows) / size)


def _jackknife(values: Sequence[float]) -> tuple[float, float]:
    windows, left_out = len(values) - 1, np.array(values[1:])
    error = math.sqrt((windows - 1) / windows * np.sum((left_out - left_out.mean()) ** 2))
    half_width = stats.t.ppf(0.95, windows - 1) * error
    return values[0] - half_width, values[0] + half_width


@pytest.mark.parametrize("windows", [4, 7])
def test_intervals_are_the_jackknife_of_the_definitions_with_windows_really_left_out(windows: int) -> None:
    generator = np.random.default_rng(1)
    baseline = _gradients(generator, windows=windows, signal_to_noise=4.0)
    candidate = baseline + 0.05 * generator.normal(size=baseline.shape) + _direction(generator, 248, 6.0)
    subsets = [list(range(windows))] + [[i for i in range(windows) if i != out] for out in range(windows)]
    found = [_textbook(candidate[subset], baseline[subset]) for subset in subsets]
    noise_low, noise_high = _jackknife([noise ** (1 / 3) for noise, _ in found])
    bias_low, bias_high = _jackknife([bias for _, bias in found])
    result = _compare(candidate, baseline)
    assert result.noise is not None
    assert result.bias is not None
    assert result.noise.estimate == pytest.approx(found[0][0])
    assert (result.noise.low, result.noise.high) == pytest.approx((noise_low**3, noise_high**3))
    assert result.bias.estimate == pytest.approx(math.sqrt(found[0][1]))
    assert (result.bias.low, result.bias.high) == pytest.approx((math.sqrt(bias_low), math.sqrt(bias_high)))
    assert (result.bias.confidence_level, result.bias.method) == (0.9, f"jackknife over {windows} windows, Student t")
    assert result.windows == windows


def test_a_pure_factor_is_known_exactly() -> None:
    baseline = _gradients(np.random.default_rng(2), signal_to_noise=0.001)
    for factor in (1.03, 0.97):
        result = _compare(factor * baseline, baseline)
        assert result.noise is not None
        assert result.bias is not None
        assert (result.noise.low, result.noise.estimate, result.noise.high) == pytest.approx((9e-4, 9e-4, 9e-4))
        assert (result.bias.low, result.bias.estimate) == pytest.approx((0.03, 0.03))
        assert result.worst_bias == pytest.approx(0.03)


@pytest.mark.parametrize("drowned", [True, False])
def test_a_sampled_column_weighs_the_elements_it_stands_for(drowned: bool) -> None:
    generator = np.random.default_rng(3)
    baseline = generator.normal(size=(6, 3)) + (0.0 if drowned else 1.0)
    candidate = baseline * [1.0, 1.5, 1.5] if drowned else baseline + generator.normal(size=(6, 3))
    sampled = RowLayout(("a", "b"), np.array([1, 2]), np.array([3, 4]))
    everything = RowLayout(("a", "b"), np.array([3, 4]), np.array([3, 4]))
    copies = [0, 0, 0, 1, 1, 2, 2]
    expected = _figures(_compare(candidate[:, copies], baseline[:, copies], layers=everything))
    assert _figures(_compare(candidate, baseline, layers=sampled)) == pytest.approx(expected)


def _figures(result: GradientEquivalence) -> tuple[float, ...]:
    assert result.noise is not None
    assert result.bias is not None
    ends = (result.noise.low, result.noise.estimate, result.noise.high, result.bias.low, result.bias.high)
    return (*ends, result.bias.estimate, result.worst_bias or 0.0)


@pytest.mark.parametrize("mean", [0.0, 0.24])
def test_a_mean_drowned_in_noise_counts_as_a_twentieth_of_it(mean: float) -> None:
    generator = np.random.default_rng(31)
    baseline = generator.normal(size=(WINDOWS, 100))
    baseline += mean - baseline.mean(axis=0)  # 0.24² < 1 / 16: the mean is smaller than its own noise
    candidate = baseline + _direction(generator, 100, 0.3) + 0.01 * generator.normal(size=(WINDOWS, 100))
    result = _compare(candidate, baseline, layers=_one_layer(100))
    floor = 0.05 * max(100 * mean**2, baseline.var(axis=0, ddof=1).sum() / WINDOWS)
    assert result.bias is not None
    assert result.bias.estimate == pytest.approx(0.3 / math.sqrt(floor), rel=0.01)


@pytest.mark.parametrize("own", [True, False])
def test_noise_that_only_the_baseline_has_is_no_wrong_factor(own: bool) -> None:
    """Dropout, say: the differences point against the baseline's rows, and yet neither has a factor too much."""
    for seed in range(30):
        generator = np.random.default_rng(seed)
        shared = _gradients(generator, signal_to_noise=1.0)
        baseline = shared + _noise_of(generator, 0.08)
        candidate = shared + (0.5 * _noise_of(generator, 0.02) if own else 0.0)
        result = _compare(candidate, baseline)
        assert result.verdict == "inconclusive", result.reason
        drowned = baseline - baseline.mean(axis=0)
        result = _compare(candidate - candidate.mean(axis=0), drowned)
        assert result.bias is not None
        assert result.bias.low < 0.02


def test_columns_are_handled_in_pieces_without_a_seam() -> None:
    generator = np.random.default_rng(4)
    columns = 70_000  # more than are handled at once
    baseline = generator.normal(size=(4, columns)).astype(np.float32) + 1.0
    candidate = baseline + np.float32(0.1) * generator.normal(size=(4, columns)).astype(np.float32)
    split = RowLayout(("a", "b"), np.array([30_000, 40_000]), np.array([30_000, 40_000]))
    parts, whole = (
        _compare(candidate, baseline, layers=split),
        _compare(candidate, baseline, layers=_one_layer(columns)),
    )
    assert _figures(parts)[:-1] == pytest.approx(_figures(whole)[:-1])
    noise, squared_bias = _textbook(candidate.astype(np.float64), baseline.astype(np.float64))
    assert _figures(whole)[1] == pytest.approx(noise)
    assert _figures(whole)[5] == pytest.approx(math.sqrt(max(squared_bias, 0.0)), abs=1e-6)


@pytest.mark.parametrize(
    ("noise", "bias", "signal_to_noise", "columns"),
    [(0.01, 0.02, 1.0, 100), (0.03, 0.1, 0.2, 20), (1e-4, 0.02, 5.0, 300)],
)
def test_each_bound_holds_as_often_as_it_says(noise: float, bias: float, signal_to_noise: float, columns: int) -> None:
    simulated, held = 300, np.zeros(4)
    for seed in range(simulated):
        generator = np.random.default_rng(seed)
        own, added = generator.normal(size=(2, WINDOWS, columns)) / math.sqrt(columns)
        baseline = _direction(generator, columns, math.sqrt(signal_to_noise)) + own
        candidate = (
            baseline + _direction(generator, columns, bias * math.sqrt(signal_to_noise)) + math.sqrt(noise) * added
        )
        result = _compare(candidate, baseline, layers=_one_layer(columns))
        noise_low, _, noise_high, bias_low, bias_high = _figures(result)[:5]
        held += [noise_high >= noise, noise_low <= noise, bias_high >= bias, bias_low <= bias]
    assert (held / simulated >= 0.90).all(), held / simulated
    assert (held < simulated).any()  # bounds that always hold would say nothing


@pytest.mark.parametrize("windows", [4, 6])
def test_the_bounds_hold_in_the_few_windows_of_slow_steps_too(windows: int) -> None:
    simulated, held = 300, np.zeros(4)
    for seed in range(simulated):
        generator = np.random.default_rng(seed)
        baseline = _gradients(generator, windows=windows)
        added = 0.1 * (_gradients(generator, signal_to_noise=0.0, windows=windows))
        result = _compare(baseline + 0.02 * _direction(generator, 248, math.sqrt(248)) + added, baseline)
        noise_low, _, noise_high, bias_low, bias_high = _figures(result)[:5]
        held += [noise_high >= 0.01, noise_low <= 0.01, bias_high >= 0.02, bias_low <= 0.02]
    assert (held / simulated >= 0.90).all(), held / simulated


@pytest.mark.parametrize("windows", [4, 6])
@pytest.mark.parametrize("signal_to_noise", [0.05, 1.0])
def test_few_windows_still_pass_rounding_fail_a_wrong_scale_and_never_pass_a_bias(
    windows: int, signal_to_noise: float
) -> None:
    for seed in range(40):
        generator = np.random.default_rng(seed)
        baseline = _gradients(generator, windows=windows, signal_to_noise=signal_to_noise)
        rounded = baseline * (1 + 1e-6 * generator.normal(size=baseline.shape))
        assert _compare(rounded, baseline).verdict == "non-inferior"
        assert _compare(1.05 * baseline, baseline).verdict == "inferior"
        bias = 0.05 * _direction(generator, 248, math.sqrt(248 * signal_to_noise))
        assert _compare(baseline + bias, baseline).verdict != "non-inferior"
        without_layer = baseline.copy()
        without_layer[:, SMALL] = 0.0
        assert _compare(without_layer, baseline).verdict != "non-inferior"


# Whether more windows would tell


@pytest.mark.parametrize(
    ("noise", "bias", "is_told", "looked_at"),
    [
        (0.004, 0.01, True, (0.6, 1.0)),
        (0.03, 0.0, False, (0.0, 0.25)),
        (0.004, 0.03, False, (0.0, 0.5)),  # of eight windows, often no bias at all is left possible
    ],
)
def test_more_windows_are_looked_at_where_they_would_tell(
    noise: float, bias: float, is_told: bool, looked_at: tuple[float, float]
) -> None:
    foretold: list[bool] = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        baseline = _gradients(generator, signal_to_noise=0.3, windows=64)
        shift = _direction(generator, 248, bias * math.sqrt(0.3 * 248))
        candidate = baseline + shift + math.sqrt(noise) * _gradients(generator, signal_to_noise=0.0, windows=64)
        few, many = (_compare(candidate[:count], baseline[:count]) for count in (8, 64))
        assert (many.verdict != "inconclusive") == is_told, many.reason
        if few.verdict == "inconclusive":
            foretold.append(may_tell([few], windows=64))
    assert len(foretold) >= 20
    least, most = looked_at
    assert least * len(foretold) <= sum(foretold) <= most * len(foretold)


@pytest.mark.parametrize(
    ("noise", "bias", "steering", "is_told"),
    [
        ((0.12, 0.08, 0.16), (0.01, 0.0, 0.03), 0.01, True),  # too noisy
        ((0.005, 0.0, 0.01), (0.06, 0.03, 0.09), 0.06, True),  # another gradient
        ((0.005, 0.0, 0.01), (0.06, 0.03, 0.09), 0.01, False),  # of a mean that has vanished
    ],
)
def test_more_windows_may_tell_that_a_gradient_is_another_one(
    noise: tuple[float, ...], bias: tuple[float, ...], steering: float, is_told: bool
) -> None:
    ends = (noise, bias, (steering, steering - 0.005, steering + 0.005))
    figures = [
        Interval(estimate=estimate, low=low, high=high, confidence_level=0.9, method="") for estimate, low, high in ends
    ]
    left_open = GradientEquivalence(
        subject="gradients",
        point="",
        windows=8,
        noise=figures[0],
        bias=figures[1],
        steering=figures[2],
        verdict="inconclusive",
    )
    assert may_tell([left_open], windows=64) == is_told


def test_nothing_is_expected_of_more_windows_where_nothing_is_open() -> None:
    assert not may_tell([], windows=64)


# Where a training has converged


@pytest.mark.parametrize(
    ("steering", "verdict", "is_lost"),
    [(0.005, "inconclusive", True), (0.03, "inconclusive", False), (0.06, "inferior", False)],
)
def test_a_bias_of_a_mean_that_has_vanished_is_weighed_by_what_it_steers(
    steering: float, verdict: str, is_lost: bool
) -> None:
    for seed in range(30):
        generator = np.random.default_rng(seed)
        baseline = _noise_of(generator, 1.0)
        spread = math.sqrt(baseline.var(axis=0, ddof=1).sum())
        candidate = baseline + _direction(generator, 248, steering * spread) + _noise_of(generator, 1e-4)
        result = _compare(candidate, baseline)
        assert result.bias is not None
        assert result.bias.estimate > 2 * steering  # judged by the mean, all of them are large
        assert result.steering is not None
        assert result.steering.estimate == pytest.approx(steering, abs=0.004)
        assert (result.verdict, is_lost_in_noise(result)) == (verdict, is_lost), result.reason


def test_a_mean_that_stands_out_is_judged_by_the_bias_alone() -> None:
    for seed in range(30):
        generator = np.random.default_rng(seed)
        baseline = _gradients(generator, signal_to_noise=4.0)
        candidate = baseline + _direction(generator, 248, 0.06 * 2.0 * math.sqrt(248))
        result = _compare(candidate, baseline)
        assert result.verdict == "inferior", result.reason
        assert not is_lost_in_noise(result)


@pytest.mark.parametrize("fault", ["noise", "layer", "not finite", "updates"])
def test_nothing_but_a_vanished_mean_is_lost_in_noise(fault: str) -> None:
    generator = np.random.default_rng(3)
    baseline = _noise_of(generator, 1.0)
    candidate = baseline + _direction(generator, 248, 0.1)
    if fault == "noise":
        candidate = candidate + _noise_of(generator, 0.03)
    if fault == "layer":
        candidate[:, SMALL] *= 1.15
    if fault == "not finite":
        candidate[0, 0] = np.nan
    subject: Any = "updates" if fault == "updates" else "gradients"
    result = compare(_arm(candidate), _arm(baseline), LAYERS, subject=subject, point="after 10 steps")
    assert result.verdict != "non-inferior"
    assert not is_lost_in_noise(result)


def _trace(points: Sequence[Rows]) -> GradientTrace:
    arms = [_arm(rows) for rows in points]
    rates = np.full((len(points[0]), 1), 0.1)
    return GradientTrace(LAYERS, tuple(Point(gradients=arm, updates=arm, learning_rates=rates) for arm in arms))


@pytest.mark.parametrize(
    ("at_first", "later", "steps", "verdicts"),
    [
        (0.02, 0.001, 5, ["non-inferior", "non-inferior"]),
        (0.02, 0.001, 4, ["inconclusive", "non-inferior"]),  # hardly a later point
        (0.02, 0.03, 200, ["inconclusive", "inconclusive"]),  # it stays
        (0.14, 0.03, 10, ["inferior", "inconclusive"]),
        (0.5, 0.001, 10, ["inferior", "non-inferior"]),  # as if the first batches were smaller by a third
    ],
)
def test_noise_of_the_first_steps_passes_where_it_is_shown_to_be_gone(
    at_first: float, later: float, steps: int, verdicts: list[str]
) -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        baseline = [_gradients(generator), _gradients(generator)]
        candidate = [
            rows + _noise_of(generator, noise) for rows, noise in zip(baseline, (at_first, later), strict=True)
        ]
        found = compare_points(_trace(candidate), _trace(baseline), None, steps=steps)
        assert [one.verdict for one in found] == verdicts, [one.reason for one in found]


@pytest.mark.parametrize(("noise", "later"), [(0.14, "non-inferior"), (0.14, "inconclusive"), (0.5, "non-inferior")])
def test_louder_noise_waits_for_what_is_shown_later(noise: float, later: str) -> None:
    passed = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        baseline = [_gradients(generator, signal_to_noise=0.06), _gradients(generator)]
        first = baseline[0] + _noise_of(generator, noise)
        last = baseline[1] + _noise_of(generator, 1e-3) + (later == "inconclusive") * 0.03 * baseline[1].mean(axis=0)
        found = compare_points(_trace([first, last]), _trace(baseline), None, steps=40)
        assert found[1].verdict == later, found[1].reason
        if noise > 0.25:
            assert found[0].verdict == "inferior", found[0].reason
        elif later == "inconclusive":  # what has no noise may pass with a closer look
            assert found[0].verdict == "inconclusive", found[0].reason
            assert may_pass_later(found[0], steps=40) or (found[0].worst_bias or 0.0) > LAYER_BIAS_IN_DOUBT
        passed += found[0].verdict == "non-inferior"
    assert passed >= 15 if (noise, later) == (0.14, "non-inferior") else not passed


@pytest.mark.parametrize(
    ("noise", "steering", "steps", "is_alone"),
    [
        (0.09, 0.01, 40, True),
        (0.16, 0.01, 40, True),
        (0.17, 0.01, 40, False),  # it may be beyond a quarter
        (0.005, 0.01, 40, False),  # it passes
        (0.16, 0.01, 833, True),  # up to 2 %: that adds up to a third of chance in 833 steps
        (0.16, 0.01, 834, False),
        (0.01, 0.04, 10, False),  # it is larger than what may hide in so little noise
    ],
)
def test_noise_of_the_first_steps_is_a_quarter_at_most_and_hides_little(
    noise: float, steering: float, steps: int, is_alone: bool
) -> None:
    figures = {
        "noise": (noise, 0.7 * noise, 1.5 * noise),
        "bias": (0.01, 0.0, 0.05),
        "steering": (steering, 0.0, 2 * steering),
    }
    left_open = GradientEquivalence(subject="gradients", point="initial weights", windows=8, verdict="inconclusive")
    found = left_open.replace(
        **{
            name: Interval(estimate=estimate, low=low, high=high, confidence_level=0.9, method="")
            for name, (estimate, low, high) in figures.items()
        }
    )
    assert is_noise_alone(found, steps=steps) == is_alone


@pytest.mark.parametrize(
    ("steering", "steps", "verdict"),
    [(0.01, 50, "inconclusive"), (0.01, 100, "non-inferior"), (0.03, 50, "inconclusive"), (0.03, 200, "inconclusive")],
)
def test_a_bias_of_the_first_steps_has_to_be_small_and_gone_for_long(steering: float, steps: int, verdict: str) -> None:
    for seed in range(10):
        generator = np.random.default_rng(seed)
        baseline = [_noise_of(generator, 1.0), _gradients(generator)]
        spread = math.sqrt(baseline[0].var(axis=0, ddof=1).sum())
        first = baseline[0] + _direction(generator, 248, steering * spread) + _noise_of(generator, 1e-4)
        found = compare_points(_trace([first, baseline[1]]), _trace(baseline), None, steps=steps)
        assert [one.verdict for one in found] == [verdict, "non-inferior"], found[0].reason


@pytest.mark.parametrize("fault", ["steers", "layer"])
def test_what_is_more_than_noise_does_not_pass_as_noise_of_the_first_steps(fault: str) -> None:
    generator = np.random.default_rng(5)
    baseline = [_noise_of(generator, 1.0), _gradients(generator)]
    first = baseline[0] + _noise_of(generator, 0.05)
    if fault == "steers":
        first = first + _direction(generator, 248, 0.06 * math.sqrt(248))
    else:
        first[:, SMALL] *= 1.15
    found = compare_points(_trace([first, baseline[1]]), _trace(baseline), None, steps=200)
    assert found[0].verdict != "non-inferior", found[0].reason
    assert found[1].verdict == "non-inferior"


@pytest.mark.parametrize("factor", [1.05, 0.95])
@pytest.mark.parametrize("signal_to_noise", [0.0025, 0.05, 1.0, 20.0])
def test_a_scale_that_is_wrong_by_five_percent_always_fails(signal_to_noise: float, factor: float) -> None:
    for seed in range(50):
        generator = np.random.default_rng(seed)
        baseline = _gradients(generator, signal_to_noise=signal_to_noise, decay=float(seed % 2))
        candidate = _round_to_bfloat16(factor * baseline)
        assert _compare(candidate, baseline.astype(np.float32)).verdict == "inferior"


@pytest.mark.parametrize("signal_to_noise", [0.05, 1.0, 20.0])
def test_rounding_to_bfloat16_always_passes(signal_to_noise: float) -> None:
    for seed in range(50):
        generator = np.random.default_rng(seed)
        baseline = _gradients(generator, signal_to_noise=signal_to_noise, decay=float(seed % 2)).astype(np.float32)
        result = _compare(_round_to_bfloat16(baseline), baseline)
        assert result.verdict == "non-inferior", result.reason
        assert result.noise is not None
        assert result.noise.estimate > 0.0


@pytest.mark.parametrize("signal_to_noise", [0.05, 1.0, 20.0])
def test_the_mean_of_the_means_of_unequal_micro_batches_always_fails(signal_to_noise: float) -> None:
    for seed in range(30):
        generator = np.random.default_rng(seed)
        gradient = _direction(generator, 50, math.sqrt(signal_to_noise / 32))
        samples = gradient + generator.normal(size=(WINDOWS, 32, 50)) / math.sqrt(50)
        parts = samples[:, :24].mean(axis=1), samples[:, 24:].mean(axis=1)
        result = _compare(0.5 * (parts[0] + parts[1]), samples.mean(axis=1), layers=_one_layer(50))
        assert result.verdict == "inferior"
        assert result.noise is not None
        assert result.noise.estimate == pytest.approx(1 / 3, rel=0.5)  # 24 and 8 of 32 samples


@pytest.mark.parametrize("signal_to_noise", [0.0025, 1.0])
def test_a_small_layer_that_is_zero_fails_and_is_named(signal_to_noise: float) -> None:
    for seed in range(20):
        baseline = _gradients(np.random.default_rng(seed), signal_to_noise=signal_to_noise)
        baseline[:, SMALL] *= 0.1  # 0.03 % of the squares: nothing of it shows in the whole
        candidate = baseline.copy()
        candidate[:, SMALL] = 0.0
        result = _compare(candidate, baseline)
        assert (result.verdict, result.worst_layer) == ("inferior", "layers.0.bias")
        assert result.worst_bias == pytest.approx(1.0)
        assert result.reason.startswith(
            "the gradient of layers.0.bias has a bias of 100 % and differences of 100 % of its own variance; "
        )
        assert result.bias is not None
        assert result.bias.low < 0.04


def test_a_layer_that_points_elsewhere_fails_and_is_named() -> None:
    generator = np.random.default_rng(5)
    baseline = _gradients(generator, signal_to_noise=5.0)
    baseline[:, SMALL] *= 0.1
    candidate = baseline.copy()
    candidate[:, SMALL] += _direction(generator, 8, 0.5 * float(np.linalg.norm(baseline[:, SMALL].mean(axis=0))))
    result = _compare(candidate, baseline)
    assert (result.verdict, result.worst_layer) == ("inferior", "layers.0.bias")
    assert result.worst_bias == pytest.approx(0.5, rel=0.1)


def test_a_layer_in_doubt_leaves_it_to_a_training() -> None:
    generator = np.random.default_rng(6)
    baseline = _gradients(generator, signal_to_noise=5.0)
    baseline[:, SMALL] *= 0.1
    candidate = baseline.copy()
    candidate[:, SMALL] *= 1.15
    result = _compare(candidate, baseline)
    assert (result.verdict, result.worst_layer) == ("inconclusive", "layers.0.bias")
    assert result.reason.startswith("differences are 0.00")
    assert "; the gradient of layers.0.bias has a bias of 15 % and differences of 2." in result.reason
    assert result.reason.endswith("of its own variance: only a training can tell")


@pytest.mark.parametrize(("windows", "signal_to_noise"), [(WINDOWS, 0.05), (24, 0.005)])
def test_many_tiny_layers_with_rounding_noise_are_no_reason_to_fail(windows: int, signal_to_noise: float) -> None:
    widths = np.array([1, 2, 5, 10] * 30)
    layers = RowLayout(tuple(f"layers.{number}.bias" for number in range(120)), widths, widths)
    for seed in range(60):
        generator = np.random.default_rng(seed)
        own, added = generator.normal(size=(2, windows, int(widths.sum())))
        baseline = own + math.sqrt(signal_to_noise) * generator.normal(size=int(widths.sum()))
        result = _compare(baseline + 0.005 * added, baseline, layers=layers)
        assert result.verdict == "non-inferior", result.reason
        assert result.worst_bias is not None
        assert result.worst_bias < 0.05


@pytest.mark.parametrize("rounding", [1e-7, 1e-3])
def test_rounding_noise_of_a_gradient_that_is_zero_is_left_alone(rounding: float) -> None:
    generator = np.random.default_rng(7)
    baseline = _gradients(generator)
    candidate = baseline * 1.0001
    for rows in (baseline, candidate):
        rows[:, SMALL] = rounding * generator.normal(size=(WINDOWS, 8))
    result = _compare(candidate, baseline)
    assert result.verdict == "non-inferior"
    assert result.worst_layer != "layers.0.bias"


def test_a_layer_of_noise_fails_in_gradients_and_not_in_updates() -> None:
    generator = np.random.default_rng(8)
    baseline = _gradients(generator)
    candidate = baseline.copy()
    for rows, size in ((baseline, 0.2), (candidate, 0.4)):
        rows[:, SMALL] = size * generator.normal(size=(WINDOWS, 8))
    gradients, updates = (
        compare(_arm(candidate), _arm(baseline), LAYERS, subject=subject, point="")
        for subject in ("gradients", "updates")
    )
    assert (gradients.verdict, gradients.worst_layer) == ("inferior", "layers.0.bias")
    assert (updates.verdict, updates.worst_layer) == ("inconclusive", "layers.0.bias")
    assert updates.reason.startswith("differences are ")
    assert "the update of layers.0.bias has" in updates.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
def test_a_value_that_is_not_finite_fails_in_the_candidate_and_decides_nothing_in_the_baseline(value: float) -> None:
    baseline = _gradients(np.random.default_rng(9))
    broken = baseline.copy()
    broken[3, 45] = value
    result = _compare(broken, baseline)
    assert result.verdict == "inferior"
    assert result.reason == (
        "a value of layers.0.bias in the window that ends after 128 samples is not finite, and the baseline's is"
    )
    assert (result.noise, result.bias) == (None, None)
    for candidate in (baseline, broken):
        result = _compare(candidate, broken)
        assert result.verdict == "inconclusive"
        assert result.reason.startswith("the baseline's own value of layers.0.bias in the window that ends after 128")
    worse = broken.copy()
    worse[5, 0] = math.nan
    assert _compare(worse, broken).verdict == "inferior"


def test_infinity_in_single_precision_is_found_without_a_warning() -> None:
    baseline = _gradients(np.random.default_rng(9)).astype(np.float32)
    broken = baseline.copy()
    broken[0, 0] = np.inf
    assert _compare(broken, baseline).verdict == "inferior"
    broken[0, 0] = np.finfo(np.float32).max
    assert _compare(broken, baseline).verdict == "inconclusive"  # one window of sixteen: no bound says so
    assert _compare(baseline, broken).bias is not None


@pytest.mark.parametrize("windows", [1, 3, 16])
@pytest.mark.parametrize("constant", [True, False])
def test_equal_rows_always_pass(windows: int, constant: bool) -> None:
    rows = np.ones((windows, 248)) if constant else _gradients(np.random.default_rng(10), windows=windows)
    result = _compare(rows.copy(), rows)
    assert (result.verdict, result.windows) == ("non-inferior", windows)
    assert _figures(result) == (0.0,) * 7
    assert result.reason == f"all {windows} windows equal the baseline's bit for bit"


def test_a_last_bit_is_no_longer_equal() -> None:
    rows = _gradients(np.random.default_rng(11)).astype(np.float32)
    changed = rows.copy()
    changed[0, 0] = np.nextafter(rows[0, 0], np.float32(np.inf))
    result = _compare(changed, rows)
    assert result.verdict == "non-inferior"
    assert "bit for bit" not in result.reason
    assert _compare(changed[:3], rows[:3]).verdict == "inconclusive"


@pytest.mark.parametrize(("factor", "verdict"), [(1.001, "non-inferior"), (1.03, "inconclusive"), (1.06, "inferior")])
def test_windows_that_do_not_vary_are_judged_by_the_bias_alone(factor: float, verdict: str) -> None:
    generator = np.random.default_rng(12)
    baseline = np.tile(generator.normal(size=248), (12, 1)) * (1.0 + 1e-7 * generator.normal(size=(12, 248)))
    result = _compare(factor * baseline, baseline)
    assert (result.verdict, result.noise) == (verdict, None)
    assert "the baseline's gradients do not vary from window to window, bias" in result.reason


def test_a_gradient_that_is_zero_decides_nothing() -> None:
    result = _compare(np.ones((8, 248)), np.zeros((8, 248)))
    assert (result.verdict, result.reason) == ("inconclusive", "the baseline's gradients are all zero")


def test_windows_are_paired_by_their_keys() -> None:
    generator = np.random.default_rng(13)
    rows = _gradients(generator)
    keys = 32 * np.arange(1, WINDOWS + 1)
    candidate = 1.001 * rows
    expected = compare(GradientRows(keys, candidate), GradientRows(keys, rows), LAYERS, subject="gradients", point="")
    order = generator.permutation(WINDOWS)
    shuffled = GradientRows(keys[order], candidate[order])
    assert compare(shuffled, GradientRows(keys, rows), LAYERS, subject="gradients", point="") == expected
    more = GradientRows(np.append(keys, 7), np.vstack([candidate, np.full((1, 248), np.nan)]))
    assert compare(more, GradientRows(keys, rows), LAYERS, subject="gradients", point="") == expected
    fewer = compare(
        GradientRows(keys[5:], candidate[5:]), GradientRows(keys[:8], rows[:8]), LAYERS, subject="gradients", point=""
    )
    assert (fewer.windows, fewer.verdict) == (3, "inconclusive")
    assert fewer.reason == "3 window(s) in common with the baseline: at least 4 are needed"
    none = compare(GradientRows(keys + 1, rows), GradientRows(keys, rows), LAYERS, subject="gradients", point="")
    assert (none.windows, none.verdict, none.reason) == (0, "inconclusive", "no window in common with the baseline")


def test_the_reasons_carry_their_numbers() -> None:
    generator = np.random.default_rng(14)
    baseline = _gradients(generator, signal_to_noise=20.0)
    passed = _compare(1.003 * baseline, baseline)
    assert passed.reason == (
        "differences are 0.0009 % of the gradient's own variance (at most 0.0009 %, limit 1 %), "
        "bias 0.3 % (at most 0.3 %, limit 2 %)"
    )
    failed = _compare(1.5 * baseline, baseline)
    assert failed.reason.endswith(
        "differences are 25 % of the gradient's own variance (at least 25 %, limit 10 %), "
        "bias 50 % (at least 50 %, limit 4 %)"
    )
    open_still = _compare(1.03 * baseline, baseline)
    assert open_still.verdict == "inconclusive"
    assert open_still.reason.endswith("bias 3 % (between 3 % and 3 %, limit 2 %): only a training can tell")


def test_what_is_shown_to_differ_is_left_open_where_the_baseline_errs_as_much() -> None:
    generator = np.random.default_rng(15)
    exact = _gradients(generator)
    baseline, candidate = exact + _noise_of(generator, 0.05), exact + _noise_of(generator, 0.1)
    assert _compare(candidate, baseline).verdict == "inferior"
    rescued = _compare(candidate, baseline, reference=exact)
    assert (rescued.verdict, rescued.reference_ratio) == ("inconclusive", pytest.approx(math.sqrt(2.0), rel=0.1))
    assert rescued.reason.startswith("1.4 x the baseline's own error against float64 (limit 3 x), and yet ")
    assert rescued.noise is not None
    assert rescued.noise.low > 0.1
    worse = exact + _noise_of(generator, 0.6)
    refused = _compare(worse, baseline, reference=exact)
    assert (refused.verdict, refused.reference_ratio) == ("inferior", pytest.approx(math.sqrt(12.0), rel=0.1))


def test_no_reference_rescues_a_layer_that_is_zero() -> None:
    generator = np.random.default_rng(16)
    exact = _gradients(generator)
    exact[:, SMALL] *= 0.1
    baseline = exact + _noise_of(generator, 0.01) * (np.arange(248) >= 48)
    candidate = baseline.copy()
    candidate[:, SMALL] = 0.0
    result = _compare(candidate, baseline, reference=exact)
    assert result.reference_ratio is not None
    assert result.reference_ratio < 3.0
    assert (result.verdict, result.worst_layer) == ("inferior", "layers.0.bias")


def test_a_layer_as_exact_as_the_baselines_is_left_alone() -> None:
    generator = np.random.default_rng(17)
    exact = _gradients(generator)
    exact[:, SMALL] = 0.0
    baseline, candidate = exact.copy(), 1.001 * exact
    for rows, size in ((baseline, 0.2), (candidate, 0.4)):
        rows[:, SMALL] = size * generator.normal(size=(WINDOWS, 8))
    assert _compare(candidate, baseline).verdict == "inferior"
    result = _compare(candidate, baseline, reference=exact)
    assert (result.verdict, result.worst_layer != "layers.0.bias") == ("non-inferior", True)


@pytest.mark.parametrize(("bias", "verdict"), [(0.0, "non-inferior"), (0.03, "inconclusive")])
def test_jumps_of_the_baselines_own_excuse_jumps_and_no_bias(bias: float, verdict: str) -> None:
    generator = np.random.default_rng(31)
    exact = _gradients(generator, windows=64)
    rounding = [1e-6 * _gradients(generator, windows=64) for _ in range(2)]
    jumps = 0.6 * _gradients(generator, signal_to_noise=0.0, windows=8)
    baseline, candidate = exact + rounding[0], (1 + bias) * exact + rounding[1]
    baseline[:4] += jumps[:4]
    candidate[20:24] += jumps[4:]
    assert _compare(candidate, baseline).verdict == "inconclusive"
    result = _compare(candidate, baseline, reference=exact)
    assert result.verdict == verdict
    assert result.reference_ratio is not None
    # Of the sums of all errors, to which a bias of 3 % adds next to nothing, it would be 1 in both.
    assert (result.reference_ratio < 2) == (bias == 0)


@pytest.mark.parametrize(("scaled", "verdict"), [(1, "non-inferior"), (3, "inconclusive")])
def test_one_jump_of_the_baselines_own_excuses_one(scaled: int, verdict: str) -> None:
    generator = np.random.default_rng(37)
    exact = _gradients(generator, windows=24)
    rounding = [1e-6 * _gradients(generator, windows=24) for _ in range(2)]
    baseline, candidate = exact + rounding[0], exact + rounding[1]
    baseline[5] += _gradients(generator, signal_to_noise=0.0, windows=1)[0]
    candidate[10 : 10 + scaled] *= 0.7
    assert _compare(candidate, baseline).verdict == "inconclusive"
    assert _compare(candidate, baseline, reference=exact).verdict == verdict


def test_a_reference_of_other_layers_is_ignored() -> None:
    generator = np.random.default_rng(39)
    exact = _gradients(generator)
    baseline = exact + _noise_of(generator, 0.001)
    candidate = 1.03 * baseline
    fewer = dataclasses.replace(_trace([exact[:, :8]]), layers=_one_layer(8))
    found = [
        compare_points(_trace([candidate]), _trace([baseline]), reference, steps=0, farthest=0.1)[0]
        for reference in (_trace([exact]), fewer)
    ]
    assert [one.reference_ratio is None for one in found] == [False, True]


def test_a_reference_that_says_nothing_is_ignored() -> None:
    baseline = _gradients(np.random.default_rng(18))
    candidate = 1.06 * baseline
    for reference in (baseline, np.full_like(baseline, np.nan)):
        result = _compare(candidate, baseline, reference=reference)
        assert (result.verdict, result.reference_ratio) == ("inferior", None)
    elsewhere = _arm(baseline, first_key=10_001)
    result = compare(_arm(candidate), _arm(baseline), LAYERS, subject="gradients", point="", reference=elsewhere)
    assert (result.verdict, result.reference_ratio) == ("inferior", None)


def test_one_check_over_all_is_as_bad_as_the_worst() -> None:
    baseline = _gradients(np.random.default_rng(19), signal_to_noise=20.0)
    found = {
        factor: compare(_arm(factor * baseline), _arm(baseline), LAYERS, subject="updates", point=f"at {factor}")
        for factor in (1.001, 1.01, 1.03, 1.06)
    }
    check = judge(list(found.values()), samples=512)
    assert (check.test, check.metric, check.verdict, check.seeds, check.samples) == (
        "gradients",
        "updates",
        "inferior",
        1,
        512,
    )
    assert check.difference == found[1.06].bias
    assert check.margin.amount == 0.02
    assert check.fidelity == tuple(found.values())
    assert check.reason == f"updates, at 1.06: {found[1.06].reason}"
    assert judge([found[1.03], found[1.001]], samples=0).verdict == "inconclusive"
    good = judge([found[1.01], found[1.001].replace(subject="gradients")], samples=0)
    assert (good.verdict, good.metric, good.difference) == ("non-inferior", "gradients", found[1.01].bias)


def test_a_failure_without_figures_is_still_the_worst() -> None:
    baseline = _gradients(np.random.default_rng(20))
    broken = _compare(np.full_like(baseline, np.nan), baseline)
    check = judge([_compare(1.001 * baseline, baseline), broken], samples=0)
    assert (check.verdict, check.difference) == ("inferior", None)


def test_nothing_compared_decides_nothing() -> None:
    check = judge([], samples=0)
    assert (check.verdict, check.difference, check.metric) == ("inconclusive", None, "gradients")
    assert check.reason == "no window was compared"


@pytest.mark.parametrize(
    ("error", "reordering", "verdict"),
    [
        (0.0, 0.0, "non-inferior"),
        (5e-5, 0.0, "non-inferior"),
        (2e-4, 0.0, "inferior"),
        (2e-4, 1e-4, "non-inferior"),
        (4e-4, 1e-4, "inferior"),
        (0.3, 0.01, "inferior"),
        (0.05, 0.02, "inconclusive"),  # reordering moves it by 2 % already
        (0.05, math.inf, "inconclusive"),
        (0.05, math.nan, "inferior"),
    ],
)
def test_additivity_is_judged_by_the_worst_window(error: float, reordering: float, verdict: str) -> None:
    baseline = _gradients(np.random.default_rng(21), windows=5)
    candidate = baseline.copy()
    candidate[2] *= 1.0 + error
    check = check_additivity(_arm(candidate), _arm(baseline), LAYERS, reordering=reordering)
    assert (check.test, check.metric, check.verdict) == (
        "additivity",
        "gradient of a batch against its parts",
        verdict,
    )
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx(error, abs=1e-12)
    assert check.difference.low == check.difference.high == check.difference.estimate
    assert check.difference.method == "largest over 5 windows"
    if error:
        assert f"by {error:.1e} in the worst, the window that ends after 96 samples" in check.reason


def test_additivity_sees_a_batch_norm() -> None:
    generator = np.random.default_rng(22)
    samples = generator.normal(size=(4, 32, 248)) * generator.uniform(0.5, 2.0, size=(4, 32, 1))
    whole = (samples / samples.std(axis=1, keepdims=True)).mean(axis=1)
    halves = samples.reshape(4, 2, 16, 248)
    parts = (halves / halves.std(axis=2, keepdims=True)).mean(axis=(1, 2))
    check = check_additivity(_arm(parts), _arm(whole), LAYERS, reordering=1e-7)
    assert (check.verdict, check.margin.amount) == ("inferior", 1e-4)


def test_additivity_without_usable_values() -> None:
    baseline = _gradients(np.random.default_rng(23), windows=4)
    broken = baseline.copy()
    broken[1, 45] = np.nan
    inferior = check_additivity(_arm(broken), _arm(baseline), LAYERS, reordering=0.0)
    assert (inferior.verdict, inferior.difference) == ("inferior", None)
    assert "layers.0.bias in the window that ends after 64 samples is not finite" in inferior.reason
    assert check_additivity(_arm(baseline), _arm(broken), LAYERS, reordering=0.0).verdict == "inconclusive"
    elsewhere = check_additivity(_arm(baseline, first_key=1), _arm(baseline), LAYERS, reordering=0.0)
    assert (elsewhere.verdict, elsewhere.reason) == ("inconclusive", "no window in common with the baseline")
    from_zero = check_additivity(_arm(baseline), _arm(np.zeros_like(baseline)), LAYERS, reordering=0.0)
    assert from_zero.verdict == "inferior"
    assert check_additivity(_arm(0 * baseline), _arm(0 * baseline), LAYERS, reordering=0.0).verdict == "non-inferior"


def test_relative_error_is_over_all_windows_and_weighted() -> None:
    layers = RowLayout(("a", "b"), np.array([1, 1]), np.array([1, 9]))
    baseline = np.array([[3.0, 0.0], [0.0, 1.0]])
    candidate = np.array([[3.0, 0.0], [0.0, 2.0]])
    assert relative_error(_arm(candidate), _arm(baseline), layers) == pytest.approx(math.sqrt(9 / 18))
    assert relative_error(_arm(baseline), _arm(baseline), layers) == 0.0
    assert relative_error(_arm(candidate), _arm(0 * baseline), layers) == math.inf
    assert relative_error(_arm(math.nan * candidate), _arm(baseline), layers) == math.inf
    assert relative_error(_arm(candidate, first_key=1), _arm(baseline), layers) == math.inf


def test_the_typical_error_is_that_of_most_windows() -> None:
    layers = _one_layer(2)
    baseline = np.array([[3.0, 4.0], [0.0, 1.0], [2.0, 0.0]])
    candidate = np.array([[3.0, 4.5], [9.0, 1.0], [2.0, 0.2]])
    assert typical_error(_arm(candidate), _arm(baseline), layers) == pytest.approx(0.1)
    assert typical_error(_arm(0 * baseline), _arm(baseline), layers) == 1.0
    assert typical_error(_arm(candidate), _arm(0 * baseline), layers) == math.inf
    assert typical_error(_arm(math.nan * candidate), _arm(baseline), layers) == math.inf
    assert typical_error(_arm(candidate, first_key=1), _arm(baseline), layers) == math.inf


def test_what_does_not_fit_together_is_refused() -> None:
    rows = np.ones((4, 3))
    with pytest.raises(ValueError, match="rows have 3 columns, the layers 248"):
        _compare(rows, rows)
    with pytest.raises(ValueError, match="a window occurs twice"):
        GradientRows(np.array([1, 2, 2, 3]), rows)
    with pytest.raises(ValueError, match="3 keys do not fit"):
        GradientRows(np.arange(3), rows)
    with pytest.raises(ValueError, match="1 names, 2 widths and 1 elements"):
        RowLayout(("a",), np.array([1, 2]), np.array([3]))
    with pytest.raises(ValueError, match="fewer elements than were sampled"):
        RowLayout(("a",), np.array([2]), np.array([1]))
