"""Is it the same training from outside? Its data, and its steps with their learning rates. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.drift.record.trace_file import Point
from autotune.records.measurement import Interval
from autotune.records.quality import Margin, QualityCheck, QualityTest, QualityVerdict
from autotune.records.trial import GROWTH_STEPS, DataTrace, LossCurve, TrialResult, TrialStatus

MOST_SKIPPED = 0.01
"""Share of steps that a loss scaler may leave out, beyond one for each growth of its scale."""

_SIZE = re.compile(r"(?<=[\[ ])\d+(?=[,\]])")
"""Of a dimension: the numbers in `float32[8, 3, 160]`."""

_RATE_TOLERANCE = 1e-6
"""Relative; learning rates are computed in float64, and some implementations keep them in float32."""


def check_tape(
    candidate: TrialResult,
    baseline: TrialResult,
    *,
    random_sources: Sequence[str] = (),
    whole: bool,
    rounds: bool = False,
) -> QualityCheck:
    """Compare what two loaders hand over: samples, order, types, shapes, bytes, and the ends of the epoch.

    Args:
        candidate: trial with the candidate's loader.
        baseline: trial with the baseline's.
        random_sources: generators that samples draw from. A workload's are seeded sample by sample, a script's are
            not: there the contents differ from worker to worker, and only types and shapes can be compared.
        whole: the loaders tell which samples an epoch takes, as a workload's do.
        rounds: a knob of the user's own may round the data differently; the gradients show whether it does no more.
    """
    if baseline.tape is None:
        reason = f"the baseline's loader could not be read again: {baseline.error or baseline.cause}"[:200]
        return _report("tape", "training data", "inconclusive", reason)
    if candidate.status is not TrialStatus.COMPLETED or candidate.tape is None:
        reason = f"the candidate's loader fails: {candidate.error or candidate.cause or 'nothing was read'}"[:200]
        return _report("tape", "training data", "inferior", reason)
    ours, theirs = candidate.tape, baseline.tape
    draws = bool(random_sources) and not whole
    if draws:  # what is drawn may decide how large a sample is
        ours, theirs = _leave_out(ours, varying := _find_varying(theirs)), _leave_out(theirs, varying)
    fault = _find_tape_fault(ours, theirs, contents=not (draws or rounds))
    if fault is not None:
        return _report("tape", "training data", "inferior", fault)
    batches = min(len(ours.batches), len(theirs.batches))
    if batches == 0:
        return _report("tape", "training data", "inconclusive", "no batch was read")
    if draws:
        sources = " and ".join(random_sources)
        reason = (
            f"{batches} batches of the same types and shapes; their contents cannot be compared: samples draw from "
            f"{sources}, and each worker has generators of its own"
        )
        return _report("tape", "training data", "non-inferior", reason)
    order = f", all {ours.samples:,} samples of an epoch in the same order" if whole and ours.samples else ""
    how = "of the same types and shapes" if rounds else "and the end of the epoch equal byte for byte"
    how = how if whole or rounds else "equal byte for byte"
    return _report("tape", "training data", "non-inferior", f"{batches} batches {how}{order}")


def check_schedule(candidate: Point, baseline: Point) -> QualityCheck:
    """Compare when two optimizers step, counted in samples, and at which learning rates.

    Args:
        candidate: steps noted at the initial weights.
        baseline: the same windows.
    """
    ours, theirs = candidate.gradients.keys, baseline.gradients.keys
    # A loss scaler leaves steps out now and then; steps that are shorter throughout are another training.
    every, theirs_every = _samples_per_step(ours), _samples_per_step(theirs)
    if every != theirs_every:
        reason = f"the optimizer steps every {every:g} samples, the baseline's every {theirs_every:g}"
        return _report("schedule", "optimizer steps", "inferior", reason)
    common, at_ours, at_theirs = np.intersect1d(ours, theirs, return_indices=True)
    if not len(common):
        return _report("schedule", "optimizer steps", "inconclusive", "no optimizer step in common")
    our_rates, their_rates = candidate.learning_rates[at_ours], baseline.learning_rates[at_theirs]
    steps = min(len(candidate.learning_rates), len(baseline.learning_rates))
    by_step = candidate.learning_rates[:steps], baseline.learning_rates[:steps]
    if by_step[0].shape == by_step[1].shape and np.allclose(*by_step, rtol=_RATE_TOLERANCE, atol=0.0):
        our_rates, their_rates = by_step  # a schedule that waits for a step that a loss scaler left out
    if our_rates.shape != their_rates.shape:
        reason = f"{our_rates.shape[1]} groups of parameters, the baseline has {their_rates.shape[1]}"
        return _report("schedule", "learning rates", "inferior", reason)
    wrong = np.abs(our_rates - their_rates) > _RATE_TOLERANCE * np.abs(their_rates)
    if wrong.any():
        step, group = (int(index) for index in np.argwhere(wrong)[0])
        reason = (
            f"at step {step + 1} the learning rate is {our_rates[step, group]:.6g}, "
            f"the baseline's {their_rates[step, group]:.6g}"
        )
        return _report("schedule", "learning rates", "inferior", reason)
    if not their_rates.shape[1]:
        return _report("schedule", "steps", "non-inferior", f"{len(common)} steps after the same samples")
    told = f"{len(common)} optimizer steps after the same samples at the same learning rates"
    return _report("schedule", "learning rates", "non-inferior", told)


def check_skipped_steps(candidate: Sequence[LossCurve], baseline: Sequence[LossCurve]) -> QualityCheck:
    """Compare how many optimizer steps a loss scaler left out in the last half of each training.

    The scale is made to grow every `GROWTH_STEPS` steps there, and one step may be lost to each growth.

    Args:
        candidate: one curve per seed.
        baseline: the same seeds.
    """
    steps = sum(len(curve.losses) - len(curve.losses) // 2 for curve in candidate)
    extra = sum(curve.skipped or 0 for curve in candidate) - sum(curve.skipped or 0 for curve in baseline)
    allowed = MOST_SKIPPED * steps + sum(1 + len(curve.losses) // (2 * GROWTH_STEPS) for curve in candidate)
    reason = (
        f"{extra} of {steps} optimizer steps left out by the loss scaler beyond the baseline's ({allowed:.0f} allowed)"
    )
    return _report("schedule", "skipped steps", "non-inferior" if extra <= allowed else "inferior", reason)


def _find_varying(trace: DataTrace) -> Callable[[int], bool]:
    """Return which sizes of a batch's tensors, by number, are others from batch to batch."""
    sizes = [_SIZE.findall(shape) for shape in trace.shapes]
    if len({len(one) for one in sizes}) > 1:
        return lambda _: True
    varying = {number for number, column in enumerate(zip(*sizes, strict=True)) if len({*column}) > 1}
    return varying.__contains__


def _leave_out(trace: DataTrace, varying: Callable[[int], bool]) -> DataTrace:
    def leave_out(shape: str) -> str:
        numbers = itertools.count()
        return _SIZE.sub(lambda size: "*" if varying(next(numbers)) else size.group(), shape)

    shapes, ends = (tuple(map(leave_out, one)) for one in (trace.shapes, trace.end_shapes))
    return trace.replace(shapes=shapes, end_shapes=ends)


def _samples_per_step(keys: NDArray[np.int64]) -> float:
    return float(np.median(np.diff(keys, prepend=0))) if len(keys) else 0.0


def _find_tape_fault(ours: DataTrace, theirs: DataTrace, *, contents: bool) -> str | None:
    if ours.samples != theirs.samples:
        return f"an epoch has {ours.samples} samples, the baseline's {theirs.samples}"
    if ours.repeated > theirs.repeated:
        return f"{ours.repeated} samples of an epoch come more than once"
    if ours.order != theirs.order:
        return "an epoch takes its samples in another order"
    for what, mine, base in (
        ("batch", ours.shapes, theirs.shapes),
        ("batch at the end of the epoch", ours.end_shapes, theirs.end_shapes),
    ):
        for number, (one, other) in enumerate(zip(mine, base, strict=False), start=1):
            if one != other:
                return f"{what} {number} is {one[:80]}, the baseline's {other[:80]}"
    if len(ours.end_shapes) != len(theirs.end_shapes):
        return "the epochs end after different numbers of batches"
    pairs = [*zip(ours.batches, theirs.batches, strict=False), *zip(ours.ends, theirs.ends, strict=False)]
    wrong = [number for number, (one, other) in enumerate(pairs, start=1) if one != other]
    if contents and wrong:
        return f"{len(wrong)} of {len(pairs)} batches hold other values, the first of them batch {wrong[0]}"
    return None


def _report(test: QualityTest, metric: str, verdict: QualityVerdict, reason: str) -> QualityCheck:
    same = Interval(estimate=0.0, low=0.0, high=0.0, confidence_level=0.90, method="compared one by one")
    return QualityCheck(
        test=test,
        metric=metric,
        difference=same if verdict == "non-inferior" else None,
        margin=Margin(amount=0.0),
        verdict=verdict,
        seeds=1,
        samples=0,
        reason=reason,
    )
