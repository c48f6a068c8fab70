"""The drift gate inside a search on the simulated machine: refused early, the rest tried, trained where it must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from record_factory import make_data, make_model, make_target, read_drift_limits
from simulated import BASELINE, LAUNCH_SECONDS, Machine, Run, make_report, open_search, run_simulated

from autotune.drift.compare.gradient_rows import GradientRows
from autotune.drift.gate.screen import CLOSER_WINDOWS
from autotune.drift.gate.stage import GateStage
from autotune.drift.gate.training_runs import TrainingRuns
from autotune.drift.policy import USUAL_LOSS_CHECK, LossCheckPolicy
from autotune.drift.record.trace_file import GradientTrace, Point, read_trace, write_trace
from autotune.records import Block, DriftLimits, LossCurve, TrainConfig, TrialResult, TrialSpec, TrialStatus
from autotune.records.config import changed_fields
from autotune.records.quality import CHEAP_TESTS, Margin
from autotune.records.script import Script
from autotune.records.search import Screens
from autotune.search.launch.starter import TrialStarter
from autotune.search.log import SearchLog
from autotune.search.policy import USUAL_POLICY, SearchPolicy
from autotune.space import numerics_of

KEPT, EARLY = 0.33, 0.12
"""Of the budget: kept for finals, and what a look may take while the search goes on."""

CAST = BASELINE.replace(precision="bf16")
MATH = BASELINE.replace(attention_backend="math")
FUSED = BASELINE.replace(optimizer_implementation="fused")
TUNED = BASELINE.replace(host_allocator="glibc-tuned")
HALF = BASELINE.replace(precision="fp16")
BOTH_METRICS: dict[str, Any] = {"metrics": {"accuracy": "maximize", "error": "minimize"}, "evaluate_seconds": 0.1}
IMPROVEMENT = read_drift_limits(["error:min-improvement=0.01"])


def fast(config: TrainConfig) -> float:
    """Rates of the changes that win here; they multiply."""
    rates = {"bf16": 1.5, "fp16": 1.6, "fused": 1.3, "glibc-tuned": 1.2}
    found = (config.precision, config.optimizer_implementation, config.host_allocator)
    speed = 1.1 if config.num_workers else 1.0
    for value in found:
        speed *= rates.get(str(value), 1.0)
    return speed


def wrong_when_cast(config: TrainConfig) -> float:
    return 0.1 if config.precision == "bf16" else 0.0


def drifts_when_cast(config: TrainConfig) -> float:
    return 1.05 if config.precision == "bf16" else 1.0


def makes(config: TrainConfig, changes: TrainConfig) -> bool:
    """Return whether a config makes every change that another one makes to the baseline."""
    return all(getattr(config, name) == getattr(changes, name) for name in changed_fields(changes, BASELINE))


def of_gate(specs: Sequence[TrialSpec]) -> list[TrialSpec]:
    return [spec for spec in specs if spec.purpose in ("fidelity", "tape")]


def trained(specs: Sequence[TrialSpec]) -> list[TrainConfig]:
    return [spec.config for spec in specs if spec.purpose == "quality" and spec.config is not None]


@dataclass
class Stage:
    """A drift stage on a simulated machine, past the probe.

    Attributes:
        machine: with the trials that it ran.
        log: what the stage found.
        starter: starts them.
        stage: under test.
        results: of all trials.
    """

    machine: Machine
    log: SearchLog
    starter: TrialStarter
    stage: GateStage
    results: list[TrialResult]

    @property
    def purposes(self) -> list[str]:
        return [spec.purpose for spec in self.machine.specs]

    def choose(self, *candidates: TrainConfig) -> list[TrainConfig]:
        return self.stage.choose(
            candidates, seconds=self.starter.budget.remaining_seconds - KEPT * self.starter.budget.seconds
        )

    def look_at(self, config: TrainConfig) -> None:
        self.stage.look_at(config, seconds=EARLY * self.starter.budget.seconds)

    def tests_of(self, config: TrainConfig) -> list[tuple[str, str]]:
        return [(check.test, check.verdict) for check in self.log.checks_of(config)]


def open_stage(
    folder: Path,
    machine: Machine | None = None,
    *,
    budget: float = 600.0,
    limits: DriftLimits | None = None,
    known: Sequence[TrialResult] = (),
    script: Script | None = None,
    startup: float = 0.5,
    policy: SearchPolicy = USUAL_POLICY,
    **changes: Any,
) -> Stage:
    machine = machine or Machine()
    machine.trials = folder / "trials"
    machine.trials.mkdir(exist_ok=True)
    results: list[TrialResult] = []

    def run_and_keep(spec: TrialSpec) -> TrialResult:
        results.append(machine(spec))
        return results[-1]

    report = make_report(machine)
    if isinstance(machine, Slow):
        block = Block(optimizer_steps=4, samples=128, seconds=20.0)
        report = report.replace(measurement=report.measurement.replace(blocks=(block,)))
    search = open_search(
        machine,
        budget=budget,
        run_trial=run_and_keep,
        report=report,
        startup_seconds=startup,
        policy=policy,
        max_drift=limits or DriftLimits(),
        target=make_target().replace(script=script),
        **changes,
    )
    stage = GateStage(search.log, search.starter, known)
    return Stage(machine, search.log, search.starter, stage, results)


def open_late(folder: Path, machine: Machine, seconds_left: float, **options: Any) -> Stage:
    """Return a stage that begins with so many seconds left for it."""
    stage = open_stage(folder, machine, **options)
    budget = stage.starter.budget
    machine.now = budget.seconds * (1 - KEPT) - 1.0 - seconds_left
    assert budget.remaining_seconds - KEPT * budget.seconds == pytest.approx(seconds_left)
    return stage


# What a candidate goes through


def test_a_candidate_that_rounds_is_screened_and_then_trained(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    assert stage.choose(CAST) == [CAST]
    assert stage.purposes == ["fidelity", "fidelity", "quality", "quality"]
    assert stage.tests_of(CAST) == [(test, "non-inferior") for test in ("schedule", "gradients", "paired-losses")]
    assert stage.log.notes == ()


@pytest.mark.parametrize(
    ("config", "purposes"),
    [
        (TUNED, ["fidelity", "fidelity"]),
        (BASELINE.replace(num_workers=2), ["tape", "tape"]),
        (TUNED.replace(num_workers=2), ["tape", "tape", "fidelity", "fidelity"]),
    ],
)
def test_a_candidate_that_is_exact_needs_no_training(tmp_path: Path, config: TrainConfig, purposes: list[str]) -> None:
    stage = open_stage(tmp_path)
    assert stage.choose(config) == [config]
    assert stage.purposes == purposes


def test_a_training_that_has_learned_early_is_looked_at_sooner(tmp_path: Path) -> None:
    curve = LossCurve(seed=0, samples=1280, losses=tuple(2.0 * 0.9**step for step in range(40)))
    stage = open_stage(tmp_path, baseline_losses=curve)
    assert stage.choose(CAST) == [CAST]
    (plan,) = {spec.fidelity.later_steps for spec in stage.machine.specs if spec.fidelity}
    assert plan == 15


def test_what_fails_the_cheap_tests_is_not_trained(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=wrong_when_cast))
    assert stage.choose(CAST) == []
    assert "quality" not in stage.purposes
    assert stage.log.refused == (frozenset({"precision=bf16"}),)
    (note,) = stage.log.notes
    assert note.startswith("precision=bf16 was refused by the loss check: gradients, ")
    assert "limit 4 %" in note


def test_gradients_that_leave_it_open_are_decided_by_trainings(tmp_path: Path) -> None:
    def differ(config: TrainConfig) -> float:
        return 0.03 if config.precision == "bf16" else 0.0

    stage = open_stage(tmp_path, Machine(gradient_error=differ))
    assert stage.choose(CAST) == [CAST]
    assert stage.tests_of(CAST) == [
        ("schedule", "non-inferior"),
        ("gradients", "inconclusive"),
        ("paired-losses", "non-inferior"),
    ]


def refuse_what_was_open(folder: Path, keep: Callable[[Screens], None] = lambda _screens: None) -> Stage:
    def differ(config: TrainConfig) -> float:
        return 0.03 if config.precision == "bf16" else 0.0

    stage = open_stage(folder, Machine(gradient_error=differ, loss=drifts_when_cast))
    stage.stage._keep = keep
    assert stage.choose(CAST) == []
    return stage


def test_the_training_that_refused_what_gradients_left_open_is_told(tmp_path: Path) -> None:
    (note,) = refuse_what_was_open(tmp_path).log.notes
    assert note.endswith("training loss worse by +5.00%, limit +0.50%")


def test_trials_of_the_baseline_are_shared_by_all_candidates(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    assert stage.choose(CAST) == [CAST]
    assert stage.choose(FUSED) == [FUSED]
    baselines = [spec.purpose for spec in stage.machine.specs if spec.config == BASELINE]
    assert sorted(baselines) == ["fidelity", "fidelity", "quality"]  # once more for what the optimizers do


def test_no_more_finalists_are_chosen_than_the_finals_take(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    candidates = [CAST, FUSED, TUNED, CAST.replace(num_workers=2)]
    assert stage.choose(*candidates) == candidates[: USUAL_LOSS_CHECK.most_finalists]
    assert [config for config, _ in stage.log.checks] == candidates[: USUAL_LOSS_CHECK.most_finalists]


def test_not_more_candidates_are_tested_than_there_is_patience(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=lambda config: 0.1 * (config != BASELINE)), budget=3000.0)
    changes: list[dict[str, Any]] = [
        {"precision": "bf16"},
        {"num_threads": 1},
        {"memory_format": "channels_last"},
        {"optimizer_implementation": "fused"},
        {"optimizer_implementation": "foreach"},
        {"attention_backend": "math"},
        {"activation_checkpointing": "full"},
        {"compile_mode": "default"},
    ]
    assert stage.choose(*(BASELINE.replace(**change) for change in changes)) == []
    assert len(stage.log.checks) == USUAL_LOSS_CHECK.most_tested < len(changes)


def test_a_candidate_with_a_refused_change_is_passed_over(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=wrong_when_cast))
    assert stage.choose(CAST, CAST.replace(num_threads=1), CAST.replace(num_workers=2), TUNED) == [TUNED]
    assert [config for config, _ in stage.log.checks] == [CAST, TUNED]


def test_the_rest_of_a_refused_candidate_is_the_next_one(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=wrong_when_cast))
    both = CAST.replace(optimizer_implementation="fused")
    assert stage.choose(both, TUNED) == [FUSED]
    assert stage.log.refused == (frozenset({"precision=bf16"}),)
    assert [config for config, _ in stage.log.checks] == [both, FUSED]


def test_the_baseline_is_no_candidate(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    assert stage.choose(BASELINE) == []
    assert stage.machine.specs == []


def test_a_stop_ends_the_stage_with_what_had_passed(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(stop_after=3))
    assert stage.choose(TUNED, CAST, FUSED) == [TUNED]


# Equal losses of the search's own launches


class Repeating(Machine):
    """What is exact repeats the baseline's losses bit for bit, and so does what is told to."""

    same: tuple[TrainConfig, ...] = ()

    def curves(self, config: TrainConfig, *, seeds: Sequence[int], steps: int) -> tuple[LossCurve, ...]:
        is_same = numerics_of(config, BASELINE) == "exact" or config in self.same
        return super().curves(BASELINE if is_same else config, seeds=seeds, steps=steps)


def measure(stage: Stage, *configs: TrainConfig) -> None:
    """Launch configs as the search does."""
    for config in configs:
        stage.log.add_launch(stage.starter.launch(config, "measure", 60.0))
    stage.machine.specs.clear()


def test_equal_losses_prove_what_is_exact_and_cost_nothing(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Repeating())
    measure(stage, BASELINE, TUNED)
    assert stage.stage.needed_seconds(TUNED) == 0.0
    assert stage.stage.choose([TUNED], seconds=0.0) == [TUNED]
    assert stage.purposes == []
    (check,) = stage.log.checks_of(TUNED)
    assert (check.test, check.verdict, check.seeds, check.samples) == ("exact-losses", "non-inferior", 1, 1280)
    assert check.reason == "all 40 losses of its launches in the search equal the baseline's bit for bit"


def test_a_last_bit_that_differs_is_no_proof(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)  # every config but the baseline has losses of its own
    measure(stage, BASELINE, TUNED)
    assert stage.stage.needed_seconds(TUNED) > 0.0
    assert stage.choose(TUNED) == [TUNED]
    assert stage.purposes == ["fidelity", "fidelity"]


def test_a_workloads_loader_is_looked_at_all_the_same(tmp_path: Path) -> None:
    workers = TUNED.replace(num_workers=2)
    stage = open_stage(tmp_path, Repeating())
    measure(stage, BASELINE, workers)
    assert stage.choose(workers) == [workers]
    assert stage.purposes == ["tape", "tape"]  # the end of the epoch, which the launches did not reach
    assert [test for test, _ in stage.tests_of(workers)] == ["tape", "exact-losses"]
    other = open_stage(tmp_path, Repeating(tape=lambda config: "other" if config.num_workers else "samples"))
    measure(other, BASELINE, workers)
    assert workers not in other.choose(workers)


def test_a_script_needs_no_tape_where_its_losses_are_equal(tmp_path: Path) -> None:
    workers = BASELINE.replace(num_workers=2)
    facts = {"training_loaders": ("train.py:1",)}
    script = Script(command=("python", "train.py"))
    stage = open_stage(tmp_path, Repeating(facts=facts), script=script)
    assert stage.stage.needed_seconds(workers) > 0.0
    measure(stage, BASELINE, workers)
    assert stage.stage.needed_seconds(workers) == 0.0
    assert stage.choose(workers) == [workers]
    assert stage.purposes == []


def test_for_what_may_round_equal_losses_put_the_look_off_and_prove_nothing(tmp_path: Path) -> None:
    machine = Repeating()
    machine.same = (FUSED,)
    stage = open_stage(tmp_path, machine)
    measure(stage, BASELINE, FUSED, CAST)
    stage.look_at(FUSED)
    assert stage.purposes == []
    stage.look_at(CAST)
    assert stage.purposes == ["fidelity", "fidelity"]
    assert stage.choose(FUSED) == [FUSED]
    assert "gradients" in {test for test, _ in stage.tests_of(FUSED)}


class Wandering(Repeating):
    """Each launch has batches of its own, whatever the seed, so that no gradient is another launch's."""

    def __call__(self, spec: TrialSpec) -> TrialResult:
        result = super().__call__(spec)
        factor = 1.0 + 0.01 * spec.number
        curves = (
            one.replace(losses=tuple(loss * factor for loss in one.losses if loss is not None)) for one in result.curves
        )
        return result.replace(curves=tuple(curves)) if spec.purpose == "measure" else result


def test_where_the_baseline_does_not_repeat_itself_trainings_alone_decide(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Wandering(gradient_error=wrong_when_cast))
    measure(stage, BASELINE)
    gradients = stage.stage.needed_seconds(CAST)
    measure(stage, BASELINE)
    assert stage.stage.needed_seconds(CAST) != gradients
    assert stage.choose(CAST) == [CAST]
    assert set(stage.purposes) == {"quality"}
    (open_check, *_) = stage.log.checks_of(CAST)
    assert (open_check.test, open_check.verdict) == ("gradients", "inconclusive")
    assert open_check.reason.startswith("launches of your own settings begin with different losses")
    assert not stage.log.is_refused(CAST)


class Dropping(Repeating):
    """The baseline draws random numbers, and some settings have the losses of others."""

    same_as: ClassVar[dict[str, TrainConfig]] = {}

    def curves(self, config: TrainConfig, *, seeds: Sequence[int], steps: int) -> tuple[LossCurve, ...]:
        return super().curves(self.same_as.get(config.key, config), seeds=seeds, steps=steps)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        result = super().__call__(spec)
        return result.replace(draws_random=spec.fidelity is not None and spec.fidelity.dropout)


def test_what_is_exact_is_taken_from_the_launches_also_beside_what_rounds(tmp_path: Path) -> None:
    rounding = BASELINE.replace(memory_format="channels_last")
    both = rounding.replace(host_allocator="glibc-tuned")
    prices = []
    more = TUNED.replace(device_allocator="expandable-segments")
    for launched in ((), (TUNED,), (more,), (rounding,)):
        folder = tmp_path / str(len(prices))
        folder.mkdir()
        machine = Dropping()
        machine.same_as = {both.key: rounding}
        stage = open_stage(folder, machine)
        measure(stage, BASELINE, both, *launched)
        assert stage.choose(both) == [both]
        looked_at = [spec.config for spec in of_gate(stage.machine.specs)]
        assert (TUNED in looked_at) is not bool(launched)
        prices.append(len(looked_at))
        told = {check.test: check for check in stage.log.checks_of(both)}.get("equal-launches")
        assert (told is not None) is bool(launched)
        if told is not None:
            assert told.reason == "launches with and without malloc=glibc-tuned have the same losses, bit for bit"
    assert prices == [4, 3, 3, 3]


@pytest.mark.parametrize("is_equal", [True, False])
def test_allocators_that_no_launch_has_shown_are_trained_for_a_moment_where_that_spares_a_look(
    tmp_path: Path, is_equal: bool
) -> None:
    machine = Dropping(facts={"model": make_model(draws_random=True)})
    machine.same_as = {} if is_equal else {TUNED.key: CAST}
    stage = open_stage(tmp_path, machine)
    both = CAST.replace(host_allocator="glibc-tuned")
    measure(stage, BASELINE, both)
    assert stage.choose(both) == [both]
    (moment, *_) = [spec for spec in stage.machine.specs if spec.purpose == "quality"]
    assert (moment.config, moment.seeds) == (TUNED, (stage.log.problem.state.seed,))
    assert moment.quality_steps <= 24
    looked_at = [spec.config for spec in of_gate(stage.machine.specs)]
    assert (TUNED in looked_at) is not is_equal
    assert ("equal-launches" in dict(stage.tests_of(both))) is is_equal
    # A later session knows it.
    folder = tmp_path / "later"
    folder.mkdir()
    later = open_stage(folder, Dropping(facts=machine.facts), known=stage.results)
    measure(later, BASELINE)
    assert later.choose(both) == [both]
    assert not any(spec.config == TUNED for spec in later.machine.specs if spec.purpose == "quality")


def test_allocators_that_fail_at_that_are_not_trained_again(tmp_path: Path) -> None:
    class Failing(Dropping):
        def curves(self, config: TrainConfig, *, seeds: Sequence[int], steps: int) -> tuple[LossCurve, ...]:
            return () if config == TUNED else super().curves(config, seeds=seeds, steps=steps)

    stage = open_stage(tmp_path, Failing(facts={"model": make_model(draws_random=True)}))
    measure(stage, BASELINE)
    for candidate in (CAST, BASELINE.replace(memory_format="channels_last")):
        stage.choose(candidate.replace(host_allocator="glibc-tuned"))
    assert [spec.config for spec in stage.machine.specs if spec.purpose == "quality"].count(TUNED) == 1


@pytest.mark.parametrize("is_equal", [True, False])
def test_where_one_allocator_has_other_losses_no_other_is_trained(tmp_path: Path, is_equal: bool) -> None:
    machine = Dropping(facts={"model": make_model(draws_random=True)})
    machine.same_as = {} if is_equal else {TUNED.key: CAST}
    stage, other = open_stage(tmp_path, machine), BASELINE.replace(host_allocator="jemalloc")
    measure(stage, BASELINE)
    for allocator in (TUNED, other):
        stage.choose(CAST.replace(host_allocator=allocator.host_allocator))
    trained_alone = [
        spec.config for spec in machine.specs if spec.purpose == "quality" and spec.config in (TUNED, other)
    ]
    assert trained_alone == ([TUNED, other] if is_equal else [TUNED])


def test_an_exact_candidate_has_its_turn_although_there_is_no_time_for_the_one_before(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Repeating())
    measure(stage, BASELINE, CAST, TUNED)
    assert stage.stage.choose([CAST, TUNED], seconds=1.0) == [TUNED]
    assert stage.purposes == []


# What a proof will take


def test_the_more_there_is_to_prove_the_more_it_needs(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Repeating(knobs={"variant": ("a", "b")})).stage
    baseline = BASELINE.replace(user_knobs={"variant": "a"})
    workers, cast, half, variant = (
        stage.needed_seconds(baseline.replace(**changes))
        for changes in (
            {"num_workers": 2},
            {"precision": "bf16"},
            {"precision": "fp16"},
            {"user_knobs": {"variant": "b"}, "precision": "bf16"},
        )
    )
    assert 0.0 < workers < cast < half == variant
    assert stage.needed_seconds(None) == cast
    assert stage.needed_seconds(baseline.replace(compile_mode="default")) > cast + 40.0  # compiling is paid for


def test_a_proof_is_priced_at_the_speed_that_the_machine_has_now(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    before = stage.stage.foretell_seconds(CAST)
    measure(stage, BASELINE)
    usual = stage.stage.foretell_seconds(CAST)
    stage.machine.drift = lambda _now: 0.2
    measure(stage, *[BASELINE] * 4)
    assert stage.stage.foretell_seconds(CAST) > 2 * max(before, usual)


def test_trainings_that_gradients_will_hardly_ask_for_are_a_fifth_of_a_price_or_none(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    gate, exact = stage.stage, TUNED
    screening, whole = gate.needed_seconds(CAST), gate.foretell_seconds(CAST)
    assert screening < gate.average_seconds(CAST) < screening + 0.25 * (whole - screening)
    assert gate.average_seconds(exact) == gate.foretell_seconds(exact)
    stage.machine.now = stage.starter.budget.seconds - 1.9 * (whole - screening)  # they take most of what is left
    assert gate.average_seconds(CAST) == screening
    assert gate.foretell_seconds(CAST) == whole


def test_what_was_shown_needs_nothing_and_the_baselines_part_is_paid_once(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    before = stage.stage.needed_seconds(CAST), stage.stage.needed_seconds(HALF)
    assert stage.choose(CAST) == [CAST]
    assert stage.stage.needed_seconds(CAST) == 0.0
    again = BASELINE.replace(matmul_precision="high")
    assert 0.0 < stage.stage.needed_seconds(again) < stage.stage.needed_seconds(HALF)
    windows = stage.machine.specs[0].fidelity
    assert windows is not None
    assert windows.later_steps > 0  # by the plan that was made; the prediction before was of the smallest
    assert before[0] < before[1]


def unsure_when_cast(config: TrainConfig) -> float:
    """Change a gradient by more than is shown to be nothing, and less than is shown to be something."""
    return 0.02 if config.precision == "bf16" else 0.0


def unsure_with_other_kernels(config: TrainConfig) -> float:
    return 0.02 if config.attention_backend == "math" else 0.0


def price_without_risk(stage: Stage, config: TrainConfig) -> float:
    return stage.log.prices.launch_seconds(config) + stage.stage.average_seconds(config)


def test_fewer_digits_may_have_to_be_trained_until_gradients_have_told(tmp_path: Path) -> None:
    both = CAST.replace(host_allocator="glibc-tuned")
    told, open_, (plain, unsure) = [], [], (tmp_path / "plain", tmp_path / "unsure")
    for folder, machine in ((plain, Machine()), (unsure, Machine(gradient_error=unsure_when_cast))):
        folder.mkdir()
        stage = open_stage(folder, machine)
        expected, needed = stage.stage.expect_seconds, stage.stage.needed_seconds
        assert expected(FUSED) == needed(FUSED)
        open_.append(expected(CAST) - needed(CAST))
        assert stage.stage.price_answer(CAST) == pytest.approx(1.25 * price_without_risk(stage, CAST))
        assert stage.stage.price_answer(FUSED) == price_without_risk(stage, FUSED)
        assert stage.choose(CAST) == [CAST]
        assert expected(both) == needed(both)
        assert stage.stage.price_answer(both) == price_without_risk(stage, both)
        told.append(needed(both))
    assert min(open_) > 1.0
    assert told[1] > told[0] + 1.0  # those that cannot tell need the trainings


def test_what_gradients_have_left_open_is_open_until_a_training_has_shown_it(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=unsure_when_cast))
    assert stage.stage.list_open() == []
    stage.look_at(CAST)
    assert stage.stage.list_open() == [frozenset({"precision=bf16"})]
    assert stage.choose(CAST.replace(num_workers=2)) == [CAST.replace(num_workers=2)]
    assert stage.stage.list_open() == []


def test_another_kernel_whose_gradients_jump_is_open_too_and_its_trainings_are_kept_time_for(tmp_path: Path) -> None:
    """In a sparse attention the order of a sum may decide which elements there are: no look tells of that in time."""
    both = MATH.replace(host_allocator="glibc-tuned")
    needed = []
    for name, error in (("smooth", 0.0), ("jumps", 0.02)):
        folder = tmp_path / name
        folder.mkdir()
        stage = open_stage(
            folder, Machine(gradient_error=lambda config, e=error: e * (config.attention_backend == "math"))
        )
        stage.look_at(MATH)
        needed.append(stage.stage.needed_seconds(both))
        assert stage.stage.list_open() == ([frozenset({"attention_backend=math"})] if error else [])
        assert stage.choose(both) == [both]
        assert stage.stage.list_open() == []
    assert needed[1] > needed[0] + 1.0


@pytest.mark.parametrize(
    ("speed", "most", "looked"), [(1.6, math.inf, True), (1.2, math.inf, False), (1.6, 60.0, False), (1.6, None, False)]
)
def test_fewer_digits_that_are_much_faster_get_the_time_for_a_closer_look(
    tmp_path: Path, speed: float, most: float | None, *, looked: bool
) -> None:
    machine = Machine(
        speed=lambda config: speed if config.precision == "bf16" else 1.0,
        gradient_noise=lambda config: 0.002 if config.precision == "bf16" else 0.0,
    )
    stage = open_stage(tmp_path, machine)
    for config in (BASELINE, CAST):
        stage.log.add_launch(stage.starter.launch(config, "measure", 60.0))
    stage.stage.look_at(CAST, seconds=EARLY * stage.starter.budget.seconds, most_seconds=most)
    windows = [spec.fidelity.windows for spec in machine.specs if spec.fidelity]
    assert (CLOSER_WINDOWS in windows) is looked
    assert stage.stage.list_open() == ([] if looked else [frozenset({"precision=bf16"})])


@pytest.mark.parametrize(("launches", "looked"), [(4.0, True), (3.4, False)])
def test_a_script_is_not_run_in_float64_where_that_cannot_end_in_time(
    tmp_path: Path, launches: float, *, looked: bool
) -> None:
    machine = Machine(gradient_error=unsure_with_other_kernels)
    stage = open_stage(tmp_path, machine, script=Script(command=("python", "train.py")))
    stage.stage.look_at(MATH, seconds=launches * machine.seconds)
    plans = [spec.fidelity for spec in machine.specs]
    assert all(plans)
    assert any(plan.reference for plan in plans if plan) is looked
    assert len(plans) == 2 + looked


def test_a_look_in_float64_may_take_longer_before_it_counts_as_hanging(tmp_path: Path) -> None:
    machine = Machine(gradient_error=unsure_with_other_kernels)
    stage = open_stage(tmp_path, machine, budget=6000.0, script=Script(command=("python", "train.py")))
    stage.stage.look_at(MATH, seconds=5000.0)
    patience = {spec.fidelity.reference: spec.limits.time_limit_seconds for spec in machine.specs if spec.fidelity}
    assert patience[True] > 2.0 * patience[False]


def test_a_resumed_search_knows_what_gradients_could_not_tell(tmp_path: Path) -> None:
    kept: list[Screens] = []
    stage = open_stage(tmp_path, Machine(gradient_error=unsure_when_cast))
    stage.stage._keep = kept.append
    assert stage.choose(CAST) == [CAST]
    (tmp_path / "again").mkdir()
    again, both = open_stage(tmp_path / "again").stage, CAST.replace(host_allocator="glibc-tuned")
    assert again.expect_seconds(both) > again.needed_seconds(both)
    again.restore(kept[-1])
    assert again.expect_seconds(both) == again.needed_seconds(both)


def test_a_resumed_search_knows_what_its_trainings_have_lost_and_told(tmp_path: Path) -> None:
    kept: list[Screens] = []
    stage = refuse_what_was_open(tmp_path, keep=kept.append)
    (tmp_path / "again").mkdir()
    again = open_stage(tmp_path / "again", known=stage.results)
    again.stage.restore(kept[-1])
    assert again.log.baseline_curves == stage.log.baseline_curves != ()
    assert again.log.notes == stage.log.notes != ()


def test_what_there_is_time_to_prove_has_its_turn_before_what_leads(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    assert stage.stage.choose([CAST, TUNED], seconds=600.0, is_provable=lambda config: config != CAST) == [TUNED]


def test_a_required_improvement_needs_trainings_of_everything(tmp_path: Path) -> None:
    plain = open_stage(tmp_path, Machine(facts=BOTH_METRICS)).stage
    asked = open_stage(tmp_path, Machine(facts=BOTH_METRICS), limits=IMPROVEMENT).stage
    for config in (None, TUNED, CAST):
        assert asked.needed_seconds(config) > plain.needed_seconds(config) + 1.0


def test_the_time_handed_in_is_all_that_is_used(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(seconds=6.0))
    stage.stage.choose([CAST, FUSED], seconds=14.0)
    assert stage.machine.now <= 14.0
    assert stage.machine.specs


@pytest.mark.parametrize("is_script", [False, True])
def test_a_training_of_five_seconds_a_step_is_answered_in_three_minutes(tmp_path: Path, is_script: bool) -> None:
    script = Script(command=("python", "train.py")) if is_script else None
    stage = open_stage(tmp_path, Slow(), script=script, startup=6.0)
    assert stage.stage.needed_seconds(None) < 120.0
    assert stage.stage.choose([CAST], seconds=170.0) == [CAST]
    (plan,) = {spec.fidelity for spec in stage.machine.specs if spec.config == CAST}
    assert plan is not None
    assert (plan.windows, plan.later_steps) == (8, 0)


class Slow(Machine):
    """Five seconds a step, six until the first."""

    def __call__(self, spec: TrialSpec) -> TrialResult:
        steps = spec.fidelity.windows + spec.fidelity.later_steps if spec.fidelity else 10
        self.seconds = 7.0 + 5.0 * steps
        return super().__call__(spec)


# A look during the search


def test_a_promising_config_is_screened_once_and_not_trained(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    stage.look_at(CAST)
    assert stage.purposes == ["fidelity", "fidelity"]
    stage.look_at(CAST)
    stage.look_at(CAST.replace(num_workers=2))  # nothing new that rounds
    stage.look_at(CAST.replace(optimizer_implementation="fused"))  # it waits for its turn
    assert len(stage.purposes) == 2
    stage.look_at(CAST.replace(num_threads=1))
    assert len(stage.purposes) > 2
    assert stage.log.refused == ()


def test_fewer_digits_are_looked_at_alone_and_before_anything_else(tmp_path: Path) -> None:
    stage, more = open_stage(tmp_path), CAST.replace(num_threads=1, num_workers=2)
    assert stage.stage.find_early_part(more) == CAST
    stage.look_at(more)
    assert [spec.config for spec in stage.machine.specs] == [BASELINE, CAST]
    assert stage.stage.find_early_part(more) == more
    stage.look_at(more)
    assert stage.stage.find_early_part(more) is None


def test_what_a_look_has_told_of_a_precision_is_known_of_whatever_it_comes_with(tmp_path: Path) -> None:
    kept: list[Screens] = []
    stage = open_stage(tmp_path)
    gate, more = GateStage(stage.log, stage.starter, keep=kept.append), CAST.replace(num_workers=2)
    before = gate.foretell_seconds(more)
    gate.look_at(CAST, seconds=300.0)
    again = GateStage(stage.log, stage.starter)
    again.restore(kept[-1])
    assert before > gate.foretell_seconds(more) == gate.needed_seconds(more)  # no trainings are foretold any more
    assert kept[-1].told == (("precision=bf16",),)
    assert again.expect_seconds(CAST) == again.needed_seconds(CAST)


def test_what_else_is_left_open_takes_nothing_back_of_what_gradients_have_told(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=unsure_with_other_kernels))
    stage.look_at(CAST)
    needed = stage.stage.needed_seconds(CAST)
    stage.look_at(CAST.replace(attention_backend="math"))
    assert len(stage.results) > 2
    assert stage.stage.list_open() == []
    assert stage.stage.needed_seconds(CAST) == needed


def test_a_precision_does_not_wait_for_the_look_in_float64_that_a_kernel_waits_for(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    before = stage.stage.needed_seconds(CAST.replace(attention_backend="math"))
    stage.stage.restore(Screens(doubted=(("attention_backend=math",),), reference_seconds=200.0))
    assert stage.stage.needed_seconds(MATH) > 200.0
    assert stage.stage.needed_seconds(CAST.replace(attention_backend="math")) == before


def test_a_look_is_over_once_and_a_resumed_search_knows_it(tmp_path: Path) -> None:
    kept: list[Screens] = []
    stage, both = open_stage(tmp_path), CAST.replace(attention_backend="math")
    stage.stage._keep = kept.append
    stage.log.add_launch(stage.starter.launch(both, "measure", 60.0))
    assert not stage.stage.has_looked_at(both)
    stage.look_at(both)
    again = GateStage(stage.log, stage.starter)
    again.restore(kept[-1])
    for one in (stage.stage, again):
        assert one.has_looked_at(both)
        assert one.find_early_part(both) == both  # the rest has its turn with its next launch
    stage.log.add_launch(stage.starter.launch(both, "measure", 60.0))
    assert not again.has_looked_at(both)


def test_how_closely_is_looked_is_kept_where_a_look_is_cut(tmp_path: Path) -> None:
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.INTERRUPTED if config.precision == "bf16" else TrialStatus.COMPLETED

    kept: list[Screens] = []
    stage = open_stage(tmp_path, Machine(fate=fate))
    stage.stage._keep = kept.append
    stage.look_at(CAST)
    assert kept[-1].plan == stage.machine.specs[0].fidelity
    assert kept[-1].seen == ()


def test_what_was_screened_in_the_search_is_not_screened_again(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    stage.look_at(CAST)
    ran = len(stage.machine.specs)
    assert stage.choose(CAST) == [CAST]
    assert of_gate(stage.machine.specs[ran:]) == []


def test_a_config_that_is_exact_is_not_looked_at_early(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    stage.look_at(TUNED.replace(num_workers=2))
    assert stage.machine.specs == []


def test_what_fails_the_look_is_refused_with_its_reason(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=wrong_when_cast))
    stage.look_at(CAST.replace(optimizer_implementation="fused"))
    assert stage.log.refused == (frozenset({"precision=bf16"}),)
    assert len(stage.log.notes) == 1
    assert stage.log.is_refused(CAST.replace(num_workers=2))
    assert not stage.log.is_refused(FUSED)


def test_without_time_for_a_look_it_is_left_to_the_end(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=wrong_when_cast), budget=30.0)
    stage.stage.look_at(CAST, seconds=2.9)  # two processes take 1.5 s each before their first step
    assert stage.machine.specs == []
    assert stage.choose(CAST) == []
    assert stage.log.refused == (frozenset({"precision=bf16"}),)


# Whole searches


def run_search(work: Path, *, budget: float = 600.0, **machine: Any) -> Run:
    return run_simulated(Machine(**({"speed": fast} | machine)), work, budget=budget)


def split_at_refusal(specs: Sequence[TrialSpec], config: TrainConfig) -> tuple[list[TrialSpec], list[TrialSpec]]:
    """Return the trials before the first look at a change was over, and those after it."""
    is_looking = [spec.purpose in ("fidelity", "tape") for spec in specs]
    first = next(i for i, spec in enumerate(specs) if is_looking[i] and makes(spec.config, config))
    last = is_looking.index(False, first)
    return list(specs[:last]), list(specs[last:])


def test_wrong_gradients_are_refused_while_the_search_goes_on_and_the_next_best_wins(tmp_path: Path) -> None:
    run = run_search(tmp_path, gradient_error=wrong_when_cast)
    before, after = split_at_refusal(run.machine.specs, CAST)
    assert any(spec.purpose == "measure" and makes(spec.config, CAST) for spec in before)
    searched = [spec.config for spec in after if spec.purpose == "measure"]
    assert len(searched) > 20
    assert not any(makes(config, CAST) for config in searched)
    assert not any(makes(config, CAST) for config in trained(run.machine.specs))
    assert run.profile.verdict == "improved"
    assert run.profile.config.precision == "fp32"
    assert makes(run.profile.config, FUSED)
    assert makes(run.profile.config, TUNED)
    told = [note for note in run.profile.evidence.notes if note.startswith("precision=bf16 was refused")]
    assert len(told) == 1


@pytest.mark.slow
def test_a_search_without_a_wrong_gradient_refuses_nothing(tmp_path: Path) -> None:
    run = run_search(tmp_path)
    assert run.log.refused == ()
    assert makes(run.profile.config, CAST)
    assert not any("refused" in note for note in run.profile.evidence.notes)


@pytest.mark.slow
def test_a_loader_that_hands_over_something_else_is_refused_and_the_rest_wins(tmp_path: Path) -> None:
    def read(config: TrainConfig) -> str:
        return "other samples" if config.num_workers else "samples"

    def speed(config: TrainConfig) -> float:
        return (1.4 if config.num_workers else 1.0) * (1.3 if config.optimizer_implementation == "fused" else 1.0)

    run = run_search(tmp_path, speed=speed, tape=read)
    assert run.profile.verdict == "improved"
    assert makes(run.profile.config, FUSED)
    assert run.profile.config.num_workers == 0
    assert any(any(change.startswith("num_workers=") for change in refused) for refused in run.log.refused)
    assert not any(config.num_workers for config in trained(run.machine.specs))
    told = [note for note in run.profile.evidence.notes if "was refused by the loss check" in note]
    assert told
    assert all("workers=" in note and "batches hold other values" in note for note in told)


def test_a_change_that_only_trainings_show_is_refused_and_the_rest_is_trained(tmp_path: Path) -> None:
    def speed(config: TrainConfig) -> float:
        return (1.5 if config.precision == "bf16" else 1.0) * (1.2 if config.host_allocator == "glibc-tuned" else 1.0)

    run = run_search(tmp_path, speed=speed, loss=drifts_when_cast)
    assert run.profile.verdict == "improved"
    assert run.profile.config.precision == "fp32"
    assert makes(run.profile.config, TUNED)
    assert run.profile.config in trained(run.machine.specs)
    assert any(check.test in ("exact-losses", "paired-losses") for check in run.profile.quality)


@pytest.mark.slow
def test_an_exact_winner_needs_no_training_where_nothing_was_refused(tmp_path: Path) -> None:
    run = run_search(tmp_path, speed=lambda config: 1.4 if config.host_allocator == "glibc-tuned" else 1.0, noise=0.0)
    assert run.profile.config == TUNED
    assert TUNED not in trained(run.machine.specs)
    assert {check.test for check in run.profile.quality} == {"schedule", "gradients"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_change_never_gets_into_the_answer_whatever_it_comes_with(tmp_path: Path, seed: int) -> None:
    run = run_search(tmp_path, gradient_error=wrong_when_cast, seed=seed, noise=0.03)
    assert run.profile.config.precision == "fp32"
    assert run.profile.candidate_config is None or run.profile.candidate_config.precision == "fp32"


@pytest.mark.slow
def test_the_gates_time_is_told(tmp_path: Path) -> None:
    run = run_search(tmp_path)
    spent = sum(LAUNCH_SECONDS for spec in run.machine.specs if spec.purpose in ("fidelity", "tape", "quality"))
    assert run.log.gate_seconds == pytest.approx(spent)
    assert run.profile.evidence.drift_fraction == pytest.approx(spent / run.machine.now, rel=0.02)


@pytest.mark.slow
def test_the_budget_stays_a_deadline_with_all_that_is_refused(tmp_path: Path) -> None:
    for number, budget in enumerate((60.0, 90.0, 123.0, 400.0)):
        work = tmp_path / str(number)
        work.mkdir()
        run = run_search(work, budget=budget, gradient_error=wrong_when_cast, loss=drifts_when_cast)
        assert run.machine.now <= budget


# What must be trained


def test_after_a_refusal_by_trainings_alone_what_is_left_is_trained(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(loss=drifts_when_cast))
    both = CAST.replace(host_allocator="glibc-tuned")
    assert stage.choose(both) == [TUNED]
    assert stage.tests_of(both)[-1] == ("paired-losses", "inferior")
    assert TUNED in trained(stage.machine.specs)
    assert stage.tests_of(TUNED)[-1] == ("paired-losses", "non-inferior")


def test_after_a_refusal_by_gradients_what_is_exact_is_accepted_without(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(gradient_error=wrong_when_cast))
    assert stage.choose(CAST.replace(host_allocator="glibc-tuned")) == [TUNED]
    assert trained(stage.machine.specs) == []


def improving(config: TrainConfig) -> dict[str, float | None]:
    return {"accuracy": 0.8, "error": 0.1 if config.host_allocator == "glibc-tuned" else 0.2}


@pytest.mark.parametrize("improves", [True, False])
def test_a_required_improvement_is_looked_for_even_in_an_exact_candidate(tmp_path: Path, improves: bool) -> None:
    metrics = improving if improves else lambda _config: {"accuracy": 0.8, "error": 0.2}
    stage = open_stage(tmp_path, Machine(facts=BOTH_METRICS, metrics=metrics), limits=IMPROVEMENT)
    assert stage.choose(TUNED) == ([TUNED] if improves else [])
    assert TUNED in trained(stage.machine.specs)


SHORT = 6.0 * 3
"""Seconds in which two trials of 6 s are run, and no training any more."""


def test_without_time_for_trainings_equal_gradients_are_accepted(tmp_path: Path) -> None:
    stage = open_late(tmp_path, Machine(seconds=6.0), SHORT)
    assert stage.choose(CAST) == [CAST]
    assert {test for test, _ in stage.tests_of(CAST)} == {"schedule", "gradients"}


@pytest.mark.parametrize(("spare", "is_trained"), [(0.02, True), (0.01, False)])
def test_another_order_of_sums_is_trained_only_where_that_takes_little_of_the_time(
    tmp_path: Path, spare: float, *, is_trained: bool
) -> None:
    policy = SearchPolicy(loss_check=LossCheckPolicy(spare_share=spare))  # trainings take 1.2 % of what is left
    for name, config, limits in (
        ("sums", FUSED, DriftLimits()),
        ("kept digits", BASELINE.replace(matmul_precision="medium"), DriftLimits()),
        ("digits", CAST, DriftLimits()),
        ("limited", FUSED, DriftLimits(loss=Margin(amount=0.02))),
    ):
        (tmp_path / name).mkdir()
        late = open_late(tmp_path / name, Machine(), 200.0, limits=limits, policy=policy)
        assert late.choose(config) == [config]
        assert ("quality" in late.purposes) == (is_trained or name not in ("sums", "kept digits"))


@pytest.mark.parametrize(("steps", "is_trained"), [(None, False), (500, True)])
def test_steps_that_the_user_asked_for_are_trained(tmp_path: Path, steps: int | None, *, is_trained: bool) -> None:
    script = Script(command=("python", "train.py"), quality_steps=steps)
    policy = SearchPolicy(loss_check=LossCheckPolicy(spare_share=0.0))
    stage = open_stage(tmp_path, Machine(), script=script, policy=policy, budget=6000.0)
    assert stage.choose(FUSED) == [FUSED]
    assert ("quality" in stage.purposes) == is_trained


def test_trainings_too_short_to_tell_are_not_run_of_gradients_that_have_passed(tmp_path: Path) -> None:
    stage = open_late(tmp_path, Machine(), 40.0, script=Script(command=("python", "train.py")), startup=3.0)
    assert stage.choose(CAST) == [CAST]
    assert "quality" not in stage.purposes
    other = tmp_path / "other"
    other.mkdir()
    late = open_late(other, Machine(), 100.0, script=Script(command=("python", "train.py")), startup=3.0)
    assert late.choose(HALF) == [HALF]  # it needs them
    assert "quality" in late.purposes


def test_without_time_for_trainings_half_precision_is_not_accepted(tmp_path: Path) -> None:
    stage = open_late(tmp_path, Machine(seconds=6.0), SHORT)
    assert stage.choose(HALF) == []


def test_without_time_for_trainings_a_required_improvement_is_not_shown(tmp_path: Path) -> None:
    machine = Machine(seconds=6.0, facts=BOTH_METRICS, metrics=improving)
    stage = open_late(tmp_path, machine, SHORT, limits=IMPROVEMENT)
    assert stage.choose(TUNED) == []


def test_without_time_for_trainings_a_semantic_change_is_not_accepted(tmp_path: Path) -> None:
    machine = Machine(seconds=6.0, knobs={"variant": ("a", "b")})
    stage = open_late(tmp_path, machine, SHORT)
    assert stage.choose(stage.log.problem.baseline.replace(user_knobs={"variant": "b"})) == []


def test_without_time_for_trainings_gradients_that_leave_it_open_are_no_pass(tmp_path: Path) -> None:
    machine = Machine(seconds=6.0, gradient_error=lambda config: 0.03 * (config.precision == "bf16"))
    stage = open_late(tmp_path, machine, SHORT + 6.0)
    assert stage.choose(CAST) == []


def test_without_time_for_the_cheap_tests_nothing_is_accepted(tmp_path: Path) -> None:
    stage = open_late(tmp_path, Machine(seconds=6.0), 12.0)
    assert stage.choose(CAST) == []
    assert stage.log.checks == ()


def test_half_precision_is_trained_and_its_skipped_steps_are_counted(tmp_path: Path) -> None:
    stage = open_stage(tmp_path)
    assert stage.choose(HALF) == [HALF]
    assert HALF in trained(stage.machine.specs)
    assert [test for test, _ in stage.tests_of(HALF)] == ["schedule", "gradients", "paired-losses", "schedule"]


def test_where_nothing_is_learned_equal_gradients_are_enough(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(learns=False))
    assert stage.choose(CAST) == [CAST]
    assert {test for test, _ in stage.tests_of(CAST)} <= {*CHEAP_TESTS}


class Converged(Machine):
    """The mean gradient has vanished; casting adds the same small difference in every window."""

    shift = 0.005
    """Its size over the spread of a window's own gradient."""

    is_warming_up = False
    """The learning rate rises from window to window."""

    def _capture(self, spec: TrialSpec, config: TrainConfig) -> str | None:
        path = super()._capture(spec, config)
        found = read_trace(path) if path is not None else None
        if path is None or found is None:
            return path
        arm = found.points[0].gradients
        rows = arm.rows - arm.rows.mean(axis=0) + self.shift * (config.precision == "bf16")
        rates = found.points[0].learning_rates
        if self.is_warming_up:
            rates = rates * np.arange(len(rates))[:, None]
        point = Point(GradientRows(arm.keys, rows), found.points[0].updates, rates)
        write_trace(Path(path), GradientTrace(found.layers, (point,) * len(found.points)))
        return path


@pytest.mark.parametrize(
    ("learns", "shift", "passes"), [(False, 0.005, True), (True, 0.005, True), (False, 0.06, False)]
)
def test_rounding_that_is_lost_in_the_noise_of_a_converged_training_is_not_refused(
    tmp_path: Path, learns: bool, shift: float, passes: bool
) -> None:
    machine = Converged(learns=learns)
    machine.shift = shift
    stage = open_stage(tmp_path, machine)
    assert stage.choose(CAST) == ([CAST] if passes else [])
    verdict = {"gradients": "inferior"} if not passes else {"gradients": "inconclusive" if learns else "non-inferior"}
    assert verdict.items() <= dict(stage.tests_of(CAST)).items()
    # Where something is still learned, the losses have to show that as much is.
    assert ("paired-losses" in dict(stage.tests_of(CAST))) == learns


def test_a_training_too_short_to_learn_anything_has_not_converged(tmp_path: Path) -> None:
    """What is lost in the noise at the initial weights passes by no training of a few steps."""
    stage = open_late(
        tmp_path, Converged(learns=False), 60.0, script=Script(command=("python", "train.py")), startup=3.0
    )
    assert stage.choose(CAST) == []
    (steps,) = {spec.quality_steps for spec in stage.machine.specs if spec.purpose == "quality"}
    assert steps < USUAL_POLICY.loss_check.good_steps
    assert dict(stage.tests_of(CAST))["gradients"] == "inconclusive"


@pytest.mark.parametrize("is_warming_up", [False, True])
def test_a_training_that_learns_nothing_in_its_warm_up_has_not_converged(tmp_path: Path, is_warming_up: bool) -> None:
    machine = Converged(learns=False)
    machine.is_warming_up = is_warming_up
    stage = open_stage(tmp_path, machine)
    assert stage.choose(CAST) == ([] if is_warming_up else [CAST])
    assert dict(stage.tests_of(CAST))["gradients"] == ("inconclusive" if is_warming_up else "non-inferior")
    (steps,) = {spec.quality_steps for spec in stage.machine.specs if spec.purpose == "quality"}
    assert steps >= USUAL_POLICY.loss_check.good_steps


@dataclass
class Chancy(Machine):
    """Losses of what is cast go apart by chance."""

    drift_of_cast: float = 0.0
    spread: float = 0.02
    all_by_chance: bool = False

    def curves(self, config: TrainConfig, *, seeds: Sequence[int], steps: int) -> tuple[LossCurve, ...]:
        found = super().curves(config, seeds=seeds, steps=steps)
        if config == BASELINE or (config.precision != "bf16" and not self.all_by_chance):
            return found
        moved = ([self.drift_of_cast - self.spread, self.drift_of_cast + self.spread] * len(found))[: len(found)]
        return tuple(
            curve.replace(losses=tuple((1 + by) * (loss or 0.0) for loss in curve.losses))
            for curve, by in zip(found, moved, strict=True)
        )


@pytest.mark.parametrize(
    ("drift", "gradient_error", "limit", "passes"),
    [
        (0.0, 0.0, None, True),  # too noisy to tell, and the gradients are the same
        (0.0, 0.03, None, False),  # these leave it open
        (0.05, 0.0, None, False),  # shown to be worse, whatever the gradients say
        (0.0, 0.0, "loss:0.4%", False),  # the user asked for it
    ],
)
def test_losses_that_are_too_noisy_to_tell_do_not_take_back_what_gradients_have_told(
    tmp_path: Path, drift: float, gradient_error: float, limit: str | None, passes: bool
) -> None:
    machine = Chancy(gradient_error=lambda config: gradient_error * (config.precision == "bf16"), drift_of_cast=drift)
    stage = open_stage(tmp_path, machine, limits=read_drift_limits([limit]) if limit else None)
    assert stage.choose(CAST) == ([CAST] if passes else [])
    assert CAST in trained(stage.machine.specs)
    told = [
        one
        for one in stage.log.notes
        if one.endswith("too noisy for a limit of 0.50%; the gradients show no difference that matters")
    ]
    assert len(told) == passes, stage.log.notes


def test_a_precision_that_is_lost_in_noise_leaves_others_to_their_gradients(tmp_path: Path) -> None:
    machine = Chancy(gradient_error=lambda config: 0.03 * (config.precision == "bf16"), all_by_chance=True)
    stage = open_stage(tmp_path, machine)
    assert stage.choose(CAST) == []
    assert stage.choose(FUSED) == [FUSED]
    assert FUSED not in trained(stage.machine.specs)  # the same noise would tell as little


def open_noisy(folder: Path, *, spread: float) -> Stage:
    machine = Chancy(gradient_error=lambda config: 0.03 * (config.precision == "bf16"), spread=spread)
    return open_stage(folder, machine, script=Script(command=("python", "train.py")))


@pytest.mark.parametrize(("spread", "is_lost"), [(0.2, True), (0.01, False)])
def test_losses_that_one_seed_shows_to_be_lost_in_noise_are_not_built_on(
    tmp_path: Path, spread: float, *, is_lost: bool
) -> None:
    stage = open_noisy(tmp_path, spread=spread)
    stage.look_at(CAST.replace(optimizer_implementation="fused"))
    assert trained(stage.machine.specs) == [BASELINE, CAST]
    assert stage.log.refused == ((frozenset({"precision=bf16"}),) if is_lost else ())
    assert [
        note.endswith("are 25 % apart in one short training, too noisy for a limit of 0.50%")
        for note in stage.log.notes
    ] == ([True] if is_lost else [])


def test_a_limit_that_the_user_gave_is_tested_whatever_was_lost_in_noise_before(tmp_path: Path) -> None:
    machine = Chancy(gradient_error=lambda config: 0.03 * (config.precision == "bf16"), spread=0.2, all_by_chance=True)
    script = Script(command=("python", "train.py"))
    stage = open_stage(tmp_path, machine, script=script, limits=read_drift_limits(["loss:0.4%"]))
    assert stage.choose(CAST) == []
    stage.choose(FUSED)
    assert FUSED in trained(stage.machine.specs)


def test_no_further_seed_is_trained_of_what_is_lost_in_noise(tmp_path: Path) -> None:
    stage = open_noisy(tmp_path, spread=0.2)
    assert stage.choose(CAST) == []
    assert [len(spec.seeds) for spec in stage.machine.specs if spec.purpose == "quality"] == [1, 1]


def test_one_seed_is_not_trained_early_where_that_takes_much_of_the_budget(tmp_path: Path) -> None:
    machine = Chancy(gradient_error=lambda config: 0.03 * (config.precision == "bf16"), spread=0.2)
    stage = open_stage(tmp_path, machine, script=Script(command=("python", "train.py")), startup=40.0)
    stage.stage.look_at(CAST, seconds=400.0)
    assert trained(stage.machine.specs) == []
    assert stage.log.refused == ()


class Starting(Machine):
    """Casting adds the same difference in every window of the first point, and another one of the later."""

    biases = (0.02, 0.0)
    """Over the spread of a window's own gradient, whose mean is 0.3 of it."""

    def _capture(self, spec: TrialSpec, config: TrainConfig) -> str | None:
        path = super()._capture(spec, config)
        found = read_trace(path) if path is not None else None
        if path is None or found is None or config.precision != "bf16":
            return path
        points = [
            Point(GradientRows(one.gradients.keys, one.gradients.rows + bias), one.updates, one.learning_rates)
            for one, bias in zip(found.points, self.biases, strict=False)
        ]
        write_trace(Path(path), GradientTrace(found.layers, tuple(points)))
        return path


@pytest.mark.parametrize(
    ("biases", "verdict"),
    [
        ((0.012, 0.0), "non-inferior"),  # 4 % of the mean, 1.2 % of a step's own spread, and gone
        ((0.012, 0.012), "inconclusive"),  # not gone
        ((0.030, 0.0), "inconclusive"),  # too much for a step
        ((0.0, 0.012), "inconclusive"),  # nothing makes up for what comes late
    ],
)
def test_a_bias_of_the_first_steps_alone_that_steers_none_of_them_is_nothing(
    tmp_path: Path, biases: tuple[float, float], verdict: str
) -> None:
    machine = Starting()
    machine.biases = biases
    stage = open_stage(tmp_path, machine)
    stage.choose(CAST)
    assert dict(stage.tests_of(CAST))["gradients"] == verdict


@pytest.mark.parametrize("is_script", [False, True])
def test_what_cannot_be_judged_is_not_trained(tmp_path: Path, is_script: bool) -> None:
    machine = Converged(learns=False)
    machine.is_warming_up = True
    script = Script(command=("python", "train.py")) if is_script else None
    stage = open_stage(tmp_path, machine, script=script)
    assert stage.choose(CAST) == []
    runs = [spec for spec in stage.machine.specs if spec.purpose == "quality"]
    assert {spec.config for spec in runs} == {BASELINE}
    assert sum(len(spec.seeds) for spec in runs) == (1 if is_script else USUAL_POLICY.loss_check.most_seeds)
    assert "nothing is learned" in stage.log.notes[0]


@pytest.mark.parametrize("learns", [True, False])
def test_a_first_seed_that_learns_is_trained_once(tmp_path: Path, learns: bool) -> None:
    machine = Converged(learns=learns)
    machine.is_warming_up = True
    stage = open_stage(tmp_path, machine, script=Script(command=("python", "train.py")))
    stage.choose(CAST)
    arms = [(spec.config, spec.seeds) for spec in stage.machine.specs if spec.purpose == "quality"]
    assert len(arms) == len({*arms})
    assert ((CAST, (0,)) in arms) is learns


@pytest.mark.parametrize("learns", [True, False])
def test_trainings_are_priced_by_the_steps_in_which_launches_were_seen_to_learn(tmp_path: Path, learns: bool) -> None:
    stage = open_stage(tmp_path, Machine(learns=learns))
    before = stage.stage.expect_seconds(CAST)
    measure(stage, BASELINE)
    assert (stage.stage.expect_seconds(CAST) > before + 1.0) is not learns
    folder = tmp_path / "metric"
    folder.mkdir()
    with_metric = open_stage(folder, Machine(learns=learns, facts=BOTH_METRICS, noise=0.0))
    before = with_metric.stage.expect_seconds(CAST)
    measure(with_metric, BASELINE)
    assert with_metric.stage.expect_seconds(CAST) == pytest.approx(before)


@dataclass
class Plateau(Machine):
    """Losses stand still at first."""

    flat: int = 0

    def curves(self, config: TrainConfig, *, seeds: Sequence[int], steps: int) -> tuple[LossCurve, ...]:
        found = super().curves(config, seeds=seeds, steps=self.flat + 800)
        cut = [curve.losses[:1] * self.flat + curve.losses for curve in found]
        return tuple(
            curve.replace(losses=losses[:steps], samples=32 * steps) for curve, losses in zip(found, cut, strict=True)
        )


@pytest.mark.parametrize(("flat", "launched", "is_long"), [(0, 400, True), (400, 1200, False), (400, 100, True)])
def test_a_training_is_not_long_where_launches_were_seen_to_learn_only_later(
    tmp_path: Path, flat: int, launched: int, is_long: bool
) -> None:
    stage = open_stage(tmp_path, Plateau(flat=flat))
    (curve,) = stage.machine.curves(BASELINE, seeds=[0], steps=launched)
    measure(stage, BASELINE)
    (one,) = stage.log.judged
    stage.log.add_judged(dataclasses.replace(one, result=one.result.replace(curves=(curve,))))
    runs = TrainingRuns(stage.log, stage.starter)
    plan = runs.plan(1, 10_000.0)
    assert plan is not None
    assert plan.steps == USUAL_POLICY.loss_check.most_steps
    assert runs.is_long(plan) is is_long


def test_launches_of_a_few_steps_say_nothing_of_how_long_a_training_takes_to_learn(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(learns=False))
    before = TrainingRuns(stage.log, stage.starter).least_seconds()
    measure(stage, BASELINE)
    (one,) = stage.log.judged
    least = USUAL_POLICY.loss_check.least_steps
    for steps, is_dearer in ((least - 1, False), (least, True)):
        (curve,) = stage.machine.curves(BASELINE, seeds=[0], steps=steps)
        log = open_stage(tmp_path, Machine(learns=False)).log
        log.add_judged(dataclasses.replace(one, result=one.result.replace(curves=(curve,))))
        assert (TrainingRuns(log, stage.starter).least_seconds() > before + 1.0) is is_dearer


def test_half_precision_is_trained_even_where_nothing_is_learned(tmp_path: Path) -> None:
    stage = open_stage(tmp_path, Machine(learns=False))
    stage.choose(HALF)
    assert HALF in trained(stage.machine.specs)


def test_a_required_improvement_that_cannot_be_measured_is_none_even_where_nothing_is_learned(tmp_path: Path) -> None:
    machine = Machine(learns=False, facts={**BOTH_METRICS, "evaluate_seconds": None})
    assert open_stage(tmp_path, machine, limits=IMPROVEMENT).choose(TUNED) == []


# Earlier sessions


def test_what_an_earlier_session_has_run_is_not_run_again(tmp_path: Path) -> None:
    first = open_stage(tmp_path)
    candidate = CAST.replace(num_workers=2)
    assert first.choose(candidate) == [candidate]
    assert {*first.purposes} == {"tape", "fidelity", "quality"}
    again = open_stage(tmp_path, Machine(), known=first.results)
    assert again.choose(candidate) == [candidate]
    assert again.machine.specs == []
    assert again.tests_of(candidate) == first.tests_of(candidate)


def test_a_trial_by_another_plan_is_run_again(tmp_path: Path) -> None:
    first = open_stage(tmp_path)
    assert first.choose(CAST) == [CAST]
    known = [
        one.replace(spec=one.spec.replace(fidelity=one.spec.fidelity.replace(windows=3)))
        for one in first.results
        if one.spec.fidelity is not None
    ]
    again = open_stage(tmp_path, Machine(), known=known)
    assert again.choose(CAST) == [CAST]
    assert len(of_gate(again.machine.specs)) == 2


@pytest.mark.slow
def test_a_resumed_search_screens_only_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_simulated(Machine(speed=fast), tmp_path / "whole")
    stop = next(i for i, spec in enumerate(whole.machine.specs) if spec.purpose == "quality") + 1
    first = run_simulated(Machine(speed=fast, stop_after=stop), tmp_path)
    done = [
        (result.spec.purpose, result.spec.config, result.spec.fidelity)
        for result in first.folder.read_trials()
        if result.spec.purpose in ("fidelity", "tape")
    ]
    assert done
    second = run_simulated(Machine(speed=fast), tmp_path, folder=first.folder)
    assert second.profile.verdict == "improved"
    again = [(spec.purpose, spec.config, spec.fidelity) for spec in of_gate(second.machine.specs)]
    assert not [one for one in again if one in done]


def test_a_stage_of_a_script_plans_for_steps_that_its_candidates_repeat(tmp_path: Path) -> None:
    plans = []
    for script in (None, Script(command=("python", "train.py"))):
        folder = tmp_path / str(len(plans))
        folder.mkdir()
        stage = open_stage(folder, budget=120.0, script=script)
        stage.look_at(CAST)
        plans.append(stage.machine.specs[0].fidelity)
    assert all(plan is not None for plan in plans)
    assert (plans[1].later_steps, plans[1].windows) < (plans[0].later_steps, plans[0].windows)


@pytest.mark.parametrize(("left", "statuses"), [(9.0, ["completed"]), (11.0, ["completed", "interrupted"])])
def test_a_look_that_would_be_cut_is_not_begun(tmp_path: Path, left: float, statuses: list[str]) -> None:
    """What the user's own settings took is known by then: with half of that, faster ones would be cut as well."""
    stage = open_late(tmp_path, Machine(seconds=6.0), left)
    assert stage.choose(CAST) == []
    assert [result.status.value for result in stage.results] == statuses
    assert stage.log.checks == ()


def test_a_look_that_was_cut_is_not_begun_again_before_it_may_have_more_time(tmp_path: Path) -> None:
    class SlowCast(Machine):
        def __call__(self, spec: TrialSpec) -> TrialResult:
            self.seconds = 60.0 if spec.config == CAST else 3.0
            return super().__call__(spec)

    stage = open_late(tmp_path, SlowCast(), 20.0)
    before = stage.stage.needed_seconds(CAST)
    assert stage.choose(CAST) == []
    cut = stage.results[-1].elapsed_seconds
    assert [result.status.value for result in stage.results] == ["completed", "interrupted"]
    assert stage.stage.needed_seconds(CAST) >= 2.0 * cut > before
    stage.stage.choose([CAST], seconds=cut)
    assert len(stage.results) == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_look_at_a_script_ends_before_its_first_epoch(tmp_path: Path, processes: int) -> None:
    facts = {"data": make_data(sample_count=117 * 32 * processes), "launched_processes": processes}
    stage = open_stage(tmp_path, Machine(facts=facts), script=Script(command=("python", "train.py")))
    stage.choose(CAST)
    plan = stage.machine.specs[0].fidelity
    assert plan is not None
    assert 2 * plan.windows + plan.later_steps == 117


def test_a_trial_that_is_cut_short_by_the_end_of_its_time_is_no_result(tmp_path: Path) -> None:
    stage = open_late(tmp_path, Machine(seconds=30.0), 25.0)
    assert stage.choose(CAST) == []
    assert [result.status for result in stage.results] == [TrialStatus.INTERRUPTED]
    assert stage.log.checks == ()
