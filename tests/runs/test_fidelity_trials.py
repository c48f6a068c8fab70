"""Trials that write down gradients and data: twice the same is the same bit for bit, in both ways in."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fidelity_workloads import DECAY, RATE, SAMPLES, plain
from numpy.typing import NDArray
from test_script_trials import SELF_MADE, SELF_MADE_LOADERS, TORCHRUN, Project, open_project
from trial_world import World, make_spec, open_world

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.gate.data_checks import check_schedule
from autotune.drift.record.step_records import StepRecords
from autotune.drift.record.trace_file import TRACE_FILE, WEIGHTS_FILE, GradientTrace, Point, read_trace, write_trace
from autotune.engine.gradients import StepRecorder
from autotune.engine.loop import Training
from autotune.records import TrainConfig
from autotune.records.config import changed_fields
from autotune.records.trial import DataTrace, GradientPlan, TrialResult, TrialStatus
from autotune.targets.workload import check_workload

HERE = Path(__file__).parent
PLAN = GradientPlan(windows=5, later_steps=4)
ONE_POINT = GradientPlan(windows=5, later_steps=0)
KEYS = [8, 16, 24, 32, 38]
"""Samples seen; the last window is the end of the epoch, 6 samples of 62."""
SPLITS: tuple[dict[str, int], ...] = tuple(
    {"micro_batch_size": size, "gradient_accumulation_steps": 8 // size} for size in (4, 2, 1)
)


@dataclass
class Trials:
    """Runs fidelity and tape trials of workloads in processes of their own.

    Attributes:
        world: runs them.
        known: those that have run, by what was asked.
    """

    world: World
    known: dict[str, TrialResult] = field(default_factory=dict)

    def run(self, toy: str, *, plan: GradientPlan | None = PLAN, again: int = 0, **changes: Any) -> TrialResult:
        """Return the result of a trial; the same is run once, unless `again` differs."""
        key = repr((toy, plan, again, sorted(changes.items())))
        if key not in self.known:
            number, self.world.trials = self.world.trials, self.world.trials + 1
            extra = {name: changes.pop(name) for name in ("seeds", "random_sources") if name in changes}
            purpose = "tape" if plan is None else "fidelity"
            spec = make_spec(f"{HERE / 'fidelity_workloads.py'}:{toy}", number=number, purpose=purpose)
            assert spec.config is not None
            spec = spec.replace(config=spec.config.replace(**changes), fidelity=plan, **extra)
            self.known[key] = self.world.runner(spec)
            assert self.world.find_strays() == {}
        return self.known[key]

    def capture(self, toy: str, *, plan: GradientPlan = PLAN, again: int = 0, **changes: Any) -> GradientTrace:
        return captures_of(self.run(toy, plan=plan, again=again, **changes))

    def candidate(self, toy: str, *, plan: GradientPlan = PLAN, again: int = 1, **changes: Any) -> GradientTrace:
        """Return what a trial writes that starts its later point with the baseline's weights."""
        sources = {name: changes[name] for name in ("random_sources",) if name in changes}
        baseline = self.run(toy, plan=plan, **sources)
        assert baseline.captures is not None
        weights = str(Path(baseline.captures).with_name(WEIGHTS_FILE))
        return self.capture(toy, plan=plan.replace(weights=weights), again=again, **changes)

    def tape(self, toy: str, *, again: int = 0, **changes: Any) -> DataTrace:
        result = self.run(toy, plan=None, again=again, **changes)
        assert (result.status, result.error) == (TrialStatus.COMPLETED, "")
        assert result.tape is not None
        return result.tape


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with open_world(tmp_path_factory.mktemp("trials"), warm=True) as world:
        yield Trials(world)


def captures_of(result: TrialResult) -> GradientTrace:
    assert (result.status, result.cause, result.error) == (TrialStatus.COMPLETED, "", "")
    assert result.captures is not None
    captures = read_trace(result.captures)
    assert captures is not None
    return captures


def is_same(one: GradientTrace, other: GradientTrace) -> bool:
    """Return whether two trials have written the same, bit for bit."""
    return repr(everything_of(one)) == repr(everything_of(other))


def everything_of(captures: GradientTrace) -> list[Any]:
    layers = captures.layers
    found: list[Any] = [layers.names, layers.widths.tolist(), layers.elements.tolist()]
    for point in captures.points:
        arrays = (point.gradients.keys, point.gradients.rows, point.updates.rows, point.learning_rates)
        found += [(array.dtype, array.shape, array.tobytes()) for array in arrays]
    return found


def error_of(rows: NDArray[Any], truth: NDArray[Any]) -> float:
    return float(np.linalg.norm(rows.astype(np.float64) - truth) / np.linalg.norm(truth))


# Workloads: the same twice


EACH = ("plain", "dropping", "normed", "scheduled", "clipped", "streamed", "short")


@pytest.mark.parametrize("toy", EACH)
def test_the_baseline_twice_is_the_same_bit_for_bit(trials: Trials, toy: str) -> None:
    first, second = (trials.run(toy, again=again) for again in (0, 1))
    assert len(captures_of(first).points) == 2
    assert is_same(captures_of(first), captures_of(second))
    assert first.captures != second.captures
    weights = [torch.load(Path(one.captures or "").with_name(WEIGHTS_FILE)) for one in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("toy", EACH)
def test_a_candidate_stands_where_the_baseline_had_come_to(trials: Trials, toy: str) -> None:
    baseline, candidate = trials.capture(toy), trials.candidate(toy)
    assert np.array_equal(candidate.points[1].gradients.rows, baseline.points[1].gradients.rows)
    assert np.array_equal(candidate.points[1].gradients.keys, baseline.points[1].gradients.keys)
    assert is_same(first_point(candidate), first_point(baseline))
    assert not np.array_equal(baseline.points[1].gradients.rows, baseline.points[0].gradients.rows)


def first_point(captures: GradientTrace) -> GradientTrace:
    return GradientTrace(captures.layers, captures.points[:1])


def test_samples_that_are_drawn_are_the_same_in_both_arms(trials: Trials) -> None:
    drawn = {"random_sources": ("torch",)}
    baseline, candidate = trials.capture("noisy", **drawn), trials.candidate("noisy", **drawn, num_workers=2)
    assert np.array_equal(candidate.points[0].gradients.rows, baseline.points[0].gradients.rows)
    assert np.array_equal(candidate.points[1].gradients.rows, baseline.points[1].gradients.rows)
    assert not np.array_equal(baseline.points[0].gradients.rows, trials.capture("plain").points[0].gradients.rows)


def test_a_loader_knob_changes_no_gradient(trials: Trials) -> None:
    changed = trials.capture("plain", num_workers=2, persistent_workers=True)
    assert is_same(first_point(changed), first_point(trials.capture("plain")))


def test_another_seed_is_another_training(trials: Trials) -> None:
    one, other = (trials.capture("plain", plan=ONE_POINT, seeds=(seed,)) for seed in (0, 1))
    assert not np.array_equal(one.points[0].gradients.rows, other.points[0].gradients.rows)


def test_a_smaller_plan_sees_the_same_windows(trials: Trials) -> None:
    few, many = trials.capture("dropping", plan=ONE_POINT.replace(windows=3)), trials.capture("dropping")
    assert few.points[0].gradients.keys.tolist() == [8, 16, 22]
    assert np.array_equal(few.points[0].gradients.rows[:2], many.points[0].gradients.rows[:2])


def test_where_there_is_no_later_point_no_weights_are_written(trials: Trials) -> None:
    result = trials.run("plain", plan=ONE_POINT)
    assert len(captures_of(result).points) == 1
    assert not Path(result.captures or "").with_name(WEIGHTS_FILE).exists()


# Workloads: what is written


def test_keys_are_the_samples_seen_and_the_last_window_is_the_short_end_of_the_epoch(trials: Trials) -> None:
    for point in trials.capture("plain").points:
        assert point.gradients.keys.tolist() == point.updates.keys.tolist() == KEYS


@pytest.mark.parametrize(
    ("toy", "keys"),
    [("short", [8, 16, 20, 28, 36]), ("streamed", [8, 16, 24, 32, 40])],
    ids=["an epoch shorter than the plan", "a stream"],
)
def test_without_an_end_to_go_to_windows_follow_each_other(trials: Trials, toy: str, keys: list[int]) -> None:
    for point in trials.capture(toy).points:
        assert point.gradients.keys.tolist() == keys


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: str(split["micro_batch_size"]))
def test_a_split_has_the_same_windows_and_gradients(trials: Trials, split: dict[str, int]) -> None:
    baseline, candidate = trials.capture("plain"), trials.candidate("plain", **split)
    for ours, theirs in zip(candidate.points, baseline.points, strict=True):
        assert ours.gradients.keys.tolist() == KEYS
        for row, expected in zip(ours.gradients.rows, theirs.gradients.rows, strict=True):
            assert 0.0 < error_of(row, expected) < 1e-5


def test_layers_are_the_models_parameters(trials: Trials) -> None:
    layers = trials.capture("plain").layers
    assert layers.names == tuple(f"{place}.{kind}" for place in (0, 1, 4, 7) for kind in ("weight", "bias"))
    assert layers.elements.tolist() == layers.widths.tolist() == [128, 32, 32, 32, 512, 16, 16, 1]
    assert trials.capture("plain").points[0].gradients.rows.shape == (5, 769)


def gradients_in_float64() -> NDArray[np.float64]:
    """Return the gradients of the first windows of `plain`, computed in float64 from the start to the end."""
    config = TrainConfig(micro_batch_size=8, num_threads=1)
    loaded = check_workload(plain, label="plain", fingerprint="0" * 12)
    training = Training(loaded, config, device=torch.device("cpu"), seed=0)
    model = training.model.double()
    rows = []
    for _ in range(4):
        features, targets = training.windows.next_window().batches[0]
        loss = torch.nn.functional.mse_loss(model(features.double()).squeeze(-1), targets.double())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy())
    return np.stack(rows)


def test_a_reference_is_in_float64_and_nearer_to_the_truth(trials: Trials) -> None:
    truth = gradients_in_float64()
    reference = trials.candidate("plain", plan=PLAN.replace(reference=True))
    baseline, cast = trials.capture("plain"), trials.candidate("plain", precision="bf16")
    assert reference.points[0].gradients.rows.dtype == np.float64
    assert reference.layers.names == baseline.layers.names
    errors = [error_of(one.points[0].gradients.rows[:4], truth) for one in (reference, baseline, cast)]
    assert errors[0] < 0.5 * errors[1] < 1e-6
    assert 1e-4 < errors[2] < 0.1


def test_a_reference_of_the_later_point_stands_at_the_baselines_weights(trials: Trials) -> None:
    baseline = trials.run("plain")
    weights = str(Path(baseline.captures or "").with_name(WEIGHTS_FILE))
    reference = trials.capture("plain", plan=PLAN.replace(reference=True, weights=weights))
    later = captures_of(baseline).points[1].gradients
    assert reference.points[1].gradients.keys.tolist() == KEYS
    assert 0.0 < error_of(later.rows, reference.points[1].gradients.rows) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"precision": "fp16"}], ids=["fp32", "bf16", "fp16"])
def test_gradients_are_written_as_the_optimizer_gets_them(trials: Trials, changes: dict[str, Any]) -> None:
    rows = trials.capture("clipped", plan=ONE_POINT, **changes).points[0].gradients.rows
    free = trials.capture("plain", plan=ONE_POINT).points[0].gradients.rows
    assert np.linalg.norm(free, axis=1).min() > 0.06
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.full(5, 0.05), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_errs_a_little(trials: Trials, precision: Any) -> None:
    exact, cast = trials.capture("plain"), trials.candidate("plain", precision=precision)
    for ours, theirs in zip(cast.points, exact.points, strict=True):
        assert ours.gradients.keys.tolist() == KEYS
        assert 1e-5 < error_of(ours.gradients.rows, theirs.gradients.rows) < 0.1


def test_updates_are_what_the_optimizer_does_in_its_first_step(trials: Trials) -> None:
    point = trials.capture("scheduled").points[0]
    # The first step of SGD is that of its learning rate, which falls from window to window for the first layer.
    rates = np.where(np.arange(769) < 160, RATE * DECAY ** np.arange(5)[:, None], 0.05)
    assert point.updates.rows == pytest.approx(-rates * point.gradients.rows, rel=1e-3, abs=1e-7)


def test_rates_are_those_of_the_schedule(trials: Trials) -> None:
    first, later = (point.learning_rates for point in trials.capture("scheduled").points)
    assert first == pytest.approx(np.array([[RATE * DECAY**step, 0.05] for step in range(5)]), rel=1e-12)
    assert later == pytest.approx(np.array([[RATE * DECAY**step, 0.05] for step in range(9, 14)]), rel=1e-12)


@pytest.mark.parametrize("split", SPLITS[:1], ids=["split"])
def test_a_schedule_moves_with_the_steps_and_not_with_the_micro_batches(trials: Trials, split: dict[str, int]) -> None:
    ours, theirs = trials.candidate("scheduled", **split).points[0], trials.capture("scheduled").points[0]
    assert check_schedule(ours, theirs).verdict == "non-inferior"


def test_a_schedule_is_the_same_in_half_precision(trials: Trials) -> None:
    ours, theirs = trials.candidate("scheduled", precision="fp16").points[0], trials.capture("scheduled").points[0]
    check = check_schedule(ours, theirs)
    assert check.verdict == "non-inferior", check.reason


# Workloads: dropout


def test_dropout_is_noticed(trials: Trials) -> None:
    assert trials.run("dropping").draws_random
    assert not trials.run("plain").draws_random
    assert not trials.run("plain", num_workers=2, persistent_workers=True).draws_random


def test_random_samples_are_no_dropout(trials: Trials) -> None:
    assert not trials.run("noisy", random_sources=("torch",)).draws_random
    assert trials.run("noisy_dropping", random_sources=("torch",)).draws_random


def test_without_dropout_nothing_is_drawn_and_a_split_is_its_parts(trials: Trials) -> None:
    dry = PLAN.replace(dropout=False)
    assert not trials.run("dropping", plan=dry).draws_random
    whole, parts = trials.capture("dropping", plan=dry), trials.candidate("dropping", plan=dry, **SPLITS[0])
    wet, drenched = trials.candidate("dropping", **SPLITS[0]), trials.capture("dropping")
    for number in (0, 1):
        assert error_of(parts.points[number].gradients.rows, whole.points[number].gradients.rows) < 1e-5
        assert error_of(wet.points[number].gradients.rows, drenched.points[number].gradients.rows) > 0.1
    plain_rows = trials.capture("plain").points[0].gradients.rows
    assert error_of(whole.points[0].gradients.rows, plain_rows) < 1e-6


# Workloads: what goes wrong


def test_an_optimizer_that_never_steps_is_told(trials: Trials) -> None:
    result = trials.run("never_steps")
    assert (result.status, result.cause) == (TrialStatus.CRASHED, "target")
    assert result.error == "no optimizer step was seen, so no gradient can be compared"
    assert result.captures is None


def test_gradients_that_no_loss_scale_can_hold_are_told(trials: Trials) -> None:
    result = trials.run("overflows", precision="fp16")
    assert (result.status, result.captures) == (TrialStatus.CRASHED, None)
    assert result.error == "no optimizer step was seen, so no gradient can be compared"


@pytest.mark.parametrize(
    ("toy", "cause", "told"),
    [
        ("fails_at_once", "user-error", "ValueError: the labels do not fit the points"),
        ("fails_later", "user-error", "ValueError: the labels do not fit the points"),
        ("dies_later", "crash-signal", "SIGSEGV"),
        ("empty", "target", "the training set is empty"),
    ],
)
def test_a_trial_that_goes_wrong_has_written_nothing(trials: Trials, toy: str, cause: str, told: str) -> None:
    result = trials.run(toy)
    assert (result.status, result.cause) == (TrialStatus.CRASHED, cause)
    assert told in result.error
    assert result.captures is None
    folder = trials.world.folder / f"{result.spec.number:04d}"
    assert not (folder / TRACE_FILE).exists()


def test_weights_that_are_not_there_are_an_error(trials: Trials) -> None:
    result = trials.run("plain", plan=PLAN.replace(weights="/nowhere/weights.pt"))
    assert (result.status, result.captures) == (TrialStatus.CRASHED, None)
    assert "weights.pt" in result.error


def test_weights_of_another_model_are_an_error(trials: Trials) -> None:
    weights = str(Path(trials.run("normed").captures or "").with_name(WEIGHTS_FILE))
    result = trials.run("plain", plan=PLAN.replace(weights=weights))
    assert (result.status, result.captures) == (TrialStatus.CRASHED, None)
    assert "state_dict" in result.error


# Workloads: tapes


@pytest.mark.parametrize("toy", ["plain", "noisy", "short"])
def test_a_tape_is_the_same_whatever_the_loader_does(trials: Trials, toy: str) -> None:
    drawn = {"random_sources": ("torch",)} if toy == "noisy" else {}
    tape = trials.tape(toy, **drawn)
    assert trials.tape(toy, again=1, **drawn) == tape
    assert trials.tape(toy, **drawn, num_workers=2, prefetch_factor=4, persistent_workers=True) == tape
    assert tape.samples == (20 if toy == "short" else SAMPLES)
    assert tape.repeated == 0


def test_a_tape_has_the_end_of_the_epoch(trials: Trials) -> None:
    tape = trials.tape("plain")
    assert tape.end_shapes == (
        "float32[8, 4] + float32[8]",
        "float32[6, 4] + float32[6]",
        "float32[8, 4] + float32[8]",
    )
    assert tape.ends == (*tape.batches[6:8], tape.batches[8])


def test_samples_that_workers_draw_for_themselves_show(trials: Trials) -> None:
    assert trials.tape("noisy").batches != trials.tape("noisy", num_workers=2).batches


def test_a_stream_has_a_tape_of_its_start(trials: Trials) -> None:
    tape = trials.tape("streamed")
    assert len(tape.batches) == 64
    assert (tape.samples, tape.ends) == (None, ())


def test_an_empty_data_set_has_no_tape(trials: Trials) -> None:
    result = trials.run("empty", plan=None)
    assert (result.status, result.tape) == (TrialStatus.CRASHED, None)
    assert (result.error, result.hint) == (
        "the training set is empty",
        "train_dataset() must hold at least one sample",
    )


def test_a_tape_trains_nothing(trials: Trials) -> None:
    assert trials.tape("fails_at_once") == trials.tape("plain")


# Scripts


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with open_project(tmp_path_factory.mktemp("scripts")) as project:
        project.write(SELF_MADE, "dropping.py")
        project.write(SELF_MADE.replace("nn.Dropout(0.3), ", ""), "plain.py")
        yield project


OWN = TrainConfig(num_threads=1, optimizer_implementation="for-loop", micro_batch_size=8)
SCRIPT: dict[str, Any] = {"training_loaders": SELF_MADE_LOADERS, "baseline": OWN, "config": OWN}
DDP_LOADERS = ("TensorDataset[1400] by DistributedSampler",)


def capture_script(project: Project, *words: str, plan: GradientPlan = PLAN, **wanted: Any) -> TrialResult:
    return project.run(*words, purpose="fidelity", fidelity=plan, **(SCRIPT | wanted))


def weights_of(result: TrialResult) -> str:
    weights = Path(result.captures or "").with_name(WEIGHTS_FILE)
    assert weights.exists()
    return str(weights)


@pytest.mark.slow
def test_a_script_against_itself_is_the_same_at_both_points(project: Project) -> None:
    before = project.snapshot()
    first = capture_script(project, "dropping.py")
    plan = PLAN.replace(weights=weights_of(first))
    second = capture_script(project, "dropping.py", plan=plan)
    ours, theirs = captures_of(second), captures_of(first)
    assert is_same(first_point(ours), first_point(theirs))
    assert np.array_equal(ours.points[1].gradients.rows, theirs.points[1].gradients.rows)
    assert not np.array_equal(theirs.points[1].gradients.rows, theirs.points[0].gradients.rows)
    assert ours.points[0].gradients.keys.tolist() == [8, 16, 24, 32, 40]
    # 60 samples are 8 batches, the last of 4: the later point begins once 9 whole batches have been trained on.
    assert ours.points[1].gradients.keys.tolist() == [84, 92, 100, 108, 116]
    assert first.draws_random
    cast = project_cast(project, plan)
    for number in (0, 1):
        error = error_of(cast.points[number].gradients.rows, theirs.points[number].gradients.rows)
        assert 1e-5 < error < 0.1
    assert project.snapshot() == before


def project_cast(project: Project, plan: GradientPlan) -> GradientTrace:
    config = make_config(precision="bf16")
    return captures_of(capture_script(project, "dropping.py", plan=plan, config=config))


def make_config(**changes: Any) -> TrainConfig:
    config = OWN.replace(**changes)
    assert changed_fields(config, OWN)
    return config


@pytest.mark.slow
def test_a_script_without_dropout_draws_nothing(project: Project) -> None:
    plan = ONE_POINT.replace(dropout=False)
    dry, bare = capture_script(project, "dropping.py", plan=plan), capture_script(project, "plain.py", plan=ONE_POINT)
    assert (dry.draws_random, bare.draws_random) == (False, False)
    # Of the two models the one has dropout, which lets everything pass: they draw the same weights and are the same.
    assert np.array_equal(captures_of(dry).points[0].gradients.rows, captures_of(bare).points[0].gradients.rows)


@pytest.mark.slow
def test_the_order_of_an_epoch_is_no_dropout(project: Project) -> None:
    assert not capture_script(project, "plain.py", plan=ONE_POINT.replace(windows=12)).draws_random


@pytest.mark.slow
def test_a_script_in_float64_is_nearer_to_itself_than_in_low_precision(project: Project) -> None:
    baseline = captures_of(capture_script(project, "plain.py", plan=ONE_POINT)).points[0].gradients.rows
    reference = captures_of(capture_script(project, "plain.py", plan=ONE_POINT.replace(reference=True)))
    rows = reference.points[0].gradients.rows
    assert rows.dtype == np.float64
    assert 0.0 < error_of(baseline, rows) < 1e-5


@pytest.mark.slow
def test_a_script_that_trains_in_eval_mode_is_held_at_its_weights_like_any_other(project: Project) -> None:
    """Its model is found at its second step, by when its Adam has a state in float32."""
    project.write(SELF_MADE.replace("model.train()", "model.eval()"), "evaluated.py")
    plan = ONE_POINT.replace(dropout=False)
    baseline = captures_of(capture_script(project, "evaluated.py", plan=plan)).points[0].gradients.rows
    again = captures_of(capture_script(project, "evaluated.py", plan=plan)).points[0].gradients.rows
    reference = captures_of(capture_script(project, "evaluated.py", plan=plan.replace(reference=True)))
    (project.folder / "evaluated.py").unlink()
    assert np.array_equal(baseline, again)
    assert 0.0 < error_of(baseline, reference.points[0].gradients.rows) < 1e-5


@pytest.mark.slow
def test_a_script_that_ends_early_has_the_points_that_it_came_to(project: Project) -> None:
    result = capture_script(project, "plain.py", "--epochs", "1", plan=PLAN.replace(later_steps=100))
    captures = captures_of(result)
    assert [point.gradients.keys.tolist() for point in captures.points] == [[8, 16, 24, 32, 40]]
    few = captures_of(capture_script(project, "plain.py", "--epochs", "1", plan=PLAN.replace(windows=20)))
    assert few.points[0].gradients.keys.tolist() == [8, 16, 24, 32, 40, 48, 56, 60]


@pytest.mark.slow
def test_a_script_that_trains_by_hand_is_held_at_its_weights(project: Project) -> None:
    """From its second step on: its model is found by what the first one does."""
    own = OWN.replace(micro_batch_size=32)
    wanted: dict[str, Any] = {"training_loaders": (), "baseline": own, "config": own}
    by_hand = (project.folder / "by_hand.py").read_text()
    project.write(by_hand.replace("p -= args.lr * p.grad", "p -= args.lr * (epoch == i == 0) * p.grad"), "still.py")
    still, moving = (captures_of(capture_script(project, name, **wanted)) for name in ("still.py", "by_hand.py"))
    (project.folder / "still.py").unlink()
    assert np.array_equal(still.points[0].gradients.rows, moving.points[0].gradients.rows)
    assert not np.array_equal(still.points[1].gradients.rows, moving.points[1].gradients.rows)
    assert moving.points[0].learning_rates.shape == (5, 0)


@pytest.mark.slow
def test_a_script_that_leaves_no_gradient_with_its_model_is_told(project: Project) -> None:
    by_hand = (project.folder / "by_hand.py").read_text()
    functional = by_hand.replace(
        "        loss.backward()\n", "        gradients = torch.autograd.grad(loss, list(model.parameters()))\n"
    )
    functional = functional.replace("for p in model.parameters():", "for p, g in zip(model.parameters(), gradients):")
    functional = functional.replace("p -= args.lr * p.grad", "p -= args.lr * g")
    project.write(functional, "functional.py")
    result = capture_script(project, "functional.py", training_loaders=())
    (project.folder / "functional.py").unlink()
    assert (result.status, result.cause) == (TrialStatus.UNSUPPORTED, "no-optimizer-step")
    assert result.error == "no optimizer step was seen, so no gradient can be compared"
    assert result.captures is None


@pytest.mark.slow
def test_a_script_that_fails_has_written_nothing(project: Project) -> None:
    project.write(SELF_MADE.replace("        loss.backward()\n", "        raise ValueError('no labels')\n"), "fails.py")
    result = capture_script(project, "fails.py")
    (project.folder / "fails.py").unlink()
    assert (result.status, result.captures) == (TrialStatus.CRASHED, None)
    assert "no labels" in result.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "batch", "loaders", "parameters", "windows"),
    [
        # Its two optimizers make one step together only from the third on.
        (("gan.py",), 64, ("TensorDataset[1797] by RandomSampler",), 12, 3),
        (("plain_loop.py",), 64, ("Digits[1440] by RandomSampler",), 8, 5),
        (("nano_gpt.py",), 24, (), None, 5),
        (("by_hand.py",), 32, (), 6, 5),
        ((*TORCHRUN, "ddp.py"), 32, DDP_LOADERS, 6, 5),
    ],
    ids=["gan", "plain_loop", "nano_gpt", "by_hand", "ddp"],
)
def test_a_script_of_any_shape_is_the_same_twice(
    project: Project,
    command: tuple[str, ...],
    batch: int,
    loaders: tuple[str, ...],
    parameters: int | None,
    windows: int,
) -> None:
    own = OWN.replace(micro_batch_size=batch)
    wanted: dict[str, Any] = {"training_loaders": loaders, "baseline": own, "config": own}
    first = capture_script(project, *command, **wanted)
    plan = PLAN.replace(weights=weights_of(first))
    second = captures_of(capture_script(project, *command, plan=plan, **wanted))
    baseline = captures_of(first)
    assert [len(point.gradients.keys) for point in baseline.points] == [windows, 5]
    for ours, theirs in zip(second.points, baseline.points, strict=True):
        assert np.array_equal(ours.gradients.rows, theirs.gradients.rows)
    if parameters is not None:
        assert len(baseline.layers.names) == parameters


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="a change of type takes off the hooks by which gradients are averaged"
)
def test_the_reference_of_a_script_on_several_processes_is_near_to_it(project: Project) -> None:
    plan = ONE_POINT
    arms = [
        captures_of(capture_script(project, *TORCHRUN, "ddp.py", training_loaders=DDP_LOADERS, plan=one))
        for one in (plan, plan.replace(reference=True))
    ]
    baseline, reference = (one.points[0].gradients.rows for one in arms)
    assert error_of(baseline, reference) < 1e-4


@pytest.mark.slow
def test_a_tape_of_a_script_is_the_same_with_workers(project: Project) -> None:
    wanted: dict[str, Any] = {"purpose": "tape", "quality_steps": 10, **SCRIPT}
    plain_tape = project.run("dropping.py", **wanted)
    workers = project.run("dropping.py", **(wanted | {"config": make_config(num_workers=2)}))
    for result in (plain_tape, workers):
        assert (result.status, result.error, result.captures) == (TrialStatus.COMPLETED, "", None)
    assert workers.tape == plain_tape.tape
    assert plain_tape.tape is not None
    assert len(plain_tape.tape.batches) == 10
    assert plain_tape.tape.shapes[7:9] == ("float32[4, 6] + int64[4]", "float32[8, 6] + int64[8]")
    other = project.run("dropping.py", "--seed", "4", **wanted)
    assert other.tape is not None
    assert not {*other.tape.batches} & {*plain_tape.tape.batches}


# Points


def note_points(*steps: int) -> GradientTrace:
    """Return what is noted of a training with so many steps at each point."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, recorder = torch.optim.SGD([parameter], lr=0.1), StepRecorder()
    optimizer.register_step_pre_hook(lambda one, _args, _kwargs: recorder.before(one))
    optimizer.register_step_post_hook(lambda one, _args, _kwargs: recorder.after(one))
    points = StepRecords(recorder)
    for number, count in enumerate(steps):
        points.begin_point()
        for _ in range(max(1, count)):
            parameter.grad = torch.full((2,), float(number))
            if count:
                optimizer.step()
            points.add(8)
        assert points.count() == count
    return points.assemble()


def test_samples_are_counted_from_the_start_of_each_point() -> None:
    captures = note_points(3, 2)
    assert [point.gradients.keys.tolist() for point in captures.points] == [[8, 16, 24], [8, 16]]
    assert [point.gradients.rows[0].tolist() for point in captures.points] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_later_point_without_a_step_is_left_out() -> None:
    assert len(note_points(3, 0).points) == 1
    assert note_points(0, 0).points == ()


def test_a_first_point_without_a_step_does_not_pass_the_later_one_off_as_itself() -> None:
    captures = note_points(0, 3)
    assert captures.points == () or len(captures.points[0].gradients.keys) == 0


# The file


def make_captures(points: int = 2, dtype: Any = np.float32) -> GradientTrace:
    generator = np.random.default_rng(0)
    layers = RowLayout(("0.weight", "schön.bias"), np.array([4, 2]), np.array([400, 2]))
    keys = np.array([8, 16, 22])
    made = [
        Point(
            GradientRows(keys, generator.standard_normal((3, 6)).astype(dtype)),
            GradientRows(keys, generator.standard_normal((3, 6)).astype(dtype)),
            generator.random((3, 2)),
        )
        for _ in range(points)
    ]
    return GradientTrace(layers, tuple(made))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("points", [0, 1, 2])
def test_captures_are_read_as_they_were_written(tmp_path: Path, points: int, dtype: Any) -> None:
    captures = make_captures(points, dtype)
    write_trace(tmp_path / TRACE_FILE, captures)
    for path in (tmp_path / TRACE_FILE, str(tmp_path / TRACE_FILE)):
        read = read_trace(path)
        assert read is not None
        assert everything_of(read) == everything_of(captures)
    assert [path.name for path in tmp_path.iterdir()] == [TRACE_FILE]


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    captures = make_captures(1)
    captures.points[0].gradients.rows[1, 1:3] = (np.nan, -np.inf)
    write_trace(tmp_path / TRACE_FILE, captures)
    read = read_trace(tmp_path / TRACE_FILE)
    assert read is not None
    assert is_same(read, captures)


def test_a_trial_that_noted_no_window_is_read_as_one_without(tmp_path: Path) -> None:
    nothing = GradientRows(np.zeros(0, dtype=np.int64), np.zeros((0, 6), dtype=np.float32))
    captures = GradientTrace(make_captures().layers, (Point(nothing, nothing, np.zeros((0, 0))),))
    write_trace(tmp_path / TRACE_FILE, captures)
    read = read_trace(tmp_path / TRACE_FILE)
    assert read is not None
    assert is_same(read, captures)


def test_a_torn_file_is_none_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / TRACE_FILE
    write_trace(path, make_captures())
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        assert read_trace(path) is None, length


def test_a_file_whose_values_were_damaged_is_none(tmp_path: Path) -> None:
    path = tmp_path / TRACE_FILE
    captures = make_captures()
    write_trace(path, captures)
    content = path.read_bytes()
    place = content.index(captures.points[0].gradients.rows.tobytes())
    path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    assert read_trace(path) is None


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("names.npy", "no array at all")


FOREIGN: dict[str, Any] = {
    "missing": lambda _path: None,
    "empty": lambda path: path.touch(),
    "folder": lambda path: path.mkdir(),
    "text": lambda path: path.write_text("no captures"),
    "other arrays": lambda path: savez(path, x=np.ones(3)),
    "some arrays": lambda path: savez(path, names=np.array(["a"]), widths=np.array([1])),
    "pickled names": lambda path: savez(path, **described(names=np.array([{"a": 1}], dtype=object))),
    "sizes that do not fit": lambda path: savez(path, **described(widths=np.array([9]))),
    "names that do not fit": lambda path: savez(path, **described(names=np.array(["a", "b"]))),
    "a window twice": lambda path: savez(path, **described(initial_keys=np.array([8, 8]))),
    "rows that do not fit": lambda path: savez(path, **described(initial_keys=np.array([8]))),
    "updates missing": lambda path: savez(path, **described(initial_updates=None)),
}


def described(**changes: Any) -> dict[str, Any]:
    """Return the arrays of a small file, some of them exchanged."""
    usual: dict[str, Any] = {
        "names": np.array(["a"]),
        "widths": np.array([2]),
        "elements": np.array([2]),
        "initial_keys": np.array([8, 16]),
        "initial_gradients": np.ones((2, 2)),
        "initial_updates": np.ones((2, 2)),
        "initial_rates": np.ones((2, 1)),
    }
    return {name: array for name, array in (usual | changes).items() if array is not None}


def savez(path: Path, **arrays: Any) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_none(tmp_path: Path, what: str) -> None:
    FOREIGN[what](tmp_path / TRACE_FILE)
    assert read_trace(tmp_path / TRACE_FILE) is None


def test_what_is_foreign_is_only_that(tmp_path: Path) -> None:
    savez(tmp_path / TRACE_FILE, **described())
    assert read_trace(tmp_path / TRACE_FILE) is not None


def write_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


@pytest.mark.parametrize("write", [write_zip, write_array], ids=["a zip without arrays", "a single array"])
def test_a_foreign_file_that_numpy_reads_is_none_too(tmp_path: Path, write: Any) -> None:
    write(tmp_path / TRACE_FILE)
    assert read_trace(tmp_path / TRACE_FILE) is None


def test_a_file_whose_flags_were_damaged_is_none(tmp_path: Path) -> None:
    path = tmp_path / TRACE_FILE
    write_trace(path, make_captures())
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    assert read_trace(path) is None


FSDP_LOADERS = ("TensorDataset[1797] by DistributedSampler",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "loaders", "baseline", "changes"),
    [
        pytest.param(
            "ddp.py",
            DDP_LOADERS,
            OWN.replace(micro_batch_size=32),
            {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, "static_graph": True},
            id="ddp",
        ),
        pytest.param(
            "fsdp.py",
            FSDP_LOADERS,
            OWN.replace(micro_batch_size=16, gradient_accumulation_steps=2, distributed_strategy="fsdp"),
            {"reshard_after_forward": False, "sync_each_micro_batch": True},
            id="fsdp",
        ),
    ],
)
def test_what_a_script_shares_otherwise_has_the_same_gradients(
    project: Project, script: str, loaders: tuple[str, ...], baseline: TrainConfig, changes: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"baseline": baseline, "training_loaders": loaders}
    words = (*TORCHRUN, script)
    own = capture_script(project, *words, config=baseline, plan=ONE_POINT, **options)
    other = capture_script(project, *words, config=baseline.replace(**changes), plan=ONE_POINT, **options)
    assert (own.error, other.error) == ("", "")
    rows = [captures_of(one).points[0].gradients.rows for one in (own, other)]
    assert rows[0].any()
    assert error_of(*rows) < 1e-6
