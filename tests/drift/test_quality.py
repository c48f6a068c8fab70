from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from autotune.drift.compare.losses import (
    check_losses,
    count_learning_steps,
    has_learned,
    may_learn,
    screen_losses,
    screen_other_draws,
)
from autotune.records import LossCurve, Margin, QualityCheck
from autotune.records.quality import is_passed

MARGIN = Margin(amount=0.005)


def _curve(losses: Sequence[float | None], *, seed: int = 0, batch: int = 32) -> LossCurve:
    return LossCurve(seed=seed, losses=tuple(losses), samples=batch * len(losses))


def _baseline(seeds: int, *, steps: int = 20, level: float = 2.0) -> list[LossCurve]:
    rng = random.Random(11)
    return [
        _curve([level / (1 + 0.1 * step) * rng.uniform(0.9, 1.1) for step in range(steps)], seed=seed)
        for seed in range(seeds)
    ]


def _scaled(curves: Sequence[LossCurve], factors: Sequence[float]) -> list[LossCurve]:
    return [
        curve.replace(losses=tuple(None if loss is None else loss * factor for loss in curve.losses))
        for curve, factor in zip(curves, factors, strict=True)
    ]


def _check(candidate: Sequence[LossCurve], baseline: Sequence[LossCurve], *, exact: bool = False) -> QualityCheck:
    return check_losses(candidate, baseline, margin=MARGIN, exact=exact)


def test_equal_losses_settle_an_exact_knob_with_a_zero_interval() -> None:
    check = _check(_baseline(1), _baseline(1), exact=True)
    assert (check.test, check.verdict, check.seeds, check.samples) == ("exact-losses", "non-inferior", 1, 640)
    assert check.difference is not None
    assert (check.difference.estimate, check.difference.low, check.difference.high) == (0.0, 0.0, 0.0)
    assert "all 20 losses of 1 seed(s) equal the baseline's bit for bit" in check.reason


def test_an_exact_knob_that_changes_the_last_bit_is_judged_like_any_other() -> None:
    baseline = _baseline(3)
    last = baseline[2].losses[-1]
    assert last is not None
    changed = baseline[2].replace(losses=(*baseline[2].losses[:-1], math.nextafter(last, math.inf)))
    check = _check([*baseline[:2], changed], baseline, exact=True)
    assert (check.test, check.verdict) == ("paired-losses", "non-inferior")
    assert _check([changed], [baseline[2]], exact=True).verdict == "inconclusive"


def test_an_exact_knob_is_not_settled_by_a_part_of_the_losses() -> None:
    baseline = _baseline(2)
    shorter = [curve.replace(losses=curve.losses[:10], samples=320) for curve in baseline]
    assert _check(shorter, baseline, exact=True).test == "paired-losses"
    assert _check([_curve([])], [_curve([])], exact=True).verdict == "inconclusive"
    assert _check([_curve([None])], [_curve([None])], exact=True).verdict == "inconclusive"


def test_equal_losses_of_other_knobs_are_judged_by_the_paired_test() -> None:
    check = _check(_baseline(3), _baseline(3))
    assert (check.test, check.verdict, check.seeds) == ("paired-losses", "non-inferior", 3)


def test_the_paired_test_is_the_t_interval_of_the_mean_log_drift() -> None:
    factors = (1.001, 0.999, 1.002, 1.000)
    check = _check(_scaled(_baseline(4), factors), _baseline(4))
    logs = [math.log(factor) for factor in factors]
    low, high = stats.t.interval(0.90, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx(math.expm1(sum(logs) / 4), rel=1e-9)
    assert (check.difference.low, check.difference.high) == pytest.approx((math.expm1(low), math.expm1(high)), rel=1e-8)
    assert (check.difference.confidence_level, check.verdict) == (0.90, "non-inferior")
    assert check.difference.method == "Student t over 4 paired seeds, log ratio"


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.000, 1.001, 0.999), "non-inferior"),
        ((0.90, 0.91, 0.90), "non-inferior"),  # better is never a reason to refuse
        ((1.02, 1.021, 1.019), "inferior"),
        ((0.98, 1.02, 1.00), "inconclusive"),
        ((1.004, 1.005, 1.006), "inconclusive"),  # on the margin itself
    ],
)
def test_verdicts(factors: tuple[float, ...], verdict: str) -> None:
    check = _check(_scaled(_baseline(3), factors), _baseline(3))
    assert check.verdict == verdict
    assert check.metric == "training loss"
    assert "+0.50%" in check.reason


def test_the_reason_is_one_sentence_with_its_numbers() -> None:
    check = _check(_scaled(_baseline(3), (1.02, 1.02, 1.02)), _baseline(3))
    assert check.reason == (
        "the relative worsening of training loss is +2.00% over 3 seeds "
        "(above +2.00% and below +2.00%, at 95 % each): beyond the margin of +0.50%"
    )


def test_only_the_last_half_of_the_matched_steps_counts() -> None:
    baseline = [_curve([1.0] * 10, seed=seed) for seed in range(2)]
    slow_start = [_curve([9.0] * 5 + [1.0] * 5, seed=seed) for seed in range(2)]
    bad_end = [_curve([1.0] * 5 + [9.0] * 5, seed=seed) for seed in range(2)]
    assert _check(slow_start, baseline).verdict == "non-inferior"
    assert _check(bad_end, baseline).verdict == "inferior"
    longer = [_curve([1.0] * 10 + [9.0] * 10, seed=seed) for seed in range(2)]
    check = _check(longer, baseline)
    assert (check.verdict, check.samples) == ("non-inferior", 320)


def test_curves_are_paired_by_seed_in_any_order() -> None:
    baseline = _baseline(4)
    check = _check([baseline[3], baseline[1], _curve([9.0], seed=99)], baseline)
    assert (check.verdict, check.seeds) == ("non-inferior", 2)
    with pytest.raises(ValueError, match="occurs twice"):
        _check([baseline[0], baseline[0]], baseline)


@pytest.mark.parametrize("seeds", [0, 1])
def test_fewer_than_two_common_seeds_prove_nothing(seeds: int) -> None:
    check = _check(_baseline(seeds), _baseline(3))
    assert (check.verdict, check.seeds, check.difference) == ("inconclusive", seeds, None)
    assert check.reason == f"{seeds} seed(s) in common with the baseline: at least 2 are needed"


@pytest.mark.parametrize("step", [0, 7, 19])
def test_a_loss_that_is_not_finite_is_inferior_at_any_step(step: int) -> None:
    baseline = _baseline(3)
    broken = list(baseline[1].losses)
    broken[step] = None
    check = _check([baseline[0], baseline[1].replace(losses=tuple(broken)), baseline[2]], baseline)
    assert (check.verdict, check.difference) == ("inferior", None)
    assert check.reason == f"at step {step + 1} of seed 1 the loss is not finite, and the baseline's is"


def test_a_single_seed_suffices_to_refuse_what_is_not_finite() -> None:
    assert _check([_curve([None])], [_curve([1.0])]).verdict == "inferior"


def test_a_baseline_that_is_not_finite_is_inconclusive() -> None:
    baseline = [_curve([1.0, None, 1.0], seed=seed) for seed in range(2)]
    finite = [_curve([1.0, 1.0, 1.0], seed=seed) for seed in range(2)]
    for candidate in (finite, baseline):
        check = _check(candidate, baseline, exact=True)
        assert check.verdict == "inconclusive"
        assert check.reason == "at step 2 of seed 0 the baseline's own loss is not finite"
    worse = [finite[0], finite[1].replace(losses=(None, 1.0, 1.0))]
    assert _check(worse, baseline).verdict == "inferior"


def test_no_common_step_is_inconclusive() -> None:
    check = _check([_curve([], seed=0), _curve([1.0], seed=1)], [_curve([1.0], seed=0), _curve([1.0], seed=1)])
    assert check.verdict == "inconclusive"
    assert check.reason == "seed 0 has no optimizer step in common with the baseline"


def test_steps_of_another_batch_size_are_not_compared() -> None:
    baseline = [_curve([1.0] * 8, seed=seed, batch=32) for seed in range(2)]
    doubled = [_curve([0.5] * 8, seed=seed, batch=64) for seed in range(2)]
    check = _check(doubled, baseline)
    assert check.verdict == "inconclusive"
    assert check.reason == "a step is 64 samples, the baseline's 32: their losses do not compare step by step"
    assert screen_losses(doubled[0], baseline[0]) is None


def test_losses_below_zero_are_compared_by_their_difference() -> None:
    baseline = [_curve([-1.0, -2.0, -4.0, -4.0], seed=seed) for seed in range(3)]
    worse = [_curve([-1.0, -2.0, -3.9, -3.9 - 0.001 * seed], seed=seed) for seed in range(3)]
    check = _check(worse, baseline)
    assert check.verdict == "inferior"
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx((0.1 + 0.1 - 0.001) / 2 / 4)
    assert check.difference.method == "Student t over 3 paired seeds"
    better = [_curve([-1.0, -2.0, -4.1, -4.1], seed=seed) for seed in range(3)]
    assert _check(better, baseline).verdict == "non-inferior"


def test_a_baseline_loss_of_zero_is_inconclusive() -> None:
    zero = [_curve([1.0, 0.0], seed=seed) for seed in range(2)]
    check = _check([_curve([1.0, 0.5], seed=seed) for seed in range(2)], zero)
    assert (check.verdict, check.difference) == ("inconclusive", None)
    assert check.reason == "the baseline's training loss is 0: no worsening exists"


@pytest.mark.parametrize("margin", [Margin(amount=-0.1), Margin(amount=0.1, unit="absolute")])
@pytest.mark.parametrize("exact", [False, True])
def test_the_margin_of_losses_is_relative_and_not_negative(margin: Margin, exact: bool) -> None:
    with pytest.raises(ValueError, match="relative margin that is not negative"):
        check_losses(_baseline(2), _baseline(2), margin=margin, exact=exact)


losses = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=5)


@given(st.lists(st.tuples(losses, losses), max_size=4), st.floats(0, 1), st.booleans())
def test_any_curves_get_a_verdict_and_missing_values_never_pass(
    arms: list[tuple[list[float | None], list[float | None]]], margin: float, exact: bool
) -> None:
    candidate = [_curve(ours, seed=seed) for seed, (ours, _) in enumerate(arms)]
    baseline = [_curve(theirs, seed=seed) for seed, (_, theirs) in enumerate(arms)]
    check = check_losses(candidate, baseline, margin=Margin(amount=margin), exact=exact)
    matched = [list(zip(*pair, strict=False)) for pair in arms]
    if check.verdict == "non-inferior":
        assert check.difference is not None
        assert check.difference.high < margin or check.test == "exact-losses"
        assert all(steps and all(None not in step for step in steps) for steps in matched)
    if any(ours is None and theirs is not None for steps in matched for ours, theirs in steps):
        assert check.verdict == "inferior"
    assert check.reason
    assert "\n" not in check.reason
    for ours, theirs in zip(candidate, baseline, strict=True):
        screened = screen_losses(ours, theirs)
        assert screened is None or math.isfinite(screened)


def test_screening_gives_the_worsening_of_one_seed() -> None:
    baseline = _curve([5.0, 5.0, 1.0, 2.0])
    assert screen_losses(_curve([9.0, 9.0, 1.1, 2.2]), baseline) == pytest.approx(0.1)
    assert screen_losses(_curve([9.0, 1.5]), baseline) == pytest.approx(-0.7)
    assert screen_losses(_curve([9.0]), baseline) == pytest.approx(0.8)
    assert screen_losses(_curve([-1.0]), _curve([-2.0])) == pytest.approx(0.5)
    assert screen_losses(baseline, baseline) == 0.0


def test_screening_leaves_out_what_may_be_chance() -> None:
    """Losses of a network on a GPU, with its dropout and, in another memory layout, with other masks."""
    own = [0.0113, 0.0127, 0.0162, 0.0043, 0.0210, 0.0129, 0.0119, 0.0096, 0.0082, 0.0081]
    own += [0.0084, 0.0065, 0.0106, 0.0076, 0.0079, 0.0078, 0.0131, 0.0160, 0.0106, 0.0176]
    other = [0.0107, 0.0190, 0.0196, 0.0094, 0.0337, 0.0111, 0.0244, 0.0132, 0.0125, 0.0076]
    other += [0.0109, 0.0097, 0.0129, 0.0080, 0.0076, 0.0171, 0.0068, 0.0130, 0.0139, 0.0291]
    baseline = _curve(own * 2)
    assert screen_losses(_curve(other * 2), baseline) < 0.1
    assert screen_losses(_curve([1.3 * loss for loss in own] * 2), baseline) == pytest.approx(0.3)
    assert screen_losses(_curve([2 * loss for loss in other] * 2), baseline) > 0.5
    assert screen_losses(_curve([-3.0, -1.0] * 4), _curve([-2.5, -2.0] * 4)) < 0.1
    blown = _curve([*own, *own[:-3], 10.0, 1e3, 1e6])
    assert screen_losses(blown, baseline) > 100.0
    assert screen_losses(_curve([1.0, 1.0, 5.0, 20.0]), _curve([1.0] * 4)) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("candidate", "baseline"),
    [([], [1.0]), ([1.0], []), ([None, 1.0], [1.0, 1.0]), ([1.0], [None]), ([1.0], [0.0])],
)
def test_screening_finds_nothing_to_compare(candidate: list[float | None], baseline: list[float | None]) -> None:
    assert screen_losses(_curve(candidate), _curve(baseline)) is None


def test_five_seeds_pass_a_harmless_change_and_never_a_harmful_one() -> None:
    # Paired sd 0.1 %, a fifth of the margin: a change of 0 must pass nearly always; 1 % worse must never pass.
    rng = random.Random(12)
    verdicts: dict[float, list[str]] = {0.0: [], 0.005: [], 0.01: []}
    for drift, found in verdicts.items():
        for _ in range(400):
            factors = [math.exp(drift + rng.gauss(0.0, 0.001)) for _ in range(5)]
            baseline = [_curve([1.0, 1.0], seed=seed) for seed in range(5)]
            found.append(_check(_scaled(baseline, factors), baseline).verdict)
    assert verdicts[0.0].count("non-inferior") / 400 > 0.99
    assert verdicts[0.005].count("non-inferior") / 400 < 0.08  # nominal 5 % on the margin itself
    assert verdicts[0.01].count("non-inferior") == 0
    assert verdicts[0.01].count("inferior") / 400 > 0.99


@pytest.mark.parametrize(
    ("losses", "learned"),
    [
        ([2.0 / (1 + 0.1 * step) for step in range(40)], True),
        ([2.0] * 40, False),
        ([0.0] * 40, False),
        ([2.0 - 0.0001 * step for step in range(40)], False),  # a fall of 0.1 % hides a drift of 0.5 %
        ([2.0 + 0.1 * step for step in range(40)], False),
        ([-1.0 - 0.1 * step for step in range(40)], True),  # a log likelihood
        ([2.0], False),
        ([], False),
    ],
)
def test_a_drift_could_show_only_where_something_is_learned(losses: list[float], learned: bool) -> None:
    curves = [_curve([loss * (1 + 1e-4 * seed) for loss in losses], seed=seed) for seed in range(4)]
    assert has_learned(curves, margin=0.005) is learned


def test_a_fall_that_only_some_seeds_show_is_no_learning() -> None:
    curves = [_curve([2.0] * 20 + [2.0 + shift] * 20, seed=seed) for seed, shift in enumerate((-0.5, 0.4, -0.4, 0.5))]
    assert not has_learned(curves, margin=0.005)


def test_one_seed_says_whether_more_of_them_may_show_that_something_is_learned() -> None:
    assert may_learn(_curve([2.0 - 0.05 * step for step in range(20)]), margin=0.005)
    for flat in ([2.0] * 20, [2.0 - 1e-4 * step for step in range(20)], [1.0 + 0.1 * step for step in range(20)]):
        assert not may_learn(_curve(flat), margin=0.005)
    for unknown in ([], [2.0], [2.0, None, None]):
        assert not may_learn(_curve(unknown), margin=0.005)


@pytest.mark.parametrize(
    ("fall", "noise", "steps"),
    [(0.05, 0.0, 8), (0.0, 0.0, None), (0.0, 0.1, None), (0.0008, 0.0, 24), (-0.05, 0.0, None)],
)
def test_the_steps_in_which_a_training_is_seen_to_learn_are_told_by_one_seed(
    fall: float, noise: float, steps: int | None
) -> None:
    rng = random.Random(3)
    curve = _curve([2.0 * (1 - fall * step / 2) * (1 + noise * rng.uniform(-1, 1)) for step in range(40)])
    found = count_learning_steps(curve, margin=0.005, least=8)
    assert found is None if steps is None else found is not None and steps / 2 < found <= 2 * steps
    if found is not None:
        assert has_learned([curve.replace(losses=curve.losses[:found], seed=seed) for seed in range(4)], margin=0.005)


def test_luck_of_noisy_losses_is_seldom_taken_for_learning() -> None:
    rng = random.Random(5)
    curves = [_curve([2.0 + 0.3 * rng.gauss(0, 1) for _ in range(12)]) for _ in range(200)]
    assert sum(count_learning_steps(one, margin=0.005, least=8) is not None for one in curves) < 40


def test_what_launches_show_of_some_changes_settles_no_gradients_of_the_others() -> None:
    passed = _check(_baseline(4), _baseline(4))
    open_gradients = passed.replace(test="gradients", verdict="inconclusive")
    assert is_passed((open_gradients, passed))
    assert not is_passed((open_gradients, passed.replace(test="equal-launches")))


def test_with_other_masks_one_seed_shows_only_that_nothing_is_learned():
    fast = _curve([2.3] * 10 + [2.3 * 0.9**step for step in range(30)])
    slow = _curve([2.3] * 25 + [2.3 * 0.95**step for step in range(15)])
    assert screen_losses(slow, fast) > 1.0
    assert screen_other_draws(slow, fast) < 0.05
    assert screen_other_draws(_curve([2.3 * 1.02**step for step in range(40)]), fast) > 0.2
    rising = _curve([0.5 * 1.02**step for step in range(40)])  # as of a GAN's generator
    assert screen_other_draws(rising, rising) == 0.0
    assert screen_other_draws(_curve([2.3, None]), _curve([2.3, 2.2])) is None
