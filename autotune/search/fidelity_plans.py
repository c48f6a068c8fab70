"""How much a look at gradients takes in, by the time there is. Pure."""

from __future__ import annotations

from autotune.records.trial import FidelityPlan

_PLANS = ((24, 200), (24, 100), (16, 100), (16, 40), (16, 10), (12, 10), (8, 5), (8, 0))
"""Windows at each point and steps between the points, the best first."""

PATIENCE = 1.6
"""A step that notes its gradients takes longer than one that does not."""


def plan_fidelity(
    seconds: float, *, seconds_per_step: float, start_seconds: float, candidates: int, repeats_steps: bool
) -> FidelityPlan | None:
    """Return what fits the time for the baseline and some candidates; None when nothing does.

    Args:
        seconds: for all of them.
        seconds_per_step: of the baseline.
        start_seconds: what one process spends before its first step.
        candidates: how many.
        repeats_steps: candidates go through the steps between the points too, as scripts do.
    """
    for windows, later in _PLANS:
        plan = FidelityPlan(windows=windows, later_steps=later)
        steps = count_steps(plan, candidates=candidates, repeats_steps=repeats_steps)
        if (1 + candidates) * start_seconds + PATIENCE * steps * seconds_per_step <= seconds:
            return plan
    return None


def count_steps(plan: FidelityPlan, *, candidates: int, repeats_steps: bool) -> int:
    """Return the optimizer steps that a plan takes for the baseline and some candidates; arguments as above."""
    held = (2 if plan.later_steps else 1) * plan.windows
    return held + plan.later_steps + candidates * (held + plan.later_steps * repeats_steps)
