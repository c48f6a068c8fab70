"""Which launches are timed in turns with the user's settings (`isolation/channel/turns.py`). Pure.

finals       each pair, wherever both fit into memory
exploring    where the machine's speed wanders by more than pairs do, and the budget has room for enough of the longer
             launches, of which fewer do the more it wanders; what is timed alone is held against the level of the
             baseline's launches
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records.config import TrainConfig
from autotune.records.measurement import PeakMemory
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.log import SearchLog

_MOST_MEMORY = 0.8
"""Of what a trial may hold, for two that are run at a time."""
_CONTEXT_BYTES = 2**30
"""Of a GPU, for what a process holds there beside PyTorch's memory: a context and libraries (about half of that)."""
_TAKEN = ("FileExistsError", "Address already in use")
"""Of errors: two that start at a time both wanted what each would have had alone, a folder named by the second or a
port."""
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

    Memory is short for two sooner than for one, and two may want the same folder; whatever else fails, it does so alone
    as well once launches before it have shown that two can run at a time, or have failed alone as they did in turns.

    Args:
        log: of the search, without it.
        result: of the launch.
    """
    if result.measurement is not None or result.status in (TrialStatus.INTERRUPTED, TrialStatus.TOO_SLOW):
        return False
    is_short = result.status is TrialStatus.OUT_OF_MEMORY or result.cause in ("shm", "limits")
    is_crowded = is_short or any(words in result.error for words in _TAKEN)
    return is_crowded or not (has_run_in_turns(log) or log.clears_turns)


def leave_out_excused(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return trials without those that failed beside the user's settings and were run again alone, right after.

    Args:
        trials: of a search, as its folder has them.
    """
    numbered = {one.spec.number: one.spec for one in trials}

    def is_excused(one: TrialResult) -> bool:
        before, after = (numbered.get(one.spec.number + step) for step in (-1, 1))
        is_beside = before is not None and before.purpose == "reference"
        is_again = after is not None and (after.purpose, after.config) == ("measure", one.spec.config)
        return one.spec.purpose == "measure" and one.measurement is None and is_beside and is_again

    return [one for one in trials if not is_excused(one)]


def has_run_in_turns(log: SearchLog) -> bool:
    """Return whether a launch of the exploring stage was timed in turns."""
    return any(one.result.reference is not None for one in log.judged)


def fit_together(log: SearchLog, *configs: TrainConfig) -> bool:
    """Return whether what launches of some configs held at most leaves room for all of them at once.

    Args:
        log: of the search.
        configs: each counts once for every time it is given.
    """
    limits, peaks = log.problem.limits, [_find_peak(log, config) for config in configs]
    if not all(one.host_bytes for one in peaks):
        return False
    if sum(one.host_bytes for one in peaks) > _MOST_MEMORY * limits.host_memory_bytes:
        return False
    held = sum((one.device_bytes or 0) + _CONTEXT_BYTES for one in peaks)
    return limits.device_memory_bytes is None or held <= _MOST_MEMORY * limits.device_memory_bytes


def memory_beside(log: SearchLog, config: TrainConfig) -> PeakMemory:
    """Return how many bytes another trial may hold while this config runs: together they may hold what one may alone.

    Args:
        log: of the search.
        config: whose launches have been measured.
    """
    limits, held = log.problem.limits, _find_peak(log, config)
    host = max(0, limits.host_memory_bytes - held.host_bytes)
    if limits.device_memory_bytes is None:
        return PeakMemory(host_bytes=host, device_bytes=None)
    device = limits.device_memory_bytes - (held.device_bytes or 0) - _CONTEXT_BYTES
    return PeakMemory(host_bytes=host, device_bytes=max(0, device))


def _find_peak(log: SearchLog, config: TrainConfig) -> PeakMemory:
    """Return the most bytes that launches of a config held; 0 of the host's where none was measured."""
    measured = [one.result.measurement for one in log.judged if one.key == config.key]
    largest = PeakMemory.largest(one.peak_memory for one in measured if one is not None)
    return largest or PeakMemory(host_bytes=0, device_bytes=None)
