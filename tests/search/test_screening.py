"""The cheap tests of the drift gate on trials made up in memory: what is asked, compared, and made of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_factory
from record_factory import make_interval, make_spec
from simulated import BASELINE, Machine

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.gate.comparisons import (
    compare_points,
    compare_updates,
    have_same_layers,
    report_other_model,
    report_unread,
)
from autotune.drift.gate.costs import ProofCosts
from autotune.drift.gate.culprit import Blame, find_culprit
from autotune.drift.gate.data_checks import MOST_SKIPPED, check_schedule, check_skipped_steps, check_tape
from autotune.drift.gate.screen import CLOSER_WINDOWS, Gate
from autotune.drift.gate.trace_plans import (
    PLANS,
    LookCosts,
    end_while_learning,
    end_within_epoch,
    list_smaller,
    plan_fidelity,
    price_step,
)
from autotune.drift.record.trace_file import TRACE_FILE, WEIGHTS_FILE, GradientTrace, Point, read_trace, write_trace
from autotune.knobs import DATA_KNOBS
from autotune.records import LossCurve, Margin, QualityCheck, TargetFacts, TrainConfig, TrialStatus
from autotune.records.config import Precision, changed_fields
from autotune.records.quality import GradientEquivalence
from autotune.records.trial import GROWTH_STEPS, DataTrace, GradientPlan, TrialResult
from autotune.space import numerics_of, revert_knobs

PLAN = GradientPlan(windows=12, later_steps=10)
COLUMNS = 64
OWN = "user_knobs.kernel"
COMPLETED, CRASHED = TrialStatus.COMPLETED, TrialStatus.CRASHED


def make_facts(**changes: Any) -> TargetFacts:
    """Return the usual facts, of a target with a knob of its own that is declared to be mere rounding."""
    usual: dict[str, Any] = {
        "baseline": BASELINE.replace(user_knobs={"kernel": "old"}),
        "knobs": {"kernel": ("old", "new")},
        "numerics": {OWN: "rounding"},
    }
    return Machine(facts=usual | changes).find_facts()


FACTS = make_facts()
BASE = FACTS.baseline
SPLIT: dict[str, Any] = {"micro_batch_size": 16, "gradient_accumulation_steps": 2}
EQUAL = record_factory.make_check(test="equal-launches", difference=None)
KERNEL: dict[str, Any] = {"user_knobs": {"kernel": "new"}}


def make_rows(windows: int = PLAN.windows, columns: int = COLUMNS, *, seed: int = 1) -> Any:
    return 0.3 + np.random.default_rng(seed).standard_normal((windows, columns))


def make_point(rows: Any, updates: Any = None, *, rate: Any = 1e-3, every: int = 32) -> Point:
    keys = every * np.arange(1, 1 + len(rows))
    rates = np.broadcast_to(np.atleast_1d(rate), (len(rows), np.size(rate))).astype(np.float64)
    return Point(GradientRows(keys, rows), GradientRows(keys, -1e-3 * rows if updates is None else updates), rates)


def make_layers(*names: str) -> RowLayout:
    width = COLUMNS // max(1, len(names))
    return RowLayout(names, np.full(len(names), width), np.full(len(names), width))


@dataclass
class Runs:
    """Runs trials in no time: every config has the baseline's captures and tape, up to what is planted.

    Attributes:
        folder: where captures are written.
        error: relative error of a config's gradients; a sequence has one number for each point.
        noise: of its gradients at the two points, as a share of their variance.
        jump: of its gradients in one window of twelve at the initial weights, in times what they vary by.
        own_jump: the same of the baseline against float64, and the first window that does.
        update_error: the same of its updates, beside that of its gradients.
        every: samples between two of its optimizer steps.
        rate: its learning rate.
        order: what its loader hands over, in a word.
        names: of its parameters.
        fate: how its trials end.
        draws: there is dropout.
        rows: gradients of so many windows.
        points: a config's captures have.
        losses: after so many steps between the points; None where trials do not tell.
        most: trials that there is time for.
    """

    folder: Path
    error: Callable[[TrainConfig, GradientPlan], float] = lambda _config, _plan: 0.0
    noise: Callable[[TrainConfig], tuple[float, float]] = lambda _config: (0.0, 0.0)
    jump: Callable[[TrainConfig], float] = lambda _config: 0.0
    own_jump: tuple[float, int] = (0.0, 0)
    update_error: Callable[[TrainConfig], float] = lambda _config: 0.0
    every: Callable[[TrainConfig], int] = lambda _config: 32
    rate: Callable[[TrainConfig], float] = lambda _config: 1e-3
    order: Callable[[TrainConfig], str] = lambda _config: "usual"
    names: Callable[[TrainConfig], tuple[str, ...]] = lambda _config: ("weight", "bias")
    fate: Callable[[TrainConfig, str], TrialStatus] = lambda _config, _purpose: COMPLETED
    draws: bool = False
    rows: Callable[[int], Any] = make_rows
    points: Callable[[TrainConfig], int] = lambda _config: 2
    losses: Callable[[int], float] | None = None
    most: int | None = None
    calls: list[tuple[TrainConfig, str, GradientPlan | None]] = field(default_factory=list)

    def __call__(
        self, config: TrainConfig, purpose: Any, *, plan: GradientPlan | None, steps: int
    ) -> TrialResult | None:
        if self.most is not None and len(self.calls) >= self.most:
            return None
        assert steps >= 1
        assert (plan is None) == (purpose == "tape")
        self.calls.append((config, purpose, plan))
        result = make_result(config, status=self.fate(config, purpose))
        result = result.replace(spec=result.spec.replace(purpose=purpose, fidelity=plan))
        if result.status is not COMPLETED:
            return result
        if plan is None:
            return result.replace(tape=make_tape(order=self.order(config)))
        steps = range(plan.later_steps if self.losses else 0)
        losses = tuple(self.losses(step) for step in steps if self.losses)
        curves = (LossCurve(seed=0, samples=32 * len(losses), losses=losses),) if losses else ()
        draws = self.draws and plan.dropout
        return result.replace(captures=self._write(config, plan), draws_random=draws, curves=curves)

    def _write(self, config: TrainConfig, plan: GradientPlan) -> str:
        folder = self.folder / f"{len(self.calls):04d}"
        folder.mkdir()
        luck = np.random.default_rng(len(self.calls))

        def make(windows: int, noise: float) -> Point:
            rows = self.rows(windows) * (1 + self.error(config, plan))
            if numerics_of(config, BASE) != "exact" or (plan.reference and self.own_jump[0]):
                rows = rows + max(1e-6, math.sqrt(noise)) * luck.standard_normal(rows.shape)
            updates = -1e-3 * rows * (1 + self.update_error(config))
            return make_point(rows, updates, rate=self.rate(config), every=self.every(config))

        first, later = self.noise(config)
        points = [make(plan.first_windows or plan.windows, first)]
        size, place = self.own_jump if plan.reference else (self.jump(config), 7)
        jumps = points[0].gradients.rows[place::12]
        jumps += size * luck.standard_normal(jumps.shape)
        if plan.later_steps:
            points = [*points, make(plan.windows, later)][: self.points(config)]
        write_trace(folder / TRACE_FILE, GradientTrace(make_layers(*self.names(config)), points))
        if plan.later_steps and plan.weights is None:
            (folder / WEIGHTS_FILE).touch()
        return str(folder / TRACE_FILE)

    def of(self, purpose: str) -> list[tuple[TrainConfig, GradientPlan | None]]:
        return [(config, plan) for config, kind, plan in self.calls if kind == purpose]

    def plans_of(self, config: TrainConfig) -> list[GradientPlan]:
        return [plan for one, _, plan in self.calls if one == config and plan is not None]


def make_result(config: TrainConfig = BASE, *, status: TrialStatus = COMPLETED, **changes: Any) -> TrialResult:
    """Return what a trial for the gradients of a config came to, one that fails with its reason."""
    failed = {} if status is COMPLETED else {"cause": "user-error", "error": "it broke"}
    spec = make_spec(config, purpose="fidelity")
    return record_factory.make_result(spec, status=status, **(failed | changes))


def make_tape(*, order: str = "usual", count: int = 4, **changes: Any) -> DataTrace:
    usual: dict[str, Any] = {
        "batches": tuple(f"{order}{number}" for number in range(count)),
        "shapes": ("int64[32]",) * count,
        "ends": (f"{order} end", f"{order} next"),
        "end_shapes": ("int64[7]", "int64[32]"),
        "order": order,
        "samples": 1000,
    }
    return DataTrace(**(usual | changes))


def make_gate(runs: Runs, facts: TargetFacts = FACTS, **changes: Any) -> Gate:
    return Gate(facts, PLAN, runs, **changes)


def screen(runs: Runs, changes: dict[str, Any], facts: TargetFacts = FACTS, **options: Any) -> tuple[QualityCheck, ...]:
    checks = make_gate(runs, facts, **options).screen(facts.baseline.replace(**changes))
    assert checks is not None
    return checks


def outcome(checks: Sequence[QualityCheck]) -> list[tuple[str, str]]:
    return [(check.test, check.verdict) for check in checks]


def subjects(checks: Sequence[QualityCheck]) -> list[str]:
    return [one.subject for check in checks for one in check.fidelity]


def is_cast(config: TrainConfig) -> bool:
    return config.precision == "bf16"


PASSED = "non-inferior"

# Which tests are asked


@pytest.mark.parametrize(
    ("changes", "tests", "compared"),
    [
        ({}, [], []),
        ({"num_workers": 2}, ["tape"], []),
        ({"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}, ["tape"], []),
        ({"pin_memory": True}, ["tape"], []),
        ({"host_allocator": "glibc-tuned"}, ["schedule", "gradients"], ["gradients"] * 2),
        ({"device_allocator": "expandable-segments"}, ["schedule", "gradients"], ["gradients"] * 2),
        ({"precision": "bf16"}, ["schedule", "gradients"], ["gradients"] * 2),
        ({"compile_mode": "default"}, ["schedule", "gradients"], ["gradients"] * 2),
        ({"num_threads": 1, "memory_format": "channels_last"}, ["schedule", "gradients"], ["gradients"] * 2),
        ({"optimizer_implementation": "fused"}, ["schedule", "gradients"], ["updates"]),
        (SPLIT, ["additivity", "schedule", "gradients"], ["gradients"] * 2),
        (KERNEL, ["tape", "schedule", "gradients"], ["gradients", "gradients", "updates"]),
        (
            {**SPLIT, **KERNEL, "num_workers": 2, "precision": "bf16"},
            ["tape", "additivity", "schedule", "gradients"],
            ["gradients", "gradients", "updates"],
        ),
        ({"learning_rate_scale": 2.0}, [], []),
        ({"micro_batch_size": 64}, [], []),
    ],
)
def test_a_change_asks_for_the_tests_of_its_row(
    tmp_path: Path, changes: dict[str, Any], tests: list[str], compared: list[str]
) -> None:
    runs = Runs(tmp_path)
    checks = screen(runs, changes)
    assert outcome(checks) == [(test, PASSED) for test in tests]
    assert subjects(checks) == compared
    assert bool(runs.of("tape")) is ("tape" in tests)
    assert bool(runs.of("fidelity")) is ("gradients" in tests)


def test_only_the_initial_weights_are_compared_where_the_plan_has_no_later_point(tmp_path: Path) -> None:
    gate = Gate(FACTS, PLAN.replace(later_steps=0), Runs(tmp_path))
    checks = gate.screen(BASE.replace(precision="bf16"))
    assert checks is not None
    assert [one.point for one in checks[-1].fidelity] == ["initial weights"]
    assert checks[-1].samples == 0


def test_a_check_of_gradients_tells_how_far_the_training_had_come(tmp_path: Path) -> None:
    check = screen(Runs(tmp_path), {"precision": "bf16"})[-1]
    assert [one.point for one in check.fidelity] == ["initial weights", "after 10 steps"]
    assert check.samples == (12 + 10) * 32


def test_the_first_test_that_fails_is_the_last(tmp_path: Path) -> None:
    runs = Runs(tmp_path, order=lambda config: "other" if config.num_workers else "usual")
    checks = screen(runs, {"num_workers": 2, "precision": "bf16", **SPLIT})
    assert outcome(checks) == [("tape", "inferior")]
    assert runs.of("fidelity") == []


def test_a_batch_that_is_not_its_parts_fails_before_any_gradient_is_compared(tmp_path: Path) -> None:
    runs = Runs(tmp_path, error=lambda config, _plan: 1e-3 * (config.micro_batch_size == 16))
    assert outcome(screen(runs, {**SPLIT, "precision": "bf16"})) == [("additivity", "inferior")]
    assert all(not is_cast(config) for config, _ in runs.of("fidelity"))


@pytest.mark.parametrize(("error", "verdict"), [(0.1, "inferior"), (0.03, "inconclusive"), (1e-3, PASSED)])
def test_gradients_are_judged_by_their_error(tmp_path: Path, error: float, verdict: str) -> None:
    runs = Runs(tmp_path, error=lambda config, _plan: error * is_cast(config))
    assert outcome(screen(runs, {"precision": "bf16"})) == [("schedule", PASSED), ("gradients", verdict)]


@pytest.mark.parametrize("changes", [KERNEL, {"optimizer_implementation": "fused"}], ids=["own knob", "optimizer"])
def test_an_optimizer_that_does_something_else_with_the_same_gradients_is_caught(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = BASE.replace(**changes)
    checks = screen(Runs(tmp_path, update_error=lambda one: 0.1 * (one == config)), changes)
    assert outcome(checks)[-1] == ("gradients", "inferior")
    assert "updates, initial weights" in checks[-1].reason


def test_updates_are_compared_without_the_changes_that_round_gradients(tmp_path: Path) -> None:
    changes = {"optimizer_implementation": "fused", "precision": "bf16"}
    runs = Runs(tmp_path, update_error=lambda one: 0.1 * is_cast(one))
    checks = screen(runs, changes)
    assert subjects(checks) == ["gradients", "gradients", "updates"]
    assert outcome(checks)[-1] == ("gradients", PASSED)
    fused = BASE.replace(optimizer_implementation="fused")
    assert len(runs.plans_of(fused)) == 1


def test_steps_of_other_lengths_are_another_training(tmp_path: Path) -> None:
    runs = Runs(tmp_path, every=lambda config: 16 if is_cast(config) else 32)
    assert outcome(screen(runs, {"precision": "bf16"}))[0] == ("schedule", "inferior")


def test_other_learning_rates_are_another_training(tmp_path: Path) -> None:
    runs = Runs(tmp_path, rate=lambda config: 2e-3 if is_cast(config) else 1e-3)
    assert outcome(screen(runs, {"precision": "bf16"})) == [("schedule", "inferior"), ("gradients", PASSED)]


# What is run


def test_the_baseline_is_captured_once_for_all_candidates(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    gate = make_gate(runs)
    for changes in ({"precision": "bf16"}, {"host_allocator": "glibc-tuned"}, {"num_threads": 1, "num_workers": 2}):
        assert gate.screen(BASE.replace(**changes)) is not None
    assert runs.plans_of(BASE) == [PLAN]
    assert len(runs.of("fidelity")) == 4
    assert [config for config, _ in runs.of("tape")] == [BASE.replace(num_workers=2), BASE]
    assert gate.screen(BASE.replace(num_workers=1)) is not None
    assert [config for config, _ in runs.of("tape")].count(BASE) == 1


def test_a_config_is_screened_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    gate = make_gate(runs)
    first = gate.screen(BASE.replace(precision="bf16"))
    ran = len(runs.calls)
    assert gate.screen(BASE.replace(precision="bf16")) == first
    assert len(runs.calls) == ran


def test_where_the_baseline_has_learned_by_heart_gradients_are_looked_at_before(tmp_path: Path) -> None:
    def err_at_the_end(config: TrainConfig, plan: GradientPlan) -> float:
        return 0.03 if is_cast(config) and plan.later_steps > 60 else 0.0

    runs = Runs(tmp_path, error=err_at_the_end, losses=lambda step: 2.0 * 0.97**step)
    gate = Gate(FACTS, PLANS[0], runs)
    (schedule, check) = gate.screen(BASE.replace(precision="bf16")) or ()
    assert schedule.verdict == check.verdict == "non-inferior"
    looks = [plan.later_steps for _, _, plan in runs.calls if plan is not None]
    assert looks == [200, 47, 47]  # 0.97^45 is a quarter
    gate.screen(BASE.replace(memory_format="channels_last"))
    assert [plan.later_steps for _, _, plan in runs.calls[3:] if plan is not None] == [47]


def test_a_little_less_learned_is_not_worth_another_look_at_the_baseline(tmp_path: Path) -> None:
    runs = Runs(tmp_path, losses=lambda step: 2.0 * 0.992**step)  # 0.992^173 is a quarter
    assert Gate(FACTS, PLANS[0], runs).screen(BASE.replace(precision="bf16"))
    assert [plan.later_steps for _, _, plan in runs.calls if plan is not None] == [200, 200]


def is_noisy(first: float, later: float) -> Callable[[TrainConfig], tuple[float, float]]:
    """Return the noise of gradients in bf16 at the two points, that of 12 windows of the later one left open."""
    return lambda config: (first, later) if is_cast(config) else (0.0, 0.0)


def test_where_a_later_point_is_left_open_more_windows_are_looked_at_there_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path, noise=is_noisy(0.02, 0.001))
    checks = make_gate(runs, affords=lambda _plan: True).screen(BASE.replace(precision="bf16"))
    assert checks is not None
    assert outcome(checks) == [("schedule", PASSED), ("gradients", PASSED)]
    assert [(one.windows, one.is_transient) for one in checks[-1].fidelity] == [(12, True), (CLOSER_WINDOWS, False)]
    closer = [plan for _, _, plan in runs.calls if plan is not None and plan.windows == CLOSER_WINDOWS]
    assert [(plan.first_windows, plan.later_steps) for plan in closer] == [(PLAN.windows, PLAN.later_steps)] * 2


def test_where_the_first_point_is_left_open_more_windows_are_looked_at_there_too(tmp_path: Path) -> None:
    runs = Runs(tmp_path, noise=is_noisy(0.001, 0.0))
    checks = make_gate(runs, affords=lambda _plan: True).screen(BASE.replace(precision="bf16"))
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", PASSED)
    assert [one.windows for one in checks[-1].fidelity] == [CLOSER_WINDOWS] * 2


@pytest.mark.parametrize(("first", "later"), [(0.5, 0.001), (0.3, 0.03)])
def test_no_closer_look_is_taken_where_it_tells_nothing(tmp_path: Path, first: float, later: float) -> None:
    runs = Runs(tmp_path, noise=is_noisy(first, later))
    checks = make_gate(runs, affords=lambda _plan: True).screen(BASE.replace(precision="bf16"))
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", "inferior")
    assert {plan.windows for _, _, plan in runs.calls if plan is not None} == {PLAN.windows}


def jump_when_compiled(size: float) -> Callable[[TrainConfig], float]:
    """Return how far gradients of compiled code jump where sums in another order choose otherwise."""
    return lambda config: size if config.compile_mode == "default" else 0.0


def test_where_gradients_jump_in_the_first_steps_more_windows_show_how_seldom(tmp_path: Path) -> None:
    runs, compiled = Runs(tmp_path, jump=jump_when_compiled(0.7)), BASE.replace(compile_mode="default")
    assert outcome(make_gate(runs).screen(compiled) or ())[-1] == ("gradients", "inconclusive")
    checks = make_gate(runs, affords=lambda _plan: True).screen(compiled)
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", PASSED)
    assert [(one.windows, one.is_transient) for one in checks[-1].fidelity] == [(CLOSER_WINDOWS, True), (12, False)]
    looks = [(plan.windows, plan.later_steps) for plan in runs.plans_of(compiled)]
    assert looks == [(12, PLAN.later_steps)] * 2 + [(CLOSER_WINDOWS, 0)]  # of the other gate, too


@pytest.mark.parametrize(("place", "windows"), [(6, 12), (13, CLOSER_WINDOWS)])
def test_gradients_that_jump_as_the_baselines_do_are_as_exact(tmp_path: Path, place: int, windows: int) -> None:
    jump, compiled = jump_when_compiled(1.5), BASE.replace(compile_mode="default")
    runs = Runs(tmp_path, jump=jump, own_jump=(1.5, place))
    checks = make_gate(runs, affords=lambda _plan: True).screen(compiled)
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", PASSED)
    (first, later) = checks[-1].fidelity
    assert (first.windows, later.windows) == (windows, 12)
    assert first.reference_ratio == pytest.approx(math.sqrt(2), rel=0.3)
    # In float64 no step is taken between the points: it is the initial weights alone that are open.
    references = [plan for _, plan in runs.of("fidelity") if plan is not None and plan.reference]
    assert [(plan.windows, plan.later_steps) for plan in references] == [(12, 0), (64, 0)][: 1 + (windows > 12)]


@pytest.mark.parametrize(("noise", "looked"), [(1e-12, True), (1e-4, False)])
def test_what_was_seen_to_keep_its_digits_is_held_against_float64(tmp_path: Path, noise: float, looked: bool) -> None:
    medium = BASE.replace(matmul_precision="medium")
    both = medium.replace(compile_mode="default")
    runs = Runs(tmp_path, jump=jump_when_compiled(1.5), own_jump=(1.5, 6))
    runs.noise = lambda config: (noise, noise) if config.matmul_precision == "medium" else (0.0, 0.0)
    gate, changes = make_gate(runs), frozenset({"matmul_precision=medium", "compile_mode=default"})
    assert gate.has_fewer_digits(changes)  # as long as nothing was seen of it
    gate.screen(medium)
    assert gate.has_fewer_digits(changes) is not looked
    assert gate.has_fewer_digits(frozenset({"precision=bf16"}))
    assert outcome(gate.screen(both) or ())[-1] == ("gradients", PASSED if looked else "inconclusive")
    assert any(plan is not None and plan.reference for _, plan in runs.of("fidelity")) is looked


@pytest.mark.parametrize(("error", "kept"), [(1e-6, True), (1e-3, False)])
def test_digits_of_a_gradient_that_is_always_the_same_are_seen_by_its_size(
    tmp_path: Path, error: float, kept: bool
) -> None:
    medium = BASE.replace(matmul_precision="medium")
    runs = Runs(
        tmp_path,
        error=lambda config, _plan: error * (config == medium),
        rows=lambda windows: np.ones((windows, COLUMNS)),
    )
    gate = make_gate(runs)
    gate.screen(medium)
    assert gate.keeps_digits("matmul_precision=medium") is kept
    assert not gate.keeps_digits("num_threads=1")


def test_what_there_was_no_time_to_look_at_more_closely_is_looked_at_again(tmp_path: Path) -> None:
    compiled, affords = BASE.replace(compile_mode="default"), [False]
    runs = Runs(tmp_path, jump=jump_when_compiled(1.5), own_jump=(1.5, 13))
    gate = make_gate(runs, affords=lambda _plan: affords[0])
    assert outcome(gate.screen(compiled) or ())[-1] == ("gradients", "inconclusive")
    assert gate.is_cut
    affords[0], looks = True, len(runs.calls)
    assert outcome(gate.screen(compiled) or ())[-1] == ("gradients", PASSED)
    assert not gate.is_cut
    assert len(runs.calls) == looks + 3  # of more windows alone: both arms, and float64


def test_a_closer_look_at_a_script_ends_before_its_first_epoch(tmp_path: Path) -> None:
    samples = BASE.effective_batch_size * 130
    facts = make_facts(data=record_factory.make_data(sample_count=samples))
    runs, compiled = Runs(tmp_path, noise=lambda _config: (0.0, 0.001)), BASE.replace(compile_mode="default")
    plan = PLAN.replace(later_steps=100)
    Gate(facts, plan, runs, knows_order=False, affords=lambda _plan: True).screen(compiled)
    looks = [(plan.first_windows, plan.windows, plan.later_steps) for plan in runs.plans_of(compiled)]
    assert looks == [(None, 12, 100), (12, CLOSER_WINDOWS, 130 - 12 - CLOSER_WINDOWS)]


@pytest.mark.parametrize(("is_script", "share"), [(True, 1.0), (False, 24 / 34)])
def test_a_look_is_begun_with_most_of_what_its_part_of_the_own_took(
    tmp_path: Path, is_script: bool, share: float
) -> None:
    trials = make_gate(Runs(tmp_path), knows_order=not is_script).trials
    result, candidate = trials.launch(BASE, "fidelity", PLAN), BASE.replace(compile_mode="default")
    assert result is not None
    least = trials.least_seconds(candidate, "fidelity", PLAN.replace(weights="of the baseline"))
    assert least == pytest.approx(0.6 * share * result.elapsed_seconds)


def test_gradients_that_jump_where_the_baselines_do_not_stay_open(tmp_path: Path) -> None:
    runs, compiled = Runs(tmp_path, jump=jump_when_compiled(1.5)), BASE.replace(compile_mode="default")
    checks = make_gate(runs, affords=lambda _plan: True).screen(compiled)
    assert outcome(checks or ())[-1] == ("gradients", "inconclusive")
    assert [plan.windows for plan in runs.plans_of(compiled)] == [12, CLOSER_WINDOWS]


def test_no_more_windows_are_looked_at_where_fewer_digits_jump_too_far(tmp_path: Path) -> None:
    runs, cast = Runs(tmp_path, jump=lambda config: 2.0 * is_cast(config)), BASE.replace(precision="bf16")
    checks = make_gate(runs, affords=lambda _plan: True).screen(cast)
    assert outcome(checks or ())[-1] == ("gradients", "inconclusive")
    assert {plan.windows for plan in runs.plans_of(cast)} == {12}


def test_what_has_fewer_digits_may_jump_in_the_first_steps_too(tmp_path: Path) -> None:
    runs = Runs(tmp_path, jump=lambda config: 0.7 * is_cast(config))
    gate, cast = make_gate(runs, affords=lambda _plan: True), BASE.replace(precision="bf16")
    both = cast.replace(memory_format="channels_last")
    for config in (cast, both):
        assert outcome(gate.screen(config) or ())[-1] == ("gradients", PASSED)
    for config in (cast, both):
        assert [plan.windows for plan in runs.plans_of(config)] == [12, CLOSER_WINDOWS]
    assert [plan.windows for plan in runs.plans_of(BASE)] == [12, CLOSER_WINDOWS]  # once for both


def test_a_closer_look_ends_where_the_training_had_learned_its_data_by_heart(tmp_path: Path) -> None:
    runs = Runs(tmp_path, noise=is_noisy(0.0, 0.001), losses=lambda step: 2.0 * 0.97**step)
    checks = Gate(FACTS, GradientPlan(windows=12, later_steps=100), runs, affords=lambda _plan: True).screen(
        BASE.replace(precision="bf16")
    )
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", PASSED)
    assert [(plan.windows, plan.later_steps) for _, _, plan in runs.calls if plan] == [
        (12, 100),  # the baseline's, which shows that it has learned most by then
        *[(12, 47)] * 2,
        *[(CLOSER_WINDOWS, 47)] * 2,
    ]


def test_what_is_open_at_the_first_point_after_a_closer_look_at_the_later_one_is_looked_at_there_too(
    tmp_path: Path,
) -> None:
    runs, granted = Runs(tmp_path, noise=is_noisy(0.02, 0.001)), [True]
    gate = make_gate(runs, affords=lambda _plan: granted[0])
    gate.screen(BASE.replace(precision="bf16"))
    runs.noise = is_noisy(0.001, 0.001)
    both = BASE.replace(precision="bf16", memory_format="channels_last")
    checks = gate.screen(both)
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", PASSED)
    plans = [(plan.windows, plan.first_windows) for plan in runs.plans_of(both)]
    assert plans == [(CLOSER_WINDOWS, PLAN.windows), (CLOSER_WINDOWS, None)]


def test_what_was_looked_at_without_its_allocator_asks_for_the_allocator_alone(tmp_path: Path) -> None:
    gate, tuned = make_gate(Runs(tmp_path)), {"host_allocator": "glibc-tuned"}
    cast = BASE.replace(precision="bf16")
    both = cast.replace(**tuned, num_workers=2, optimizer_implementation="fused")
    costs = ProofCosts(FACTS, 1.0, 1.0, is_script=True, compile_seconds=lambda _config: 0.0, tape_steps=4)
    assert gate.find_unshown_allocators(both) is None
    whole = costs.of_screening(both, gate)
    gate.screen(cast)
    assert gate.find_unshown_allocators(both) == BASE.replace(**tuned)
    assert gate.find_unshown_allocators(BASE.replace(**tuned)) is None  # it is alone already
    assert gate.find_unshown_allocators(cast.replace(num_workers=2)) is None
    assert gate.find_unshown_allocators(both.replace(memory_format="channels_last")) is None
    # Two looks of 34 steps are spared for a process of four.
    assert costs.of_screening(both, gate) == pytest.approx(whole - 2 * (1 + 34 * price_step(1.0)) + 1 + 4)
    gate.may_be_shown = lambda config: config != BASE.replace(**tuned)
    assert gate.find_unshown_allocators(both) is None
    gate.may_be_shown, gate.shown_by_launches = lambda _config: True, lambda _changes: EQUAL
    assert gate.find_unshown_allocators(both) is None


def test_what_else_has_fewer_digits_is_looked_at_as_closely_at_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path, noise=is_noisy(0.02, 0.001))
    gate, cast = make_gate(runs, affords=lambda _plan: True), BASE.replace(precision="bf16")
    channels_last, fused = {"memory_format": "channels_last"}, {"optimizer_implementation": "fused"}
    for config in (cast, BASE.replace(**channels_last), cast.replace(**channels_last), cast.replace(**fused)):
        checks = gate.screen(config)
        assert checks is not None
        assert outcome(checks)[-1] == ("gradients", PASSED)
    assert [plan.windows for plan in runs.plans_of(BASE.replace(**channels_last))] == [PLAN.windows]
    assert [plan.windows for plan in runs.plans_of(cast.replace(**channels_last))] == [CLOSER_WINDOWS]
    # What an optimizer does with the baseline's gradients shows in as few as before.
    assert {plan.windows for plan in runs.plans_of(BASE.replace(**fused))} == {PLAN.windows}


def test_where_there_is_no_time_after_all_what_was_seen_first_stays(tmp_path: Path) -> None:
    runs = Runs(tmp_path, noise=is_noisy(0.02, 0.001), most=3)
    checks = make_gate(runs, affords=lambda _plan: True).screen(BASE.replace(precision="bf16"))
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", "inconclusive")


def test_where_only_the_optimizer_is_another_nobody_asks_how_far_it_has_learned(tmp_path: Path) -> None:
    runs = Runs(tmp_path, losses=lambda step: 2.0 * 0.97**step)
    Gate(FACTS, PLANS[0], runs).screen(BASE.replace(optimizer_implementation="fused"))
    assert {plan.later_steps for _, _, plan in runs.calls if plan is not None} == {0}


def test_a_candidate_starts_from_the_weights_that_the_baseline_wrote(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    screen(runs, {"precision": "bf16"})
    (plan,) = runs.plans_of(BASE.replace(precision="bf16"))
    assert plan == PLAN.replace(weights=str(tmp_path / "0001" / WEIGHTS_FILE))


def test_neither_the_loader_nor_anything_else_can_hide_behind_the_other(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    loader = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    screen(runs, {**loader, **SPLIT, "precision": "bf16", "host_allocator": "glibc-tuned"})
    assert [config for config, _ in runs.of("tape")] == [BASE.replace(**loader), BASE]
    for config, _ in runs.of("fidelity"):
        assert not {*changed_fields(config, BASE)} & {*DATA_KNOBS}
    assert runs.plans_of(BASE.replace(**SPLIT, precision="bf16", host_allocator="glibc-tuned")) != []


def test_a_tape_of_an_own_knob_is_that_of_the_own_knob(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    screen(runs, {**KERNEL, "precision": "bf16"})
    assert [config for config, _ in runs.of("tape")] == [BASE.replace(**KERNEL), BASE]


def test_semantic_changes_are_left_to_the_trainings(tmp_path: Path) -> None:
    facts = make_facts(numerics={})
    runs = Runs(tmp_path)
    gate = make_gate(runs, facts)
    checks = gate.screen(facts.baseline.replace(**KERNEL, precision="bf16", learning_rate_scale=2.0))
    assert checks is not None
    assert outcome(checks) == [("schedule", PASSED), ("gradients", PASSED)]
    assert [config for config, _ in runs.of("fidelity")] == [BASE, BASE.replace(precision="bf16")]
    ran = len(runs.calls)
    assert gate.screen(facts.baseline.replace(precision="bf16")) == checks
    assert len(runs.calls) == ran


def test_a_split_that_is_another_training_on_this_target_is_left_to_them_too(tmp_path: Path) -> None:
    facts = make_facts(numerics=dict.fromkeys(SPLIT, "semantic"))
    runs = Runs(tmp_path)
    assert outcome(screen(runs, {**SPLIT, "num_workers": 2}, facts)) == [("tape", PASSED)]


@pytest.mark.parametrize("most", range(6))
def test_without_time_for_a_trial_there_is_no_answer_and_what_has_run_is_kept(tmp_path: Path, most: int) -> None:
    whole = Runs(tmp_path / "whole")
    whole.folder.mkdir()
    changes = {**SPLIT, "num_workers": 2, "precision": "bf16"}
    screen(whole, changes)
    assert len(whole.calls) == 6
    runs = Runs(tmp_path, most=most)
    gate = make_gate(runs)
    assert gate.screen(BASE.replace(**changes)) is None
    runs.most = None
    checks = gate.screen(BASE.replace(**changes))
    assert checks is not None
    assert outcome(checks)[-1] == ("gradients", PASSED)
    assert len(runs.calls) == 6


def test_additivity_is_tested_in_full_precision_at_the_initial_weights(tmp_path: Path) -> None:
    facts = make_facts(baseline=BASE.replace(precision="bf16", compile_mode="default"))
    runs = Runs(tmp_path)
    assert outcome(screen(runs, SPLIT, facts))[0] == ("additivity", PASSED)
    whole = [config for config, plan in runs.of("fidelity") if plan is not None and not plan.later_steps]
    exact = facts.baseline.replace(precision="fp32", compile_mode="off")
    assert whole == [exact.replace(**SPLIT), exact]


def test_additivity_of_a_script_is_tested_as_it_casts_and_compiles(tmp_path: Path) -> None:
    facts = make_facts(baseline=BASE.replace(compile_mode="default"))
    runs = Runs(tmp_path)
    assert outcome(screen(runs, SPLIT, facts, knows_order=False))[0] == ("additivity", PASSED)
    whole = [config for config, plan in runs.of("fidelity") if plan is not None and not plan.later_steps]
    assert whole == [facts.baseline.replace(**SPLIT), facts.baseline]


def script_that_casts(folder: Path) -> tuple[Runs, tuple[QualityCheck, ...]]:
    facts, runs = make_facts(baseline=BASE.replace(precision="bf16")), Runs(folder)
    return runs, screen(runs, SPLIT, facts, knows_order=False)


def test_additivity_of_a_script_that_casts_is_not_tested_but_its_gradients_are(tmp_path: Path) -> None:
    _, checks = script_that_casts(tmp_path)
    assert outcome(checks) == [("schedule", PASSED), ("gradients", PASSED)]


def test_no_trial_is_run_for_a_test_that_is_not_made(tmp_path: Path) -> None:
    runs, _ = script_that_casts(tmp_path)
    assert all(plan is not None and plan.later_steps for _, plan in runs.of("fidelity"))


def test_what_reordering_alone_does_is_allowed_of_a_split(tmp_path: Path) -> None:
    additivity = {"error": 0.0, "reordering": 1e-3, "limit": 3e-3, "parts": 3}
    runs = Runs(tmp_path, error=lambda config, _plan: 2e-3 * (config.micro_batch_size == 16))
    assert outcome(screen(runs, SPLIT))[0] == ("additivity", "inferior")
    lenient = Runs(tmp_path / "lenient", error=runs.error)
    lenient.folder.mkdir()
    assert outcome(screen(lenient, SPLIT, make_facts(additivity=additivity)))[0] == ("additivity", PASSED)


def test_asynchronous_copies_are_compared_too(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    checks = screen(runs, {"pin_memory": True, "non_blocking": True})
    assert [test for test, _ in outcome(checks)] == ["tape", "schedule", "gradients"]
    assert any(config.non_blocking for config, _ in runs.of("fidelity"))


def test_asynchronous_copies_of_a_baseline_that_pins_are_compared(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    screen(runs, {"non_blocking": True}, make_facts(baseline=BASE.replace(pin_memory=True)))
    assert any(config.non_blocking for config, _ in runs.of("fidelity"))


# Dropout


@pytest.mark.parametrize(
    "changes", [SPLIT, {"compile_mode": "default"}, {"num_threads": 1}], ids=["split", "compiled", "threads"]
)
def test_dropout_is_off_where_its_masks_come_in_another_order(tmp_path: Path, changes: dict[str, Any]) -> None:
    runs = Runs(tmp_path, draws=True)
    checks = screen(runs, changes)
    assert outcome(checks)[-2:] == [("schedule", PASSED), ("gradients", PASSED)]
    plans = runs.plans_of(BASE.replace(**changes))
    assert plans
    assert all(not plan.dropout for plan in plans)
    weights = [plan.weights for plan in plans if plan.later_steps]
    assert weights  # those of the baseline's training without dropout, at which its gradients are compared
    place = next(index for index, call in enumerate(runs.calls) if call[::2] == (BASE, PLAN.replace(dropout=False)))
    assert weights == [str(tmp_path / f"{place + 1:04d}" / WEIGHTS_FILE)]


def test_the_rest_is_compared_again_with_dropout(tmp_path: Path) -> None:
    runs = Runs(tmp_path, draws=True)
    checks = screen(runs, {"compile_mode": "default", "activation_checkpointing": "full", "num_workers": 2})
    assert [test for test, _ in outcome(checks)] == ["tape", "schedule", "gradients", "schedule", "gradients"]
    (alone,) = runs.plans_of(BASE.replace(activation_checkpointing="full"))
    (both,) = runs.plans_of(BASE.replace(activation_checkpointing="full", compile_mode="default"))
    assert (alone.dropout, both.dropout) == (True, False)


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_launches_have_shown_to_lose_nothing_is_not_compared_again_with_dropout(
    tmp_path: Path, is_shown: bool
) -> None:
    tuned = BASE.replace(host_allocator="glibc-tuned")
    runs = Runs(tmp_path, draws=True)
    screen(
        runs,
        {"precision": "bf16", "host_allocator": "glibc-tuned"},
        shown_by_launches=lambda changes: EQUAL if is_shown and changes == {"host_allocator=glibc-tuned"} else None,
    )
    looked_at = BASE.replace(precision="bf16") if is_shown else tuned.replace(precision="bf16")
    assert len(runs.plans_of(looked_at)) == 1
    assert len(runs.plans_of(tuned)) == (0 if is_shown else 1)
    # Equal losses are no proof of what may round.
    checkpointing: dict[str, Any] = {"activation_checkpointing": "full"}
    screen(runs, {"precision": "bf16", **checkpointing}, shown_by_launches=lambda _changes: EQUAL)
    assert len(runs.plans_of(BASE.replace(**checkpointing))) == 1


def test_an_optimizer_is_compared_in_its_steps_alone_and_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path, draws=True)
    wanted: dict[str, Any] = {"precision": "bf16", "host_allocator": "glibc-tuned", "optimizer_implementation": "fused"}
    checks = screen(runs, wanted, shown_by_launches=lambda _changes: EQUAL)
    assert outcome(checks) == [*[("schedule", PASSED), ("gradients", PASSED)] * 2, ("equal-launches", PASSED)]
    assert subjects(checks) == ["gradients", "gradients", "updates"]
    (steps,) = runs.plans_of(BASE.replace(optimizer_implementation="fused"))
    assert (steps.keeps_state, steps.dropout, steps.later_steps) == (True, True, 0)
    assert runs.plans_of(BASE.replace(**wanted)) == []
    (cast,) = runs.plans_of(BASE.replace(precision="bf16"))
    assert not cast.dropout


def test_masks_that_a_recomputation_forgets_are_seen_with_dropout_only(tmp_path: Path) -> None:
    def forget(config: TrainConfig, plan: GradientPlan) -> float:
        return 0.2 if plan.dropout and config.activation_checkpointing == "full" else 0.0

    runs = Runs(tmp_path, draws=True, error=forget)
    checks = screen(runs, {"compile_mode": "default", "activation_checkpointing": "full"})
    assert [verdict for test, verdict in outcome(checks) if test == "gradients"] == [PASSED, "inferior"]


def test_what_fails_without_dropout_is_not_compared_with_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path, draws=True, error=lambda config, _plan: 0.1 * is_cast(config))
    checks = screen(runs, {"compile_mode": "default", "precision": "bf16"})
    assert outcome(checks) == [("schedule", PASSED), ("gradients", "inferior")]
    assert runs.plans_of(BASE.replace(precision="bf16")) == []


def test_a_model_that_draws_nothing_is_compared_as_it_is(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    screen(runs, {**SPLIT, "compile_mode": "default"})
    assert all(plan is not None and plan.dropout for _, plan in runs.of("fidelity"))


def test_changes_that_keep_the_order_of_random_numbers_are_compared_with_dropout(tmp_path: Path) -> None:
    runs = Runs(tmp_path, draws=True)
    screen(runs, {"activation_checkpointing": "full"})
    assert all(plan is not None and plan.dropout for _, plan in runs.of("fidelity"))


def test_of_a_model_that_the_probe_saw_draw_random_numbers_nothing_is_looked_at_to_find_it_out(tmp_path: Path) -> None:
    model, cast = FACTS.model.replace(draws_random=True), BASE.replace(precision="bf16")
    runs = Runs(tmp_path, draws=True)
    costs = ProofCosts(FACTS, 0.5, 3.0, is_script=True, compile_seconds=lambda _config: 0.0, tape_steps=24)
    gate = make_gate(runs, FACTS.replace(model=model))
    foretold = costs.of_screening(cast, gate)
    assert gate.screen(cast) is not None
    assert [(config, plan.dropout) for config, plan in runs.of("fidelity") if plan] == [(BASE, False), (cast, False)]
    assert foretold == pytest.approx(2 * costs.of_trial(BASE, PLAN))
    assert costs.of_screening(BASE.replace(precision="bf16", num_threads=1), gate) == pytest.approx(foretold / 2)


# The reference in float64


def test_gradients_that_clearly_pass_need_no_reference(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    screen(runs, {"precision": "bf16"})
    assert not any(plan is not None and plan.reference for _, plan in runs.of("fidelity"))


def err_like_the_baseline(config: TrainConfig, plan: GradientPlan) -> float:
    """A baseline that errs by 2 % against float64, and a candidate by 5 %."""
    return 0.0 if plan.reference else 0.05 if config.num_threads == 1 else 0.02


def test_a_candidate_that_is_as_exact_as_the_baseline_passes(tmp_path: Path) -> None:
    facts = make_facts(baseline=BASE.replace(precision="bf16"))
    runs = Runs(tmp_path, error=err_like_the_baseline)
    checks = screen(runs, {"num_threads": 1}, facts)
    assert outcome(checks)[-1] == ("gradients", PASSED)
    ratios = [one.reference_ratio for one in checks[-1].fidelity]
    assert ratios == pytest.approx([2.5, 2.5], rel=0.01)
    (reference,) = [call for call in runs.of("fidelity") if call[1] is not None and call[1].reference]
    weights = str(tmp_path / "0001" / WEIGHTS_FILE)
    assert reference == (
        facts.baseline.replace(precision="fp32"),
        PLAN.replace(reference=True, weights=weights),
    )


def test_one_reference_serves_all_candidates(tmp_path: Path) -> None:
    runs = Runs(tmp_path, error=lambda config, plan: 0.0 if config == BASE or plan.reference else 0.03)
    gate = make_gate(runs)
    for changes in ({"precision": "bf16"}, {"num_threads": 1}, {"memory_format": "channels_last"}):
        assert gate.screen(BASE.replace(**changes)) is not None
    assert sum(plan is not None and plan.reference for _, plan in runs.of("fidelity")) == 1


@pytest.mark.parametrize("error", [0.1, 0.3])
def test_a_reference_that_is_far_from_the_baseline_is_none(tmp_path: Path, error: float) -> None:
    runs = Runs(tmp_path, error=lambda config, plan: 0.7 if plan.reference else error * is_cast(config))
    assert outcome(screen(runs, {"precision": "bf16"}))[-1] == ("gradients", "inferior")


@pytest.mark.parametrize("trouble", ["no time", "it crashes"])
def test_without_a_reference_what_was_found_stays(tmp_path: Path, trouble: str) -> None:
    def fate(config: TrainConfig, _purpose: str) -> TrialStatus:
        is_reference = config.precision == "fp32"
        return CRASHED if is_reference and trouble == "it crashes" else COMPLETED

    facts = make_facts(baseline=BASE.replace(precision="bf16"))
    runs = Runs(tmp_path, error=err_like_the_baseline, fate=fate, most=2 if trouble == "no time" else None)
    assert outcome(screen(runs, {"num_threads": 1}, facts))[-1] == ("gradients", "inconclusive")


def test_a_reference_that_was_cut_is_begun_again_where_there_is_twice_the_time(tmp_path: Path) -> None:
    runs = Runs(tmp_path, error=lambda config, plan: 0.0 if config == BASE or plan.reference else 0.03)
    left, begun = [0.0], [0]

    def cut(config: TrainConfig, purpose: Any, **options: Any) -> TrialResult | None:
        plan = options["plan"]
        begun[0] += plan.reference
        if not plan.reference:
            return runs(config, purpose, **options)
        left[0] = 0.0
        return None

    gate = Gate(FACTS, PLAN, cut, seconds_left=lambda: left[0])
    found = []
    for left[0] in (70.0, 139.0, 141.0):  # the candidate that it was cut for has its turn again
        assert gate.screen(BASE.replace(attention_backend="math")) is not None
        found.append(begun[0])
    assert found == [1, 1, 2]


@pytest.mark.parametrize(("device", "launches", "looked"), [("cpu", 4.9, 0), ("cpu", 5.1, 1), ("cuda", 1.6, 1)])
def test_convolutions_in_float64_are_dear_on_a_cpu(tmp_path: Path, device: str, launches: float, looked: int) -> None:
    runs = Runs(tmp_path, error=lambda config, plan: 0.0 if config == BASE or plan.reference else 0.03)
    facts = make_facts(device=device, model=FACTS.model.replace(has_4d_convolution=True))
    seconds = runs(BASE, "fidelity", plan=PLAN, steps=1)
    assert seconds is not None
    left = launches * seconds.elapsed_seconds
    make_gate(runs, facts, knows_order=False, seconds_left=lambda: left).screen(BASE.replace(num_threads=1))
    assert sum(plan is not None and plan.reference for _, plan in runs.of("fidelity")) == looked


def test_a_look_in_float64_that_the_user_stops_is_no_dearer_for_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path, error=lambda config, plan: 0.0 if config == BASE or plan.reference else 0.03)

    def stopped(config: TrainConfig, purpose: Any, **options: Any) -> TrialResult | None:
        return None if options["plan"].reference else runs(config, purpose, **options)

    gate = Gate(FACTS, PLAN, stopped, seconds_left=lambda: 600.0)
    gate.screen(BASE.replace(attention_backend="math"))
    assert gate.doubted
    assert gate.reference_seconds == 0.0


def test_what_waits_for_a_look_in_float64_costs_that_much_more_until_it_was_made(tmp_path: Path) -> None:
    runs = Runs(tmp_path, error=lambda config, plan: 0.0 if config == BASE or plan.reference else 0.03)
    left = [0.0]
    gate = make_gate(runs, knows_order=False, seconds_left=lambda: left[0])
    kernel, other = BASE.replace(attention_backend="math"), BASE.replace(num_threads=1)
    assert gate.price_doubts(kernel) == 0.0
    gate.screen(kernel)
    assert gate.doubted == {frozenset({"attention_backend=math"})}
    assert gate.price_doubts(kernel) == gate.price_doubts(kernel.replace(num_threads=1)) == gate.reference_seconds > 0.0
    assert gate.price_doubts(other) == gate.price_doubts(BASE) == 0.0
    left[0] = gate.reference_seconds
    gate.screen(kernel)
    assert gate.price_doubts(kernel) == 0.0


@pytest.mark.parametrize(("own", "changed", "looked"), [("fp32", "bf16", 0), ("bf16", "fp32", 1), ("bf16", "fp16", 1)])
def test_fewer_digits_than_float32_are_not_held_against_float64(
    tmp_path: Path, own: Precision, changed: Precision, looked: int
) -> None:
    """They err far more: no look shows otherwise."""
    baseline = BASE.replace(precision=own)
    runs = Runs(tmp_path, error=lambda config, plan: 0.0 if config == baseline or plan.reference else 0.03)
    make_gate(runs, make_facts(baseline=baseline)).screen(BASE.replace(precision=changed))
    assert sum(plan is not None and plan.reference for _, plan in runs.of("fidelity")) == looked


# What cannot be compared


def test_other_parameters_are_another_model(tmp_path: Path) -> None:
    runs = Runs(tmp_path, names=lambda config: ("weight", "scale") if is_cast(config) else ("weight", "bias"))
    checks = screen(runs, {"precision": "bf16"})
    assert outcome(checks) == [("gradients", "inferior")]
    assert "other parameters" in checks[0].reason


@pytest.mark.parametrize("whose", ["candidate", "baseline"])
@pytest.mark.parametrize("status", [CRASHED, TrialStatus.OUT_OF_MEMORY, TrialStatus.TIMED_OUT])
def test_a_trial_that_wrote_nothing_leaves_it_open(tmp_path: Path, whose: str, status: TrialStatus) -> None:
    def fate(config: TrainConfig, _purpose: str) -> TrialStatus:
        return status if (config == BASE) is (whose == "baseline") else COMPLETED

    checks = screen(Runs(tmp_path, fate=fate), {"precision": "bf16"})
    assert outcome(checks) == [("gradients", "inconclusive")]
    assert checks[0].reason == f"{status}: it broke"


@pytest.mark.parametrize("whose", ["candidate", "baseline"])
def test_a_torn_file_leaves_it_open(tmp_path: Path, whose: str) -> None:
    runs = Runs(tmp_path)

    def tear(config: TrainConfig, purpose: Any, **options: Any) -> TrialResult | None:
        result = runs(config, purpose, **options)
        if result is not None and result.captures and (config == BASE) is (whose == "baseline"):
            Path(result.captures).write_bytes(Path(result.captures).read_bytes()[:100])
        return result

    checks = Gate(FACTS, PLAN, tear).screen(BASE.replace(precision="bf16"))
    assert checks is not None
    assert outcome(checks) == [("gradients", "inconclusive")]
    assert checks[0].reason == "nothing was written down"


def test_a_split_whose_trial_fails_leaves_additivity_open(tmp_path: Path) -> None:
    runs = Runs(tmp_path, fate=lambda c, _p: CRASHED if c != BASE else COMPLETED)
    assert outcome(screen(runs, SPLIT)) == [("additivity", "inconclusive"), ("gradients", "inconclusive")]


def test_a_loader_that_fails_refuses_its_knob(tmp_path: Path) -> None:
    runs = Runs(tmp_path, fate=lambda c, _p: CRASHED if c.num_workers else COMPLETED)
    checks = screen(runs, {"num_workers": 2})
    assert outcome(checks) == [("tape", "inferior")]
    assert checks[0].reason == "the candidate's loader fails: it broke"


def test_a_later_point_that_the_candidate_lacks_is_no_pass(tmp_path: Path) -> None:
    runs = Runs(tmp_path, points=lambda config: 1 if is_cast(config) else 2)
    assert outcome(screen(runs, {"precision": "bf16"}))[-1] == ("gradients", "inconclusive")


# The noise scale


def test_the_noise_scale_is_the_baselines_at_the_latest_point(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    gate = make_gate(runs)
    assert gate.screen(BASE.replace(precision="bf16")) is not None
    ran = len(runs.calls)
    scale = gate.noise_scale()
    assert scale is not None
    rows = make_rows()
    variance = rows.var(axis=0, ddof=1).sum()
    expected = 32 * variance / ((rows.mean(axis=0) ** 2).sum() - variance / len(rows))
    assert scale == pytest.approx(expected, rel=1e-9)
    assert len(runs.calls) == ran  # its captures are there already


@pytest.mark.parametrize("trouble", ["no time", "it crashes"])
def test_without_captures_there_is_no_noise_scale(tmp_path: Path, trouble: str) -> None:
    runs = Runs(tmp_path, fate=lambda _c, _p: CRASHED, most=0 if trouble == "no time" else None)
    assert make_gate(runs).noise_scale() is None


# Planning


def plan(seconds: float, **changes: Any) -> GradientPlan | None:
    usual: dict[str, Any] = {"seconds_per_step": 0.05, "start_seconds": 4.0, "repeats_steps": False}
    candidates = changes.pop("candidates", 2)
    return plan_fidelity(seconds, LookCosts(**(usual | changes)), candidates=candidates)


def test_faster_candidates_and_long_steps_leave_time_for_more_of_a_look() -> None:
    long = {"seconds_per_step": 1.7, "repeats_steps": True, "candidates": 1}
    assert size_of(plan(120.0, **long)) == (8, 5)
    assert size_of(plan(120.0, **long, speed=1.6)) == (12, 10)
    # What noting adds to a short step it does not to a long one.
    looks = [LookCosts(seconds, 0.0, repeats_steps=False).of_looks(PLANS[-1], 0) / seconds for seconds in (0.05, 5.0)]
    assert looks[0] > 1.3 * looks[1]


def size_of(found: GradientPlan | None) -> tuple[int, int]:
    return (found.windows, found.later_steps) if found is not None else (0, 0)


def test_a_plan_grows_with_the_time_there_is() -> None:
    found = [size_of(plan(float(seconds))) for seconds in range(1, 120)]
    assert found == sorted(found)
    assert found[0] == (0, 0)
    assert found[-1] == (24, 200)
    assert len({*found}) >= 6


@pytest.mark.parametrize(
    "harder", [{"seconds_per_step": 0.5}, {"start_seconds": 15.0}, {"candidates": 8}, {"repeats_steps": True}]
)
def test_what_takes_longer_gets_a_smaller_plan(harder: dict[str, Any]) -> None:
    pairs = [(size_of(plan(seconds)), size_of(plan(seconds, **harder))) for seconds in range(10, 120, 10)]
    assert all(hard <= easy for easy, hard in pairs)
    assert any(hard < easy for easy, hard in pairs)


def test_a_plan_leaves_time_for_the_look_in_float64_that_is_to_be_expected() -> None:
    for seconds in range(20, 400, 20):
        plain, found = (plan(seconds, candidates=1, repeats_steps=True, reference=one) for one in (0.0, 2.0))
        assert size_of(found) <= size_of(plain)
        if found is not None:
            look = (2 if found.later_steps else 1) * found.windows + found.later_steps
            assert 3 * 4.0 + 0.05 * (2 + 2.0) * look <= seconds
    assert size_of(plan(80.0, candidates=1, repeats_steps=True, reference=2.0)) < (24, 200)


def test_where_nothing_fits_there_is_no_plan() -> None:
    assert plan(11.9) is None  # three starts alone take 12 s
    assert plan(0.0) is None


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("candidates", [1, 4])
def test_a_plan_takes_no_longer_than_there_is(candidates: int, repeats: bool) -> None:
    for seconds in range(5, 200, 5):
        found = plan(seconds, candidates=candidates, repeats_steps=repeats)
        if found is None:
            continue
        held = (2 if found.later_steps else 1) * found.windows
        steps = (1 + candidates) * held + found.later_steps * (1 + candidates * repeats)
        assert (1 + candidates) * 4.0 + 0.05 * steps <= seconds


# The bookkeeping: tapes


def compare_tapes(ours: DataTrace | None, theirs: DataTrace | None, **options: Any) -> tuple[str, str]:
    arms = (make_result(tape=tape) for tape in (ours, theirs))
    check = check_tape(*arms, **({"whole": True} | options))
    assert check.test == "tape"
    assert (check.difference is not None) is (check.verdict == PASSED)
    return check.verdict, check.reason


def test_what_is_drawn_may_decide_the_size_of_a_sample() -> None:
    own = [f"float32[8, 3, 64] + int64[{boxes}, 4]" for boxes in (2, 5, 3, 3)]
    theirs = make_tape(shapes=tuple(own), batches=("a", "b", "c", "d"), ends=(), end_shapes=())
    ours = theirs.replace(shapes=("float32[8, 3, 64] + int64[7, 4]",) * 4, batches=("e", "f", "g", "h"))
    options = {"whole": False, "random_sources": ("a generator of the dataset's own",)}
    verdict, told = compare_tapes(ours, theirs, **options)
    assert (verdict, "their contents cannot be compared" in told) == (PASSED, True)
    for shape in ("float32[8, 3, 96] + int64[7, 4]", "float32[8, 3, 64] + int32[7, 4]", "float32[8, 3, 64]"):
        assert compare_tapes(ours.replace(shapes=(shape,) * 4), theirs, **options)[0] == "inferior"
    steady = theirs.replace(shapes=(own[0],) * 4)
    assert compare_tapes(ours, steady, **options)[0] == "inferior"


def test_equal_tapes_pass_and_tell_what_was_compared() -> None:
    assert compare_tapes(make_tape(), make_tape()) == (
        PASSED,
        "4 batches and the end of the epoch equal byte for byte, all 1,000 samples of an epoch in the same order",
    )
    assert compare_tapes(make_tape(), make_tape(), whole=False) == (PASSED, "4 batches equal byte for byte")
    stream = make_tape(ends=(), end_shapes=(), order="", samples=None)
    assert compare_tapes(stream, stream) == (PASSED, "4 batches and the end of the epoch equal byte for byte")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 992}, "an epoch has 992 samples, the baseline's 1000"),
        ({"samples": None}, "an epoch has None samples, the baseline's 1000"),
        ({"repeated": 3}, "3 samples of an epoch come more than once"),
        ({"order": "other"}, "an epoch takes its samples in another order"),
        (
            {"shapes": ("int64[32]", "int32[32]", "int64[32]", "int64[32]")},
            "batch 2 is int32[32], the baseline's int64[32]",
        ),
        (
            {"end_shapes": ("int64[8]", "int64[32]")},
            "batch at the end of the epoch 1 is int64[8], the baseline's int64[7]",
        ),
        (
            {"ends": ("usual end",), "end_shapes": ("int64[7]",)},
            "the epochs end after different numbers of batches",
        ),
        (
            {"batches": ("usual0", "x", "y", "usual3")},
            "2 of 6 batches hold other values, the first of them batch 2",
        ),
        ({"ends": ("usual end", "x")}, "1 of 6 batches hold other values, the first of them batch 6"),
    ],
)
def test_a_tape_that_differs_is_refused_with_the_first_difference(changes: dict[str, Any], told: str) -> None:
    assert compare_tapes(make_tape(**changes), make_tape()) == ("inferior", told)


def test_a_baseline_that_repeats_samples_lets_the_candidate_do_so() -> None:
    assert compare_tapes(make_tape(repeated=3), make_tape(repeated=3))[0] == PASSED
    assert compare_tapes(make_tape(repeated=2), make_tape(repeated=3))[0] == PASSED


def test_of_tapes_of_different_lengths_the_common_part_is_compared() -> None:
    verdict, reason = compare_tapes(make_tape(count=2), make_tape(count=4))
    assert (verdict, reason.split(" and")[0]) == (PASSED, "2 batches")
    assert compare_tapes(make_tape(count=4, order="other"), make_tape(count=2))[0] == "inferior"


def test_no_batch_in_common_shows_nothing() -> None:
    bare = make_tape(count=0, ends=(), end_shapes=())
    assert compare_tapes(bare, bare) == ("inconclusive", "no batch was read")


def test_samples_of_a_script_that_are_drawn_are_compared_by_their_shapes() -> None:
    ours, theirs = make_tape(batches=("a", "b", "c", "d")), make_tape()
    drawn: dict[str, Any] = {"random_sources": ("torch", "numpy"), "whole": False}
    verdict, reason = compare_tapes(ours, theirs, **drawn)
    assert verdict == PASSED
    assert "their contents cannot be compared: samples draw from torch and numpy" in reason
    shorter = ours.replace(shapes=("int64[31]",) * 4)
    assert compare_tapes(shorter, theirs, **drawn)[0] == "inferior"
    # A workload's are seeded sample by sample: there the values have to be the same.
    assert compare_tapes(ours, theirs, random_sources=("torch",), whole=True)[0] == "inferior"


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "told"),
    [
        ({}, {"tape": make_tape()}, "inferior", "the candidate's loader fails: nothing was read"),
        (
            {"status": CRASHED},
            {"tape": make_tape()},
            "inferior",
            "the candidate's loader fails: it broke",
        ),
        (
            {"status": TrialStatus.TIMED_OUT, "error": "", "tape": make_tape()},
            {"tape": make_tape()},
            "inferior",
            "the candidate's loader fails: user-error",
        ),
        (
            {"tape": make_tape()},
            {"status": CRASHED},
            "inconclusive",
            "the baseline's loader could not be read again: it broke",
        ),
    ],
)
def test_a_tape_that_is_not_there(ours: dict[str, Any], theirs: dict[str, Any], verdict: str, told: str) -> None:
    check = check_tape(make_result(**ours), make_result(**theirs), whole=True)
    assert (check.verdict, check.reason) == (verdict, told)


# The bookkeeping: steps and rates


def with_keys(point: Point, keys: Sequence[int]) -> Point:
    """Return only the steps that end after some numbers of samples."""
    kept = np.isin(point.gradients.keys, keys)
    arms = (GradientRows(one.keys[kept], one.rows[kept]) for one in (point.gradients, point.updates))
    return Point(*arms, point.learning_rates[kept])


def with_rates(rates: Any) -> Point:
    return dataclasses.replace(make_point(make_rows(len(rates))), learning_rates=np.array(rates, dtype=np.float64))


FALLING = [[0.1 * 0.9**step, 0.01] for step in range(6)]


@pytest.mark.parametrize(
    ("candidate", "baseline", "verdict", "told"),
    [
        (with_rates(FALLING), with_rates(FALLING), PASSED, "6 optimizer steps after the same samples at the same"),
        (with_rates(np.float32(FALLING)), with_rates(FALLING), PASSED, "6 optimizer steps"),
        (
            with_rates(FALLING[1:]),
            with_rates(FALLING[:5]),
            "inferior",
            "at step 1 the learning rate is 0.09, the baseline's 0.1",
        ),
        (
            with_rates([*FALLING[:3], *([0.1, 0.02] for _ in range(3))]),
            with_rates(FALLING),
            "inferior",
            "at step 4 the learning rate is 0.1, the baseline's 0.0729",
        ),
        (with_rates([[0.1]] * 6), with_rates(FALLING), "inferior", "1 groups of parameters, the baseline has 2"),
        (
            make_point(make_rows(6), every=16),
            make_point(make_rows(6), every=32),
            "inferior",
            "the optimizer steps every 16 samples, the baseline's every 32",
        ),
        (
            with_keys(make_point(make_rows(6)), [64, 96, 128, 160, 192]),
            make_point(make_rows(6)),
            PASSED,
            "5 optimizer steps",
        ),
        (
            with_keys(make_point(make_rows(6)), [32, 64]),
            with_keys(make_point(make_rows(6)), [96, 128, 160, 192]),
            "inconclusive",
            "no optimizer step in common",
        ),
        (make_point(make_rows(0)), make_point(make_rows(6)), "inferior", "the optimizer steps every 0 samples"),
    ],
)
def test_steps_and_rates_are_compared_one_by_one(candidate: Point, baseline: Point, verdict: str, told: str) -> None:
    check = check_schedule(candidate, baseline)
    assert (check.test, check.verdict) == ("schedule", verdict)
    assert check.reason.startswith(told)


def test_a_rate_of_zero_is_compared_too() -> None:
    warming = [[0.0], [0.1], [0.2]]
    assert check_schedule(with_rates(warming), with_rates(warming)).verdict == PASSED
    assert check_schedule(with_rates([[1e-9], *warming[1:]]), with_rates(warming)).verdict == "inferior"


def test_a_short_batch_at_the_end_of_an_epoch_does_no_harm() -> None:
    keys = np.array([32, 64, 96, 103])
    point = make_point(make_rows(4))
    short = Point(
        GradientRows(keys, point.gradients.rows), GradientRows(keys, point.updates.rows), point.learning_rates
    )
    assert check_schedule(short, short).verdict == PASSED


@pytest.mark.parametrize(
    ("ours", "theirs", "steps", "verdict"),
    [
        ((0, 0), (0, 0), 60, PASSED),
        ((1, 1), (0, 0), 60, PASSED),
        ((1, 2), (0, 0), 60, "inferior"),
        ((5, 5), (4, 4), 60, PASSED),
        ((0, 0), (9, 9), 60, PASSED),
        ((2, 2), (0, 0), 300, PASSED),
        ((30, 30), (0, 0), 300, "inferior"),
        ((5, 0), (0, 0), 60, "inferior"),
    ],
)
def test_a_loss_scaler_may_leave_out_one_step_for_each_growth(
    ours: tuple[int, ...], theirs: tuple[int, ...], steps: int, verdict: str
) -> None:
    arms = [
        [
            LossCurve(seed=seed, losses=(1.0,) * steps, samples=32 * steps, skipped=one)
            for seed, one in enumerate(skipped)
        ]
        for skipped in (ours, theirs)
    ]
    check = check_skipped_steps(*arms)
    assert (check.test, check.verdict) == ("schedule", verdict)
    allowed = 2 * (1 + steps // (2 * GROWTH_STEPS)) + MOST_SKIPPED * steps
    assert f"{sum(ours) - sum(theirs)} of {steps} optimizer steps" in check.reason
    assert f"({allowed:.0f} allowed)" in check.reason


# The comparisons


def make_captures(*points: Point, layers: RowLayout | None = None) -> GradientTrace:
    return GradientTrace(layers or make_layers("weight"), points)


@pytest.mark.parametrize(
    ("layers", "same"),
    [
        (RowLayout(("a", "b"), np.array([8, 4]), np.array([80, 4])), True),
        (RowLayout(("a", "c"), np.array([8, 4]), np.array([80, 4])), False),
        (RowLayout(("b", "a"), np.array([8, 4]), np.array([80, 4])), False),
        (RowLayout(("a", "b"), np.array([8, 4]), np.array([81, 4])), False),
        (RowLayout(("a", "b"), np.array([7, 4]), np.array([80, 4])), False),
        (RowLayout(("a",), np.array([8]), np.array([80])), False),
        (RowLayout(("a", "b", "c"), np.array([8, 4, 1]), np.array([80, 4, 1])), False),
    ],
)
def test_models_are_the_same_by_the_names_and_sizes_of_their_parameters(layers: RowLayout, same: bool) -> None:
    base = GradientTrace(RowLayout(("a", "b"), np.array([8, 4]), np.array([80, 4])), ())
    assert have_same_layers(GradientTrace(layers, ()), base) is same
    assert have_same_layers(base, GradientTrace(layers, ())) is same


def test_points_are_compared_in_their_order() -> None:
    rows = make_rows()
    base = make_captures(make_point(rows), make_point(make_rows(seed=2)))
    bad_later = make_captures(make_point(rows), make_point(1.2 * make_rows(seed=2)))
    found = compare_points(bad_later, base, None, steps=40)
    assert [(one.point, one.verdict) for one in found] == [("initial weights", PASSED), ("after 40 steps", "inferior")]
    assert {one.subject for one in found} == {"gradients"}


def test_a_reference_serves_the_points_that_it_has() -> None:
    rows, later = make_rows(), make_rows(seed=2)
    base = make_captures(make_point(1.02 * rows), make_point(1.02 * later))
    ours = make_captures(make_point(1.05 * rows), make_point(1.05 * later))
    reference = make_captures(make_point(rows))
    found = compare_points(ours, base, reference, steps=40, farthest=0.1)
    assert [one.verdict for one in found] == [PASSED, "inconclusive"]
    assert [one.reference_ratio is None for one in found] == [False, True]


@pytest.mark.parametrize(("noise", "bias", "is_same"), [(0.002, 0.0, True), (0.05, 0.0, False), (0.0, 0.05, False)])
def test_a_baseline_that_jumps_a_little_everywhere_is_held_against_float64_at_the_initial_weights(
    noise: float, bias: float, is_same: bool
) -> None:
    luck = np.random.default_rng(3)

    def err(rows: Any) -> Any:
        return rows + math.sqrt(noise) * luck.standard_normal(rows.shape)

    rows, later = make_rows(24), make_rows(24, seed=2)
    reference = make_captures(make_point(rows), make_point(later))
    base = make_captures(make_point(err(rows) * (1 + bias)), make_point(err(later)))
    jumping = err(rows)
    jumping[:1] += 0.5 * luck.standard_normal(jumping[:1].shape)
    found = compare_points(make_captures(make_point(jumping), base.points[1]), base, reference, steps=40)
    assert [one.reference_ratio is not None for one in found] == [is_same, False]


def noisy_updates(*, damage: float = 0.0) -> tuple[GradientTrace, GradientTrace]:
    """Two optimizers that agree wherever there is a gradient; the sign of mere rounding is up to each of them."""
    rows = make_rows()
    rows[:, COLUMNS // 2 :] *= 1e-8
    arms = []
    for seed, factor in ((5, 1.0 + damage), (6, 1.0)):
        updates = -1e-3 * factor * np.sign(rows)
        updates[:, COLUMNS // 2 :] = 1e-3 * np.sign(
            np.random.default_rng(seed).standard_normal((len(rows), COLUMNS // 2))
        )
        arms.append(make_captures(make_point(rows, updates)))
    return arms[0], arms[1]


def test_updates_of_what_is_only_rounding_are_left_out() -> None:
    found = compare_updates(*noisy_updates())
    assert (found.subject, found.point, found.verdict) == ("updates", "initial weights", PASSED)
    assert compare_updates(*noisy_updates(damage=0.1)).verdict == "inferior"


def test_an_update_that_is_not_finite_counts_wherever_it_is() -> None:
    candidate, baseline = noisy_updates()
    candidate.points[0].updates.rows[3, -1] = math.nan
    assert compare_updates(candidate, baseline).verdict == "inferior"


def test_updates_without_any_gradient_show_nothing() -> None:
    base = make_captures(make_point(np.zeros((12, COLUMNS)), np.zeros((12, COLUMNS))))
    other = make_captures(make_point(np.zeros((12, COLUMNS)), np.ones((12, COLUMNS))))
    assert compare_updates(other, base).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (make_result(), "nothing was written down"),
        (make_result(status=CRASHED), "crashed: it broke"),
        (make_result(status=TrialStatus.TIMED_OUT, error=""), "timed_out: user-error"),
        (make_result(status=CRASHED, error="x" * 500), "crashed: " + 191 * "x"),
    ],
)
def test_what_could_not_be_read_tells_why(result: TrialResult, reason: str) -> None:
    check = report_unread(result, "additivity")
    assert (check.test, check.verdict, check.reason) == ("additivity", "inconclusive", reason)
    assert check.difference is None


def test_another_model_is_refused() -> None:
    assert (report_other_model().test, report_other_model().verdict) == ("gradients", "inferior")


# Blame


def make_check(test: str, verdict: str = PASSED, *, bias: float | None = None) -> QualityCheck:
    fidelity = ()
    if bias is not None:
        interval = make_interval(bias, confidence_level=0.9, method="planted")
        fidelity = (
            GradientEquivalence(
                subject="gradients", point="initial weights", windows=16, bias=interval, verdict=verdict
            ),
        )
    margin = Margin(amount=0.0)
    return record_factory.make_check(
        test=test, metric=test, margin=margin, verdict=verdict, seeds=1, samples=0, reason=test, fidelity=fidelity
    )


@dataclass
class Screens:
    """A gate that finds guilty whoever is planted, and knows how much each change moves the gradients.

    Attributes:
        guilty: sets of changes; a config that has all of one of them fails.
        bias: of each change.
        most: configs that there is time for.
    """

    guilty: Sequence[frozenset[str]] = ()
    bias: dict[str, float] = field(default_factory=dict)
    most: int = 100
    facts: TargetFacts = FACTS
    screened: list[tuple[str, ...]] = field(default_factory=list)

    def screen(self, config: TrainConfig) -> tuple[QualityCheck, ...] | None:
        changed = changed_fields(config, self.facts.baseline)
        if len(self.screened) >= self.most:
            return None
        self.screened.append(changed)
        verdict = "inferior" if any(one <= {*changed} for one in self.guilty) else PASSED
        return (make_check("gradients", verdict, bias=sum(self.bias.get(name, 0.0) for name in changed)),)


MANY: dict[str, Any] = {
    "precision": "bf16",
    "compile_mode": "default",
    "num_threads": 1,
    "memory_format": "channels_last",
    "num_workers": 2,
    "host_allocator": "glibc-tuned",
}
FAILED_GRADIENTS = (make_check("schedule"), make_check("gradients", "inferior"))
FAILED_TRAINING = (make_check("gradients"), make_check("paired-losses", "inferior"))


def one(*names: str) -> frozenset[str]:
    return frozenset(names)


@pytest.mark.parametrize("name", ["precision", "compile_mode", "num_threads", "memory_format"])
def test_the_change_without_which_the_rest_passes_is_guilty(name: str) -> None:
    config = BASE.replace(**MANY)
    blame = find_culprit(Screens([one(name)]), config, FAILED_GRADIENTS)
    assert blame == Blame((name,), revert_knobs(config, BASE, [name]))


def test_guilt_in_steps_and_rates_is_found_by_leaving_out_too() -> None:
    config = BASE.replace(**MANY)
    checks = (make_check("schedule", "inferior"), make_check("gradients"))
    assert find_culprit(Screens([one("num_threads")]), config, checks).knobs == ("num_threads",)


def test_the_search_for_the_guilty_ends_with_the_first_rest_that_passes() -> None:
    screens = Screens([one("precision")])
    find_culprit(screens, BASE.replace(**MANY), FAILED_GRADIENTS)
    assert len(screens.screened) == 1


def test_changes_that_fail_only_together_cost_the_more_suspicious_one() -> None:
    screens = Screens([one("precision", "num_threads")])
    assert find_culprit(screens, BASE.replace(**MANY), FAILED_GRADIENTS).knobs == ("precision",)


def test_two_guilty_changes_are_refused_with_all_that_is_not_exact() -> None:
    screens = Screens([one("precision"), one("num_threads")])
    blame = find_culprit(screens, BASE.replace(**MANY), FAILED_GRADIENTS)
    assert {*blame.knobs} == {"precision", "compile_mode", "num_threads", "memory_format"}
    assert blame.rest is None
    assert len(screens.screened) == 4


def test_without_time_to_look_every_change_is_refused() -> None:
    blame = find_culprit(Screens([one("num_threads")], most=0), BASE.replace(**MANY), FAILED_GRADIENTS)
    assert blame.rest is None
    assert {*blame.knobs} == {"precision", "compile_mode", "num_threads", "memory_format"}


def test_a_guilty_change_found_before_the_time_was_up_is_the_one() -> None:
    screens = Screens([one("precision")], most=1)
    assert find_culprit(screens, BASE.replace(**MANY), FAILED_GRADIENTS).knobs == ("precision",)


@pytest.mark.parametrize("checks", [FAILED_GRADIENTS, FAILED_TRAINING], ids=["gradients", "training"])
def test_a_single_change_is_guilty_without_a_look(checks: Any) -> None:
    screens = Screens()
    config = BASE.replace(precision="bf16", num_workers=2)
    assert find_culprit(screens, config, checks) == Blame(("precision",), BASE.replace(num_workers=2))
    assert find_culprit(screens, BASE.replace(precision="bf16"), checks) == Blame(("precision",), None)
    assert screens.screened == []


def test_exact_changes_alone_are_refused_together() -> None:
    config = BASE.replace(host_allocator="glibc-tuned", num_workers=2)
    blame = find_culprit(Screens(), config, FAILED_GRADIENTS)
    assert {*blame.knobs} == {"host_allocator", "num_workers"}
    assert blame.rest is None


def test_a_tape_that_differs_is_the_loaders_doing() -> None:
    screens = Screens()
    config = BASE.replace(**MANY, **KERNEL, prefetch_factor=4)
    blame = find_culprit(screens, config, (make_check("tape", "inferior"),))
    assert {*blame.knobs} == {"num_workers", "prefetch_factor"}
    rest = {name: value for name, value in MANY.items() if name != "num_workers"}
    assert blame.rest == BASE.replace(**rest, **KERNEL)
    assert screens.screened == []


def test_a_tape_that_differs_without_a_loader_knob_is_the_own_knobs_doing() -> None:
    config = BASE.replace(**KERNEL, precision="bf16")
    blame = find_culprit(Screens(), config, (make_check("tape", "inferior"),))
    assert blame == Blame((OWN,), BASE.replace(precision="bf16"))


@pytest.mark.parametrize("verdict", ["inferior", "inconclusive"])
def test_a_batch_that_is_not_its_parts_is_put_back_as_a_whole(verdict: str) -> None:
    config = BASE.replace(**SPLIT, precision="bf16")
    blame = find_culprit(Screens(), config, (make_check("tape"), make_check("additivity", verdict)))
    assert {*blame.knobs} == {*SPLIT}
    assert blame.rest == BASE.replace(precision="bf16")


def test_the_batch_is_left_out_as_a_whole_and_last() -> None:
    screens = Screens([one("micro_batch_size")])
    config = BASE.replace(**SPLIT, num_threads=1, precision="bf16")
    blame = find_culprit(screens, config, FAILED_GRADIENTS)
    assert {*blame.knobs} == {*SPLIT}
    assert blame.rest == BASE.replace(num_threads=1, precision="bf16")
    assert len(screens.screened) == 3


@pytest.mark.parametrize("checks", [FAILED_GRADIENTS, FAILED_TRAINING], ids=["gradients", "training"])
def test_what_changes_the_training_itself_is_guilty_first(checks: Any) -> None:
    screens = Screens(facts=make_facts(numerics={}))
    config = BASE.replace(**KERNEL, **MANY)
    assert find_culprit(screens, config, checks) == Blame((OWN,), BASE.replace(**MANY))
    larger = BASE.replace(micro_batch_size=64, learning_rate_scale=2.0, precision="bf16")
    assert {*find_culprit(screens, larger, checks).knobs} == {"micro_batch_size", "learning_rate_scale"}
    assert screens.screened == []


def test_suspects_are_left_out_in_their_order_own_knobs_first() -> None:
    screens = Screens([one(OWN), one("num_threads")])
    config = BASE.replace(**MANY, **KERNEL, attention_backend="math", activation_checkpointing="full", **SPLIT)
    find_culprit(screens, config, FAILED_GRADIENTS)
    whole = {*changed_fields(config, BASE)}
    left_out = [sorted(whole - {*changed}) for changed in screens.screened]
    assert left_out == [
        [OWN],
        ["precision"],
        ["compile_mode"],
        ["attention_backend"],
        ["activation_checkpointing"],
        *sorted([["memory_format"], ["num_threads"]], key=lambda names: changed_fields(config, BASE).index(names[0])),
        sorted(SPLIT),
    ]


def training_failed(bias: float) -> tuple[QualityCheck, ...]:
    return (make_check("gradients", bias=bias), make_check("paired-losses", "inferior"))


@pytest.mark.parametrize("name", ["num_threads", "memory_format", "compile_mode", "precision"])
def test_trainings_that_drift_are_put_down_to_the_change_that_stands_out(name: str) -> None:
    bias = dict.fromkeys(("precision", "compile_mode", "num_threads", "memory_format"), 0.001) | {name: 0.015}
    screens = Screens(bias=bias)
    blame = find_culprit(screens, BASE.replace(**MANY), training_failed(sum(bias.values())))
    assert blame == Blame((name,), revert_knobs(BASE.replace(**MANY), BASE, [name]))
    assert len(screens.screened) == 4


@pytest.mark.parametrize(
    "bias",
    [
        {"num_threads": 1e-4},
        {"precision": 0.005, "num_threads": 0.006, "compile_mode": 0.005},
        {},
    ],
    ids=["too small to tell", "about alike", "none"],
)
def test_where_none_stands_out_it_is_the_first_suspect(bias: dict[str, float]) -> None:
    blame = find_culprit(Screens(bias=bias), BASE.replace(**MANY), training_failed(sum(bias.values())))
    assert blame.knobs == ("precision",)


def test_where_trainings_drift_a_rest_with_other_gradients_is_no_way_out() -> None:
    screens = Screens([one("compile_mode")], bias={"precision": 0.02})
    blame = find_culprit(screens, BASE.replace(**MANY), training_failed(0.02))
    assert blame.knobs == ("compile_mode",)


def test_gradients_that_left_it_open_are_not_what_failed() -> None:
    bias = {"precision": 0.001, "num_threads": 0.03}
    checks = (make_check("gradients", "inconclusive", bias=0.031), make_check("paired-losses", "inferior"))
    assert find_culprit(Screens(bias=bias), BASE.replace(**MANY), checks).knobs == ("num_threads",)


def test_whoever_is_guilty_the_rest_has_what_is_not() -> None:
    names = ("precision", "compile_mode", "num_threads", "memory_format")
    for size in (1, 2):
        for guilty in itertools.combinations(names, size):
            config = BASE.replace(**MANY)
            blame = find_culprit(Screens([one(*guilty)]), config, FAILED_GRADIENTS)
            assert {*blame.knobs} & {*guilty}
            assert blame.rest is not None
            assert {*changed_fields(blame.rest, BASE)} == {*MANY} - {*blame.knobs}


def test_captures_made_here_are_read_as_they_were_written(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    result = runs(BASE, "fidelity", plan=PLAN, steps=1)
    assert result is not None
    assert result.captures is not None
    read = read_trace(result.captures)
    assert read is not None
    assert np.array_equal(read.points[1].gradients.rows, make_rows())


@pytest.mark.parametrize(
    ("fall", "later_steps"),
    [(0.99, PLANS[0].later_steps), (0.9, 15), (0.2, 5), (1.02, PLANS[0].later_steps)],
)
def test_gradients_are_looked_at_where_a_training_still_learns(fall, later_steps):
    curve = LossCurve(seed=0, samples=4_000, losses=tuple(2.0 * fall**step for step in range(40)))
    assert end_while_learning(PLANS[0], curve) == PLANS[0].replace(later_steps=later_steps)


@pytest.mark.parametrize("losses", [(2.0, None) * 20, (0.0,) * 40, (1.0, 0.01)])
def test_losses_that_tell_nothing_leave_the_steps_as_they_are(losses):
    assert end_while_learning(PLANS[0], LossCurve(seed=0, samples=100, losses=losses)) == PLANS[0]


def test_a_plan_that_ends_while_a_training_learns_has_smaller_ones() -> None:
    assert list_smaller(PLANS[0]) == list(PLANS)
    early = PLANS[0].replace(later_steps=14)
    smaller = list_smaller(early)
    assert smaller[0] == early
    assert [(one.windows, one.later_steps) for one in smaller[1:3]] == [(16, 10), (12, 10)]
    assert smaller[-1] == PLANS[-1]


@pytest.mark.parametrize(
    ("steps", "later_steps"),
    [(0, 100), (52, 100), (53, 5), (117, 69), (147, 99), (148, 100), (1000, 100)],
)
def test_a_look_ends_before_an_epoch_does_where_its_points_can_be_apart_all_the_same(
    steps: int, later_steps: int
) -> None:
    plan = GradientPlan(windows=24, later_steps=100)
    assert end_within_epoch(plan, steps) == plan.replace(later_steps=later_steps)


def test_steps_that_a_loss_scaler_leaves_out_are_its_precisions():
    config = BASE.replace(**{**MANY, "precision": "fp16"})
    skipped = make_check("schedule", "inferior").replace(metric="skipped steps")
    blame = find_culprit(Screens(), config, (make_check("gradients"), skipped))
    assert blame.knobs == ("precision",)
