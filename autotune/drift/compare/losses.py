"""Are the training losses as low under a candidate as under the baseline? Loss curves in, `QualityCheck` out.

    d_s = what seed s lost under the candidate, both arms with the same initial weights and the same data
    worsening = mean(d) with a one-sided 95 % Student t bound over the seeds, against a margin fixed beforehand

    0 ─────────── margin ───────────
      ├─ d ─┤         │                non-inferior: the upper bound is inside the margin
                 ├──── d ────┤         inconclusive: too few seeds or too much noise to say
                      │   ├─ d ─┤      inferior: the lower bound is beyond it

The burden of proof lies with the candidate: noise, a missing value or a missing seed is never a pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.drift.compare.paired_seeds import (
    CONFIDENCE_LEVEL,
    LARGEST_WORSENING,
    Comparison,
    Finding,
    Pair,
    cut,
    drift_interval,
    find_too_few_seeds,
    judge,
    pair_by_seed,
    relative_drift,
    relative_drifts,
    report,
    report_finding,
)
from autotune.measure.student_t import student_t_quantile
from autotune.records.measurement import Interval
from autotune.records.quality import Margin, QualityCheck
from autotune.records.trial import LossCurve

_BATCH_TOLERANCE = 0.05  # a smaller last batch moves the mean by less
_SEEDS = 4
_SURE = 0.99
_RUINED = math.log(2.0)


def check_losses(
    candidate: Sequence[LossCurve], baseline: Sequence[LossCurve], *, margin: Margin, exact: bool
) -> QualityCheck:
    """Compare training losses, paired by seed.

    The drift of a seed is the mean over the tail, the last half of the steps both arms ran, of
    log(candidate loss) - log(baseline loss); the worsening is exp(mean drift) - 1. Where a loss in a tail is not
    positive, it is instead the mean difference over the baseline's mean absolute loss, per seed.

    Args:
        candidate: one curve per seed.
        baseline: one curve per seed; seeds without a partner are left out.
        margin: largest relative worsening allowed.
        exact: the candidate should not change the arithmetic: losses equal bit for bit settle it at once, and
            anything else is judged like every other candidate.

    Returns:
        non-inferior or inferior when a one-sided 95 % bound proves it, or inferior when the candidate's loss is not
        finite where the baseline's is; inconclusive otherwise, and when the arms cannot be compared.

    Raises:
        ValueError: a seed occurs twice in one arm, or the margin is negative or not relative.
    """
    if margin.unit != "relative" or margin.amount < 0.0:
        raise ValueError(f"losses are compared by a relative margin that is not negative, got {margin}")
    pairs = pair_by_seed(candidate, baseline)
    if exact and pairs and all(_repeats(ours, theirs) for ours, theirs in pairs):
        return _report_exact(Comparison("exact-losses", "training loss", margin, pairs))
    comparison = Comparison("paired-losses", "training loss", margin, pairs)
    finding = _find_unusable_losses(pairs) or find_too_few_seeds(pairs)
    if finding is not None:
        return report_finding(comparison, finding)
    windows = [_tail(ours, theirs) for ours, theirs in pairs]
    if all(_all_positive(window) for window in windows):
        interval = drift_interval([_log_drift(window) for window in windows])
        return judge(comparison, _exponentiated(interval))
    if any(_is_zero(window) for window in windows):
        return report_finding(comparison, ("inconclusive", "the baseline's training loss is 0: no worsening exists"))
    return judge(comparison, drift_interval([relative_drift(window) for window in windows]))


def seed_drift(candidate: LossCurve, baseline: LossCurve) -> float | None:
    """Return the drift of one seed, as `check_losses` takes it; None where it cannot be told by logarithms."""
    window = _tail(candidate, baseline)
    is_comparable = bool(window) and _all_positive(window) and _same_batch(candidate, baseline)
    return _log_drift(window) if is_comparable else None


def has_learned(curves: Sequence[LossCurve], *, margin: float) -> bool:
    """Return whether training losses fell by more than a margin, so that a drift of that size could show in them.

    The fall of a seed is the mean of the first quarter of its losses minus the mean of their last half, over the
    former's size; a one-sided 95 % Student t bound over the seeds must lie beyond the margin. Labels that are noise, a
    loss that is always the same and a training that has converged long ago all fail: nothing they show is evidence.

    Args:
        curves: one per seed.
        margin: largest relative worsening allowed, e.g. 0.005.
    """
    found = [_find_fall(curve.losses) for curve in curves]
    falls = [fall for fall in found if fall is not None]
    return len(falls) == len(found) >= 2 and drift_interval(falls).low > margin


def may_learn(curve: LossCurve, *, margin: float) -> bool:
    """Return whether the losses of one seed fell by more than a margin: else further seeds will hardly show that."""
    fall = _find_fall(curve.losses)
    return fall is not None and fall > margin


def count_learning_steps(curve: LossCurve, *, margin: float, least: int) -> int | None:
    """Return in how few steps four seeds may be seen to learn, by one of them; None where not even in all of its steps.

    The seeds are taken to differ as the losses of the one do from step to step.

    Args:
        curve: of one seed.
        margin: as of `has_learned`.
        least: steps that are asked for anyway.
    """
    lengths = [least]
    while lengths[-1] <= len(curve.losses):
        lengths.append(lengths[-1] + max(1, lengths[-1] // 4))
    tells = [_is_seen_to_fall(curve.losses[:steps], margin) for steps in lengths[:-1]]
    # Of so many looks one is lucky now and then: the next has to say so too.
    return next((steps for steps, *both in zip(lengths, tells, [*tells[1:], True], strict=False) if all(both)), None)


def _is_seen_to_fall(losses: Sequence[float | None], margin: float) -> bool:
    """Return whether four seeds whose means are as noisy as one's losses would have fallen by more than a margin."""
    fall, tail = _find_fall(losses), [loss for loss in losses[len(losses) // 2 :] if loss is not None]
    if fall is None or len(tail) < 2 or not losses[0]:
        return False
    spread = statistics.stdev(tail) * math.sqrt(6 / len(losses)) / abs(losses[0])  # of a mean of 1/4 and one of 1/2
    quantile = student_t_quantile((1 + CONFIDENCE_LEVEL) / 2, _SEEDS - 1)
    return fall - quantile * spread / math.sqrt(_SEEDS) > margin


def _find_fall(losses: Sequence[float | None]) -> float | None:
    """Return how much lower the last half is than the first quarter, relative; None where too little is known."""
    known = [loss for loss in losses if loss is not None]
    if len(known) < 2:
        return None
    early = statistics.fmean(known[: max(1, len(known) // 4)])
    late = statistics.fmean(known[len(known) // 2 :])
    return cut((early - late) / abs(early)) if early else 0.0


def screen_losses(candidate: LossCurve, baseline: LossCurve) -> float | None:
    """Return the relative worsening of one seed over the tail of its losses that chance does not explain: a first look.

    With other masks of dropout a loss that falls fast is higher at some steps and lower at others. What a one-sided
    99 % Student t bound over the steps leaves of a worsening is shown; a single step is taken at its word, and so are
    the last three where each is twice as high.

    Returns:
        The worsening as in `check_losses` (positive is worse), at least so much. None when there is nothing to compare:
        no common step, another batch size, a baseline of 0, or a loss of either arm that is not finite. None is never
        a pass.
    """
    if _find_unusable_losses(((candidate, baseline),)) is not None:
        return None
    window = _tail(candidate, baseline)
    if _all_positive(window):
        return _worsening(_shown([math.log(ours) - math.log(theirs) for ours, theirs in window]))
    if _is_zero(window):
        return None
    return cut(_shown(relative_drifts(window)))


def screen_other_draws(candidate: LossCurve, baseline: LossCurve) -> float | None:
    """Return what `screen_losses` does where one seed has other masks of dropout: what shows that nothing is learned.

    How long a loss stays on its first level is a seed's own luck (a training of MNIST with Adadelta was at a seventh of
    its first loss after 30 steps, and with other masks at nine tenths). So a step is no worse than where the baseline's
    losses, in their first quarter, have begun.
    """
    begun = [loss for loss in baseline.losses[: max(1, len(baseline.losses) // 4)] if loss is not None]
    level = statistics.fmean(begun) if begun else -math.inf
    least = tuple(None if loss is None else max(loss, level) for loss in baseline.losses)
    return screen_losses(candidate, baseline.replace(losses=least))


def _shown(drifts: Sequence[float]) -> float:
    """Return the mean of what steps lost, without what of it may be chance."""
    mean = statistics.fmean(drifts)
    if mean <= 0.0 or len(drifts) < 2:
        return mean
    scale = max(map(abs, drifts))  # squares of what is cut at 1e12 are no matter; of less, they may vanish
    spread = scale * statistics.stdev(drift / scale for drift in drifts)
    bound = mean - student_t_quantile(_SURE, len(drifts) - 1) * spread / math.sqrt(len(drifts))
    last = min(drifts[-3:])
    return max(0.0, bound, last if last > _RUINED else 0.0)


def _repeats(ours: LossCurve, theirs: LossCurve) -> bool:
    return bool(theirs.losses) and None not in theirs.losses and ours.losses == theirs.losses


def _find_unusable_losses(pairs: Sequence[Pair]) -> Finding | None:
    broken: Finding | None = None
    for ours, theirs in pairs:
        steps = list(zip(ours.losses, theirs.losses, strict=False))
        for step, (our_loss, their_loss) in enumerate(steps, start=1):
            if our_loss is None and their_loss is not None:
                reason = f"at step {step} of seed {ours.seed} the loss is not finite, and the baseline's is"
                return "inferior", reason
            if their_loss is None and broken is None:
                reason = f"at step {step} of seed {ours.seed} the baseline's own loss is not finite"
                broken = ("inconclusive", reason)
        if not steps and broken is None:
            broken = ("inconclusive", f"seed {ours.seed} has no optimizer step in common with the baseline")
        if broken is None and not _same_batch(ours, theirs):
            reason = f"a step is {_samples_per_step(ours):.4g} samples, the baseline's {_samples_per_step(theirs):.4g}"
            broken = ("inconclusive", f"{reason}: their losses do not compare step by step")
    return broken


def _same_batch(ours: LossCurve, theirs: LossCurve) -> bool:
    expected = _samples_per_step(theirs)
    return abs(_samples_per_step(ours) - expected) <= _BATCH_TOLERANCE * expected


def _samples_per_step(curve: LossCurve) -> float:
    return curve.samples / len(curve.losses)


def _tail(ours: LossCurve, theirs: LossCurve) -> list[tuple[float, float]]:
    steps = list(zip(ours.losses, theirs.losses, strict=False))
    return [(a, b) for a, b in steps[len(steps) // 2 :] if a is not None and b is not None]


def _all_positive(window: Sequence[tuple[float, float]]) -> bool:
    return all(ours > 0.0 and theirs > 0.0 for ours, theirs in window)


def _is_zero(window: Sequence[tuple[float, float]]) -> bool:
    return all(theirs == 0.0 for _, theirs in window)


def _log_drift(window: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(math.log(ours) - math.log(theirs) for ours, theirs in window)


def _worsening(log_drift: float) -> float:
    return math.expm1(min(math.log(LARGEST_WORSENING), log_drift))


def _exponentiated(logs: Interval) -> Interval:
    return logs.replace(
        estimate=_worsening(logs.estimate),
        low=_worsening(logs.low),
        high=_worsening(logs.high),
        method=f"{logs.method}, log ratio",
    )


def _report_exact(comparison: Comparison) -> QualityCheck:
    steps = sum(len(ours.losses) for ours, _ in comparison.pairs)
    reason = f"all {steps} losses of {len(comparison.pairs)} seed(s) equal the baseline's bit for bit"
    zero = Interval(estimate=0.0, low=0.0, high=0.0, confidence_level=CONFIDENCE_LEVEL, method="equal bit for bit")
    return report(comparison, "non-inferior", reason, zero)
