"""Steps that come in bursts: many short ones, then a long one, and again. Pure.

Reinforcement learning plays between its updates, loader workers hand out what each has ready and then let wait, an
epoch ends and its workers start anew. A block that is cut anywhere then holds a long step more or less by where it
begins, and launches of some settings begin at the same step: others, that begin elsewhere, would differ from them in
every pair. So a block begins after a long step, and goes on until one ends.

That favours nothing: whether to stop is decided by what was seen alone, so by Wald's equation (1944) the steps and the
time up to there have the ratio of their means, whether long steps recur or come by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_STEPS = 8
_TIMES_SHORT = 4.0
_TELLING_SHARE = 0.1
"""Of the time, in long steps: with less, one more or less hardly counts."""
_MANY = 3
_TIMES_SHORT_OF_FEW = 10.0
_TELLING_SHARE_OF_FEW = 0.2
"""The same where one or two were seen, which may have been accidents."""


@dataclass(frozen=True)
class Bursts:
    """How long steps recur.

    Attributes:
        long_seconds: a step that takes as long ends a burst.
        seconds: from one long step to the next; all that was seen where there was a single one.
        step_seconds: mean of all steps.
    """

    long_seconds: float
    seconds: float
    step_seconds: float


def find_bursts(steps: Sequence[float]) -> Bursts | None:
    """Return how long steps recur; None where they take little of the time, or are too few to tell.

    A long step takes four times what the shortest quarter does at least, and half of what long ones do.

    Args:
        steps: seconds of each, in order, from the first typical one on.
    """
    if len(steps) < _LEAST_STEPS:
        return None
    short, _, _ = statistics.quantiles(steps, n=4, method="inclusive")
    long = [seconds for seconds in steps if seconds >= _TIMES_SHORT * short]
    total, share = math.fsum(steps), _TELLING_SHARE
    if len(long) < _MANY:
        long, share = [seconds for seconds in long if seconds >= _TIMES_SHORT_OF_FEW * short], _TELLING_SHARE_OF_FEW
    if not long or math.fsum(long) < share * total:
        return None
    least = max(_TIMES_SHORT * short, statistics.median(long) / 2)
    return Bursts(long_seconds=least, seconds=total / len(long), step_seconds=total / len(steps))
