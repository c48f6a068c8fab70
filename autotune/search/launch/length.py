"""How long a launch measures: longer where its blocks differ so much that more launches would tell less. Pure.

Where batches may differ in what they cost, two that are compared time the same ones: each warms up over as many steps
as any before, and times as many samples.

variance of a launch's mean    between² + v / t, with v: variance of a block's log pace times its seconds
its price                      rest + t, with rest: what starting, warming up and ending take
least variance for its price   t = sqrt(v · rest) / between, and hardly more at half of that
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.measure.confidence import pooled_sd
from autotune.measure.warmup import SLOW_STEP_SECONDS
from autotune.records.config import TrainConfig
from autotune.records.measurement import Block, Measurement
from autotune.records.trial import TrialResult
from autotune.search.log import SearchLog
from autotune.search.scores.baseline_level import PRIOR_DEGREES, PRIOR_SD

_BETWEEN_SD = 0.01
"""What launches differ by however long they measure: next to nothing in turns, and then longer ones are worth more."""
_OF_THE_BEST = 0.5
_LEAST_STEPS = 4
"""Of a launch in turns that times as many samples as the one beside it."""
_MOST_TIMES = 3.0
"""Of what the search was told, which fits its budget."""


def find_measured_seconds(log: SearchLog, beside: TrainConfig | None = None) -> float:
    """Return how long each launch after the first one measures, in seconds: at least what the search was told.

    The probe and the first launch say how much blocks differ, once and for all: launches of one search measure equally
    long, but for those of a proof whose candidate's blocks differ more than the baseline's.

    Args:
        log: of the search.
        beside: such a candidate; None for any other launch.
    """
    told, probed = log.problem.state.measure_seconds, log.problem.report.measurement
    own = list_timings(log, log.problem.baseline)
    if not own:
        return told
    first, measured = own[0]
    variance = _find_variance([probed.blocks, measured.blocks])
    if beside is not None:
        variance = max(variance, _find_variance([one.blocks for _, one in list_timings(log, beside)]))
    rest = max(0.0, first.elapsed_seconds - measured.seconds)
    wanted = _OF_THE_BEST * math.sqrt(variance * rest) / _BETWEEN_SD
    return max(told, min(wanted, rest, _MOST_TIMES * told))


def find_warmup_steps(log: SearchLog, config: TrainConfig) -> int:
    """Return over how many steps a launch of a config and one beside it of the user's settings warm up at least.

    As many as any of either took to settle, where batches may differ, but no more than twice as many as usual; else 0,
    each as many as it needs.
    """
    if not _may_batches_differ(log):
        return 0
    launches = (one.result for one in log.judged if one.config in (config, log.problem.baseline))
    timings = (timing for one in launches for timing in (one.measurement, one.reference) if timing is not None)
    steps = [one.warmup_steps for one in timings]
    return min(max(steps), int(2 * statistics.median(steps))) if steps else 0


def find_compared_samples(log: SearchLog) -> int | None:
    """Return how many samples a launch in turns with the user's settings times; None where only the time counts.

    Half of what their launches alone timed, where batches may differ: both have the time of one.
    """
    baseline = log.problem.baseline
    own = [one.samples for _, one in list_timings(log, baseline)]
    if not own or not _may_batches_differ(log):
        return None
    return max(math.ceil(statistics.median_high(own) / 2), _LEAST_STEPS * baseline.effective_batch_size)


def _may_batches_differ(log: SearchLog) -> bool:
    """Return whether batches may differ in what they cost, and enough of them are timed to have the same ones."""
    data, measured = log.problem.report.target.data, log.problem.report.measurement
    return (data.batch_shapes is None or data.has_varying_shapes) and measured.seconds_per_step < SLOW_STEP_SECONDS


def list_timings(log: SearchLog, config: TrainConfig) -> list[tuple[TrialResult, Measurement]]:
    """Return the launches of a config that were timed, in order, each with its timing."""
    own = (one.result for one in log.judged if one.config == config)
    return [(one, one.measurement) for one in own if one.measurement is not None]


def _find_variance(launches: Sequence[Sequence[Block]]) -> float:
    """Return v: the variance of a block's log pace times its seconds; 0 without a block."""
    paces = [[math.log(block.seconds / block.samples) for block in blocks] for blocks in launches]
    sd, _ = pooled_sd(paces, prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES)  # of long steps there are few blocks
    seconds = [block.seconds for blocks in launches for block in blocks]
    return sd * sd * statistics.fmean(seconds) if seconds else 0.0
