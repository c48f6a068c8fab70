"""From the candidates of a search to its finalists: cheap tests on each, trainings on the first; what fails is dropped.

candidate ── equal losses? ── screen ──▶ passed ── train ──▶ finalist
│ failed                    │ failed
└── leave one change out, find the guilty one, refuse it ── the rest is the next candidate

How long it may take is handed in with every call, and `needed_seconds` tells beforehand what a proof takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autotune.drift.gate.comparisons import accept_lost, are_lost_in_noise
from autotune.drift.gate.costs import ProofCosts, count_tape_steps
from autotune.drift.gate.culprit import find_culprit, promises
from autotune.drift.gate.exactness import EqualLosses
from autotune.drift.gate.paired_trainings import Arms, Trainings
from autotune.drift.gate.screen import ALLOCATORS, OPTIMIZER, Gate
from autotune.drift.gate.screen_trials import GatePurpose
from autotune.drift.gate.trace_plans import LookCosts, end_while_learning, end_within_epoch, list_smaller, plan_for_some
from autotune.drift.gate.training_runs import TrainingRuns
from autotune.drift.record.trace_file import have_captures
from autotune.knobs import DriftTest
from autotune.records.config import TrainConfig, changed_fields, get_knob, is_user_knob
from autotune.records.quality import CHEAP_TESTS, DriftLimits, QualityCheck, is_passed
from autotune.records.search import CheckedConfig, Screens
from autotune.records.trial import GradientPlan, TrialResult, TrialSpec, TrialStatus
from autotune.search.launch.starter import TrialStarter, TrialTask
from autotune.search.log import SearchLog, list_changes
from autotune.sentences.loss_check import describe_refusal
from autotune.space import classify_changes, numerics_of, revert_knobs

_REFERENCE_PATIENCE = 2.5
"""Times the patience with a look that one in float64 has: convolutions took up to nine times as long on a CPU."""

_OPEN_SHARE = 0.2
"""Of configs with fewer digits, that gradients leave open; judgement: they have shown or refused most public scripts'
(docs/recipes.md)."""
_DIGITS = ("precision", "matmul_precision")
"""Knobs that leave fewer digits to a product: with a user's own, all that does more than sum in another order."""


class GateStage:
    """The drift gate at work in one search.

    Args:
        log: of the search; every check is added to it, and what is refused.
        starter: starts the trials.
        known: trials of earlier sessions of this search.
        keep: called with what was shown so far, whenever there is more.
    """

    def __init__(
        self,
        log: SearchLog,
        starter: TrialStarter,
        known: Sequence[TrialResult] = (),
        *,
        keep: Callable[[Screens], None] = lambda _screens: None,
    ) -> None:
        problem = log.problem
        self._keep = keep
        self._policy = policy = problem.policy.loss_check
        self._log, self._starter = log, starter
        self._facts, self._baseline = problem.report.target, problem.baseline
        self._is_script = problem.state.target.script is not None
        self._tape_steps = count_tape_steps(problem.report.measurement.seconds_per_step, policy)
        self._equal_losses = EqualLosses(log)
        self._gate = self._make_gate()
        self._looks = [one for one in known if one.spec.purpose == "fidelity" and have_captures(one.captures)]
        for one in (*self._looks, *(one for one in known if one.spec.purpose == "tape")):
            if one.spec.quality_steps == self._tape_steps:
                self._gate.trials.recall(one)
        for one in known:
            if one.spec.purpose == "quality" and one.curves and self._trains_allocators_alone(one.spec):
                self._equal_losses.add(one)
        self._trainings = Trainings(log, starter, TrainingRuns(log, starter, known))
        self._deadline, self._look_speed = -math.inf, 1.0
        self._seen: set[str] = set()
        self._looked_after = -1
        self._refusal_notes: tuple[str, ...] = ()
        self._told_by_gradients: dict[frozenset[str], bool] = {}
        limits = problem.state.max_drift
        # An improvement that is asked for shows in the metric alone.
        self._must_train = any(limits.of(name).amount < 0 for name in self._facts.metrics)

    def _make_gate(self) -> Gate:
        return Gate(
            self._facts,
            None,
            self._run,
            knows_order=not self._is_script,
            tape_steps=self._tape_steps,
            affords=self._affords,
            shown_by_launches=self._equal_losses.show,
            repeats=self._equal_losses.repeats,
            seconds_left=self._left,
            may_be_shown=self._equal_losses.may_be_shown,
        )

    @property
    def _costs(self) -> ProofCosts:
        """What proofs cost at the speed that the machine has now."""
        return ProofCosts(
            self._facts,
            self._log.seconds_per_step,
            self._log.startup_seconds + self._policy.process_seconds,
            self._is_script,
            self._log.prices.compile_seconds,
            self._tape_steps,
            self._policy,
        )

    def restore(self, screens: Screens) -> None:
        """Take up what earlier sessions have shown; how closely they looked, where their gradients are still there."""
        for changes in screens.refused:
            self._log.refuse(frozenset(changes))
        for one in screens.checked:
            self._log.add_checks(one.config, one.checks)
            self._note_gradients(one.config, one.checks)
            self._log.add_attempt(one.config)
        for told, found in ((True, screens.told), (False, screens.untold)):
            self._told_by_gradients |= {frozenset(changes): told for changes in found}
        self._seen |= {*screens.seen}
        self._looked_after = screens.looked_after
        self._must_train = self._must_train or screens.must_train
        self._gate.doubted |= {frozenset(changes) for changes in screens.doubted}
        self._gate.reference_seconds = screens.reference_seconds
        self._trainings.recall_baseline()
        self._refusal_notes = screens.notes
        self._log.add_notes(*screens.notes)
        plan, looks = screens.plan, [one.spec.fidelity for one in self._looks]
        if plan is not None and any(look and look.replace(dropout=plan.dropout) == plan for look in looks):
            self._gate.plan = plan

    def _save(self) -> None:
        decided = ((config, checks) for config, checks in self._log.checks if is_passed(checks) or _failed(checks))
        self._keep(
            Screens(
                refused=tuple(tuple(sorted(changes)) for changes in self._log.refused),
                seen=tuple(sorted(self._seen)),
                looked_after=self._looked_after,
                plan=self._gate.plan,
                doubted=tuple(tuple(sorted(changes)) for changes in self._gate.doubted),
                reference_seconds=self._gate.reference_seconds,
                told=tuple(tuple(sorted(changes)) for changes, told in self._told_by_gradients.items() if told),
                untold=tuple(tuple(sorted(changes)) for changes, told in self._told_by_gradients.items() if not told),
                must_train=self._must_train,
                checked=tuple(CheckedConfig(config=config, checks=checks) for config, checks in decided),
                notes=self._refusal_notes,
            )
        )

    def needed_seconds(self, config: TrainConfig | None) -> float:
        """Return how long it would take from now to show that a config learns the same, by the least that can show it.

        Nothing for one that was shown already, or that is exact and whose launches had the baseline's losses bit for
        bit; its cheap tests for any other exact one; the gradients of the baseline, where they are not known yet, and
        its own for one that rounds; the least trainings on top for fp16, for semantic changes and where a metric has
        to improve. It is a prediction: what is left open takes more.

        Args:
            config: the settings; None for any that rounds, the least to keep back as long as nothing leads.
        """
        if config is not None and is_passed(self._log.checks_of(config)):
            return 0.0
        shown = frozenset[DriftTest]() if config is None else self._shown_by_losses(config)[0]
        return self._price_tests(config, shown)

    def expect_seconds(self, config: TrainConfig) -> float:
        """Return what it will hardly take more than: `needed_seconds`, and the least trainings where it may need them.

        Fewer digits, or what a user's own knob does, are seen in most gradients: then only a training can tell.
        """
        needed = self.needed_seconds(config)
        return needed + self._trainings.least_seconds if needed > 0.0 and self._may_be_trained(config) else needed

    def foretell_seconds(self, config: TrainConfig) -> float:
        """Return what `expect_seconds` will be of a config that is still to be launched.

        One that is exact is taken to have the baseline's losses then.
        """
        return self._foretell(config, 1.0)

    def average_seconds(self, config: TrainConfig) -> float:
        """Return the same on average, for what is weighed by its price: gradients mostly tell without trainings.

        What takes most of the time that is left is given up instead, and costs none.
        """
        affordable = self._log.problem.policy.most_reserve_share * self._starter.budget.remaining_seconds
        return self._foretell(config, _OPEN_SHARE if self._trainings.least_seconds <= affordable else 0.0)

    def price_answer(self, config: TrainConfig) -> float:
        """Return what an answer by a config costs, in seconds: its launch, and what shows that it learns the same.

        Where that is not shown all of it is lost: so many more are launched for one that answers.
        """
        risk = _OPEN_SHARE if self._may_be_trained(config) else 0.0
        return (self._log.prices.launch_seconds(config) + self.average_seconds(config)) / (1.0 - risk)

    def _foretell(self, config: TrainConfig, open_share: float) -> float:
        shown = self._shown_where_equal if self._is_exact(config) else frozenset()
        seconds = self._price_tests(config, shown)
        return seconds + open_share * self._trainings.least_seconds if self._may_be_trained(config) else seconds

    def _may_be_trained(self, config: TrainConfig) -> bool:
        """Return whether a config is trained where its gradients cannot tell: nobody has seen yet what these can."""
        unsure = self._list_unsure(config)
        is_open = not self._trains_all and not self._is_always_trained(config)
        return is_open and bool(unsure) and unsure not in self._told_by_gradients

    def _list_unsure(self, config: TrainConfig) -> frozenset[str]:
        """Return the changes that do more to a gradient than to sum it in another order, as `name=value`."""
        unsure = self._list_inexact(config, lambda name: name in _DIGITS or is_user_knob(name))
        return frozenset(change for change in unsure if not self._gate.keeps_digits(change))

    def _wants_reference(self, config: TrainConfig) -> bool:
        """Return whether a config will hardly pass without a look in float64, which may show that it is as exact."""
        unsure = self._list_unsure(config)
        return bool(unsure) and not self._gate.has_fewer_digits(unsure)

    def _list_inexact(
        self, config: TrainConfig, is_meant: Callable[[str], bool] = lambda _name: True
    ) -> frozenset[str]:
        """Return the changes of some knobs that round otherwise, or do more, as `name=value`."""
        changes = classify_changes(config, self._baseline, self._facts.numerics)
        names = [name for name, kind in changes.items() if kind != "exact" and is_meant(name)]
        return list_changes(config, self._baseline, names)

    def _note_gradients(self, config: TrainConfig, checks: Sequence[QualityCheck]) -> None:
        """Note whether gradients have told that a config's changes learn the same: elsewhere they tell as much.

        What only sums in another order is left open where gradients jump, as a sparse attention's do.
        """
        compared = [check.verdict == "non-inferior" for check in checks if check.test == "gradients"]
        changes = self._list_unsure(config) or self._list_inexact(config)
        waits = any(doubted <= changes for doubted in self._gate.doubted)  # a look in float64 may still tell
        if compared and changes and (all(compared) or not waits):
            # What else a config changes may have left it open, or have failed: that takes nothing back.
            self._told_by_gradients[changes] = all(compared) or self._told_by_gradients.get(changes, False)

    def _price_tests(self, config: TrainConfig | None, shown: frozenset[DriftTest]) -> float:
        seconds = self._costs.of_screening(config, self._gate, shown=shown)
        if self._trains_all or (config is not None and self._is_always_trained(config)):
            seconds += self._trainings.least_seconds
        return seconds

    def find_early_part(self, config: TrainConfig) -> TrainConfig | None:
        """Return what of a config is looked at while the search goes on; None for nothing that was not seen yet.

        What leaves fewer digits comes first and alone: most is built on it, and nothing else fails as often. Another
        implementation of an optimizer waits for its turn: it hardly ever fails, and changes its steps alone.
        """
        new = [name for name, change in self._list_early(config).items() if change not in self._seen]
        digits = [name for name in new if name in _DIGITS]
        others = [name for name in changed_fields(config, self._baseline) if name not in digits]
        later = others if digits else ALLOCATORS
        return revert_knobs(config, self._baseline, later) if new else None

    def _list_early(self, config: TrainConfig) -> dict[str, str]:
        """Return what may be looked at early: each change as `name=value`, by its knob."""
        changes = classify_changes(config, self._baseline, self._facts.numerics)
        rounding = [name for name, kind in changes.items() if kind == "rounding" and name != OPTIMIZER]
        return {name: f"{name}={get_knob(config, name)}" for name in rounding}

    def look_at(self, config: TrainConfig, *, seconds: float, most_seconds: float | None = None) -> None:
        """Screen a part of a promising config while the search goes on: nothing is to be built on what drifts.

        Args:
            config: the settings.
            seconds: that it may take.
            most_seconds: the same of fewer digits that are much faster; None for no more.
        """
        part = self.find_early_part(config)
        if part is None:
            return
        self._grant(seconds)
        # Equal losses are no proof that it rounds nowhere, but enough to go on with until its turn comes.
        if self._equal_losses.find(config) is None:
            entry = self._log.ranking.find(config)
            # What a part of it gains is not known; with a root of the whole the plan is hardly ever too large.
            speed = math.exp(max(0.0, entry.speed) / 2) if entry else 1.0
            self._open_gate(seconds, self._policy.early_candidates, is_unsure=self._wants_reference(part), speed=speed)
            self._open_gate(seconds, self._policy.early_candidates, speed=speed)
            checks = self._screen_early(part, most_seconds or 0.0, speed=speed) if self._gate.plan is not None else ()
            if checks is None:
                self._save()
                return
            self._note_gradients(part, checks)
            if any(check.verdict == "inferior" for check in checks):
                self._refuse(part, checks, seen=config)
            elif self._list_unsure(part) and not is_passed(checks) and not self._gate.is_cut:
                self._try_training(part, checks, seen=config)
        self._seen |= {*self._list_early(part).values()}
        self._looked_after = max((one.result.spec.number for one in self._log.judged), default=0)
        self._save()

    def _screen_early(self, part: TrainConfig, most_seconds: float, *, speed: float) -> tuple[QualityCheck, ...] | None:
        """Screen fewer digits with the time for a closer look where they are part of something much faster."""
        is_worth_it = speed**2 >= self._policy.worth_a_closer_look
        if is_worth_it and self._gate.has_fewer_digits(self._list_unsure(part)):
            share = self._policy.early_closer_share * self._starter.budget.seconds
            self._grant(max(self._left(), min(share, most_seconds)))
            self._look_speed = speed
        checks = self._gate.screen(part)
        self._look_speed = 1.0
        return checks

    def _try_training(self, part: TrainConfig, checks: tuple[QualityCheck, ...], *, seen: TrainConfig) -> None:
        """Train one seed of what gradients have left open: what trainings cannot show is not built on either."""
        self._grant(self._policy.early_share * self._starter.budget.seconds)
        lost = self._trainings.find_lost(part, self._left)
        if lost is not None:
            self._refuse(part, (*checks, lost), seen=seen)

    def has_looked_at(self, config: TrainConfig) -> bool:
        """Return whether a config was not launched again after the latest look that came to its end."""
        return all(one.result.spec.number <= self._looked_after for one in self._log.judged if one.config == config)

    def choose(
        self,
        candidates: Sequence[TrainConfig],
        *,
        seconds: float,
        is_provable: Callable[[TrainConfig], bool] = lambda _config: True,
    ) -> list[TrainConfig]:
        """Return the finalists: shown to learn as well, the most promising first; every check goes to the log.

        Args:
            candidates: the most promising first.
            seconds: that it may take for all of them.
            is_provable: returns whether there is time for the loss check of one and for its finals; another has its
                turn only after these.
        """
        log = self._log
        self._grant(seconds)
        self._open_late(candidates, seconds)
        queue, passed, tested = list(candidates), list[TrainConfig](), 0
        while queue and len(passed) < self._policy.most_finalists and tested < self._policy.most_tested:
            queue = [one for one in queue if not (log.is_refused(one) or one in passed or one == self._baseline)]
            config = self._find_next(queue, is_provable)
            if config is None or self._starter.should_stop():
                break
            queue.remove(config)
            tested += 1
            checks = self._test(config, len(candidates))
            if checks is None:
                continue
            log.add_checks(config, checks)
            if is_passed(checks):
                passed.append(config)
                continue
            rest = self._refuse(config, checks)
            # Trainings that drift although the gradients are the same leave it open which change it was.
            failed = _failed(checks)
            self._must_train |= bool(failed) and all(check.test not in CHEAP_TESTS for check in failed)
            if rest is not None and promises(
                log.ranking_of_all.measured, self._baseline, config, rest, least_gain=log.problem.policy.least_gain
            ):
                queue = [rest, *(one for one in queue if one != rest)]
        self._save()
        return passed

    def _find_next(
        self, queue: Sequence[TrainConfig], is_provable: Callable[[TrainConfig], bool]
    ) -> TrainConfig | None:
        """Return the first that there is time for with all that it may need, or else with the least that it needs."""
        left = self._left()
        likely = (one for one in queue if self.expect_seconds(one) <= left and is_provable(one))
        return next(likely, None) or next((one for one in queue if self.needed_seconds(one) <= left), None)

    def close(self) -> None:
        """Delete the gradients and weights that the gate's trials wrote; what they showed is kept."""
        self._gate.discard()

    def _test(self, config: TrainConfig, candidates: int) -> tuple[QualityCheck, ...] | None:
        """Return every check of a config; None when there was no time for those that it needs."""
        self._train_allocators(config)
        shown, equal = self._shown_by_losses(config)
        screened = self._gate.screen(config, shown=shown)
        if screened is None and self._gate.plan is not None:
            return None
        checks = (*(screened or ()), *equal)
        if any(check.verdict == "inferior" for check in checks):
            return checks
        if self._is_exact(config) and is_passed(checks) and not self._must_train:
            return checks
        compared = any(check.test == "gradients" for check in checks)
        self._note_gradients(config, checks)
        needs_training = (
            self._must_train
            or self._is_always_trained(config)
            or not is_passed(checks)
            or not (compared or self._is_exact(config))
        )
        if not needs_training and not self._list_unsure(config) and self._may_spare_trainings:
            return checks  # its gradients are the baseline's but for the order of their sums
        # In a warm-up next to nothing is learned yet, however many steps there are.
        is_lost = are_lost_in_noise(checks) and not self._gate.is_warming_up
        trained = self._trainings.check(
            config,
            Arms(min(self._policy.most_finalists, candidates), self._left, self._gate.noise_scale),
            shown=not needs_training,
            lost=is_lost,
        )
        if trained is not None:
            return (*(accept_lost(checks) if is_lost and self._trainings.shows_standstill else checks), *trained)
        return None if needs_training else checks

    @property
    def _may_spare_trainings(self) -> bool:
        """Whether trainings that nothing needs take much of the time that is left, and the user asked for none."""
        state = self._log.problem.state
        script, metrics = state.target.script, self._facts.metrics
        is_asked = script is not None and bool(script.quality_steps or script.quality_epochs or metrics)
        return self._trainings.take_long and not is_asked and state.max_drift == DriftLimits()

    def _trains_allocators_alone(self, spec: TrialSpec) -> bool:
        changed = set() if spec.config is None else set(changed_fields(spec.config, self._baseline))
        return bool(changed) and changed <= ALLOCATORS and spec.seeds == (self._log.problem.state.seed,)

    def _train_allocators(self, config: TrainConfig) -> None:
        """Train a few steps with a config's allocators alone, where its losses may spare a much longer look."""
        alone = self._gate.find_unshown_allocators(config)
        if alone is None or not self._equal_losses.repeats():
            return
        seconds = self._left()
        if seconds < self._policy.least_seconds or self._starter.should_stop():
            return
        costs = self._costs
        task = TrialTask(steps=self._tape_steps, seeds=(self._log.problem.state.seed,))
        full = costs.wait_for(costs.start_seconds + self._tape_steps * costs.seconds_per_step)
        result = self._starter.launch(alone, "quality", min(seconds, full), task=task, ends_with_stage=seconds < full)
        if result.status is not TrialStatus.INTERRUPTED:
            self._equal_losses.add(result)

    @property
    def _trains_all(self) -> bool:
        """Whether whatever changes something is trained, whatever it is."""
        return self._must_train or not self._equal_losses.repeats()

    def _is_always_trained(self, config: TrainConfig) -> bool:
        numerics = numerics_of(config, self._baseline, self._facts.numerics)
        inexact = self._list_inexact(config)
        is_open = any(changes <= inexact for changes in self._left_open)
        return numerics == "semantic" or config.precision == "fp16" or is_open

    @property
    def _left_open(self) -> list[frozenset[str]]:
        return [changes for changes, told in self._told_by_gradients.items() if not told]

    def list_open(self) -> list[frozenset[str]]:
        """Return the changes, as `name=value`, that gradients have left open, and that no training has shown yet."""
        passed = [self._list_inexact(config) for config, checks in self._log.checks if is_passed(checks)]
        return [changes for changes in self._left_open if not any(changes <= shown for shown in passed)]

    def _shown_by_losses(self, config: TrainConfig) -> tuple[frozenset[DriftTest], tuple[QualityCheck, ...]]:
        """Return the tests that an exact config need not take and the check instead: its launches lost nothing.

        A workload's loader is looked at all the same, for the ends of the epoch; a script's tape tells no more.
        """
        if not self._is_exact(config):
            return frozenset(), ()
        equal = self._equal_losses.find(config)
        if equal is None:
            return frozenset(), ()
        return self._shown_where_equal, (equal,)

    @property
    def _shown_where_equal(self) -> frozenset[DriftTest]:
        return frozenset(("tape", "gradients") if self._is_script else ("gradients",))

    def _is_exact(self, config: TrainConfig) -> bool:
        return numerics_of(config, self._baseline, self._facts.numerics) == "exact"

    def _refuse(
        self, config: TrainConfig, checks: tuple[QualityCheck, ...], *, seen: TrainConfig | None = None
    ) -> TrainConfig | None:
        """Refuse the guilty change of a config that failed; return what is left of it, None when that is nothing.

        Args:
            config: the settings.
            checks: that failed.
            seen: what was launched, where that is more than these.
        """
        log = self._log
        blame = find_culprit(self._gate, config, checks)
        refused = list_changes(config, self._baseline, blame.knobs)
        entry = log.ranking.find(seen or config)
        log.refuse(refused)
        note = describe_refusal(sorted(refused), checks, entry.speed if entry else None)
        self._refusal_notes = (*self._refusal_notes, note)
        log.add_notes(note)
        return blame.rest

    def _grant(self, seconds: float) -> None:
        self._deadline = self._starter.budget.now() + seconds

    def _left(self) -> float:
        return max(0.0, self._deadline - self._starter.budget.now())

    def _open_gate(self, seconds: float, candidates: int, *, is_unsure: bool = False, speed: float = 1.0) -> None:
        """Fix how much is looked at, where that is not done and there is time for any.

        Args:
            seconds: that it may take.
            candidates: to look at.
            is_unsure: the first of them will hardly pass without a look in float64, which may take no more either.
            speed: theirs, times the baseline's.
        """
        if self._gate.plan is None:
            reference = self._gate.reference_price if is_unsure else 0.0
            costs = self._costs
            look = LookCosts(costs.seconds_per_step, costs.start_seconds, self._is_script, reference, speed)
            plan = plan_for_some(seconds, look, candidates=candidates)
            plan = plan and end_while_learning(plan, self._log.problem.baseline_losses)
            plan = plan and end_within_epoch(plan, self._gate.epoch_steps)
            # One point is a weaker proof than two, whatever else there is time for.
            self._gate.plan = None if is_unsure and plan is not None and not plan.later_steps else plan

    def _open_late(self, candidates: Sequence[TrainConfig], seconds: float) -> None:
        """Fix how much is looked at of the candidates, so that trainings have their part where it is enough for any."""
        costs = (self._costs.of_screening(one, self._gate, shown=self._shown_by_losses(one)[0]) for one in candidates)
        count = min(self._policy.candidates, sum(cost > 0 for cost in costs))
        trainings = self._trainings.least_seconds
        must = self._trains_all or any(map(self._is_always_trained, candidates))
        may = must or any(map(self._may_be_trained, candidates[:1]))
        is_fixed = self._gate.plan is not None
        is_unsure = any(map(self._wants_reference, candidates[:1]))
        if trainings <= (1 - self._policy.screen_share) * seconds:
            self._open_gate(self._policy.screen_share * seconds, count, is_unsure=is_unsure)
        self._open_gate(seconds - trainings * may, 1 if may else count, is_unsure=is_unsure)
        self._open_gate(seconds - trainings * may, 1 if may else count)
        self._open_gate(seconds - trainings * must, count)
        if is_fixed or not candidates or self._gate.plan is None:
            return
        plans = list_smaller(self._gate.plan)
        for price in (self.expect_seconds, self.needed_seconds):  # with all that goes with it
            for plan in plans:
                self._gate.plan = plan
                if price(candidates[0]) <= seconds:
                    return

    def _affords(self, plan: GradientPlan) -> bool:
        """Return whether there is time for a closer look at one candidate, which is likely to tell.

        It leaves most of the gate's time for the others, or takes no longer than the trainings that it spares.
        """
        own, theirs = (self._costs.of_trial(self._baseline, plan, goes_on=later) for later in (True, self._is_script))
        is_known = self._gate.trials.has_run(self._baseline, "fidelity", plan)
        closer, left = own * (not is_known) + theirs / self._look_speed, self._left()
        return closer <= max(self._policy.closer_share * left, min(left, self._trainings.least_seconds))

    def _run(
        self, config: TrainConfig, purpose: GatePurpose, *, plan: GradientPlan | None, steps: int
    ) -> TrialResult | None:
        seconds = self._left()
        least = max(self._policy.least_seconds, self._gate.trials.least_seconds(config, purpose, plan))
        if seconds < least or self._starter.should_stop():
            return None
        full = self._costs.patience(config, plan)
        if plan is not None and plan.reference:
            full *= _REFERENCE_PATIENCE
        task = TrialTask(steps=steps, fidelity=plan)
        result = self._starter.launch(config, purpose, min(seconds, full), task=task, ends_with_stage=seconds < full)
        if result.status is not TrialStatus.INTERRUPTED:
            return result
        if not self._starter.should_stop():
            self._gate.trials.note_cut(config, purpose, plan, seconds)
        return None


def _failed(checks: tuple[QualityCheck, ...]) -> list[QualityCheck]:
    return [check for check in checks if check.verdict == "inferior"]
