"""How much a look at gradients takes in, by the time there is. Pure.

What a smaller plan can still tell. The bounds hold with any number of windows (the jackknife's Student t widens them):
a small plan never passes what a large one would not. What it cannot tell it leaves open, and trainings decide.

    24 + 200   all of it: what shows only at other weights than the first, and a bias of 2 % in noisy gradients
     8 +   5   noise of the first steps, as bf16 has it in a ResNet, is seen to go
     8 +   0   the initial weights alone: other data, masks, weights, scales and layers; nothing that comes later
     4 +   0   rounding in float32 passes, a wrong scale of the loss fails, a layer that is wrong is left open; so is
               nearly all that bf16 does to convolutions
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from autotune.records.trial import GradientPlan, LossCurve

_PLANS = ((24, 200), (24, 100), (16, 100), (16, 40), (16, 10), (12, 10), (8, 5), (8, 0), (6, 0), (4, 0))
"""Windows at each point and steps between the points, the best first."""

PLANS = tuple(GradientPlan(windows=windows, later_steps=later) for windows, later in _PLANS)
SMALLEST_PLAN = PLANS[-1]

_LEARNED = 0.25
"""Of the first loss: a training with less has learned most of what there is."""
_MEDIAN_STEPS = 5
_LEAST_LATER_STEPS = 5
"""Between the points, where it is fewer than the time allows."""

_NOTING, _MOST_NOTING_SECONDS = 1.6, 0.1
"""What noting its gradients makes of a short step, in times its seconds, and most adds to a long one (seen on six
public scripts: 0.05 to 0.13 s, with what a process takes at its end)."""


@dataclass(frozen=True)
class LookCosts:
    """What looks at the gradients of one target cost.

    Attributes:
        seconds_per_step: of the baseline.
        start_seconds: what one process spends before its first step.
        repeats_steps: candidates go through the steps between the points too, as scripts do.
        reference: times a candidate's look that one in float64 takes as well; 0 where none is to be expected.
        speed: of the candidates, times the baseline's.
    """

    seconds_per_step: float
    start_seconds: float
    repeats_steps: bool
    reference: float = 0.0
    speed: float = 1.0

    def of_looks(self, plan: GradientPlan, candidates: int) -> float:
        """Return the seconds of the baseline's look, of some candidates' and of the one in float64."""
        own = count_steps(plan, candidates=self.reference, repeats_steps=self.repeats_steps)
        theirs = candidates * (count_steps(plan, candidates=1, repeats_steps=self.repeats_steps) - count_steps(plan))
        processes = 1 + candidates + (self.reference > 0.0)
        seconds = own * price_step(self.seconds_per_step) + theirs * price_step(self.seconds_per_step / self.speed)
        return processes * self.start_seconds + seconds


def plan_for_some(seconds: float, costs: LookCosts, *, candidates: int) -> GradientPlan | None:
    """Return what fits the time for the baseline and as many candidates as it can; None when not even one fits.

    Two points for fewer candidates come before one point for more: what one point leaves open costs trainings.
    Arguments as of `plan_fidelity`, but `candidates` is how many are wanted.
    """
    for with_later in (True, False):
        for count in range(max(1, candidates), 0, -1):
            plan = plan_fidelity(seconds, costs, candidates=count)
            if plan is not None and (plan.later_steps > 0 or not with_later):
                return plan
    return None


def end_while_learning(plan: GradientPlan, curve: LossCurve) -> GradientPlan:
    """Return a plan whose second point is not where a training has learned its data by heart.

    Gradients are next to nothing there, and rounding the weights alone is as large: after 40 steps of an MNIST, at a
    twentieth of its first loss, bf16 could not be told from a bias of 8 %, and after 20 steps it had one of 0.1 %. The
    last step is taken at which the median loss of five was a quarter of the first five's.

    Args:
        plan: as the time has it.
        curve: of the baseline, as far as it is known.
    """
    losses = [loss for loss in curve.losses if loss is not None and loss > 0.0]
    if len(losses) < max(len(curve.losses), 2 * _MEDIAN_STEPS):
        return plan
    levels = [statistics.median(losses[step : step + _MEDIAN_STEPS]) for step in range(len(losses) - _MEDIAN_STEPS + 1)]
    learns = [step for step, level in enumerate(levels) if level >= _LEARNED * levels[0]]
    if learns[-1] == len(levels) - 1:
        return plan
    return plan.replace(later_steps=min(plan.later_steps, max(_LEAST_LATER_STEPS, learns[-1] + _MEDIAN_STEPS // 2)))


def end_within_epoch(plan: GradientPlan, steps: int) -> GradientPlan:
    """Return a plan that ends before an epoch does, where an epoch has steps for both points.

    After it most scripts validate, which takes its time.

    Args:
        plan: as the time has it.
        steps: optimizer steps of an epoch.
    """
    later = steps - (count_steps(plan) - plan.later_steps)
    return plan.replace(later_steps=int(later)) if _LEAST_LATER_STEPS <= later < plan.later_steps else plan


def list_smaller(plan: GradientPlan) -> list[GradientPlan]:
    """Return a plan and all that take no more windows and no more steps, the best first.

    Args:
        plan: any, also one that ends while a training learns.
    """
    smaller = (one for one in PLANS if one.windows <= plan.windows and one.later_steps <= plan.later_steps)
    return [plan, *(one for one in smaller if one != plan)]


def plan_fidelity(seconds: float, costs: LookCosts, *, candidates: int) -> GradientPlan | None:
    """Return what fits the time for the baseline and some candidates; None when nothing does.

    Args:
        seconds: for all of them.
        costs: of the target's looks.
        candidates: how many.
    """
    return next((plan for plan in PLANS if costs.of_looks(plan, candidates) <= seconds), None)


def price_step(seconds: float) -> float:
    """Return what a step of so many seconds takes that notes its gradients."""
    return min(_NOTING * seconds, seconds + _MOST_NOTING_SECONDS)


def count_steps(plan: GradientPlan, *, candidates: float = 0, repeats_steps: bool = True) -> float:
    """Return the optimizer steps that a plan takes for the baseline and some candidates.

    Args:
        plan: of the looks.
        candidates: how many, a look in float64 as so many of them.
        repeats_steps: as of `LookCosts`.
    """
    held = (plan.first_windows or plan.windows) + (plan.windows if plan.later_steps else 0)
    return held + plan.later_steps + candidates * (held + plan.later_steps * repeats_steps)
