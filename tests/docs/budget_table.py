"""Print the table of docs/faq.md: which budget proves which gain at which noise.

python tests/docs/budget_table.py

By the search's own calculation (`autotune.search.finals`): the pairs that a first look needs for a chance of 80 %, in
the third of the budget that a proof is taken to have; and never less than the launches before the first proof take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autotune.search.finals.finalist import LEAST_ROUNDS, MOST_ROUNDS, rounds_needed
from autotune.search.finals.more_time import budget_for
from autotune.search.finals.risk import SHARE_OF_A_LOOK
from autotune.search.policy import USUAL_POLICY

LAUNCH_SECONDS = 10.0
GAINS = (1.05, 1.1, 1.2, 1.5, 2.0)
NOISES = (0.01, 0.02, 0.03, 0.05, 0.10, 0.20)


def list_lines() -> Iterator[str]:
    """Yield the table, in Markdown."""
    yield f"| launches differ by | {' | '.join(f'{gain:g}x' for gain in GAINS)} |"
    yield "| --: |" + " --: |" * len(GAINS)
    for noise in NOISES:
        cells = (describe(noise, gain) for gain in GAINS)
        yield f"| {noise:.0%} | {' | '.join(cells)} |".replace("%", " %")


def describe(noise: float, gain: float) -> str:
    """Return the budget for a gain, and the pairs that it pays for."""
    pair_sd, wanted = math.sqrt(2) * noise, math.log(gain)
    proof = budget_for(wanted, pair_sd=pair_sd, pair_seconds=2 * LAUNCH_SECONDS, budget_seconds=0.0)
    if proof is None:
        return "not to be had"
    pairs = rounds_needed(pair_sd, wanted, fewest=LEAST_ROUNDS, most=MOST_ROUNDS, risk_share=SHARE_OF_A_LOOK)
    explored = (USUAL_POLICY.least_explored + 2 * pairs) * LAUNCH_SECONDS
    return f"{math.ceil(max(proof, explored) / 60)} min ({pairs})"


if __name__ == "__main__":
    print("\n".join(list_lines()))
