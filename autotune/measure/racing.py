"""Racing: whether a trial's blocks so far prove it slower than its rival. Pure.

d_k = log(seconds per sample of block k / rival's); stopped when sum(d) - k · margin leaves what luck reaches
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.measure.confidence import standard_deviation

CLEAR_LOG_RATIO = math.log(1.5)
"""Two blocks this much slower need no statistics."""


def racing_boundary(looks: int, sd: float, *, risk: float = 0.05, rho: float = 8.0) -> float:
    """Return what a sum of independent zero-mean terms stays below at every look with probability 1 - risk.

    sqrt(sd² (k + rho) ln((k + rho) / (4 risk² rho) + 1)): the one-sided normal mixture boundary for sub-Gaussian terms
    (Howard et al., Annals of Statistics 2021, with ln(x² + 1) for their wider ln((x + 1)²): that costs at most 2 % of
    the risk). k is how many terms are summed so far, sd that of one, and rho sets where the boundary is tightest.

    Raises:
        ValueError: no look, a negative sd, a risk outside (0, 1), or a rho that is not positive.
    """
    if looks < 1:
        raise ValueError(f"looks is {looks}: it must be at least 1")
    if not 0.0 < risk < 1.0:
        raise ValueError(f"risk is {risk}: it must be between 0 and 1")
    if not 0.0 < rho < math.inf:
        raise ValueError(f"rho is {rho}: it must be positive and finite")
    if not 0.0 <= sd < math.inf:
        raise ValueError(f"sd is {sd}: it must be finite and must not be negative")
    return sd * math.sqrt((looks + rho) * math.log((looks + rho) / rho / (2.0 * risk) ** 2 + 1.0))


def is_clearly_slower(log_ratios: Sequence[float], *, block_sd: float, margin: float) -> bool:
    """Return whether a trial's blocks so far prove it slower than its rival, valid when asked after every block.

    A log ratio is log(seconds per sample of a block / the rival's), positive where slower; no block proves nothing.
    sum - k · margin > racing_boundary(k, max(block_sd, own sd) · sqrt(2)), for the rival's blocks have noise too; or,
    from two blocks on, every block is slower by more than log(1.5) + margin. block_sd is that of one block's log in
    other trials; the margin forgives what is the same in every block: the luck of two launches, the error of a rival's
    mean. Without it, a rival known from 8 blocks lets luck alone stop 7 % within 48 blocks.

    Raises:
        ValueError: a negative block_sd or margin, or a number that is not finite.
    """
    if not all(map(math.isfinite, (*log_ratios, block_sd, margin))):
        raise ValueError("racing needs finite values")
    if min(block_sd, margin) < 0.0:
        raise ValueError(f"block_sd is {block_sd} and margin is {margin}: they must not be negative")
    looks, sd = len(log_ratios), block_sd
    if looks == 0:
        return False
    if looks >= 2:
        if min(log_ratios) > CLEAR_LOG_RATIO + margin:
            return True
        sd = max(sd, standard_deviation(log_ratios))
    return math.fsum(log_ratios) - looks * margin > racing_boundary(looks, sd * math.sqrt(2.0))
