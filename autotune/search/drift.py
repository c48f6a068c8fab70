"""The drift check: same initial weights, same data order, several seeds; losses and metric against the baseline's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.measure.quality import check_losses, check_metric, has_learned
from autotune.records.config import TrainConfig
from autotune.records.measurement import QualityCheck
from autotune.records.probe import TargetFacts
from autotune.records.trial import LossCurve, TrialResult
from autotune.space import numerics_of
from autotune.units import format_percent

SEEDS = 4
LEAST_STEPS = 8
GOOD_STEPS = 60
"""Fewer steps than these are run only when there is no time for more."""
MOST_STEPS = 300

USABLE_SHARE = 0.85
_START_SECONDS = 1.0


@dataclass(frozen=True)
class DriftPlan:
    """How much the drift checks train, fixed before the first of them.

    Attributes:
        steps: optimizer steps per seed.
        evaluate: compare the target's metric too.
        candidates: how many there is time for.
    """

    steps: int
    evaluate: bool
    candidates: int


Train = Callable[[TrainConfig, DriftPlan], TrialResult | None]
"""Trains a config with every seed as planned; None when the time is up or the user stopped."""


@dataclass
class DriftGate:
    """Judges candidates against one set of baseline runs.

    Attributes:
        facts: what the probe found.
        max_drift: largest relative loss of quality.
        plan: how much is trained.
        train: runs a config.
    """

    facts: TargetFacts
    max_drift: float
    plan: DriftPlan
    train: Train
    _baseline: tuple[LossCurve, ...] | None = None

    def check(self, config: TrainConfig) -> tuple[QualityCheck, ...] | None:
        """Return the checks of a config; None when there was no time for them."""
        if self._baseline is None:
            trained = self.train(self.facts.baseline, self.plan)
            if trained is None or not trained.curves:
                return None
            self._baseline = trained.curves
        candidate = self.train(config, self.plan)
        if candidate is None:
            return None
        numerics = numerics_of(config, self.facts.baseline, self.facts.numerics)
        checks = [check_losses(candidate.curves, self._baseline, margin=self.max_drift, exact=numerics == "exact")]
        if checks[0].test != "exact-losses" and not has_learned(self._baseline, margin=self.max_drift):
            checks[0] = _blind(checks[0])
        if self.plan.evaluate and self.facts.metric_name is not None:
            checks.append(
                check_metric(
                    candidate.curves,
                    self._baseline,
                    name=self.facts.metric_name,
                    direction=self.facts.metric_direction,
                    margin=self.max_drift,
                )
            )
        elif numerics == "semantic":
            checks.append(_unjudged(self.facts.metric_name, self.max_drift))
        return tuple(checks)


def _blind(check: QualityCheck) -> QualityCheck:
    reason = (
        f"the baseline's own training loss does not fall by more than {format_percent(check.margin)} in these steps: "
        "nothing is learned that could be lost, so nothing can be judged"
    )
    return check.replace(verdict="inconclusive", difference=None, reason=reason)


def _unjudged(metric: str | None, margin: float) -> QualityCheck:
    return QualityCheck(
        test="metric",
        metric=metric or "metric",
        difference=None,
        margin=margin,
        verdict="inconclusive",
        seeds=0,
        samples=0,
        reason="a setting that changes what is learned is judged by the metric, and it was not compared",
    )


def is_passed(checks: tuple[QualityCheck, ...]) -> bool:
    """Return whether every check showed that nothing is lost."""
    return bool(checks) and all(check.verdict == "non-inferior" for check in checks)


def plan_drift(
    seconds: float,
    facts: TargetFacts,
    *,
    seconds_per_step: float,
    candidates: int,
    start_seconds: float = _START_SECONDS,
    asked_steps: int | None = None,
) -> DriftPlan | None:
    """Return what fits the time: the metric before more candidates; None when not even the least number of steps does.

    Args:
        seconds: for the baseline and all candidates together.
        facts: what the probe found.
        seconds_per_step: of the baseline.
        candidates: how many could be checked.
        start_seconds: what one arm spends before and between its seeds.
        asked_steps: steps per seed that the user asked for; None to choose by the time.
    """
    with_metric = [(count, wanted, True) for wanted in (GOOD_STEPS, LEAST_STEPS) for count in range(candidates, 0, -1)]
    if asked_steps is not None:
        with_metric = [(count, asked_steps, True) for count in range(candidates, 0, -1)]
    losses_only = [(count, wanted, False) for count, wanted, _ in with_metric]
    for count, wanted, evaluate in [*with_metric, *losses_only]:
        if evaluate and facts.evaluate_seconds is None and facts.metric_name is not None:
            continue
        evaluation = (facts.evaluate_seconds or 0.0) if evaluate else 0.0
        arm_seconds = USABLE_SHARE * seconds / (1 + count) - start_seconds
        steps = int((arm_seconds / SEEDS - evaluation) / max(seconds_per_step, 1e-6))
        if steps >= wanted:
            has_metric = evaluate and facts.metric_name is not None
            most = asked_steps or min(MOST_STEPS, steps)
            return DriftPlan(steps=most, evaluate=has_metric, candidates=count)
    return None
