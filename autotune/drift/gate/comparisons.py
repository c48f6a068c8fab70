"""From the captures of two fidelity trials to what they show. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from autotune.drift.compare.additivity import typical_error
from autotune.drift.compare.gradient_rows import GradientRows
from autotune.drift.compare.gradients import (
    BIAS_PASSES,
    LAYER_BIAS_IN_DOUBT,
    NOISE_FAILS,
    NOISE_PASSES,
    UNTOLD,
    compare,
)
from autotune.drift.record.trace_file import GradientTrace
from autotune.records.quality import GradientEquivalence, Margin, QualityCheck, QualityVerdict
from autotune.records.trial import TrialResult, TrialStatus

INITIAL = "initial weights"
"""Where the first comparison is made."""

_GONE_STEPS = 100
"""After which a bias that was there at the initial weights may be called gone."""
_QUIET_STEPS = 5
"""The same for noise, which adds up to nothing."""
_LOUDEST = 0.25
"""Of the gradient's variance, in the first steps: until it is gone, luck counts as in batches of four fifths."""
_PART_OF_CHANCE = 1 / 3
"""Of the variance that chance makes until noise is gone: most that a bias in it can add up to."""
_PART_OF_NOISE = 1 / 4
"""Of its variance: most that the square of a bias may be to be hidden in it."""

_LEAST_GRADIENT = 1e-5
"""Of the typical element; float32 rounds at 6e-8 of the terms that make it up."""

FARTHEST_REFERENCE = {"fp32": 0.01, "bf16": 0.1, "fp16": 0.1}
"""Relative distance of the baseline's gradients from a reference that may be taken for one, by its precision."""


def have_same_layers(candidate: GradientTrace, baseline: GradientTrace) -> bool:
    """Return whether two trainings have parameters of the same names and sizes in the same order."""
    ours, theirs = candidate.layers, baseline.layers
    return (
        ours.names == theirs.names
        and np.array_equal(ours.elements, theirs.elements)
        and np.array_equal(ours.widths, theirs.widths)
    )


def compare_points(
    candidate: GradientTrace,
    baseline: GradientTrace,
    reference: GradientTrace | None,
    *,
    steps: int,
    farthest: float = 0.01,
) -> list[GradientEquivalence]:
    """Compare the gradients at each point; what is of the first steps alone passes where it is gone at the later one.

    Args:
        candidate: of one arm.
        baseline: of the other.
        reference: of the baseline in float64; None without.
        steps: between the points.
        farthest: relative distance of the baseline from a reference, in the median window; beyond, there is none.
    """
    found: list[GradientEquivalence] = []
    if reference is not None and not have_same_layers(reference, baseline):
        reference = None  # a shorter look: not every optimizer had its first step
    if len(candidate.points) < len(baseline.points):
        reason = "the candidate did not get to the later point"
        found.append(
            GradientEquivalence(
                subject="gradients", point=f"after {steps} steps", windows=0, verdict="inconclusive", reason=reason
            )
        )
    shared = range(min(len(candidate.points), len(baseline.points)))
    exact = [_find_reference(reference, baseline, number, farthest) for number in shared]
    points = [_compare_point(candidate, baseline, exact[number], number, steps=steps) for number in shared]
    if points and points[0].verdict == "inferior" and _is_quiet(points[1:]):
        points[0] = _compare_point(candidate, baseline, exact[0], 0, steps=steps, most_noise=_LOUDEST)
    return _accept_transient([*found, *points], steps=steps)


def _find_reference(
    reference: GradientTrace | None, baseline: GradientTrace, number: int, farthest: float
) -> GradientRows | None:
    """Return a point's gradients in float64; None without, and where another computation than the baseline's made them.

    Far in most windows the baseline is where its gradients jump at the initial weights, too: as long as that is noise
    of little weight, and no bias is shown, it is the same computation.
    """
    if reference is None or len(reference.points) <= number:
        return None
    exact, base = reference.points[number].gradients, baseline.points[number].gradients
    if typical_error(base, exact, baseline.layers) <= farthest:
        return exact
    if number > 0:
        return None
    seen = compare(base, exact, baseline.layers, subject="gradients", point=INITIAL)
    if seen.noise is None or seen.bias is None:
        return None
    return exact if seen.noise.high <= NOISE_PASSES and seen.bias.low <= BIAS_PASSES else None


def _compare_point(
    candidate: GradientTrace,
    baseline: GradientTrace,
    exact: GradientRows | None,
    number: int,
    *,
    steps: int,
    most_noise: float = NOISE_FAILS,
) -> GradientEquivalence:
    return compare(
        candidate.points[number].gradients,
        baseline.points[number].gradients,
        baseline.layers,
        subject="gradients",
        point=f"after {steps} steps" if number else INITIAL,
        reference=exact,
        most_noise=most_noise,
    )


def _is_quiet(later: Sequence[GradientEquivalence]) -> bool:
    """Return whether later gradients are shown to have no noise that counts; False without any."""
    return bool(later) and all(one.noise is not None and one.noise.high <= NOISE_PASSES for one in later)


def leave_updates_open() -> GradientEquivalence:
    """Return the comparison of the updates of a script that changes its weights by itself: they are not seen."""
    reason = "the script changes its weights by itself: what it makes of a gradient was not seen"
    return GradientEquivalence(subject="updates", point=INITIAL, windows=0, verdict="inconclusive", reason=reason)


def compare_updates(candidate: GradientTrace, baseline: GradientTrace) -> GradientEquivalence:
    """Compare what two optimizers do at the initial weights, where neither has seen anything else yet.

    Elements whose gradient is rounding noise are left out: Adam divides a gradient by its own size.
    """
    ours, theirs = candidate.points[0], baseline.points[0]
    sizes = np.sqrt(np.mean(np.square(theirs.gradients.rows, dtype=np.float64), axis=0))
    matters = sizes > _LEAST_GRADIENT * math.sqrt(float(np.mean(np.square(sizes)))) if sizes.size else sizes > 0
    if not matters.any():
        matters[:] = True  # without any gradient there is nothing to leave out
    matters |= ~np.isfinite(ours.updates.rows).all(axis=0)
    mine, base = (GradientRows(one.updates.keys, np.where(matters, one.updates.rows, 0.0)) for one in (ours, theirs))
    return compare(mine, base, baseline.layers, subject="updates", point=INITIAL)


def excuse_draws(checks: list[QualityCheck]) -> list[QualityCheck]:
    """Leave open what gradients seem to show of a step that draws random numbers even without dropout."""
    told = "the step draws random numbers, and this setting draws them in another order: "
    return [
        check.replace(verdict="inconclusive", reason=told + check.reason)
        if check.test in ("gradients", "additivity") and check.verdict == "inferior"
        else check
        for check in checks
    ]


def require_equality(check: QualityCheck) -> QualityCheck:
    """Leave open a check of settings that are said to be exact, where the gradients are not equal bit for bit."""
    figures = [figure for one in check.fidelity for figure in (one.noise, one.bias) if figure is not None]
    if check.verdict != "non-inferior" or all(figure.high == 0.0 for figure in figures):
        return check
    return check.replace(verdict="inconclusive", reason=f"not bit for bit, as it should be: {check.reason}")


def is_lost_in_noise(found: GradientEquivalence) -> bool:
    """Return whether all that keeps a comparison from passing is a bias of a mean that has vanished.

    Nothing else is in doubt, and what steers is shown to be at most 2 % of the spread of one step's own gradient. Where
    a training still learns that is no pass: there the mean is what it learns by, however small it is beside the spread.
    """
    if found.verdict == "non-inferior":
        return True
    noise, steering = found.noise, found.steering
    if found.verdict == "inferior" or found.subject != "gradients" or noise is None or steering is None:
        return False
    is_layer_in_doubt = (found.worst_bias or 0.0) > LAYER_BIAS_IN_DOUBT
    return noise.high <= NOISE_PASSES and steering.high <= BIAS_PASSES and not is_layer_in_doubt


def _accept_transient(found: Sequence[GradientEquivalence], *, steps: int) -> list[GradientEquivalence]:
    """Return comparisons in which what is there in the first steps passes that is shown to be gone later.

    A bias has to steer a step by at most 2 % of that step's own spread, which weighs less than chance for 2,500 steps,
    and the gradients 100 steps later or more have to pass. Noise of at most a quarter of the variance may hide a bias
    that adds up to a third of what chance does until it is gone; the gradients 5 steps later or more have to pass.
    bf16 has such noise in a ResNet that begins: 10 to 14 % at its initial weights, 0.3 % after 5 steps. What is wrong
    throughout passes neither way.

    Args:
        found: at the initial weights, and later.
        steps: between the two.
    """
    later = [one for one in found if one.subject == "gradients" and one.point != INITIAL]
    if not later or any(one.verdict != "non-inferior" for one in later):
        return [*found]
    return [
        one.replace(
            verdict="non-inferior",
            is_transient=True,
            reason=f"{one.reason.removesuffix(UNTOLD)}, gone after {steps} steps",
        )
        if may_pass_later(one, steps=steps)
        else one
        for one in found
    ]


def may_pass_later(found: GradientEquivalence, *, steps: int) -> bool:
    """Return whether all that keeps a comparison at the initial weights from passing may be gone some steps later."""
    if found.point != INITIAL or found.verdict != "inconclusive":
        return False
    is_bias = is_lost_in_noise(found) and steps >= _GONE_STEPS
    return is_bias or (steps >= _QUIET_STEPS and is_noise_alone(found, steps=steps))


def is_noise_alone(found: GradientEquivalence, *, steps: int) -> bool:
    """Return whether noise of at most a quarter, and a bias that may hide in it for so many steps, are all there is."""
    noise, bias, steering = found.noise, found.bias, found.steering
    if found.subject != "gradients" or noise is None or bias is None or steering is None:
        return False
    is_noise = NOISE_PASSES < noise.high <= _LOUDEST
    # What is the same in each step adds up with their number, chance with its root.
    is_little = steering.high**2 <= min(_PART_OF_CHANCE / steps, _PART_OF_NOISE * noise.high)
    is_hidden = bias.low <= BIAS_PASSES and is_little
    return is_noise and is_hidden and not (found.worst_bias or 0.0) > LAYER_BIAS_IN_DOUBT


def is_rare(found: GradientEquivalence) -> bool:
    """Return whether noise of a few windows may be all that keeps the initial weights from passing: nothing is shown.

    Where gradients jump when sums are in another order, the baseline's own may do so as often, against float64.
    """
    noise, bias = found.noise, found.bias
    if noise is None or bias is None or found.subject != "gradients" or found.point != INITIAL:
        return False
    return found.verdict == "inconclusive" and noise.low <= NOISE_PASSES and bias.low <= BIAS_PASSES


def accept_lost(checks: Sequence[QualityCheck]) -> tuple[QualityCheck, ...]:
    """Return the checks of a training that learns nothing any more: what is lost in its noise is none worse."""
    return tuple(
        check.replace(
            verdict="non-inferior",
            reason=f"lost in the noise of a training that learns nothing any more: {check.reason}",
        )
        if are_lost_in_noise([check])
        else check
        for check in checks
    )


def are_lost_in_noise(checks: Sequence[QualityCheck]) -> bool:
    """Return whether all that was left open is biases of means that have vanished."""
    left_open = [check for check in checks if check.verdict != "non-inferior"]
    return bool(left_open) and all(
        any(one.verdict != "non-inferior" for one in check.fidelity) and all(map(is_lost_in_noise, check.fidelity))
        for check in left_open
    )


def report_other_model() -> QualityCheck:
    """Return the check of a candidate whose gradients are none of the baseline's."""
    return _report("gradients", "inferior", "it trains other parameters than the baseline")


def report_unrepeated() -> QualityCheck:
    """Return the check where two launches of the baseline differ from the start: only trainings can tell."""
    reason = "launches of your own settings begin with different losses in spite of the seed: each has other batches"
    return _report("gradients", "inconclusive", reason)


def report_unread(result: TrialResult, test: Literal["additivity", "gradients"]) -> QualityCheck:
    """Return the check where one of the two trials wrote nothing down: only a training can tell."""
    reason = "nothing was written down"
    if result.status is not TrialStatus.COMPLETED:
        reason = f"{result.status}: {result.error or result.cause}"[:200]
    return _report(test, "inconclusive", reason)


def _report(test: Literal["additivity", "gradients"], verdict: QualityVerdict, reason: str) -> QualityCheck:
    margin = Margin(amount=0.0)
    return QualityCheck(
        test=test,
        metric="gradients",
        difference=None,
        margin=margin,
        verdict=verdict,
        seeds=0,
        samples=0,
        reason=reason,
    )
