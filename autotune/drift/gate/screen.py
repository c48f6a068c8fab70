"""The drift gate's cheap tests: seconds each, no training needed. Trials in, `QualityCheck`s out.

    loader knobs  ── tape ──────── the same samples, order, shapes, bytes
    batch split   ── additivity ── the gradient of a batch is that of its parts
    arithmetic    ── gradients ─── the same windows at the same weights, at the start and further on
                     schedule ──── the same steps at the same learning rates

Every test has the loader knobs, or everything but them, as the baseline has them, so that one cannot hide another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.drift.compare.additivity import check_additivity
from autotune.drift.compare.gradients import foresee, judge, may_tell
from autotune.drift.compare.noise_scale import gradient_noise_scale
from autotune.drift.gate.comparisons import (
    FARTHEST_REFERENCE,
    INITIAL,
    compare_points,
    compare_updates,
    excuse_draws,
    have_same_layers,
    is_rare,
    leave_updates_open,
    may_pass_later,
    report_other_model,
    report_unread,
    report_unrepeated,
    require_equality,
)
from autotune.drift.gate.data_checks import check_schedule, check_tape
from autotune.drift.gate.screen_trials import AGAIN, GateTrials, Run
from autotune.drift.gate.trace_plans import count_steps, end_while_learning, end_within_epoch
from autotune.drift.record.trace_file import GradientTrace, find_weights
from autotune.knobs import DATA_KNOBS, KNOBS, DriftTest
from autotune.records.config import TrainConfig, changed_fields, is_user_knob
from autotune.records.facts import TargetFacts
from autotune.records.quality import GradientEquivalence, QualityCheck
from autotune.records.script import Numerics
from autotune.records.trial import GradientPlan
from autotune.search.log import list_changes
from autotune.space import REORDERING_KNOBS, classify_changes, revert_knobs

_FEWER_DIGITS = frozenset({"precision=bf16", "precision=fp16", "matmul_precision=high", "matmul_precision=medium"})
CLOSER_WINDOWS = 64
"""Looked at where fewer leave it open, and so many would tell; at the initial weights only what is open there."""

_SAME_DIGITS = 1e-9
"""Of the gradient's variance: most that sums in another order make of it in float32 (seen: 1e-12), and fewer digits do
not (TF32 rounds at 5e-4 of each factor)."""

OPTIMIZER = "optimizer_implementation"

ALLOCATORS = frozenset({"host_allocator", "device_allocator"})

_REFERENCE_PRICE = 1.5
"""Of a script's own look at gradients, at least, for the same in float64; seen: 1.7 to 2.8 of it."""
_REFERENCE_PRICE_OF_CONVOLUTIONS = 5.0
"""The same of convolutions on a CPU, whose library has none in float64: they took 6 to 9 times as long."""

_MUCH_EARLIER = 0.75
"""Of the steps before the second point."""

_RISE = 0.01
"""A learning rate that is higher by this in the steps that were looked at is one of a warm-up."""


@dataclass
class Gate:
    """Tests candidates against one baseline.

    Attributes:
        facts: what the probe found.
        plan: how much is looked at, fixed before the first look at gradients; None as long as there is no time for any.
        run: runs a trial.
        knows_order: the target is a workload, whose loaders tell which samples they take.
        tape_steps: optimizer steps of which a script's data are looked at.
        affords: there is time for a candidate and the baseline by a longer plan.
        shown_by_launches: the check that exact changes, each `name=value`, lose nothing; None where launches have
            not shown it.
        repeats: launches of the baseline begin with the same losses.
        seconds_left: returns the time that is left for all of it.
        may_be_shown: a few steps of exact settings may show that they lose nothing.
        is_cut: the latest screening has left open what a look may tell that there was no time for.
        doubted: sets of changes, each `name=value`, that wait for a look in float64: without it they stay open.
        reference_seconds: that this look takes, as far as is known.
    """

    facts: TargetFacts
    plan: GradientPlan | None
    run: Run
    knows_order: bool = True
    tape_steps: int = 24
    affords: Callable[[GradientPlan], bool] = lambda _plan: False
    shown_by_launches: Callable[[frozenset[str]], QualityCheck | None] = lambda _changes: None
    repeats: Callable[[], bool] = lambda: True
    seconds_left: Callable[[], float] = lambda: math.inf
    may_be_shown: Callable[[TrainConfig], bool] = lambda _config: True
    doubted: set[frozenset[str]] = field(default_factory=set)
    reference_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.trials = GateTrials(
            self.run, self.facts.baseline, tape_steps=self.tape_steps, repeats_steps=not self.knows_order
        )
        self._screened: dict[str, tuple[QualityCheck, ...]] = {}
        self._keeps: dict[str, bool] = {}
        self.is_cut = False

    def screen(
        self, config: TrainConfig, *, shown: frozenset[DriftTest] = frozenset()
    ) -> tuple[QualityCheck, ...] | None:
        """Return the cheap tests that a config's changes ask for, up to the first that fails.

        None when there was no time for them. Semantic changes are put back first: trainings judge them, and
        everything where the baseline does not repeat itself.

        Args:
            config: the settings.
            shown: tests that need not be made: equal losses have shown the same.
        """
        baseline = self.facts.baseline
        semantic = [name for name, kind in self._classify(config).items() if kind == "semantic"]
        config = revert_knobs(config, baseline, semantic)
        self.is_cut = False
        if not self.repeats():
            return (report_unrepeated(),)
        if self.has_screened(config, shown=shown):
            return self._screened[_screen_key(config, shown)]
        checks: list[QualityCheck] = []
        tests: tuple[tuple[DriftTest, Callable[[TrainConfig], list[QualityCheck] | None]], ...] = (
            ("tape", self._test_tape),
            ("additivity", self._test_additivity),
            ("gradients", self._test_gradients),
        )
        for name, test in tests:
            if name not in asked_tests(config, baseline) - shown:
                continue
            found = test(config) if name == "tape" or self.plan is not None else None
            if found is None:
                return None
            checks += found
            if any(check.verdict == "inferior" for check in found):
                break
        if not self.is_cut:  # else there may be more time for it at its turn
            self._screened[_screen_key(config, shown)] = tuple(checks)
        return tuple(checks)

    def has_screened(self, config: TrainConfig, *, shown: frozenset[DriftTest] = frozenset()) -> bool:
        """Return whether the cheap tests of a config without semantic changes were made; arguments as of `screen`."""
        return _screen_key(config, shown) in self._screened

    @property
    def reads_tapes(self) -> bool:
        """The target has loaders whose data can be looked at: a script may have none."""
        return self.knows_order or bool(self.facts.training_loaders)

    @property
    def draws_random(self) -> bool:
        """The baseline was seen to draw random numbers: there is dropout or the like."""
        return self.facts.model.draws_random or self.trials.draws_random

    def noise_scale(self) -> float | None:
        """Return the gradient noise scale of the baseline in samples, at the latest point; None where it is not known.

        Source: McCandlish et al. 2018, appendix A.1.
        """
        result = None if self.plan is None else self.trials.launch(self.facts.baseline, "fidelity", self.plan)
        captures = None if result is None else self.trials.read(result)
        if captures is None:
            return None
        rows = captures.points[-1].gradients.rows
        return gradient_noise_scale(rows, captures.layers, batch_size=self.facts.baseline.effective_batch_size)

    @property
    def is_warming_up(self) -> bool:
        """The baseline's learning rate still rises in the steps that were looked at."""
        found = self.trials.find_baseline()
        if found is None:
            return False
        first, last = found.points[0].learning_rates[:1], found.points[-1].learning_rates[-1:]
        return bool(np.any(last > (1 + _RISE) * first))

    @property
    def _planned(self) -> GradientPlan:
        assert self.plan is not None
        return self.plan

    def _classify(self, config: TrainConfig) -> dict[str, Numerics]:
        return classify_changes(config, self.facts.baseline, self.facts.numerics)

    def _test_tape(self, config: TrainConfig) -> list[QualityCheck] | None:
        baseline = self.facts.baseline
        if not self.reads_tapes:
            return []  # a script that has no loader: its gradients show what it trains on
        others = [name for name in changed_fields(config, baseline) if name not in DATA_KNOBS and "." not in name]
        ours = self.trials.launch(revert_knobs(config, baseline, others), "tape")
        theirs = self.trials.launch(baseline, "tape")
        if ours is None or theirs is None:
            return None
        sources = self.facts.data.random_sources
        rounds = any(is_user_knob(name) and kind == "rounding" for name, kind in self._classify(config).items())
        return [check_tape(ours, theirs, random_sources=sources, whole=self.knows_order, rounds=rounds)]

    def _test_additivity(self, config: TrainConfig) -> list[QualityCheck] | None:
        baseline = self.facts.baseline
        exact = {"precision": "fp32", "compile_mode": "off", "matmul_precision": "highest"}
        if not self.knows_order:
            exact = {}  # a script casts and compiles by itself, and goes on doing so
        whole = baseline.replace(**exact)
        parts = whole.replace(
            micro_batch_size=config.micro_batch_size, gradient_accumulation_steps=config.gradient_accumulation_steps
        )
        casts = baseline.precision != "fp32" and not self.knows_order
        if parts == whole or casts:
            return []  # a script that casts rounds too much for this test; its gradients are compared anyway
        plan = self._planned.replace(later_steps=0, dropout=not self._has_dropout())
        ours, theirs = (self.trials.launch(one, "fidelity", plan) for one in (parts, whole))
        if ours is None or theirs is None:
            return None
        split, plain = self.trials.read(ours), self.trials.read(theirs)
        if split is None or plain is None:
            return [report_unread(ours if split is None else theirs, "additivity")]
        reordering = self.facts.additivity.reordering if self.facts.additivity else 0.0
        first, base = split.points[0].gradients, plain.points[0].gradients
        found = [check_additivity(first, base, plain.layers, reordering=reordering)]
        return self._excuse_draws(found) if theirs.draws_random else found

    def _test_gradients(self, config: TrainConfig) -> list[QualityCheck] | None:
        apart = self.check_allocators(config)
        if apart is None:
            return self._test_arithmetic(config)
        checks = self._test_arithmetic(revert_knobs(config, self.facts.baseline, ALLOCATORS))
        return None if checks is None else [*checks, apart]

    def _test_arithmetic(self, config: TrainConfig) -> list[QualityCheck] | None:
        baseline = self.facts.baseline
        # Copies are asynchronous from pinned memory alone.
        kept = {"pin_memory"} if "non_blocking" in changed_fields(config, baseline) else set()
        config = revert_knobs(config, baseline, set(DATA_KNOBS) - kept)
        if config == baseline:
            return []
        reorders = bool(REORDERING_KNOBS.intersection(changed_fields(config, baseline))) and self._has_dropout()
        rest = self.find_rest(config) if reorders else None
        checks = self._compare_gradients(config, dropout=not reorders, updates=rest is None)
        if checks is not None and reorders:
            checks = self._excuse_draws(checks)
        if checks is None or rest is None or any(check.verdict == "inferior" for check in checks):
            return checks
        more = self._compare_gradients(rest, dropout=True)
        return None if more is None else [*checks, *more]

    def find_rest(self, config: TrainConfig) -> TrainConfig | None:
        """Return what is to be compared with dropout of settings that draw their masks in another order.

        Without dropout a recomputation whose masks differ cannot be seen: it is the rest of the changes, but for those
        of which launches have shown that they lose nothing. None where nothing is left.
        """
        baseline = self.facts.baseline
        rest = self.leave_shown(revert_knobs(config, baseline, {*REORDERING_KNOBS, *DATA_KNOBS}))
        return None if rest == baseline else rest

    def find_unshown_allocators(self, config: TrainConfig) -> TrainConfig | None:
        """Return allocators alone whose equal losses would spare a config a look; None where they would not.

        Where its masks are drawn in another order it is the look with dropout: two, one of the baseline, unless it was
        made, and one of what is compared with dropout. Else it is a look at what was looked at without them.
        """
        baseline = self.facts.baseline
        alone = revert_knobs(config, baseline, set(changed_fields(config, baseline)) - ALLOCATORS)
        if alone == baseline or self.check_allocators(config) is not None or not self.may_be_shown(alone):
            return None
        reorders = bool(REORDERING_KNOBS.intersection(changed_fields(config, baseline))) and self.draws_random
        without = leave_optimizer(revert_knobs(config, baseline, {*ALLOCATORS, *DATA_KNOBS}), baseline)
        if self.plan is not None and without != baseline:
            look = self.choose_plan(without, dropout=not reorders)
            if self.trials.has_looked(without, look):
                return alone
        rest = self.find_rest(config) if reorders else None
        is_spared = rest is not None and set(changed_fields(rest, baseline)) <= {*ALLOCATORS, OPTIMIZER}
        return alone if is_spared else None

    def leave_shown(self, config: TrainConfig) -> TrainConfig:
        """Return a config without its allocators where launches have shown that these lose nothing."""
        is_shown = self.check_allocators(config) is not None
        return revert_knobs(config, self.facts.baseline, ALLOCATORS) if is_shown else config

    def check_allocators(self, config: TrainConfig) -> QualityCheck | None:
        """Return the check by launches that a config's allocators lose nothing; None where there is none."""
        baseline = self.facts.baseline
        changed = {name for name in ALLOCATORS if getattr(config, name) != getattr(baseline, name)}
        changes = frozenset(f"{name}={getattr(config, name)}" for name in changed)
        return self.shown_by_launches(changes) if changes else None

    def _excuse_draws(self, checks: list[QualityCheck]) -> list[QualityCheck]:
        result = self.trials.launch(self.facts.baseline, "fidelity", self._planned.replace(dropout=False))
        return excuse_draws(checks) if result is not None and result.draws_random else checks

    def _compare_gradients(
        self, config: TrainConfig, *, dropout: bool, updates: bool = True
    ) -> list[QualityCheck] | None:
        plan = self.choose_plan(config, dropout=dropout)
        checks = self._look(config, plan, updates=updates)
        # A look may have found that the later point has to come earlier.
        plan = plan.replace(later_steps=min(plan.later_steps, self._planned.later_steps))
        may_err = not self.has_fewer_digits(self._list_rounding(config))
        closer, first = self._find_closer(checks or [], plan), _find_closer_first(checks or [], plan, may_err=may_err)
        if closer is not None and self.affords(closer):
            return self._look(config, closer, updates=updates) or checks
        if first is not None and self.affords(first):
            return self._look(config, plan, updates=updates, first=first) or checks
        self.is_cut = self.is_cut or (first is not None and may_err)
        return checks

    def choose_plan(self, config: TrainConfig, *, dropout: bool = True) -> GradientPlan:
        """Return how much is looked at of a config: of fewer digits as much as was looked at closely of the baseline.

        What they are a part of will need as much.
        """
        plan = self._planned.replace(dropout=dropout)
        if not self.has_fewer_digits(self._list_rounding(config)):
            return plan
        looks = self._list_closer(plan)
        return next((look for look in looks if self.trials.has_run(self.facts.baseline, "fidelity", look)), plan)

    def _list_closer(self, plan: GradientPlan) -> list[GradientPlan]:
        """Return the closer looks that may follow a plan's: at both points, and at the later one alone."""
        first = plan.first_windows or plan.windows
        firsts = (None, first if first < CLOSER_WINDOWS else None)
        looks = (plan.replace(windows=CLOSER_WINDOWS, first_windows=one) for one in firsts)
        return [end_within_epoch(look, self.epoch_steps) for look in looks]

    def _find_closer(self, checks: Sequence[QualityCheck], plan: GradientPlan) -> GradientPlan | None:
        """Return a plan with more windows that may settle what a look has left open; None where there is none.

        What is open at the initial weights alone because of noise that passes once it is gone waits for the later
        point.
        """
        still = _list_still_open(checks, plan)
        at_both, at_later = self._list_closer(plan)
        closer = at_later if plan.later_steps > 0 and all(one.point != INITIAL for one in still) else at_both
        return None if closer == plan or not may_tell(still, windows=CLOSER_WINDOWS) else closer

    def _come_back_to_learning(self, plan: GradientPlan) -> GradientPlan:
        """Return a plan whose second point is earlier where the baseline has learned its data by heart up to it.

        A little earlier it would have done so as well, and another look at the baseline is not worth that.
        """
        theirs = self.trials.launch(self.facts.baseline, "fidelity", plan) if plan.later_steps else None
        if theirs is None or not theirs.curves:
            return plan
        earlier = end_while_learning(plan, theirs.curves[0])
        if earlier.later_steps > _MUCH_EARLIER * plan.later_steps:
            return plan
        self.plan = self._planned.replace(later_steps=earlier.later_steps)
        return earlier

    def _look(
        self, config: TrainConfig, plan: GradientPlan, *, updates: bool, first: GradientPlan | None = None
    ) -> list[QualityCheck] | None:
        """Compare gradients, and what an optimizer makes of them, which at weights that are held shows in no gradient.

        With gradients that are rounded otherwise, Adam makes full steps of rounding noise: it gets the baseline's own.

        Args:
            config: the settings.
            plan: of the look.
            updates: compare what the optimizer makes of them as well.
            first: of a look at the initial weights that takes the place of the plan's own there.
        """
        baseline, found, schedules = self.facts.baseline, list[GradientEquivalence](), list[QualityCheck]()
        arithmetic = leave_optimizer(config, baseline)
        if arithmetic != baseline:
            plan = self._come_back_to_learning(plan)
            arms = self._capture_points(arithmetic, plan, first)
            if not isinstance(arms, tuple):
                return arms
            if not have_same_layers(*arms):
                return [report_other_model()]
            found += self._compare_points(*arms, plan, self._list_rounding(arithmetic), first=first)
            schedules.append(check_schedule(arms[0].points[0], arms[1].points[0]))
        stepping = revert_knobs(config, baseline, set(changed_fields(config, baseline)) - self._stepping_knobs(config))
        if updates and stepping != baseline:
            first = plan.replace(windows=plan.first_windows or plan.windows, first_windows=None, later_steps=0)
            arms = self._capture_pair(stepping, first.replace(keeps_state=True))
            if not isinstance(arms, tuple):
                return arms
            if not have_same_layers(*arms):
                return [report_other_model()]
            found.append(compare_updates(*arms) if arms[0].points[0].updates.rows.shape[1] else leave_updates_open())
            schedules.append(check_schedule(arms[0].points[0], arms[1].points[0]))
        if not found:
            return []
        samples = (plan.windows + plan.later_steps) * baseline.effective_batch_size
        judged = judge(found, samples=samples if plan.later_steps else 0)
        schedule = next((one for one in schedules if one.verdict != "non-inferior"), schedules[0])
        return [schedule, require_equality(judged) if self._is_exact(config) else judged]

    def _compare_points(
        self,
        candidate: GradientTrace,
        base: GradientTrace,
        plan: GradientPlan,
        changes: frozenset[str],
        *,
        first: GradientPlan | None,
    ) -> list[GradientEquivalence]:
        found = compare_points(candidate, base, None, steps=plan.later_steps)
        if all(one.verdict == "non-inferior" for one in found):
            return found
        if self.has_fewer_digits(changes):
            return found  # it errs far more than the baseline (seen: 14,000 times), whatever it is held against
        is_later = any(one.point != INITIAL and one.verdict != "non-inferior" for one in found)
        reference = self._capture_reference(plan, changes, first=None if is_later else first or _leave_later(plan))
        if reference is None:
            return found
        farthest = FARTHEST_REFERENCE[self.facts.baseline.precision]
        return compare_points(candidate, base, reference, steps=plan.later_steps, farthest=farthest)

    def has_fewer_digits(self, changes: frozenset[str]) -> bool:
        """Return whether some changes, as `name=value`, compute a float32 training in fewer digits."""
        is_full = self.facts.baseline.precision == "fp32"
        return is_full and not all(map(self.keeps_digits, changes & _FEWER_DIGITS))

    def keeps_digits(self, change: str) -> bool:
        """Return whether a look has shown that a setting has as many digits here, as oneDNN's products on many CPUs.

        Args:
            change: as `name=value`; False of one that does not leave fewer digits.
        """
        if change in self._keeps or self.plan is None or change not in _FEWER_DIGITS:
            return self._keeps.get(change, False)
        baseline, plan, (name, value) = self.facts.baseline, self._planned, change.split("=")
        plans = (plan.replace(dropout=True), plan.replace(dropout=False))
        for look in (*plans, *(closer for one in plans for closer in self._list_closer(one))):
            ours = self.trials.read_look(baseline.replace(**{name: value}), look)
            theirs = self.trials.read_look(baseline, look)
            found = compare_points(ours, theirs, None, steps=look.later_steps) if ours and theirs else []
            if found:
                self._keeps[change] = max(map(_find_error, found)) <= _SAME_DIGITS
                break
        return self._keeps.get(change, False)

    def _is_exact(self, config: TrainConfig) -> bool:
        return all(kind == "exact" for kind in self._classify(config).values())

    def _stepping_knobs(self, config: TrainConfig) -> set[str]:
        """Return the knobs that may change what an optimizer does with a gradient."""
        return {OPTIMIZER} | {f"user_knobs.{name}" for name in config.user_knobs}

    def _capture_pair(
        self, config: TrainConfig, plan: GradientPlan
    ) -> tuple[GradientTrace, GradientTrace] | list[QualityCheck] | None:
        """Return a config's and the baseline's captures; a check that says why there are none; None without time."""
        theirs = self.trials.launch(self.facts.baseline, "fidelity", plan)
        if theirs is None:
            return None
        weights = find_weights(theirs.captures)
        # Without the baseline's weights there is no later point in common.
        ours = self.trials.launch(
            config, "fidelity", plan.replace(weights=weights, later_steps=plan.later_steps * bool(weights))
        )
        if ours is None:
            return None
        candidate, baseline = self.trials.read(ours), self.trials.read(theirs)
        if candidate is None or baseline is None:
            return [report_unread(ours if candidate is None else theirs, "gradients")]
        return candidate, baseline

    def _capture_points(
        self, config: TrainConfig, plan: GradientPlan, first: GradientPlan | None
    ) -> tuple[GradientTrace, GradientTrace] | list[QualityCheck] | None:
        """Return what `_capture_pair` does, with the initial weights as another look saw them, where there is one."""
        arms = self._capture_pair(config, plan)
        if first is None or not isinstance(arms, tuple):
            return arms
        looks = self._capture_pair(config, first)
        if not isinstance(looks, tuple):
            return looks
        if not all(map(have_same_layers, looks, arms)):
            return arms  # a shorter look: not every optimizer had its first step
        ours, theirs = (
            GradientTrace(arm.layers, (look.points[0], *arm.points[1:])) for arm, look in zip(arms, looks, strict=True)
        )
        return ours, theirs

    def _capture_reference(
        self, plan: GradientPlan, changes: frozenset[str], *, first: GradientPlan | None
    ) -> GradientTrace | None:
        """Return the baseline's captures in float64; None where it does not run, or there is no time for it.

        Args:
            plan: of the look that left something open.
            changes: that were looked at.
            first: of a look at the initial weights, where nothing else is open; None for both points.
        """
        theirs = self.trials.launch(self.facts.baseline, "fidelity", plan)
        share = 1.0 if first is None else count_steps(first) / count_steps(plan)
        least = 0.0 if first else self.reference_seconds
        # A script goes through all steps between the points again, in more digits.
        if theirs is not None and not self.knows_order:
            start = theirs.startup_seconds or 0.0
            least = max(least, start + self.reference_price * share * (theirs.elapsed_seconds - start))
        weights = find_weights(theirs.captures) if theirs and not first else None
        plan = (first or plan).replace(weights=weights, reference=True)
        plain = self.facts.baseline.replace(precision="fp32", compile_mode="off", matmul_precision="highest")
        had = self.seconds_left()
        if had < least and not self.trials.has_run(plain, "fidelity", plan):
            self._doubt(changes, least)
            return None
        result = self.trials.launch(plain, "fidelity", plan)
        if result is None:
            # It may have ended before its time: where the user has stopped.
            self._doubt(changes, max(least, AGAIN * (had - self.seconds_left())))
            return None
        self.doubted.clear()
        # Other random numbers in another width: another computation.
        return None if result.draws_random else self.trials.read(result)

    def _doubt(self, changes: frozenset[str], seconds: float) -> None:
        self.is_cut, self.reference_seconds = True, max(self.reference_seconds, seconds)
        if changes:  # what is exact asks for equality, which no reference shows
            self.doubted.add(changes)

    def price_doubts(self, config: TrainConfig) -> float:
        """Return what the look in float64 takes that a config's changes wait for, in seconds; 0 where none does."""
        changes = self._list_rounding(config)
        if self.has_fewer_digits(changes):
            return 0.0
        return self.reference_seconds if any(one <= changes for one in self.doubted) else 0.0

    def _list_rounding(self, config: TrainConfig) -> frozenset[str]:
        kinds = self._classify(config)
        return list_changes(config, self.facts.baseline, [name for name, kind in kinds.items() if kind == "rounding"])

    @property
    def reference_price(self) -> float:
        """Times a script's own look at gradients that the same takes in float64, at least."""
        convolves = self.facts.device == "cpu" and self.facts.model.has_4d_convolution
        return _REFERENCE_PRICE_OF_CONVOLUTIONS if convolves else _REFERENCE_PRICE

    @property
    def epoch_steps(self) -> int:
        """The optimizer steps of a script's epoch, after which it may validate; 0 where that is not known."""
        return 0 if self.knows_order else int(self.facts.steps_per_epoch or 0)

    def _has_dropout(self) -> bool:
        if self.draws_random:
            return True
        result = self.trials.launch(self.facts.baseline, "fidelity", self._planned)
        return result is None or result.draws_random

    def discard(self) -> None:
        """Delete what the trials wrote down: for a large model it is large."""
        self.trials.discard()


def _find_error(one: GradientEquivalence) -> float:
    """Return the most that gradients may differ by, as a share of their variance; of their size where all are one."""
    if one.noise is not None:
        return one.noise.high
    return math.inf if one.bias is None else one.bias.high**2


def _find_closer_first(checks: Sequence[QualityCheck], plan: GradientPlan, *, may_err: bool) -> GradientPlan | None:
    """Return a plan of the initial weights alone that may show that noise there is no more than passes once gone.

    Args:
        checks: of the look so far.
        plan: of it.
        may_err: the baseline may be seen to err as much, against float64.
    """
    still, steps = _list_still_open(checks, plan), plan.later_steps
    is_quiet = all(may_pass_later(foresee(one, windows=CLOSER_WINDOWS), steps=steps) for one in still)
    may_pass = bool(still) and (is_quiet or (may_err and all(map(is_rare, still))))
    closer = _leave_later(plan).replace(windows=CLOSER_WINDOWS)
    return closer if may_pass and closer.windows > _leave_later(plan).windows else None


def _leave_later(plan: GradientPlan) -> GradientPlan:
    """Return what a plan takes in at the initial weights."""
    return plan.replace(windows=plan.first_windows or plan.windows, first_windows=None, later_steps=0)


def _list_still_open(checks: Sequence[QualityCheck], plan: GradientPlan) -> list[GradientEquivalence]:
    """Return what a look has left open and the later point will not settle; nothing where something has failed."""
    if any(check.verdict == "inferior" for check in checks):
        return []
    left_open = [one for check in checks for one in check.fidelity if one.verdict == "inconclusive"]
    return [one for one in left_open if not may_pass_later(one, steps=plan.later_steps)]


def leave_optimizer(config: TrainConfig, baseline: TrainConfig) -> TrainConfig:
    """Return settings with the baseline's implementation of its optimizer: what is left computes the gradients."""
    return revert_knobs(config, baseline, {OPTIMIZER})


def asked_tests(config: TrainConfig, baseline: TrainConfig) -> frozenset[DriftTest]:
    """Return the cheap tests that the changes of a config ask for."""
    changed = changed_fields(config, baseline)
    asked: set[DriftTest] = {test for knob in KNOBS if knob.field in changed for test in knob.tests}
    # A knob of the user's own that is declared to be no more than rounding has to show it like every other.
    return frozenset(asked | ({"tape", "gradients"} if any(is_user_knob(name) for name in changed) else set()))


def _screen_key(config: TrainConfig, shown: frozenset[DriftTest]) -> str:
    return f"{config.key} {sorted(shown)}"
