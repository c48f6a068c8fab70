from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from autotune.drift.compare.metrics import check_metric
from autotune.records import LossCurve, Margin, QualityCheck

Direction = Literal["minimize", "maximize"]

RELATIVE = Margin(amount=0.01)
ABSOLUTE = Margin(amount=0.01, unit="absolute")
IMPROVEMENT = Margin(amount=-0.01, unit="absolute")


def _arm(values: Sequence[float | None]) -> list[LossCurve]:
    return [
        LossCurve(seed=seed, losses=(1.0, 0.9), samples=64, metrics={"accuracy": value, "other": 1.0})
        for seed, value in enumerate(values)
    ]


def _check(
    candidate: Sequence[float | None],
    baseline: Sequence[float | None],
    *,
    direction: Direction = "maximize",
    margin: Margin = RELATIVE,
) -> QualityCheck:
    return check_metric(_arm(candidate), _arm(baseline), name="accuracy", direction=direction, margin=margin)


@pytest.mark.parametrize(
    ("direction", "candidate", "verdict", "estimate"),
    [
        ("maximize", (0.79, 0.79, 0.79), "inferior", 0.0125),
        ("maximize", (0.81, 0.81, 0.81), "non-inferior", -0.0125),
        ("minimize", (0.81, 0.81, 0.81), "inferior", 0.0125),
        ("minimize", (0.79, 0.79, 0.79), "non-inferior", -0.0125),
        ("maximize", (0.70, 0.90, 0.80), "inconclusive", 0.0),
    ],
)
def test_relative_verdicts(direction: Direction, candidate: tuple[float, ...], verdict: str, estimate: float) -> None:
    check = _check(candidate, (0.8, 0.8, 0.8), direction=direction)
    assert (check.test, check.metric, check.verdict, check.seeds) == ("metric", "accuracy", verdict, 3)
    assert (check.margin, check.samples) == (RELATIVE, 64)
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx(estimate, abs=1e-12)


@pytest.mark.parametrize(
    ("direction", "candidate", "verdict", "estimate"),
    [
        ("maximize", (49.992, 49.993, 49.991), "non-inferior", 0.008),  # a hundred times as large: no division
        ("maximize", (49.98, 49.98, 49.98), "inferior", 0.02),
        ("minimize", (50.02, 50.02, 50.02), "inferior", 0.02),
        ("minimize", (49.9, 49.9, 49.9), "non-inferior", -0.1),
        ("minimize", (50.02, 49.98, 50.0), "inconclusive", 0.0),
        ("minimize", (50.01, 50.012, 50.008), "inconclusive", 0.01),  # on the margin itself
    ],
)
def test_absolute_verdicts(direction: Direction, candidate: tuple[float, ...], verdict: str, estimate: float) -> None:
    check = _check(candidate, (50.0, 50.0, 50.0), direction=direction, margin=ABSOLUTE)
    assert (check.verdict, check.margin) == (verdict, ABSOLUTE)
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx(estimate, abs=1e-9)


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        ((0.82, 0.821, 0.822), "non-inferior"),
        ((0.805, 0.806, 0.807), "inferior"),  # better, but not by as much as is required
        ((0.80, 0.82, 0.84), "inconclusive"),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_required_improvement_has_to_be_shown(candidate: tuple[float, ...], verdict: str, sign: float) -> None:
    direction: Direction = "maximize" if sign > 0 else "minimize"
    ours, theirs = tuple(sign * value for value in candidate), 3 * (sign * 0.8,)
    assert _check(ours, theirs, direction=direction, margin=IMPROVEMENT).verdict == verdict


def test_the_bounds_are_the_t_interval_of_the_differences() -> None:
    candidate, baseline = (0.80, 0.83, 0.79, 0.81), (0.81, 0.82, 0.81, 0.80)
    check = _check(candidate, baseline, margin=ABSOLUTE)
    drifts = [theirs - ours for ours, theirs in zip(candidate, baseline, strict=True)]
    low, high = stats.t.interval(0.90, 3, loc=sum(drifts) / 4, scale=stats.sem(drifts))
    assert check.difference is not None
    assert (check.difference.low, check.difference.high) == pytest.approx((low, high), rel=1e-8)


def test_the_reason_is_one_sentence_in_the_margins_unit() -> None:
    assert _check((0.6, 0.6), (0.8, 0.8), margin=ABSOLUTE).reason == (
        "the absolute worsening of accuracy is +0.2000 over 2 seeds "
        "(above +0.2000 and below +0.2000, at 95 % each): beyond the margin of +0.0100"
    )
    assert _check((0.6, 0.6), (0.8, 0.8)).reason == (
        "the relative worsening of accuracy is +25.00% over 2 seeds "
        "(above +25.00% and below +25.00%, at 95 % each): beyond the margin of +1.00%"
    )


def test_a_metric_below_zero_worsens_in_its_own_direction() -> None:
    assert _check((-90.0, -91.0), (-100.0, -101.0), direction="minimize").verdict == "inferior"
    assert _check((-90.0, -91.0), (-100.0, -101.0), direction="maximize").verdict == "non-inferior"


@pytest.mark.parametrize("margin", [RELATIVE, ABSOLUTE, IMPROVEMENT])
def test_a_missing_metric_is_inferior_even_with_one_seed(margin: Margin) -> None:
    for candidate, baseline in (((0.8, None, 0.8), (0.8, 0.8, 0.8)), ((None,), (0.8,))):
        check = _check(candidate, baseline, margin=margin)
        assert (check.verdict, check.difference) == ("inferior", None)
        assert "there is no finite accuracy for seed" in check.reason


@pytest.mark.parametrize("margin", [RELATIVE, ABSOLUTE, IMPROVEMENT])
def test_a_baseline_without_the_metric_proves_nothing(margin: Margin) -> None:
    for candidate in ((0.8, 0.8), (None, 0.8)):
        check = _check(candidate, (None, 0.8), margin=margin)
        assert (check.verdict, check.reason) == ("inconclusive", "the baseline has no finite accuracy for seed 0")


def test_a_metric_that_no_curve_has_proves_nothing() -> None:
    arms = _arm((0.8, 0.8)), _arm((0.8, 0.8))
    check = check_metric(*arms, name="kappa", direction="maximize", margin=ABSOLUTE)
    assert (check.verdict, check.reason) == ("inconclusive", "the baseline has no finite kappa for seed 1")


def test_a_baseline_of_zero_has_an_absolute_worsening_only() -> None:
    check = _check((0.0, 0.0), (0.8, 0.0))
    assert check.verdict == "inconclusive"
    assert check.reason == "the baseline's accuracy is 0 for seed 1: no relative worsening exists"
    assert _check((0.005, 0.004), (0.0, 0.0), direction="minimize", margin=ABSOLUTE).verdict == "non-inferior"
    assert _check((0.05, 0.04), (0.0, 0.0), direction="minimize", margin=ABSOLUTE).verdict == "inferior"


def test_one_seed_and_no_seed_prove_nothing() -> None:
    for values in ((), (0.8,)):
        check = _check(values, values, margin=ABSOLUTE)
        assert (check.verdict, check.seeds) == ("inconclusive", len(values))
        assert "at least 2 are needed" in check.reason


def test_a_seed_may_not_occur_twice() -> None:
    curve = _arm((0.8,))[0]
    with pytest.raises(ValueError, match="occurs twice"):
        check_metric([curve], [curve, curve], name="accuracy", direction="minimize", margin=ABSOLUTE)


values = st.none() | st.floats(allow_nan=False, allow_infinity=False)
margins = st.sampled_from([RELATIVE, ABSOLUTE, IMPROVEMENT])


@given(st.lists(st.tuples(values, values), max_size=4), margins, st.sampled_from(["minimize", "maximize"]))
def test_any_metrics_get_a_verdict_and_missing_values_never_pass(
    arms: list[tuple[float | None, float | None]], margin: Margin, direction: Direction
) -> None:
    check = _check([ours for ours, _ in arms], [theirs for _, theirs in arms], margin=margin, direction=direction)
    if any(None in pair for pair in arms):
        assert check.verdict != "non-inferior"
    if check.verdict == "non-inferior":
        assert check.difference is not None
        assert check.difference.high < margin.amount
    assert check.reason
    assert "\n" not in check.reason


def test_a_worsening_beyond_an_absolute_margin_hardly_ever_passes() -> None:
    # Paired sd 0.002 around the margin itself: 5 % may pass; an improvement that is required is no easier.
    rng = random.Random(5)
    for margin in (ABSOLUTE, IMPROVEMENT):
        drifts = [[margin.amount + rng.gauss(0.0, 0.002) for _ in range(4)] for _ in range(400)]
        passed = [_check([0.5 - drift for drift in seeds], [0.5] * 4, margin=margin).verdict for seeds in drifts]
        assert 0.02 < passed.count("non-inferior") / 400 < 0.08
