"""What a search makes best, in words: what a candidate gains, what a winner is claimed to. Pure."""

from __future__ import annotations

import math

from autotune.format import format_bytes, format_factor, format_factor_down, format_share
from autotune.records.measurement import PeakMemory
from autotune.records.objective import Objective


def describe_gain(objective: Objective, factor: float) -> str:
    """Return what settings gain over the user's own, e.g. `1.28x` or `23 % less memory`.

    Args:
        objective: of the search.
        factor: speed-up, or the own peak over theirs.
    """
    if objective is not Objective.MEMORY:
        return format_factor(factor)
    share = 1 - 1 / factor
    return f"{format_share(abs(share))} {'less' if share >= 0 else 'more'} memory"


def describe_least(objective: Objective, factor: float, *, sign: str = "x") -> str:
    """Return what is claimed, rounded down, e.g. `at least 1.28x faster` or `at least 23 % less memory`.

    Args:
        objective: of the search.
        factor: speed-up, or the own peak over theirs.
        sign: of a factor.
    """
    if objective is not Objective.MEMORY:
        return f"at least {format_factor_down(factor, sign=sign)} faster"
    return f"at least {math.floor(100 * (1 - 1 / factor) + 1e-9)} % less memory"


def describe_less(before: PeakMemory | None, after: PeakMemory | None) -> str:
    """Return what a peak is and was, e.g. `512 MiB -> 400 MiB, 112 MiB less`; empty where one is not known."""
    if before is None or after is None:
        return ""
    own, theirs = before.used_bytes, after.used_bytes
    return f"{format_bytes(own)} -> {format_bytes(theirs)}, {format_bytes(abs(own - theirs))} {_compare(theirs, own)}"


def _compare(size: int, other: int) -> str:
    return "less" if size <= other else "more"
