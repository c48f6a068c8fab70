"""Steps that come in bursts: many short ones, then a long one, and again. Pure.

Reinforcement learning plays between its updates, and loader workers hand out what each has ready and then let wait. A
block that is cut anywhere then holds a long step more or less by where it begins, and launches of some settings begin
at the same step: others, that begin elsewhere, would differ from them in every pair. So a block begins after a long
step, and goes on until one ends.

That favours nothing: whether to stop is decided by what was seen alone, so by Wald's equation (1944) the steps and the
time up to there have the ratio of their means, whether long steps recur or come by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_TIMES_SHORT = 4.0
_TELLING_SHARE = 0.1
"""Of the time, in long steps: with less, one more or less hardly counts."""
_PARTS = 3
"""Of the steps, in each of which there is a long one where they recur: a machine that stalls once does not."""


@dataclass(frozen=True)
class Bursts:
    """How long steps recur.

    Attributes:
        long_seconds: a step that takes as long ends a burst.
        seconds: from one long step to the next.
        step_seconds: mean of all steps.
    """

    long_seconds: float
    seconds: float
    step_seconds: float


def find_bursts(steps: Sequence[float]) -> Bursts | None:
    """Return how long steps recur; None where they do not, or take little of the time.

    A long step takes four times what the shortest quarter does at least, and half of what long ones do.

    Args:
        steps: seconds of each, in order, settled.
    """
    if len(steps) < 2 * _PARTS:
        return None
    short, _, _ = statistics.quantiles(steps, n=4, method="inclusive")
    places = [place for place, seconds in enumerate(steps) if seconds >= _TIMES_SHORT * short]
    long = [steps[place] for place in places]
    total = math.fsum(steps)
    if len({_PARTS * place // len(steps) for place in places}) < _PARTS or math.fsum(long) < _TELLING_SHARE * total:
        return None
    least = max(_TIMES_SHORT * short, statistics.median(long) / 2)
    return Bursts(long_seconds=least, seconds=total / len(long), step_seconds=total / len(steps))
