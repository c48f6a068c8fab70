"""Which launches are timed in turns with the user's settings (`isolation/channel/turns.py`). Pure.

finals       each pair, wherever both fit into memory
exploring    where the machine's speed wanders by more than pairs do, and the budget has room for enough of the longer
             launches; what is timed alone is held against the level of the baseline's launches
"""

from __future__ import annotations

from autotune.records.config import TrainConfig
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.log import SearchLog

_MOST_MEMORY = 0.8
"""Of what a trial may hold, for two that are run at a time."""


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
    if policy.least_in_turns * 2 * log.prices.usual_seconds(baseline) > budget_seconds:
        return False
    noise, degrees = log.ranking.machine_noise
    return degrees < policy.least_noise_degrees or noise > policy.quiet_noise


def is_blamed_on_turns(log: SearchLog, result: TrialResult) -> bool:
    """Return whether a launch in turns has failed, and none before it has shown that two can run at a time.

    Args:
        log: of the search, without it.
        result: of the launch.
    """
    if result.status in (TrialStatus.INTERRUPTED, TrialStatus.TOO_SLOW):
        return False
    is_whole = result.measurement is not None and result.reference is not None
    return not is_whole and not any(one.reference is not None for one in log.judged)


def fit_together(log: SearchLog, *configs: TrainConfig) -> bool:
    """Return whether what launches of some configs held at most leaves room for all of them at once.

    Args:
        log: of the search.
        configs: each counts once for every time it is given.
    """
    peaks: dict[str, int] = {}
    for one in log.judged:
        if one.result.measurement is not None:
            peaks[one.key] = max(peaks.get(one.key, 0), one.result.measurement.peak_memory.host_bytes)
    keys = [config.key for config in configs]
    room = _MOST_MEMORY * log.problem.limits.host_memory_bytes
    return all(key in peaks for key in keys) and sum(peaks[key] for key in keys) <= room
