"""Trainings of candidates beside the baseline, where gradients do not settle it: planned once, its arm run once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autotune.drift.compare.noise_scale import predicted_samples_ratio
from autotune.drift.gate.loss_check import DriftPlan, LossCheck
from autotune.drift.gate.training_runs import TrainingRuns
from autotune.records.config import TrainConfig
from autotune.records.quality import QualityCheck
from autotune.search.launch.starter import TrialStarter
from autotune.search.log import SearchLog
from autotune.sentences.loss_check import describe_untold


@dataclass(frozen=True)
class Arms:
    """What trainings may count on.

    Attributes:
        candidates: how many there may be.
        left: the seconds that are left for them.
        noise_scale: of the baseline's gradient, in samples; None where it is not known.
    """

    candidates: int
    left: Callable[[], float]
    noise_scale: Callable[[], float | None]


class Trainings:
    """Trains candidates beside the baseline.

    Args:
        log: of the search; the baseline's losses are added to it, and what could not be compared.
        starter: of the search's trials.
        learner: trains.
    """

    def __init__(self, log: SearchLog, starter: TrialStarter, learner: TrainingRuns) -> None:
        self._log, self._starter, self._learner = log, starter, learner
        self._drift: LossCheck | None = None

    def recall_baseline(self) -> None:
        """Add to the log what the baseline's trainings of earlier sessions lost."""
        self._log.add_baseline_trainings(self._learner.recall_baseline())

    @property
    def have_run(self) -> bool:
        """The baseline was trained for them."""
        return self._drift is not None and bool(self._drift.baseline_curves)

    @property
    def least_seconds(self) -> float:
        """The least time in which one more candidate can be judged by trainings."""
        return self._learner.least_seconds(self._drift.plan if self._drift is not None and self.have_run else None)

    @property
    def take_long(self) -> bool:
        """Whether one more candidate takes more of the time that is left than one should that needs no training."""
        share = self._log.problem.policy.loss_check.spare_share
        return self.least_seconds > share * self._starter.budget.remaining_seconds

    @property
    def shows_standstill(self) -> bool:
        """The baseline was trained for long enough to be seen to learn, and does not."""
        drift = self._drift
        return drift is not None and self.have_run and self._learner.is_long(drift.plan) and not drift.learns

    def check(self, config: TrainConfig, arms: Arms, *, shown: bool, lost: bool) -> tuple[QualityCheck, ...] | None:
        """Return the checks of paired trainings; None when there was no time for them.

        Args:
            config: the settings.
            arms: what they may count on.
            shown: its gradients were shown to be the baseline's: then a training in which nothing is learned does not
                take that back, and there is none where the time is only for so few steps that it would tell little.
            lost: its gradients differ by no more than is lost in a step's own noise.
        """
        log, problem = self._log, self._log.problem
        if self._drift is None:
            plan = self._learner.plan(arms.candidates, arms.left())
            if plan is None or (shown and not self._learner.tells(plan)):
                return None
            self._announce(plan)
            learn = partial(self._learner.learn, left=arms.left)
            facts, limits = problem.report.target, problem.state.max_drift
            self._drift = LossCheck(facts, limits, plan, learn, tries_first=problem.state.target.script is not None)
        elif shown and (self._drift.is_noisy or not self._learner.tells(self._drift.plan)):
            return None  # what could be lost would be lost in noise again
        entry = log.ranking.find(config)
        outlook = None if entry is None else math.exp(entry.speed)
        predicted = self._predict_samples(config, arms)
        lost = lost and self._learner.is_long(self._drift.plan)  # a short training learns nothing either
        checks = self._drift.check(config, speedup=outlook, predicted=predicted, shown=shown, lost=lost)
        if self._drift.baseline_curves:
            log.add_baseline_trainings(self._drift.baseline_curves)
        for name in sorted(self._drift.zeros):
            note = (
                f"{name} was not compared: under your own settings it is still 0 after {self._drift.plan.steps} steps"
            )
            if note not in log.notes:
                log.add_notes(note)
        log.add_notes(*map(describe_untold, self._drift.untold))
        return checks

    def find_lost(self, config: TrainConfig, left: Callable[[], float]) -> QualityCheck | None:
        """Return the check of a config whose losses are lost in noise by one seed already; None for any other.

        Args:
            config: the settings.
            left: the seconds that it may take; nothing is begun that takes more.
        """
        plan, seconds = self._learner.plan_one_seed()
        facts, limits = self._log.problem.report.target, self._log.problem.state.max_drift
        if self._drift is not None or facts.metrics or seconds > left():
            return None
        checks = LossCheck(facts, limits, plan, partial(self._learner.learn, left=left)).try_first(config, lost=True)
        return checks[0] if checks else None

    def _announce(self, plan: DriftPlan) -> None:
        self._starter.enter("drift", f"{plan.seeds} seeds of {plan.steps} steps for the baseline and each candidate")
        metrics = ", ".join(self._log.problem.report.target.metrics)
        if metrics and not plan.evaluate:
            self._log.add_notes(f"{metrics} was not compared: there was no time to evaluate")

    def _predict_samples(self, config: TrainConfig, arms: Arms) -> float | None:
        baseline = self._log.problem.baseline
        growth = config.effective_batch_size / baseline.effective_batch_size
        scale = arms.noise_scale() if growth != 1.0 else None
        if scale is None:
            return None
        return predicted_samples_ratio(scale, batch_size=baseline.effective_batch_size, factor=growth)
