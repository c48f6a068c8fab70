from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from autotune.drift.compare.paired_seeds import pair_by_seed
from autotune.drift.compare.samples_to_loss import (
    LARGEST_RATIO,
    SamplesRatio,
    check_samples_to_loss,
    compare_at_horizons,
)
from autotune.records.quality import QualityCheck
from autotune.records.trial import LossCurve

BATCH = 32
NOISE = 0.15
"""Standard deviation of a baseline step's loss, relative: what a small classifier shows."""

Law = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Arm = list[LossCurve]


def _law(ratio: float = 1.0, *, exponent: float = 0.4) -> Law:
    """A training that needs `ratio` times the samples for every loss."""
    return lambda samples: 0.5 + 2.0 * (1.0 + samples / (200.0 * ratio)) ** -exponent


def _growing(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    return _law()(samples / (1.0 + samples / (100 * BATCH)))


def _collapsed(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(2.0, _law()(samples))


def _converged(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(0.6, 0.5 + 2.0 / (1.0 + samples / 50.0))


def _curve(losses: Sequence[float | None], *, seed: int = 0, batch: int = BATCH) -> LossCurve:
    return LossCurve(seed=seed, losses=tuple(losses), samples=batch * len(losses))


def _exact(law: Law, *, seeds: int = 3, steps: int = 400, factor: int = 1) -> Arm:
    """The loss of a step is that of the weights before it; a seed only moves and stretches all of them."""
    losses = law(np.arange(steps // factor) * float(BATCH * factor))
    arm = [(1.0 + 0.1 * seed) * losses + 0.2 * seed for seed in range(seeds)]
    return [_curve(each.tolist(), seed=seed, batch=BATCH * factor) for seed, each in enumerate(arm)]


def _noisy(
    candidate: Law, baseline: Law, rng: np.random.Generator, *, seeds: int = 4, steps: int = 100, factor: int = 1
) -> tuple[Arm, Arm]:
    """Both arms of a search: part of the noise is the samples', which they share, the rest is each one's own."""
    ours, theirs = [], []
    for seed in range(seeds):
        shared = rng.standard_normal(steps)
        for arm, law, size in ((ours, candidate, factor), (theirs, baseline, 1)):
            own = rng.standard_normal(steps)
            noise = NOISE * (math.sqrt(0.6) * shared + math.sqrt(0.4) * own).reshape(-1, size).mean(axis=1)
            losses = law(np.arange(steps // size) * float(BATCH * size)) * (1.0 + noise)
            arm.append(_curve(losses.tolist(), seed=seed, batch=BATCH * size))
    return ours, theirs


def samples_ratios(candidate: Arm, baseline: Arm) -> list[SamplesRatio]:
    return [horizon.found for horizon in compare_at_horizons(pair_by_seed(candidate, baseline))]


def _check(candidate: Arm, baseline: Arm, *, speedup: float | None = None) -> QualityCheck:
    return check_samples_to_loss(candidate, baseline, speedup=speedup, predicted=None)


def _count(candidate: Law, baseline: Law, *, searches: int, speedup: float | None, factor: int = 1) -> Counter[str]:
    rng = np.random.default_rng(7)
    arms = (_noisy(candidate, baseline, rng, factor=factor) for _ in range(searches))
    return Counter(_check(*each, speedup=speedup).verdict for each in arms)


def _most(searches: int) -> int:
    """As many as an error rate of 5 % gives, but for one run in a thousand."""
    return int(stats.binom.ppf(0.999, searches, 0.05))


@pytest.mark.parametrize(
    ("factor", "ratio", "exponent"),
    [
        (1, 0.8, 0.2),
        (4, 0.8, 1.0),
        (2, 1.0, 1.0),
        (4, 1.1, 0.2),
        (2, 1.5, 0.2),
        (1, 3.0, 1.0),
        (4, 3.0, 0.2),
        (4, 3.0, 1.0),
    ],
)
def test_the_ratio_of_power_laws_is_recovered_at_every_horizon(factor: int, ratio: float, exponent: float) -> None:
    candidate = _exact(_law(ratio, exponent=exponent), factor=factor)
    found = samples_ratios(candidate, _exact(_law(exponent=exponent)))
    assert [each.samples for each in found] == [3200, 6400, 12800]
    for each in found:
        assert each.ratio.estimate == pytest.approx(ratio, rel=0.02)
        assert each.ratio.low <= each.ratio.estimate <= each.ratio.high
        assert each.ratio.confidence_level == 0.90


def test_equal_curves_give_exactly_one() -> None:
    rng = np.random.default_rng(3)
    baseline, _ = _noisy(_law(), _law(), rng)
    for each in samples_ratios(baseline, baseline):
        assert (each.ratio.low, each.ratio.estimate, each.ratio.high) == (1.0, 1.0, 1.0)
    check = _check(baseline, baseline)
    assert (check.verdict, check.test, check.metric) == ("non-inferior", "samples-to-loss", "samples to the same loss")
    assert check.difference is not None
    assert (check.difference.low, check.difference.high, check.margin.amount) == (0.0, 0.0, 0.005)
    assert _check(baseline, baseline, speedup=1.0).verdict == "inconclusive"


def test_swapping_the_arms_inverts_the_ratio() -> None:
    candidate, baseline = _noisy(_law(1.3), _law(), np.random.default_rng(3), factor=2)
    for ours, theirs in zip(samples_ratios(candidate, baseline), samples_ratios(baseline, candidate), strict=True):
        assert ours.ratio.estimate * theirs.ratio.estimate == pytest.approx(1.0)
        assert ours.ratio.low * theirs.ratio.high == pytest.approx(1.0)


def test_the_interval_is_students_t_on_the_log_ratios() -> None:
    ratios = (1.1, 1.2, 1.4)
    candidate = [_exact(_law(ratio))[seed] for seed, ratio in enumerate(ratios)]
    found = samples_ratios(candidate, _exact(_law()))[-1].ratio
    logs = np.log(ratios)
    low, high = stats.t.interval(0.90, 2, loc=logs.mean(), scale=stats.sem(logs))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=0.01)
    assert found.method == "Student t over 3 paired seeds, log ratio"


@pytest.mark.parametrize(("law", "factor"), [(_law(), 1), (_law(), 2), (_converged, 1)])
def test_equal_trainings_cover_one_and_are_seldom_called_worse(law: Law, factor: int) -> None:
    searches, rng, verdicts = 250, np.random.default_rng(11), Counter[str]()
    above = below = 0
    for _ in range(searches):
        check = _check(*_noisy(law, law, rng, factor=factor))
        assert check.difference is not None
        above += check.difference.low > 0.0
        below += check.difference.high < 0.0
        verdicts[check.verdict] += 1
    assert above <= _most(searches)
    assert below <= _most(searches)
    assert verdicts["inferior"] <= _most(searches)
    assert verdicts["inconclusive"] > searches / 2


@pytest.mark.parametrize(("ratio", "factor"), [(1.1, 2), (2.0, 4)])
def test_a_speedup_that_only_just_does_not_pay_seldom_passes(ratio: float, factor: int) -> None:
    verdicts = _count(_law(ratio), _law(), searches=200, speedup=ratio, factor=factor)
    assert verdicts["non-inferior"] <= _most(200)
    assert verdicts["inferior"] <= _most(200)


def test_a_larger_batch_passes_where_its_speed_pays() -> None:
    assert _count(_law(1.1), _law(), searches=60, speedup=1.5, factor=2)["non-inferior"] >= 50
    assert _count(_law(1.1), _law(), searches=60, speedup=1.05, factor=2)["non-inferior"] <= 3


def test_a_larger_batch_whose_speed_does_not_pay_is_inferior() -> None:
    check = _check(_exact(_law(1.5), factor=2), _exact(_law()), speedup=1.3)
    assert (check.verdict, check.margin.amount) == ("inferior", pytest.approx(0.3))
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx(0.5, rel=0.02)


def test_a_training_that_needs_fewer_samples_passes_without_speed() -> None:
    assert _check(_exact(_law(0.8)), _exact(_law())).verdict == "non-inferior"
    assert _check(_exact(_law(0.8)), _exact(_law()), speedup=0.9).verdict == "non-inferior"
    assert _check(_exact(_law(0.8)), _exact(_law()), speedup=0.7).verdict == "inferior"


def test_a_collapsed_training_is_always_inferior() -> None:
    assert _count(_collapsed, _law(), searches=100, speedup=3.0) == {"inferior": 100}


def test_a_training_that_learns_nothing_has_no_upper_bound() -> None:
    candidate = _exact(lambda samples: np.full_like(samples, 3.0))
    found = samples_ratios(candidate, _exact(_law()))
    assert [each.ratio.high for each in found] == [LARGEST_RATIO] * 3
    assert [each.ratio.estimate for each in found] == sorted(each.ratio.estimate for each in found)
    assert _check(candidate, _exact(_law()), speedup=3.0).verdict == "inferior"
    assert _check(_exact(_law()), candidate, speedup=3.0).verdict == "inconclusive"


def test_a_ratio_is_cut() -> None:
    steps = 20_000
    baseline = _exact(lambda samples: np.where(samples < 10 * BATCH, 3.0, 1.0) - samples * 1e-9, steps=steps)
    candidate = _exact(lambda samples: np.full_like(samples, 2.0), steps=steps)
    last = samples_ratios(candidate, baseline)[-1].ratio
    assert (last.low, last.high) == pytest.approx((LARGEST_RATIO, LARGEST_RATIO))


def test_an_interval_ends_at_the_largest_ratio_and_its_inverse() -> None:
    candidate = [_exact(_law(ratio))[seed] for seed, ratio in enumerate((0.2, 5.0))]
    last = samples_ratios(candidate, _exact(_law()))[-1].ratio
    assert (last.low, last.high) == pytest.approx((1.0 / LARGEST_RATIO, LARGEST_RATIO))


def test_a_loss_that_rises_at_the_end_does_not_pass() -> None:
    def rising(samples: NDArray[np.float64]) -> NDArray[np.float64]:
        return _law()(samples) + np.where(samples > 0.75 * 400 * BATCH, 3.0, 0.0)

    assert _check(_exact(rising), _exact(_law()), speedup=3.0).verdict == "inferior"


def test_a_lag_that_grows_is_not_a_pass() -> None:
    check = _check(_exact(_growing), _exact(_law()), speedup=9.0)
    assert check.verdict == "inconclusive"
    assert "the ratio grows with the horizon, so a longer training would pay more than was seen" in check.reason
    assert check.difference is not None
    assert check.difference.high < 8.0
    assert _check(_exact(_law(1.0 + check.difference.high)), _exact(_law()), speedup=9.0).verdict == "non-inferior"


def test_growth_is_seen_from_the_first_horizon_that_shows_a_ratio() -> None:
    candidate, baseline = _exact(_law(2.0), steps=40, factor=4), _exact(_law(), steps=40)
    first, middle, last = samples_ratios(candidate, baseline)
    assert first.ratio.high == LARGEST_RATIO
    assert last.ratio.estimate > 1.05 * first.ratio.estimate
    check = _check(candidate, baseline, speedup=4.0)
    assert check.verdict == "non-inferior"
    assert f"times that at {middle.samples} samples" in check.reason
    assert f"takes >{first.ratio.estimate:.4g}x / {middle.ratio.estimate:.4g}x" in check.reason


def test_a_lag_that_is_caught_up_passes() -> None:
    def late(samples: NDArray[np.float64]) -> NDArray[np.float64]:
        return _law()(np.maximum(0.0, samples - 4.0 * BATCH))

    first, _, last = samples_ratios(_exact(late), _exact(_law()))
    assert first.ratio.estimate > 1.04 > last.ratio.estimate > 1.0
    assert _check(_exact(late), _exact(_law()), speedup=1.1).verdict == "non-inferior"


@pytest.mark.parametrize("shift", [-0.7, -10.0])
def test_losses_may_be_zero_and_negative(shift: float) -> None:
    arms = _exact(_law(1.2), factor=2), _exact(_law())
    shifted = tuple(
        [curve.replace(losses=tuple(loss + shift for loss in curve.losses if loss is not None)) for curve in arm]
        for arm in arms
    )
    for ours, theirs in zip(samples_ratios(*arms), samples_ratios(*shifted), strict=True):
        assert ours.ratio.estimate == pytest.approx(theirs.ratio.estimate, rel=1e-6)
    assert _check(*shifted, speedup=1.5).verdict == "non-inferior"


def test_a_huge_loss_leaves_nothing_in_later_windows() -> None:
    arms = _exact(_law(1.2)), _exact(_law())
    huge = (sys.float_info.max,) * 3
    spiked = tuple([curve.replace(losses=(*huge, *curve.losses[3:])) for curve in arm] for arm in arms)
    expected, found = samples_ratios(*arms)[-1].ratio, samples_ratios(*spiked)[-1].ratio
    assert found.estimate == pytest.approx(expected.estimate, rel=1e-9)
    assert _check(*spiked, speedup=1.5).verdict == "non-inferior"


def test_losses_too_small_to_tell_apart_prove_nothing() -> None:
    arms = _exact(lambda samples: 1e-310 * _law(1.3)(samples)), _exact(lambda samples: 1e-310 * _law()(samples))
    tiny = tuple([curve.replace(losses=tuple(loss or 0.0 for loss in curve.losses)) for curve in arm] for arm in arms)
    assert samples_ratios(*tiny)[-1].ratio.high == LARGEST_RATIO


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_constant_end_of_both_is_no_lag(factor: int) -> None:
    def floored(samples: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(1.7, _law()(samples))

    for each in samples_ratios(_exact(floored, steps=96, factor=factor), _exact(floored, steps=96)):
        assert each.ratio.estimate == pytest.approx(1.0, rel=0.04)


def test_only_the_samples_that_both_ran_are_compared() -> None:
    long, short = _exact(_law(), steps=800), _exact(_law(), steps=400)
    candidate = _exact(_law(1.2), factor=2)
    assert samples_ratios(candidate, long) == samples_ratios(candidate, short)
    assert _check(candidate, long, speedup=1.5).samples == 12800
    late = _exact(lambda samples: np.where(samples < 400 * BATCH, 2.0, 1.0), steps=800)
    assert _check(candidate, late).reason.endswith("nothing is learned that could be lost")
    ends_badly = [curve.replace(losses=(*curve.losses[:-1], None)) for curve in long]
    assert _check(ends_badly, short).verdict == "non-inferior"


def _without(arm: Arm, seed: int, *steps: int) -> Arm:
    losses = [None if step in steps else loss for step, loss in enumerate(arm[seed].losses)]
    return [*arm[:seed], arm[seed].replace(losses=tuple(losses)), *arm[seed + 1 :]]


def test_a_loss_that_is_not_finite_where_the_baselines_is_is_inferior() -> None:
    candidate, baseline = _without(_exact(_law(), factor=2), 1, 10), _exact(_law())
    check = _check(candidate, baseline, speedup=3.0)
    assert (check.verdict, check.difference) == ("inferior", None)
    assert check.reason == "at step 11 of seed 1 the loss is not finite, and the baseline's is"
    assert _check(candidate[1:2], baseline[1:2]).verdict == "inferior"
    for elsewhere in (19, 22):
        assert _check(candidate, _without(baseline, 1, elsewhere)).verdict == "inferior"


def test_steps_that_end_together_do_not_overlap() -> None:
    def broken(samples: int, steps: int, at: int) -> LossCurve:
        return LossCurve(seed=0, losses=tuple(None if step == at else 1.0 for step in range(steps)), samples=samples)

    overlapping = [
        (samples, step, before)
        for samples in range(70, 90)
        for step in range(1, 10)
        for before in (3 * step - 1, 3 * step + 3)
        if _check([broken(samples, 10, step)], [broken(samples, 30, before)]).verdict != "inferior"
    ]
    assert overlapping == []


@pytest.mark.parametrize("samples", [30, 49, 60])
def test_a_step_that_begins_where_the_baseline_ended_is_not_compared(samples: int) -> None:
    assert 11 * (samples / 11) < samples  # the case that rounding would count as a part of a step
    beyond = LossCurve(seed=0, losses=(1.0,) * 11 + (None,) * 11, samples=2 * samples)
    assert _check([beyond], [LossCurve(seed=0, losses=(1.0,) * 11, samples=samples)]).verdict == "inconclusive"


def test_a_baseline_that_is_not_finite_is_inconclusive() -> None:
    baseline = _without(_exact(_law()), 1, 20)
    for candidate in (_exact(_law(), factor=2), _without(_exact(_law(), factor=2), 1, 10)):
        check = _check(candidate, baseline, speedup=3.0)
        assert check.verdict == "inconclusive"
        assert check.reason == "at step 21 of seed 1 the baseline's own loss is not finite"


def test_seeds_are_paired_and_two_are_needed() -> None:
    candidate, baseline = _exact(_law(1.2), seeds=4), _exact(_law(), seeds=4)
    check = _check(candidate[1:], list(reversed(baseline[:3])), speedup=1.5)
    assert (check.verdict, check.seeds, check.samples) == ("non-inferior", 2, 12800)
    for few, seeds in ((baseline[:1], 1), ([], 0)):
        check = _check(candidate, few, speedup=1.5)
        assert (check.verdict, check.seeds) == ("inconclusive", seeds)
        assert check.reason == f"{seeds} seed(s) in common with the baseline: at least 2 are needed"
    with pytest.raises(ValueError, match="a seed occurs twice"):
        _check([*candidate, candidate[0]], baseline)


@pytest.mark.parametrize(("steps", "factor", "taken"), [(1, 1, "1"), (7, 1, "7"), (28, 4, "7")])
def test_too_few_steps_are_inconclusive(steps: int, factor: int, taken: str) -> None:
    candidate, baseline = _exact(_law(), steps=steps, factor=factor), _exact(_law())
    check = _check(candidate, baseline, speedup=3.0)
    assert check.verdict == "inconclusive"
    assert check.reason == (
        f"the candidate's seed 0 took {taken} optimizer steps for the samples both arms ran: at least 8 are needed"
    )
    large = _exact(_law(), steps=14, factor=2)
    assert "the baseline's seed 0 took 7 optimizer steps" in _check(baseline, large, speedup=3.0).reason


def test_no_losses_are_inconclusive() -> None:
    empty = [_curve([], seed=seed) for seed in range(2)]
    assert _check(empty, empty).verdict == "inconclusive"
    assert _check(empty, _exact(_law(), seeds=2)).samples == 0


@pytest.mark.parametrize("level", [2.0, -2.0, 0.0])
def test_where_nothing_is_learned_nothing_is_shown(level: float) -> None:
    constant = _exact(lambda samples: np.full_like(samples, level))
    check = _check(constant, constant, speedup=3.0)
    assert check.verdict == "inconclusive"
    assert check.reason.endswith("nothing is learned that could be lost")


def test_noise_is_not_learned() -> None:
    def level(samples: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.full_like(samples, 2.0)

    rng = np.random.default_rng(1)
    assert sum(_check(*_noisy(level, level, rng), speedup=3.0).difference is None for _ in range(40)) >= 40 - _most(40)


@pytest.mark.parametrize("speedup", [0.0, -1.0, math.inf, math.nan])
def test_a_speedup_must_be_positive_and_finite(speedup: float) -> None:
    with pytest.raises(ValueError, match="speedup"):
        _check(_exact(_law()), _exact(_law()), speedup=speedup)


def test_the_reason_is_one_sentence_with_its_numbers() -> None:
    candidate = [_exact(_law(ratio))[seed] for seed, ratio in enumerate((1.08, 1.1, 1.12))]
    found = (
        "the same training loss takes 1.1x / 1.1x / 1.1x the baseline's samples at 3,200 / 6,400 / 12,800 samples over "
        "3 seeds, the last ratio is above 1.067x and below 1.134x at 95 % each, "
        "1 times that at 3,200 samples (above 1 at 95 %)"
    )
    check = check_samples_to_loss(candidate, _exact(_law()), speedup=1.5, predicted=1.08)
    assert check.reason == (
        f"{found}, the gradient noise scale predicts 1.08x, "
        "the net speed-up is 1.364x (above 1.323x and below 1.406x): within what is allowed"
    )
    assert _check(candidate, _exact(_law())).reason == f"{found}, up to 1.005x is allowed: more than is allowed"
    assert _check(candidate, _exact(_law()), speedup=1.1).reason.endswith("below 1.031x): too uncertain")


any_losses = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=24)


@given(
    st.lists(st.tuples(any_losses, any_losses), max_size=3), st.sampled_from([1, 2, 3]), st.none() | st.floats(0.1, 9)
)
def test_any_curves_get_a_verdict_and_missing_values_never_pass(
    arms: list[tuple[list[float | None], list[float | None]]], factor: int, speedup: float | None
) -> None:
    candidate = [_curve(ours, seed=seed, batch=BATCH * factor) for seed, (ours, _) in enumerate(arms)]
    baseline = [_curve(theirs, seed=seed) for seed, (_, theirs) in enumerate(arms)]
    check = _check(candidate, baseline, speedup=speedup)
    assert check.reason
    assert "\n" not in check.reason
    if check.verdict == "non-inferior":
        assert check.difference is not None
        assert check.difference.high < check.margin.amount
        for ours, theirs in arms:
            assert None not in ours[: len(theirs) // factor]
            assert None not in theirs[: factor * len(ours)]
