"""What a search has found, as its answer tells it: taken from the log whenever an answer is due."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.presets import load_presets
from autotune.records.config import Allowed, LearningRateRule, TrainConfig
from autotune.records.measurement import Measurement
from autotune.records.objective import Objective
from autotune.records.probe import ProbeReport
from autotune.records.profile import ParetoPoint, StopReason
from autotune.records.quality import Margin, QualityCheck
from autotune.records.trial import LossCurve
from autotune.search.answer.pareto import find_pareto
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.rounds import FinalsPlan
from autotune.search.log import Checked, SearchLog, find_checks
from autotune.search.policy import USUAL_POLICY
from autotune.search.scores.objective import Judged


@dataclass(frozen=True)
class Findings:
    """What a search has found so far.

    Attributes:
        report: of the probe.
        judged: the search's trials.
        checks: loss checks by config, in the order they were made.
        baseline_curves: losses of the baseline's trainings among them, one for each seed.
        plan: of the finals; None before they were planned.
        finals: None before they were run.
        stop_reason: why the search ended.
        notes: for the user, one sentence each.
        elapsed_seconds: of the whole command.
        measured_seconds: of these, inside measured blocks.
        gate_seconds: of these, in trials of the drift gate.
        planned_samples: of the final training; None when its length is not known.
        planned_seconds: it takes with the user's own settings; None when it was not given as a time.
        loss_limit: how much worse the training loss may get; None for the default.
        allowed: changes of what is learned that the user allows.
        learning_rate_rule: for effective batches other than the user's own.
        interrupted: launches that were cut, by the end of the time left or by the user; they are not among `judged`.
        knobs: there are to try.
        left_out: candidates that were not started, as they cannot run here.
        launch_seconds: that one more launch is expected to take; None when that is not known.
        least_gain: that a config has to have to lead, as a logarithm.
        objective: what is made best.
        pareto: throughput against memory, the fastest first.
    """

    report: ProbeReport
    judged: tuple[Judged, ...] = ()
    checks: tuple[Checked, ...] = ()
    baseline_curves: tuple[LossCurve, ...] = ()
    plan: FinalsPlan | None = None
    finals: FinalsOutcome | None = None
    stop_reason: StopReason = "running"
    notes: tuple[str, ...] = ()
    elapsed_seconds: float = 0.0
    measured_seconds: float = 0.0
    gate_seconds: float = 0.0
    planned_samples: float | None = None
    planned_seconds: float | None = None
    loss_limit: Margin | None = None
    allowed: tuple[Allowed, ...] = ()
    learning_rate_rule: LearningRateRule = "none"
    interrupted: int = 0
    knobs: tuple[str, ...] = ()
    left_out: int = 0
    launch_seconds: float | None = None
    least_gain: float = USUAL_POLICY.least_gain
    objective: Objective = Objective.THROUGHPUT
    pareto: tuple[ParetoPoint, ...] = ()

    def checks_of(self, config: TrainConfig) -> tuple[QualityCheck, ...]:
        """Return the loss checks of a config; empty when it was not checked."""
        return find_checks(self.checks, config)

    def timings_of(self, config: TrainConfig) -> tuple[Measurement, ...]:
        """Return every timing of a config in the search, then in the finals; the probe's is none of them."""
        searched = (one.result for one in self.judged if one.config == config)
        proven = (one for one in self.finals.results if one.spec.config == config) if self.finals is not None else ()
        return tuple(one.measurement for one in (*searched, *proven) if one.measurement is not None)


def collect_findings(log: SearchLog, *, elapsed_seconds: float, stop_reason: StopReason) -> Findings:
    """Return what a search has found so far.

    Args:
        log: of the search.
        elapsed_seconds: of the whole command.
        stop_reason: why it ended; `running` before that.
    """
    problem = log.problem
    return Findings(
        problem.report,
        judged=log.judged,
        checks=log.checks,
        baseline_curves=log.baseline_curves,
        plan=log.finals_plan,
        finals=log.finals,
        stop_reason=stop_reason,
        notes=log.notes,
        elapsed_seconds=elapsed_seconds,
        measured_seconds=log.measured_seconds,
        gate_seconds=log.gate_seconds,
        planned_samples=problem.planned_samples,
        planned_seconds=problem.planned_seconds,
        loss_limit=problem.state.max_drift.loss,
        allowed=problem.state.allowed,
        learning_rate_rule=problem.state.learning_rate_rule,
        interrupted=log.interrupted_count,
        knobs=problem.space.free_knobs,
        left_out=len(log.hopeless),
        launch_seconds=log.prices.launch_seconds(problem.baseline),
        least_gain=problem.policy.least_gain,
        objective=problem.objective,
        pareto=find_pareto(
            log.ranking,
            problem.space,
            (*load_presets(), *problem.state.presets),
            log.finals.results if log.finals is not None else (),
        ),
    )
