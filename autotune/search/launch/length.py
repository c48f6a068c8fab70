"""How long a launch measures: longer where its blocks differ so much that more launches would tell less. Pure.

variance of a launch's mean    between² + v / t, with v: variance of a block's log pace times its seconds
its price                      rest + t, with rest: what starting, warming up and ending take
least variance for its price   t = sqrt(v · rest) / between, and hardly more at half of that
"""

from __future__ import annotations

import math
import statistics

from autotune.measure.confidence import pooled_sd
from autotune.search.log import SearchLog
from autotune.search.scores.baseline_level import PRIOR_DEGREES, PRIOR_SD

_BETWEEN_SD = 0.01
"""What launches differ by however long they measure: next to nothing in turns, and then longer ones are worth more."""
_OF_THE_BEST = 0.5
_MOST_TIMES = 3.0
"""Of what the search was told, which fits its budget."""


def find_measured_seconds(log: SearchLog) -> float:
    """Return how long each launch after the first one measures, in seconds: at least what the search was told.

    The probe and the first launch say how much blocks differ, once and for all: launches of one search measure equally
    long.

    Args:
        log: of the search.
    """
    told, probed = log.problem.state.measure_seconds, log.problem.report.measurement
    own = (one.result for one in log.judged if one.config == log.problem.baseline)
    first = next((one for one in own if one.measurement is not None), None)
    if first is None or first.measurement is None:
        return told
    groups = [one.blocks for one in (probed, first.measurement)]
    paces = [[math.log(block.seconds / block.samples) for block in blocks] for blocks in groups]
    sd, _ = pooled_sd(paces, prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES)  # of long steps there are few blocks
    variance = sd * sd * statistics.fmean(block.seconds for blocks in groups for block in blocks)
    rest = max(0.0, first.elapsed_seconds - first.measurement.seconds)
    wanted = _OF_THE_BEST * math.sqrt(variance * rest) / _BETWEEN_SD
    return max(told, min(wanted, rest, _MOST_TIMES * told))
