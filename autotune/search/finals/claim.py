"""What has to be shown of a candidate for a claim, by the objective of the search.

    faster        speed   the one-sided 99 % lower end clears +1 %, and the 99.9 % one clears 0
    less memory   speed   the 99 % lower end keeps 0.97 of the user's own: not inferior
                  memory  the 99 % end of what is saved clears 2 %, and the 99.9 % one clears 0

Each at its share of the risk. All of them have to hold, so that none needs a smaller share for the others' sake: a
claim that is false is so in one of them at least (an intersection-union test: Berger, Technometrics 1982).
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.objective import LEAST_SPEED, MOST_MEMORY, Objective

THRESHOLD = 1.01
"""A gain of less than this is not claimed."""

CLAIM_RISK = 0.01
"""One-sided: the lower end at this risk has to clear the threshold, over all looks of one search."""

FALSE_RISK = 0.001
"""One-sided: the lower end at this risk has to show a gain at all. On a machine whose noise is large against the
threshold the first rule alone would claim something in nearly 1 % of searches in which nothing is faster."""


@dataclass(frozen=True)
class Bar:
    """What the lower end of an interval has to clear.

    Attributes:
        ratio: that it has to exceed.
        risk: one-sided, of the interval.
    """

    ratio: float
    risk: float


@dataclass(frozen=True)
class Claim:
    """What is claimed of a winner.

    Attributes:
        speed: bars for the ratio of its speed to the baseline's.
        saving: bars for the ratio of the baseline's peak memory to its own; none where memory is not what counts.
    """

    speed: tuple[Bar, ...]
    saving: tuple[Bar, ...] = ()


FASTER = Claim(speed=(Bar(THRESHOLD, CLAIM_RISK), Bar(1.0, FALSE_RISK)))
SMALLER = Claim(speed=(Bar(LEAST_SPEED, CLAIM_RISK),), saving=(Bar(1 / MOST_MEMORY, CLAIM_RISK), Bar(1.0, FALSE_RISK)))


def find_claim(objective: Objective) -> Claim:
    """Return what a search with an objective claims of its winner."""
    return SMALLER if objective is Objective.MEMORY else FASTER
