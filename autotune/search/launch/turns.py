"""Which launches are timed in turns with the user's settings (`isolation/channel/turns.py`). Pure.

finals       each pair, wherever both fit into memory
exploring    where the machine's speed wanders by more than pairs do, and the budget has room for enough of the longer
             launches, of which fewer do the more it wanders; what is timed alone is held against the level of the
             baseline's launches
"""

from __future__ import annotations

from autotune.records.config import TrainConfig
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.log import SearchLog

_MOST_MEMORY = 0.8
"""Of what a trial may hold, for two that are run at a time."""
_PRICE_OF_BOTH = 1.5
"""Times a launch alone, of two in turns, which start at a time (seen: 1.4 to 1.7 where starting takes most of it)."""


def explores_in_turns(log: SearchLog, config: TrainConfig, budget_seconds: float) -> bool:
    """Return whether a launch of the exploring stage is timed in turns with the baseline.

    Args:
        log: of the search.
        config: to be launched.
        budget_seconds: of the search.
    """
    policy, baseline = log.problem.policy, log.problem.baseline
    if not log.takes_turns or config == baseline or not fit_together(log, baseline, baseline):
        return False
    if any(one.config == config for one in log.judged) and not fit_together(log, baseline, config):
        return False
    noise, degrees = log.ranking.machine_noise
    enough = policy.least_in_turns * min(1.0, policy.loud_noise / noise)
    if enough * _PRICE_OF_BOTH * log.prices.usual_seconds(baseline) > budget_seconds:
        return False
    return degrees < policy.least_noise_degrees or noise > policy.quiet_noise


def is_blamed_on_turns(log: SearchLog, result: TrialResult) -> bool:
    """Return whether a launch has failed in turns that need not fail alone.

    Memory is short for two sooner than for one; whatever else fails, it does so alone as well once launches before it
    have shown that two can run at a time.

    Args:
        log: of the search, without it.
        result: of the launch.
    """
    if result.measurement is not None or result.status in (TrialStatus.INTERRUPTED, TrialStatus.TOO_SLOW):
        return False
    return result.status is TrialStatus.OUT_OF_MEMORY or not any(one.result.reference is not None for one in log.judged)


def fit_together(log: SearchLog, *configs: TrainConfig) -> bool:
    """Return whether what launches of some configs held at most leaves room for all of them at once.

    Args:
        log: of the search.
        configs: each counts once for every time it is given.
    """
    peaks = [_find_peak(log, config) for config in configs]
    room = _MOST_MEMORY * log.problem.limits.host_memory_bytes
    return all(peaks) and sum(peaks) <= room


def memory_beside(log: SearchLog, config: TrainConfig) -> int:
    """Return how many bytes another trial may hold while this config runs: together they may hold what one may alone.

    Args:
        log: of the search.
        config: whose launches have been measured.
    """
    return log.problem.limits.host_memory_bytes - _find_peak(log, config)


def _find_peak(log: SearchLog, config: TrainConfig) -> int:
    """Return the most bytes that a launch of a config held; 0 where none was measured."""
    measured = [one.result.measurement for one in log.judged if one.key == config.key]
    return max((one.peak_memory.host_bytes for one in measured if one is not None), default=0)
