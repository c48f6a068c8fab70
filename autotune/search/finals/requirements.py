"""What a search needs of its memory and its budget, asked once the baseline is measured."""

from __future__ import annotations

import math

from autotune.errors import NothingFeasibleError, UsageError
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult
from autotune.search.finals.reserve import Reserve
from autotune.search.launch.budget import CLOSING_SECONDS
from autotune.search.launch.launcher import Launcher
from autotune.search.scores.objective import Limits
from autotune.units import format_bytes, format_duration

_SPARE = 1.1
"""Of the least budget: what is told where the one given is too small."""


def require_memory(report: ProbeReport, limits: Limits) -> None:
    """Refuse a limit on the memory that the user's own settings break.

    Raises:
        NothingFeasibleError: they use more.
    """
    peak = report.measurement.peak_memory
    pairs = ((peak.device_bytes, limits.device_memory_bytes), (peak.host_bytes, limits.host_memory_bytes))
    for used, limit in pairs:
        if used is not None and limit is not None and used > limit:
            raise NothingFeasibleError(
                f"your own settings use {format_bytes(used)}, more than the {format_bytes(limit)} allowed",
                hint="raise --memory-limit, or give the baseline a smaller micro batch and more accumulation",
            )


def require_time(launcher: Launcher, reserve: Reserve, probed: TrialResult) -> None:
    """Refuse a budget that cannot hold the baseline, one candidate and the cheapest proof of it.

    Raises:
        UsageError: it is too small.
    """
    launch = launcher.predict_seconds(launcher.baseline)
    needed = 2 * launch + reserve.least_seconds()
    if needed > launcher.budget.remaining_seconds:
        least = _SPARE * (needed + probed.elapsed_seconds + CLOSING_SECONDS)
        asked = format_duration(launcher.budget.seconds)
        raise UsageError(
            f"--budget {asked} is too small for this target: one launch takes {launch:.1f} s",
            hint=f"give at least {format_duration(math.ceil(least / 10) * 10)}, and several times that to find much",
        )
