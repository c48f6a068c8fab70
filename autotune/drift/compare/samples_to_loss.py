"""How many more samples does a candidate need for the same training loss? Loss curves in, `QualityCheck` out.

    loss                               at a horizon of n samples, per seed:
      │ ╲ ╲                              level = the larger of the two arms' losses at n: both have reached it
      │  ╲  ╲                            ratio = samples the candidate took to it / samples the baseline took to it
      │   ╲    ╲  candidate                    = n / p where the candidate is behind, p / n where the baseline is
      │    ╲─ ─ ─ ─╲ level
      │      ╲ baseline                over the seeds: Student t on the log ratios
      └──── p ───── n ── log samples   net speed-up = speed-up of the throughput / ratio

For what changes the statistics of training, a larger batch above all: a short run's gap in loss is mostly such a lag.
The arm behind is charged all n samples, not the moment it first saw that loss: who stops learning keeps paying.
Swapping the arms inverts the ratio whatever noise flattens, so the log ratio of equal trainings is symmetric about 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.losses import has_learned
from autotune.drift.compare.paired_seeds import (
    Comparison,
    Finding,
    Pair,
    cut,
    drift_interval,
    find_too_few_seeds,
    pair_by_seed,
    report,
    report_finding,
)
from autotune.records.measurement import Interval
from autotune.records.quality import Margin, QualityCheck, QualityVerdict
from autotune.records.trial import LossCurve

LARGEST_RATIO = 1000.0
"""A ratio is cut there, and at its inverse: how much worse makes no difference any more."""

_LARGEST_LOG = math.log(LARGEST_RATIO)
_LARGEST_LOSS = 1e100  # cut there: it decides the same, and sums of it are finite
_MARGIN = 0.005  # of more samples, where no speed-up pays for them
_MOST_GROWTH = 1.05  # of the ratio, from horizon to horizon
_HORIZONS = 3
_FEWEST_STEPS = 2**_HORIZONS  # two to the first horizon: the first one alone has learned nothing yet
_WINDOWS_PER_OCTAVE = 16  # neighbours share nearly all their steps: more would add nothing
_TIE = 1e-12  # relative: equal losses added up in another order
_NOTHING = 1e-300  # a difference too small to divide by
_ROUNDING = 1e-9  # of a step

_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class SamplesRatio:
    """What a candidate pays in samples, at one horizon."""

    samples: int
    """Samples trained on in each arm, per seed."""
    ratio: Interval
    """Samples the candidate needs / samples the baseline needs for the same loss: 1.1 is 10 % more. Two-sided 90 %
    over the seeds. Where a candidate's loss is above all that the baseline shows, it is at least that: `high` is then
    `LARGEST_RATIO`."""


class _Smoothed(NamedTuple):
    losses: _Numbers  # (windows,), the earliest first
    log_samples: _Numbers  # (windows,), of the mean of those trained on before each step


class Horizon(NamedTuple):
    """What the seeds pay at one horizon."""

    found: SamplesRatio
    """Over all of them."""
    log_ratios: tuple[float, ...]
    """One a seed."""


def check_samples_to_loss(
    candidate: Sequence[LossCurve], baseline: Sequence[LossCurve], *, speedup: float | None, predicted: float | None
) -> QualityCheck:
    """Judge whether a candidate's speed pays for the additional samples it needs, paired by seed.

    net speed-up = speedup / ratio at the last of three horizons (`compare_at_horizons`), each bound one-sided at 95 %.
    Batches are compared like this by McCandlish et al., arXiv 1812.06162, and Shallue et al., JMLR 2019.

    Args:
        candidate: one curve per seed.
        baseline: one curve per seed; seeds without a partner are left out.
        speedup: samples per second over the baseline's, as measured; None to allow 0.5 % more samples at most.
        predicted: ratio of samples that the gradient noise scale predicts, for the reason alone; None for none.

    Returns:
        The difference is ratio - 1. non-inferior when a net speed-up is proven; inferior when a net slowdown is, or
        when the candidate's loss is not finite where the baseline's is. inconclusive otherwise: too few seeds or
        steps, a baseline that is not finite or does not learn, or a ratio that would pass but grows with the horizon
        (proven at 95 %, and by more than 5 %, from the first that has an upper end to the last).

    Raises:
        ValueError: a seed occurs twice in one arm, or the speed-up is not positive and finite.
    """
    if speedup is not None and not 0.0 < speedup < math.inf:
        raise ValueError(f"speedup is {speedup}: it must be positive and finite")
    margin, pairs = Margin(amount=_MARGIN if speedup is None else speedup - 1.0), pair_by_seed(candidate, baseline)
    comparison = Comparison("samples-to-loss", "samples to the same loss", margin, pairs)
    finding = _find_not_finite(pairs) or find_too_few_seeds(pairs) or _find_too_few_steps(pairs)
    finding = finding or _find_nothing_learned(pairs)
    if finding is not None:
        return report_finding(comparison, finding)
    horizons = compare_at_horizons(pairs)
    ratio, (start, growth) = horizons[-1].found.ratio, _growth(horizons)
    difference = ratio.replace(estimate=ratio.estimate - 1.0, low=ratio.low - 1.0, high=ratio.high - 1.0)
    verdict, conclusion = _judge(difference, margin, growth)
    found = ", ".join([*_describe_ratios(horizons, start, growth), *_describe_pay(ratio, speedup, predicted)])
    return report(comparison, verdict, f"{found}: {conclusion}", difference)


def _find_not_finite(pairs: Sequence[Pair]) -> Finding | None:
    broken: Finding | None = None
    for ours, theirs in pairs:
        shared = _shared_samples([(ours, theirs)])
        their_gaps = _gaps(theirs, shared)
        for step, start, end in _gaps(ours, shared):
            if all(their_end <= start or end <= their_start for _, their_start, their_end in their_gaps):
                return "inferior", f"at step {step} of seed {ours.seed} the loss is not finite, and the baseline's is"
        if their_gaps and broken is None:
            reason = f"at step {their_gaps[0][0]} of seed {ours.seed} the baseline's own loss is not finite"
            broken = ("inconclusive", reason)
    return broken


def _gaps(curve: LossCurve, shared: int) -> list[tuple[int, float, float]]:
    size = _samples_per_step(curve)
    missing = [step for step, loss in enumerate(curve.losses) if loss is None and (step + _ROUNDING) * size < shared]
    return [(step + 1, step * size, (step + 1 - _ROUNDING) * size) for step in missing]


def _samples_per_step(curve: LossCurve) -> float:
    return curve.samples / max(1, len(curve.losses))


def _shared_samples(pairs: Sequence[Pair]) -> int:
    return max(0, min(curve.samples for pair in pairs for curve in pair))


def _find_too_few_steps(pairs: Sequence[Pair]) -> Finding | None:
    shared = _shared_samples(pairs)
    for pair in pairs:
        for who, curve in zip(("candidate", "baseline"), pair, strict=True):
            steps = shared * len(curve.losses) / curve.samples if shared else 0.0
            if steps < _FEWEST_STEPS:
                reason = f"the {who}'s seed {curve.seed} took {steps:.3g} optimizer steps for the samples both arms ran"
                return "inconclusive", f"{reason}: at least {_FEWEST_STEPS} are needed"
    return None


def _find_nothing_learned(pairs: Sequence[Pair]) -> Finding | None:
    shared = _shared_samples(pairs)
    if has_learned([theirs.replace(losses=_losses_within(theirs, shared)) for _, theirs in pairs], margin=0.0):
        return None
    return "inconclusive", "the baseline's loss falls by no more than its noise: nothing is learned that could be lost"


def _losses_within(curve: LossCurve, samples: float) -> tuple[float, ...]:
    size = _samples_per_step(curve)
    begun = [loss for step, loss in enumerate(curve.losses) if step * size < samples]
    return tuple(cut(loss, largest=_LARGEST_LOSS) for loss in begun if loss is not None)


def compare_at_horizons(pairs: Sequence[Pair]) -> list[Horizon]:
    """Return the ratio of the samples needed for the same training loss at N/4, N/2 and N.

    N is what every curve ran. The loss at n samples is the mean over the last half of them, (n/2, n], made
    non-increasing by isotonic regression on what came until then (pool adjacent violators: Ayer et al., Annals of
    Mathematical Statistics 1955), and linear in the logarithm of the samples in between. Windows in proportion to n
    keep the ratio as it is: smoothing a stretched curve stretches the smooth one, however bent. The loss of a step
    belongs to the weights before it, so to the samples of the steps before.

    Args:
        pairs: the candidate's curve and the baseline's, one a seed; at least two of at least 8 steps and finite losses.
            A step of one may be of another number of samples than the other's.
    """
    shared = _shared_samples(pairs)
    smoothed = [_smooth_alike(pair, shared) for pair in pairs]
    compared = []
    for halvings in reversed(range(_HORIZONS)):
        cuts = halvings * _WINDOWS_PER_OCTAVE
        lags = [_log_ratio(_drop_last(ours, cuts), _drop_last(theirs, cuts)) for ours, theirs in smoothed]
        logs, are_unbounded = zip(*lags, strict=True)
        ratio = _exponentiated(drift_interval(logs))
        if any(are_unbounded):
            ratio = ratio.replace(high=LARGEST_RATIO)
        compared.append(Horizon(SamplesRatio(round(shared / 2**halvings), ratio), logs))
    return compared


def _smooth_alike(pair: Pair, shared: int) -> tuple[_Smoothed, _Smoothed]:
    octaves = math.log2(shared / (2.0 * max(_samples_per_step(curve) for curve in pair)))
    back = np.arange(math.floor(octaves * _WINDOWS_PER_OCTAVE), -1, -1)
    ends = shared * np.exp2(-back / _WINDOWS_PER_OCTAVE)
    return _smooth(pair[0], ends), _smooth(pair[1], ends)


def _smooth(curve: LossCurve, ends: _Numbers) -> _Smoothed:
    losses, size = np.array(_losses_within(curve, ends[-1])), _samples_per_step(curve)
    before = np.arange(len(losses)) * size
    overlaps = np.minimum(before + size, ends[:, None]) - np.maximum(before, 0.5 * ends[:, None])
    weights = np.maximum(overlaps, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    # No running sums: a single huge loss would leave its rounding in every later window.
    return _Smoothed((weights * losses).sum(axis=1), np.log((weights * before).sum(axis=1)))


def _drop_last(smoothed: _Smoothed, windows: int) -> _Smoothed:
    kept = len(smoothed.losses) - windows
    return _Smoothed(smoothed.losses[:kept], smoothed.log_samples[:kept])


def _log_ratio(ours: _Smoothed, theirs: _Smoothed) -> tuple[float, bool]:
    ours, theirs = _fit_non_increasing(ours), _fit_non_increasing(theirs)
    level = max(ours.losses[-1], theirs.losses[-1])
    our_log, their_log = (float(np.interp(-level, -fit.losses, fit.log_samples)) for fit in (ours, theirs))
    return our_log - their_log, bool(level > theirs.losses[0])


def _fit_non_increasing(smoothed: _Smoothed) -> _Smoothed:
    blocks: list[tuple[float, float, int]] = []  # sums of losses, of logarithms and of windows
    for loss, log in zip(smoothed.losses.tolist(), smoothed.log_samples.tolist(), strict=True):
        losses, logs, size = loss, log, 1
        while blocks and blocks[-1][0] / blocks[-1][2] - losses / size <= _TIE * abs(losses / size) + _NOTHING:
            earlier = blocks.pop()
            losses, logs, size = losses + earlier[0], logs + earlier[1], size + earlier[2]
        blocks.append((losses, logs, size))
    sums = np.array(blocks)
    log_samples = sums[:, 1] / sums[:, 2]
    # At its end, not at its middle: a hair above the last loss must not be reached far earlier than the last loss.
    log_samples[-1] = smoothed.log_samples[-1]
    return _Smoothed(sums[:, 0] / sums[:, 2], log_samples)


def _exponentiated(logs: Interval) -> Interval:
    estimate, low, high = (math.exp(cut(log, largest=_LARGEST_LOG)) for log in (logs.estimate, logs.low, logs.high))
    return logs.replace(estimate=estimate, low=low, high=high, method=f"{logs.method}, log ratio")


def _growth(horizons: Sequence[Horizon]) -> tuple[Horizon, Interval]:
    # From a horizon that only says "at least", every later ratio looks like growth.
    start = next((each for each in horizons[:-1] if each.found.ratio.high < LARGEST_RATIO), horizons[0])
    ends = zip(start.log_ratios, horizons[-1].log_ratios, strict=True)
    return start, _exponentiated(drift_interval([last - first for first, last in ends]))


def _judge(difference: Interval, margin: Margin, growth: Interval) -> tuple[QualityVerdict, str]:
    if difference.low > margin.amount:
        return "inferior", "more than is allowed"
    if difference.high >= margin.amount:
        return "inconclusive", "too uncertain"
    if growth.low > 1.0 and growth.estimate > _MOST_GROWTH:
        return "inconclusive", "the ratio grows with the horizon, so a longer training would pay more than was seen"
    return "non-inferior", "within what is allowed"


def _describe_ratios(horizons: Sequence[Horizon], start: Horizon, growth: Interval) -> list[str]:
    *_, ratio = ratios = [horizon.found.ratio for horizon in horizons]
    each = " / ".join(f"{'>' if found.high >= LARGEST_RATIO else ''}{found.estimate:.4g}x" for found in ratios)
    at, seeds = " / ".join(f"{horizon.found.samples:,}" for horizon in horizons), len(start.log_ratios)
    if all(f"{end:.4g}" == "1" for found in ratios for end in (found.low, found.high)):
        return [f"the same training loss takes as many samples as the baseline's, over {seeds} seeds and up to {at}"]
    return [
        f"the same training loss takes {each} the baseline's samples at {at} samples over {seeds} seeds",
        f"the last ratio is above {ratio.low:.4g}x and below {ratio.high:.4g}x at 95 % each",
        f"{growth.estimate:.4g} times that at {start.found.samples:,} samples (above {growth.low:.4g} at 95 %)",
    ]


def _describe_pay(ratio: Interval, speedup: float | None, predicted: float | None) -> list[str]:
    words = [] if predicted is None else [f"the gradient noise scale predicts {predicted:.4g}x"]
    if speedup is None:
        return [*words, f"up to {1.0 + _MARGIN:.4g}x is allowed"]
    net, low, high = (f"{speedup / each:.4g}x" for each in (ratio.estimate, ratio.high, ratio.low))
    return [*words, f"the net speed-up is {net}" + (f" (above {low} and below {high})" if low != high else "")]
