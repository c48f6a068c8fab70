"""What one search has launched and found out. It only grows; where the search stands is derived from it.

launches, cuts, refusals ──▶ ranking, schedule, prices, suspects
checks, finals           ──▶ who leads, what is settled, the answer
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from autotune.records.config import TrainConfig, changed_fields, get_knob, is_user_knob
from autotune.records.objective import Objective
from autotune.records.quality import QualityCheck, is_passed
from autotune.records.trial import LossCurve, TrialResult, TrialStatus
from autotune.search.finals.finalist import Finalist, FinalsOutcome
from autotune.search.finals.rounds import FinalsPlan
from autotune.search.launch.prices import Prices
from autotune.search.launch.suspects import Ended, Suspects
from autotune.search.problem import SearchProblem
from autotune.search.scores.objective import Judged, draws_otherwise, score_trial, trim_launch
from autotune.search.scores.ranking import Entry, Ranking
from autotune.search.scores.schedule import Schedule
from autotune.space import classify_changes

GATE_PURPOSES = frozenset({"quality", "fidelity", "tape"})
"""Trials of the drift gate: nothing is timed in them."""

Checked = tuple[TrainConfig, tuple[QualityCheck, ...]]
_Derived = TypeVar("_Derived")


class SearchLog:
    """The log of one search: records are added, none is ever changed, and what is handed out does not grow.

    Args:
        problem: what the search has to solve.
        measured_seconds: inside measured blocks before the first launch: the probe's, where it was run now.
        interrupted_before: timings of earlier sessions that were cut.

    Attributes:
        takes_turns: launches may be timed in turns; until one has failed for it. Not what was found out, but how.
        clears_turns: one that has failed in turns has failed alone as well.
    """

    takes_turns = False
    clears_turns = False

    def __init__(self, problem: SearchProblem, *, measured_seconds: float = 0.0, interrupted_before: int = 0) -> None:
        self.problem = problem
        self._measured_seconds, self._gate_seconds = measured_seconds, 0.0
        self._interrupted_before = interrupted_before
        self._judged: tuple[Judged, ...] = ()
        self._estimates: Mapping[str, float] = {}
        self._last_ranking: Ranking | None = None
        self._earlier_launches = 0
        self._interrupted: tuple[TrialResult, ...] = ()
        self._refused: tuple[frozenset[str], ...] = ()
        self._hopeless: dict[str, TrainConfig] = {}
        self._written: frozenset[str] = frozenset()
        self._written_elsewhere: frozenset[str] = frozenset()
        self._checks: tuple[Checked, ...] = ()
        self._baseline_curves: tuple[LossCurve, ...] = ()
        self._finals: FinalsOutcome | None = None
        self._finals_plan: FinalsPlan | None = None
        self._settled: tuple[TrainConfig, ...] = ()
        self._attempted: frozenset[str] = frozenset()
        self._notes: tuple[str, ...] = ()
        self._has_repeatable_losses = True
        self._derived: dict[str, object] = {}

    # ---- what is added

    def add_trial(self, result: TrialResult) -> None:
        """Add what any trial of this session took, and what its script wrote."""
        self._measured_seconds += result.measurement.seconds if result.measurement else 0.0
        self._gate_seconds += result.elapsed_seconds if result.spec.purpose in GATE_PURPOSES else 0.0
        self.add_written(result)

    def add_written(self, result: TrialResult) -> None:
        """Add the files that a script made in a trial."""
        self._written |= frozenset(result.written)
        self._written_elsewhere |= frozenset(result.written_elsewhere)

    def add_launch(self, result: TrialResult) -> Judged:
        """Add a timing launch that was not cut, scored; refuse the user's values that it shows to drift."""
        problem = self.problem
        redraws = result.spec.config is not None and draws_otherwise(result.spec.config, problem.report.target)
        score = score_trial(result, problem.baseline_losses, problem.limits, other_draws=redraws)
        if score.status is TrialStatus.DRIFTED and result.spec.config == problem.baseline:
            self._take_back_drift()
        judged = Judged(
            trim_launch(result, problem.baseline_losses),
            score if self._has_repeatable_losses else score.without_drift(),
        )
        self.add_judged(judged)
        if judged.score.status is TrialStatus.DRIFTED:
            self.refuse_user_values(judged.config)
        return judged

    def _take_back_drift(self) -> None:
        """Screen no launch by its losses any more: the user's own settings would not pass; the loss check decides."""
        if not self._has_repeatable_losses:
            return
        self._has_repeatable_losses = False
        self._judged = tuple(Judged(one.result, one.score.without_drift()) for one in self._judged)
        self.add_notes(
            "the losses of your own settings differ from launch to launch by more than the limit, so that no setting "
            "was refused for its first steps: seed what your training draws, and they can be compared"
        )

    def add_earlier_launch(self, result: TrialResult) -> None:
        """Add a timing launch of an earlier session; all of them come before this session's own."""
        self.add_launch(result)
        self.add_written(result)
        self._earlier_launches = len(self._judged)

    def add_judged(self, *judged: Judged) -> None:
        """Add launches that are scored already."""
        self._judged = (*self._judged, *judged)
        self._derived = {}

    def add_estimates(self, estimates: Mapping[str, float]) -> None:
        """Add what all launches so far say of each config, its log speed-up by key; it takes the place of earlier."""
        self._estimates = estimates
        for name in ("ranking", "ranking_of_all", "schedule"):
            self._derived.pop(name, None)

    def add_interrupted(self, result: TrialResult) -> None:
        """Add a timing launch that the end of its time or the user cut; one during which the machine slept is none."""
        if result.cause == "disturbed":
            return
        self._interrupted = (*self._interrupted, result)
        self._derived = {}

    def add_hopeless(self, config: TrainConfig) -> None:
        """Add a config that is not tried because it cannot run by what the probe measured."""
        self._hopeless.setdefault(config.key, config)

    def refuse(self, changes: frozenset[str]) -> None:
        """Refuse changes of the baseline, each as `name=value`, wherever all of them are made together."""
        if changes not in self._refused:
            self._refused = (*self._refused, changes)
            self._derived = {}

    def refuse_user_values(self, config: TrainConfig) -> None:
        """Refuse the user knobs' values of a config that learned something else, where nothing but them can be why."""
        baseline = self.problem.baseline
        classes = classify_changes(config, baseline, self.problem.report.target.numerics)
        suspects = [name for name, kind in classes.items() if kind != "exact"]
        if suspects and all(is_user_knob(name) for name in suspects):
            self.refuse(list_changes(config, baseline, suspects))

    def add_checks(self, config: TrainConfig, checks: tuple[QualityCheck, ...]) -> None:
        """Add the loss checks of a config."""
        self._checks = (*self._checks, (config, checks))

    def add_baseline_trainings(self, curves: tuple[LossCurve, ...]) -> None:
        """Add the losses of the baseline's trainings, one curve for each seed."""
        self._baseline_curves = curves

    def add_attempt(self, config: TrainConfig) -> None:
        """Add that a config's turn to be proven has come."""
        self._attempted |= {config.key}

    def add_recalled_finals(self, plan: FinalsPlan, outcome: FinalsOutcome) -> None:
        """Add what the finals of earlier sessions have shown; what they left open may be taken up again."""
        self._finals, self._finals_plan = outcome, plan
        self._settle(outcome, [one for one in outcome.candidates if one.outcome == "no gain"])

    def add_finals(self, plan: FinalsPlan, outcome: FinalsOutcome) -> None:
        """Add what finals have shown, with those before them, by the plan of the last."""
        shown = outcome.winner or outcome.best
        self._finals = outcome
        if self._finals_plan is None or shown is None or shown.config in plan.finalists:
            self._finals_plan = plan
        # More pairs of what is futile would hardly show anything: the time is another's.
        self._settle(
            outcome, [one for one in outcome.candidates if one.failure or one.futile or one.outcome == "no gain"]
        )

    def _settle(self, outcome: FinalsOutcome, ended: Sequence[Finalist]) -> None:
        # Another is answered: more pairs of what is proven would change nothing.
        answered = [one for one in outcome.proven if one is not outcome.winner]
        self._settled = (*self._settled, *(one.config for one in (*ended, *answered)))

    def add_notes(self, *notes: str) -> None:
        """Add sentences for the user."""
        self._notes = (*self._notes, *notes)

    # ---- what was added

    @property
    def judged(self) -> tuple[Judged, ...]:
        """The timing launches in order, those of earlier sessions among them."""
        return self._judged

    @property
    def interrupted(self) -> tuple[TrialResult, ...]:
        """The timing launches of this session that were cut; they are not among `judged`."""
        return self._interrupted

    @property
    def interrupted_count(self) -> int:
        """How many timings were cut, in earlier sessions as well."""
        return self._interrupted_before + len(self._interrupted)

    @property
    def refused(self) -> tuple[frozenset[str], ...]:
        """Changes that were refused, each alone or together with others."""
        return self._refused

    @property
    def hopeless(self) -> tuple[TrainConfig, ...]:
        """Configs that were not tried because they cannot run by what the probe measured."""
        return tuple(self._hopeless.values())

    @property
    def written(self) -> frozenset[str]:
        """Files that a script made in its trials, all thrown away."""
        return self._written

    @property
    def written_elsewhere(self) -> frozenset[str]:
        """Files that it wrote outside of its view, which are real."""
        return self._written_elsewhere

    @property
    def measured_seconds(self) -> float:
        """Time inside measured blocks, over all trials of this session."""
        return self._measured_seconds

    @property
    def gate_seconds(self) -> float:
        """Time in trials of the drift gate."""
        return self._gate_seconds

    @property
    def checks(self) -> tuple[Checked, ...]:
        """Loss checks by config, in the order they were made."""
        return self._checks

    @property
    def baseline_curves(self) -> tuple[LossCurve, ...]:
        """Losses of the baseline's trainings among them, one curve for each seed."""
        return self._baseline_curves

    @property
    def finals(self) -> FinalsOutcome | None:
        """What all finals so far have shown; None before they were held."""
        return self._finals

    @property
    def finals_plan(self) -> FinalsPlan | None:
        """The plan of the finals that the answer is about; None before they were held."""
        return self._finals_plan

    @property
    def settled(self) -> tuple[TrainConfig, ...]:
        """Configs whose finals are over: failed, no gain, proven but not answered, or more pairs than there is time."""
        return self._settled

    @property
    def attempted(self) -> frozenset[str]:
        """Keys of the configs whose turn to be proven has come."""
        return self._attempted

    @property
    def notes(self) -> tuple[str, ...]:
        """For the user, one sentence each."""
        return self._notes

    def checks_of(self, config: TrainConfig) -> tuple[QualityCheck, ...]:
        """Return the loss checks of a config; empty when it was not checked."""
        return find_checks(self._checks, config)

    def samples_ratio_of(self, config: TrainConfig) -> float:
        """Return how many times the baseline's samples a config needs at most for the same loss; 1 where not known."""
        key = config.key
        passed = [checks for checked, checks in self._checks if checked.key == key and is_passed(checks)]
        return samples_ratio(passed[-1]) if passed else 1.0

    # ---- what follows from it

    @property
    def ranking(self) -> Ranking:
        """Where the configs stand, the refused ones left out."""
        return self._derive("ranking", lambda: self._rank(self.is_refused))

    @property
    def ranking_of_all(self) -> Ranking:
        """Where the configs stand, the refused ones among them."""
        return self._derive("ranking_of_all", lambda: self._rank(lambda _config: False))

    def _rank(self, is_refused: Callable[[TrainConfig], bool]) -> Ranking:
        problem = self.problem
        self._last_ranking = Ranking(
            self._judged,
            problem.baseline,
            planned_samples=problem.charged_samples,
            is_refused=is_refused,
            before=self._last_ranking,
            estimates=self._estimates,
            least_change_gain=problem.policy.least_change_gain,
            least_speed=problem.policy.least_speed if problem.objective is Objective.MEMORY else None,
        )
        return self._last_ranking

    @property
    def schedule(self) -> Schedule:
        """What decides which config is launched again."""
        problem = self.problem
        return self._derive(
            "schedule",
            lambda: Schedule(
                self._judged,
                problem.baseline,
                self.ranking,
                session_start=self._earlier_launches,
                policy=problem.policy,
            ),
        )

    @property
    def prices(self) -> Prices:
        """What launches will take, in seconds."""
        problem = self.problem
        return self._derive(
            "prices",
            lambda: Prices(
                problem.report,
                self._judged,
                self._interrupted,
                startup_seconds=self.startup_seconds,
                measure_seconds=problem.state.measure_seconds,
            ),
        )

    def find_suspects(self, *, count_overdue: bool, elsewhere: Iterable[Ended] = ()) -> Suspects:
        """Return which values have made launches fail.

        Args:
            count_overdue: a launch that was cut only late counts as timed out.
            elsewhere: how launches of other workers ended, where they share the study.
        """
        overdue = self.prices.overdue() if count_overdue else []
        results = [*(one.result.replace(status=one.score.status) for one in self._judged), *overdue]
        return Suspects(results, self.problem.baseline, self.problem.report.target.numerics, elsewhere=elsewhere)

    def is_refused(self, config: TrainConfig) -> bool:
        """Return whether a config makes a change that was refused."""
        baseline = self.problem.baseline
        changes = list_changes(config, baseline, changed_fields(config, baseline)) if self._refused else frozenset()
        return any(refused <= changes for refused in self._refused)

    @property
    def best(self) -> Entry | None:
        """The config with the highest score, unconfirmed; None before one was launched."""
        return max(self.ranking.entries, key=lambda one: one.score, default=None) if self._judged else None

    @property
    def baseline_rate(self) -> float:
        """The baseline's samples per second now; the probe's reading until it was launched."""
        if not self._judged or not self.ranking.baseline_level.values:
            return self.problem.report.measurement.samples_per_second
        return math.exp(self.ranking.baseline_level.level_now()[0])

    @property
    def seconds_per_step(self) -> float:
        """Of an optimizer step with the user's settings, at the rate that launches read now."""
        probed = self.problem.report.measurement
        return probed.seconds_per_step * probed.samples_per_second / self.baseline_rate

    @property
    def startup_seconds(self) -> float:
        """Of a process beside its steps, mostly until its first one: as most launches took, before them as the probe's.

        A workload's are those of the baseline, which are forked: another malloc library asks for a process of its own.
        """
        return self._derive("startup", self._find_startup)

    def _find_startup(self) -> float:
        is_script = self.problem.state.target.script is not None
        launched = [one.result for one in self._judged if is_script or one.config == self.problem.baseline]
        told = [one.starting_seconds for one in launched if one.status is TrialStatus.COMPLETED and one.startup_seconds]
        return statistics.median(told) if told else self.problem.startup_seconds

    def _derive(self, name: str, make: Callable[[], _Derived]) -> _Derived:
        """Return what follows from the log, made once until it grows."""
        if name not in self._derived:
            self._derived[name] = make()
        found: _Derived = self._derived[name]  # type: ignore[assignment]
        return found


def find_checks(checks: Sequence[Checked], config: TrainConfig) -> tuple[QualityCheck, ...]:
    """Return the first checks of a config; empty when it was not checked."""
    return next((found for checked, found in checks if checked == config), ())


def samples_ratio(checks: Sequence[QualityCheck]) -> float:
    """Return how many times the baseline's samples a config needs at most for the same loss; 1 where it is the same."""
    found = (check.difference for check in checks if check.test == "samples-to-loss")
    # A short run that is ahead proves nothing of a long one: what it may need less is no gain.
    return next((max(1.0, 1.0 + difference.high) for difference in found if difference is not None), 1.0)


def list_changes(config: TrainConfig, baseline: TrainConfig, names: Iterable[str]) -> frozenset[str]:
    """Return the changes that some knobs make to the baseline, each as `name=value`."""
    changed = changed_fields(config, baseline)
    return frozenset(f"{name}={get_knob(config, name)}" for name in names if name in changed)
