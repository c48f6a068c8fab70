"""The drift check: same initial weights, same data order, several seeds; losses and metric against the baseline's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune.drift.compare.losses import check_losses, has_learned, may_learn, seed_drift
from autotune.drift.compare.metrics import check_metric
from autotune.drift.compare.samples_to_loss import check_samples_to_loss
from autotune.drift.gate.data_checks import check_skipped_steps
from autotune.drift.policy import USUAL_LOSS_CHECK, LossCheckPolicy
from autotune.format import format_share
from autotune.records.config import TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.quality import DriftLimits, Margin, QualityCheck
from autotune.records.script import Numerics
from autotune.records.trial import LossCurve, TrialResult
from autotune.sentences.loss_check import format_margin
from autotune.space import BATCH_KNOBS, classify_changes, numerics_of

_LOST = 6.0
"""Margins that the losses of one seed are apart where no seeds that are trained would show that nothing is lost: of
eight, whose mean is nothing, a spread of 1.5 margins shows it."""


@dataclass(frozen=True)
class DriftPlan:
    """How much the drift checks train, fixed before the first of them.

    Attributes:
        steps: optimizer steps per seed.
        evaluate: compare the target's metrics too.
        candidates: how many there is time for.
        seeds: trained with in each arm.
    """

    steps: int
    evaluate: bool
    candidates: int
    seeds: int = USUAL_LOSS_CHECK.seeds


Train = Callable[[TrainConfig, DriftPlan], TrialResult | None]
"""Trains a config with every seed as planned; None when the time is up or the user stopped."""


@dataclass
class LossCheck:
    """Judges candidates against one set of baseline runs.

    Attributes:
        facts: what the probe found.
        max_drift: how much worse the training loss and each metric may get.
        plan: how much is trained.
        train: runs a config.
        tries_first: the first seed of the baseline may be trained by itself, to see whether anything is learned.
        zeros: metrics that were left out of the last check, as they have not begun to tell anything.
        untold: checks that were left out of it, as they are too noisy to tell.
        is_noisy: losses of some candidate were too noisy to tell, by no limit that the user gave and with no metric
            beside them.
    """

    facts: TargetFacts
    max_drift: DriftLimits
    plan: DriftPlan
    train: Train
    tries_first: bool = False
    zeros: set[str] = field(default_factory=set, init=False)
    untold: tuple[QualityCheck, ...] = field(default=(), init=False)
    is_noisy: bool = field(default=False, init=False)
    _baseline: tuple[LossCurve, ...] | None = None

    def check(
        self,
        config: TrainConfig,
        *,
        speedup: float | None = None,
        predicted: float | None = None,
        shown: bool = False,
        lost: bool = False,
    ) -> tuple[QualityCheck, ...] | None:
        """Return the checks of a config; None when there was no time for them.

        Args:
            config: the settings.
            speedup: of its throughput, as the search saw it; what it costs in samples is held against that.
            predicted: samples that it needs over the baseline's, by the gradient noise scale; None where not known.
            shown: its gradients were shown to be the baseline's. Losses of a training in which nothing is learned then
                say nothing, and there is no check of them; nor of what is too noisy to tell and may be no worse.
            lost: its gradients differ by no more than is lost in a step's own noise: where nothing is learned, that is
                as good as shown.
        """
        self.untold = ()
        needs_learning = not shown and self._is_judged_by_learning(config)
        if needs_learning and self.tries_first:
            settled = self.try_first(config, lost=lost)
            if settled is None or settled:
                return settled
        if self._baseline is None:
            trained = self.train(self.facts.baseline, self.plan)
            if trained is None or not trained.curves:
                return None
            self._baseline = trained.curves
        shown = shown or (lost and not self.learns)
        if shown and not self.learns and not self._compares_metrics:
            return ()
        if needs_learning and not self.learns:
            return (self._make_blind(self.baseline_curves),)  # whatever the candidate learned could not be judged
        candidate = self.train(config, self.plan)
        if candidate is None:
            return None
        missing = {curve.seed for curve in self._baseline} - {curve.seed for curve in candidate.curves}
        if missing:
            return (_missing(candidate, sorted(missing), self.max_drift.loss),)
        return self._judge(config, candidate.curves, speedup=speedup, predicted=predicted, shown=shown)

    def try_first(self, config: TrainConfig, *, lost: bool = False) -> tuple[QualityCheck, ...] | None:
        """Return the checks that one seed settles: nothing is learned, or losses go apart by more than any could show.

        Args:
            config: the settings.
            lost: as of `check`.

        Returns:
            Nothing where further seeds may tell; None when there was no time.
        """
        once, margin = replace(self.plan, seeds=1), self.max_drift.loss
        first = self.train(self.facts.baseline, once)
        if first is None or not first.curves:
            return None
        if not may_learn(first.curves[0], margin=margin.amount):
            return () if lost else (self._make_blind(first.curves),)
        tried = self.train(config, once)
        if tried is None:
            return None
        drift = seed_drift(tried.curves[0], first.curves[0]) if tried.curves else None
        if drift is None or abs(drift) <= _LOST * margin.amount:
            return ()
        self.is_noisy = not self._has_own_limit
        apart = f"{format_share(math.expm1(abs(drift)))} apart in one short training"
        reason = f"the losses are {apart}, too noisy for a limit of {format_margin(margin).lstrip('+')}"
        return (self._leave_open(first.curves, reason),)

    def _is_judged_by_learning(self, config: TrainConfig) -> bool:
        """Return whether a training tells nothing of a config where nothing is learned; fp16's may break down there."""
        numerics = numerics_of(config, self.facts.baseline, self.facts.numerics)
        return numerics == "rounding" and config.precision != "fp16" and not self._compares_metrics

    def _judge(
        self,
        config: TrainConfig,
        curves: tuple[LossCurve, ...],
        *,
        speedup: float | None,
        predicted: float | None,
        shown: bool,
    ) -> tuple[QualityCheck, ...]:
        """Return the checks of a config's curves, one for each seed of the baseline's; arguments as of `check`."""
        baseline = self.baseline_curves
        numerics = numerics_of(config, self.facts.baseline, self.facts.numerics)
        classes = classify_changes(config, self.facts.baseline, self.facts.numerics)
        if numerics == "semantic" and {name for name, kind in classes.items() if kind == "semantic"} <= BATCH_KNOBS:
            # After as many samples it has taken other steps, and may lag: only the samples it needs can be compared.
            # So with the metrics, but for those that the user gave a limit of their own.
            check = check_samples_to_loss(curves, baseline, speedup=speedup, predicted=predicted)
            named = self._check_metrics(curves, "rounding", names=set(self.max_drift.metrics))
            return (check, *named, *self._check_skips(config, curves))
        if numerics == "semantic":
            losses = [check_samples_to_loss(curves, baseline, speedup=speedup, predicted=None)]
        else:
            losses = self._check_losses(curves, exact=numerics == "exact", shown=shown)
        # What is still 0, and no worse, has not begun to tell anything: equal gradients do.
        self.zeros = self._find_zeros(curves) if shown and numerics != "semantic" else set()
        metrics = self._check_metrics(curves, numerics, names=set(self.facts.metrics) - self.zeros)
        checks = (*losses, *metrics, *self._check_skips(config, curves))
        self.is_noisy |= not self._compares_metrics and any(map(self._tells_nothing, checks))
        self.untold = tuple(filter(self._tells_nothing, checks)) if shown and numerics != "semantic" else ()
        return tuple(check for check in checks if check not in self.untold)

    @property
    def _has_own_limit(self) -> bool:
        """The user gave a limit for the training loss."""
        return self.max_drift.loss != DriftLimits().loss

    def _tells_nothing(self, check: QualityCheck) -> bool:
        """Return whether a check is too noisy to tell, and has no limit that the user gave: it may be no worse."""
        found, limits = check.difference, self.max_drift
        is_given = check.metric in limits.metrics if check.test == "metric" else self._has_own_limit
        is_noisy = check.verdict == "inconclusive" and found is not None and found.low <= 0.0 <= found.high
        return is_noisy and check.test in ("paired-losses", "metric") and not is_given

    def _check_losses(self, curves: tuple[LossCurve, ...], *, exact: bool, shown: bool) -> list[QualityCheck]:
        check = check_losses(curves, self.baseline_curves, margin=self.max_drift.loss, exact=exact)
        is_broken = check.verdict == "inferior" and check.difference is None
        if check.test == "exact-losses" or self.learns or is_broken:
            return [check]
        return [] if shown else [self._make_blind(self.baseline_curves)]

    def _make_blind(self, curves: tuple[LossCurve, ...]) -> QualityCheck:
        return self._leave_open(
            curves,
            "the baseline's own training loss does not fall by more than "
            f"{format_margin(self.max_drift.loss)} in these steps: nothing is learned that could be lost, so nothing "
            "can be judged",
        )

    def _leave_open(self, curves: tuple[LossCurve, ...], reason: str) -> QualityCheck:
        return QualityCheck(
            test="paired-losses",
            metric="training loss",
            difference=None,
            margin=self.max_drift.loss,
            verdict="inconclusive",
            seeds=len(curves),
            samples=min(curve.samples for curve in curves),
            reason=reason,
        )

    @property
    def learns(self) -> bool:
        """The baseline's losses fall enough for a drift to show in them; only once it was trained."""
        return has_learned(self.baseline_curves, margin=self.max_drift.loss.amount)

    @property
    def baseline_curves(self) -> tuple[LossCurve, ...]:
        """Losses of the baseline, one curve for each seed; empty until it was trained."""
        return self._baseline or ()

    def _find_zeros(self, curves: tuple[LossCurve, ...]) -> set[str]:
        """Return the metrics that are 0 for every seed of the baseline, of which no share can be lost, and none was."""
        zeros: set[str] = set()
        for name, direction in self.facts.metrics.items():
            before = {curve.seed: curve.metrics.get(name) for curve in self.baseline_curves}
            is_still_zero = bool(before) and all(value == 0.0 for value in before.values())
            found = [curve.metrics.get(name) for curve in curves if curve.seed in before]
            worse = [value is None or (value < 0.0 if direction == "maximize" else value > 0.0) for value in found]
            if is_still_zero and not any(worse) and self.max_drift.of(name).unit == "relative":
                zeros.add(name)
        return zeros

    def _check_skips(self, config: TrainConfig, curves: tuple[LossCurve, ...]) -> list[QualityCheck]:
        assert self._baseline is not None
        counted = all(curve.skipped is not None for curve in (*curves, *self._baseline))
        return [check_skipped_steps(curves, self._baseline)] if config.precision == "fp16" and counted else []

    @property
    def _compares_metrics(self) -> bool:
        return self.plan.evaluate and bool(self.facts.metrics)

    def _check_metrics(
        self, curves: tuple[LossCurve, ...], numerics: Numerics, *, names: set[str]
    ) -> list[QualityCheck]:
        limits = self.max_drift
        metrics = {name: direction for name, direction in self.facts.metrics.items() if name in names}
        assert self._baseline is not None
        if self._compares_metrics:
            return [
                check_metric(curves, self._baseline, name=name, direction=direction, margin=limits.of(name))
                for name, direction in metrics.items()
            ]
        if numerics == "semantic":
            return [_unjudged(name, limits.of(name)) for name in metrics or ("metric",)]
        asked = [name for name in metrics if name in limits.metrics or limits.of(name).amount < 0]
        return [_unjudged(name, limits.of(name)) for name in asked]


def _missing(candidate: TrialResult, seeds: list[int], margin: Margin) -> QualityCheck:
    ended = f"{candidate.status}: {candidate.error or candidate.cause or 'no losses'}"[:160]
    return QualityCheck(
        test="paired-losses",
        metric="training loss",
        difference=None,
        margin=margin,
        verdict="inferior",
        seeds=len(candidate.curves),
        samples=0,
        reason=f"it did not train with seed {seeds[0]} as the baseline did ({ended})",
    )


def _unjudged(metric: str, margin: Margin) -> QualityCheck:
    return QualityCheck(
        test="metric",
        metric=metric,
        difference=None,
        margin=margin,
        verdict="inconclusive",
        seeds=0,
        samples=0,
        reason="what changes or has to improve what is learned is judged by the metric, and it was not compared",
    )


def plan_drift(
    seconds: float,
    facts: TargetFacts,
    *,
    seconds_per_step: float,
    candidates: int,
    start_seconds: float | None = None,
    asked_steps: int | None = None,
    seed_seconds: float = 0.0,
    policy: LossCheckPolicy = USUAL_LOSS_CHECK,
) -> DriftPlan | None:
    """Return what fits the time: the metrics before more candidates; None when not even the least number of steps does.

    Args:
        seconds: for the baseline and all candidates together.
        facts: what the probe found.
        seconds_per_step: of the baseline.
        candidates: how many could be checked.
        start_seconds: what one arm spends before and between its seeds; None for a workload's.
        asked_steps: steps per seed that the user asked for; None to choose by the time.
        seed_seconds: what one more seed costs beside its steps.
        policy: how much is trained.
    """
    start_seconds = policy.start_seconds if start_seconds is None else start_seconds
    levels = (policy.good_steps, policy.least_steps)
    with_metric = [(count, wanted, True) for wanted in levels for count in range(candidates, 0, -1)]
    if asked_steps is not None:
        with_metric = [(count, asked_steps, True) for count in range(candidates, 0, -1)]
    losses_only = [(count, wanted, False) for count, wanted, _ in with_metric]
    for count, wanted, evaluate in [*with_metric, *losses_only]:
        if evaluate and facts.evaluate_seconds is None and facts.metrics:
            continue
        evaluation = (facts.evaluate_seconds or 0.0) if evaluate else 0.0
        arm_seconds = policy.usable_share * seconds / (1 + count) - start_seconds
        steps = int((arm_seconds / policy.seeds - evaluation) / max(seconds_per_step, 1e-6))
        if steps >= wanted:
            has_metric = evaluate and bool(facts.metrics)
            most = asked_steps or min(policy.most_steps, steps)
            # More seeds narrow the bound faster than longer trainings, which go apart by chance.
            each = max(1e-6, most * seconds_per_step + evaluation + seed_seconds)
            affordable = int((arm_seconds + policy.seeds * seed_seconds) / each)
            seeds = max(policy.seeds, min(policy.most_seeds, affordable))
            return DriftPlan(steps=most, evaluate=has_metric, candidates=count, seeds=seeds)
    return None


def least_drift_seconds(
    facts: TargetFacts,
    *,
    seconds_per_step: float,
    start_seconds: float | None = None,
    asked_steps: int | None = None,
    policy: LossCheckPolicy = USUAL_LOSS_CHECK,
) -> float:
    """Return the least time in which `plan_drift` finds a plan for one candidate, its metrics among it; as there."""
    evaluation = (facts.evaluate_seconds or 0.0) if facts.metrics else 0.0
    each = (asked_steps or policy.least_steps) * max(seconds_per_step, 1e-6) + evaluation
    start_seconds = policy.start_seconds if start_seconds is None else start_seconds
    # A thousandth more, lest rounding takes a step off.
    return 1.001 * 2 * (start_seconds + policy.seeds * each) / policy.usable_share
