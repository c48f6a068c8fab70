"""Faults planted in a training: each is survived by a safe step down, which is said and written into the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_world import Workplace, make_profile, read_metrics, read_state

from autotune.drift.guard.check_schedule import CheckPace
from autotune.drift.guard.guard import DriftGuard
from autotune.errors import CheckpointError, TargetError
from autotune.records.codec import read_record
from autotune.records.config import TrainConfig
from autotune.records.run import RunPlan, TrainingSummary
from autotune.train.loop import health_checks as looks
from autotune.train.loop import session
from autotune.train.loop.checkpoint import Checkpoints
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.recovery.steps_down import FreshProcessNeeded
from autotune.train.run import run_training

BASELINE = TrainConfig(micro_batch_size=8, num_threads=1)
BF16 = BASELINE.replace(precision="bf16")

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def faulty(tmp_path: Path) -> Workplace:
    for name in ("noisy_workload.py", "faulty_workload.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    return Workplace(tmp_path)


def train(place: Workplace, toy: str, config: TrainConfig = BASELINE, **options: Any) -> TrainingSummary:
    label = f"faulty_workload.py:{toy}"
    make_profile(place.folder, label, config, baseline_config=BASELINE).save(place.folder / "best.json")
    told: list[str] = []
    chosen = TrainingOptions(**({"profile": "best.json", "epochs": 4, "out": "run"} | options))
    summary = run_training(
        chosen,
        label,
        folder=place.folder,
        callbacks=TrainingCallbacks(warn=place.said.append, step_down=lambda one: told.append(one.sentence)),
    )
    assert told == [one.sentence for one in summary.step_downs[-len(told) :]] or not told
    assert told or chosen.resume or not summary.step_downs
    run = place.folder / str(chosen.out)
    assert read_record(run / "run.json", RunPlan).step_downs == summary.step_downs
    assert summary.finished
    steps = [line["step"] for line in read_metrics(run) if "samples" in line]
    assert steps == sorted(set(steps))
    return summary


def weights_differ(first: Path, second: Path) -> float:
    ours, theirs = (read_state(folder)["model"] for folder in (first, second))
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.slow_cases("out_of_host_memory")
@pytest.mark.parametrize(
    ("toy", "cause"),
    [("out_of_memory", "oom-device"), ("out_of_host_memory", "oom-host"), ("half_updated", "oom-host")],
)
@pytest.mark.fault(
    "1",
    injected="torch.OutOfMemoryError in mid backward; MemoryError in mid optimizer step",
    outcome="smaller micro batches, same effective batch, from the last whole state",
)
def test_out_of_memory_splits_the_batch_from_the_last_consistent_state(faulty: Workplace, toy: str, cause: str) -> None:
    train(faulty, "quiet", out="straight")
    summary = train(faulty, toy)
    (step_down,) = summary.step_downs
    assert (step_down.cause, step_down.action, step_down.resumed_step) == (cause, "fewer-samples", 6)
    assert step_down.config == BASELINE.replace(micro_batch_size=4, gradient_accumulation_steps=2)
    assert "micro_batch 8 -> 4, accumulation 1 -> 2" in step_down.sentence
    # The effective batch, the order and the schedule are the same: what differs is rounding.
    assert weights_differ(faulty.folder / "straight", faulty.folder / "run") < 1e-5
    assert summary.samples == 4 * 44


@pytest.mark.parametrize("toy", ["out_of_memory_over_pairs", "out_of_memory_normalised"])
def test_a_batch_is_not_split_where_smaller_ones_learn_something_else(faulty: Workplace, toy: str) -> None:
    with pytest.raises(TargetError, match="a smaller micro batch would be another training") as caught:
        train(faulty, toy)
    assert "--resume" in caught.value.hint
    assert read_record(faulty.folder / "run" / "run.json", RunPlan).step_downs == ()


def test_an_allocator_that_gives_memory_back_again_and_again_is_out_of_memory(
    faulty: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = iter(range(1000))
    monkeypatch.setattr(looks, "count_allocation_retries", lambda _device: min(next(retries), 5))
    summary = train(faulty, "quiet", epochs=8)
    (step_down,) = summary.step_downs
    assert (step_down.cause, step_down.action) == ("allocator-thrash", "fewer-samples")
    assert summary.config == BASELINE.replace(micro_batch_size=4, gradient_accumulation_steps=2)


def test_an_allocator_that_goes_on_so_where_nothing_helps_ends_no_training(
    faulty: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = iter(range(1000))
    monkeypatch.setattr(looks, "count_allocation_retries", lambda _device: next(retries))
    summary = train(faulty, "quiet", BASELINE.replace(micro_batch_size=1, gradient_accumulation_steps=8), epochs=8)
    assert [(one.cause, one.action) for one in summary.step_downs] == [("allocator-thrash", "endured")]
    assert summary.samples == 8 * 44


@pytest.mark.fault("45", injected="a compiled model that raises", outcome="trained without compiling")
def test_a_compilation_that_fails_is_left_out(faulty: Workplace) -> None:
    train(faulty, "quiet", out="straight")
    summary = train(faulty, "does_not_compile", BASELINE.replace(compile_mode="default"))
    (step_down,) = summary.step_downs
    assert (step_down.cause, step_down.action, step_down.resumed_step) == ("compile-error", "eager", 0)
    assert step_down.config == BASELINE
    assert weights_differ(faulty.folder / "straight", faulty.folder / "run") == 0.0


@pytest.mark.parametrize(("toy", "resumed"), [("overflows_in_bf16", 12), ("poisons_its_weights", 6)])
@pytest.mark.fault(
    "15", injected="a loss and a weight that overflow in bf16", outcome="the baseline's arithmetic, from before it"
)
def test_what_is_not_finite_goes_back_to_the_baselines_arithmetic(faulty: Workplace, toy: str, resumed: int) -> None:
    summary = train(faulty, toy, BF16)
    (step_down,) = summary.step_downs
    assert (step_down.cause, step_down.action, step_down.resumed_step) == ("non-finite", "baseline-numerics", resumed)
    assert step_down.config == BASELINE
    assert all(torch.isfinite(value).all() for value in read_state(faulty.folder / "run")["model"].values())


@pytest.mark.fault(
    "16", injected="gradients a third too large under autocast", outcome="back to the baseline's settings"
)
def test_gradients_that_drift_go_back_to_the_baseline(faulty: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of a fraction of a millisecond leave next to no time for looks.
    monkeypatch.setattr(DriftGuard, "pace", CheckPace(first_step=20, least_steps=1, most_cost=1.0))
    train(faulty, "quiet", out="straight", epochs=12)
    summary = train(faulty, "drifts_in_bf16", BF16, epochs=12)
    (step_down,) = summary.step_downs
    assert (step_down.cause, step_down.action, step_down.resumed_step) == ("drift-gradients", "baseline", 0)
    assert step_down.config == BASELINE
    assert summary.guard is not None
    assert summary.guard.alarms == 1
    # No checkpoint was from before the drift: it began anew, and nothing of it is left.
    assert weights_differ(faulty.folder / "straight", faulty.folder / "run") == 0.0


@pytest.mark.slow
def test_drift_that_comes_later_goes_back_to_before_it(faulty: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriftGuard, "pace", CheckPace(first_step=10, least_steps=1, most_cost=1.0))
    summary = train(faulty, "drifts_later_in_bf16", BF16, epochs=24)
    (step_down,) = summary.step_downs
    assert (step_down.cause, step_down.config) == ("drift-gradients", BASELINE)
    assert 0 < step_down.resumed_step < step_down.step
    assert summary.guard is not None
    assert summary.guard.alarms == 1
    folder = faulty.folder / "run" / "checkpoints"
    assert all(int(path.name[-8:]) > step_down.resumed_step for path in folder.glob("suspect-*"))
    assert summary.best is not None
    assert summary.best.step == summary.steps
    state = torch.load(Path(summary.best.checkpoint) / "state.pt", weights_only=True)
    assert state["precision"] == "fp32"


@pytest.mark.parametrize(
    ("toy", "cause"),
    [
        pytest.param("hanging_workers", "dataloader-worker-hung", marks=pytest.mark.slow),
        ("dying_workers", "dataloader-worker-died"),
    ],
)
@pytest.mark.fault(
    "8", injected="loader workers that hang, and that die", outcome="tried once more, then trained without workers"
)
def test_workers_that_fail_twice_are_given_up(faulty: Workplace, toy: str, cause: str) -> None:
    train(faulty, "quiet", out="straight", epochs=2)
    summary = train(faulty, toy, BASELINE.replace(num_workers=1), epochs=2, worker_timeout_seconds=1.0)
    assert [(one.cause, one.action) for one in summary.step_downs] == [(cause, "again"), (cause, "no-workers")]
    assert summary.step_downs[-1].config.num_workers == 0
    assert weights_differ(faulty.folder / "straight", faulty.folder / "run") == 0.0


def test_a_damaged_file_is_no_dead_worker(faulty: Workplace) -> None:
    with pytest.raises(TargetError, match="Compressed file ended"):
        train(faulty, "truncated_file", BASELINE.replace(num_workers=1), epochs=1)
    plan = read_record(faulty.folder / "run" / "run.json", RunPlan)
    assert not [one for one in plan.step_downs if one.cause != "user-error" or one.action == "no-workers"]


def test_samples_that_cannot_be_drawn_again_are_told_of(faulty: Workplace) -> None:
    train(faulty, "draws_by_itself", epochs=1)
    assert any("a sample fetched twice is another one" in text for text in faulty.said)
    faulty.said.clear()
    train(faulty, "quiet", epochs=1, out="other")
    assert not any("fetched twice" in text for text in faulty.said)


def test_layers_without_a_size_are_refused(faulty: Workplace) -> None:
    with pytest.raises(TargetError, match="layers without a size yet") as caught:
        train(faulty, "lazy", epochs=1)
    assert "call the model once" in caught.value.hint


def test_a_run_that_was_moved_keeps_its_best_one(faulty: Workplace) -> None:
    best = train(faulty, "quiet", epochs=2).best
    assert best is not None
    (faulty.folder / "run").rename(faulty.folder / "moved")
    after = train(faulty, "quiet", epochs=3, out="moved", resume=True).best
    assert after is not None
    assert after.value <= best.value
    assert Path(after.checkpoint).parent == faulty.folder / "moved" / "checkpoints"


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(faulty: Workplace) -> None:
    train(faulty, "quiet", epochs=1)
    shutil.rmtree(faulty.folder / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="the run ended with one at step 6"):
        train(faulty, "quiet", epochs=2, resume=True)
    assert read_metrics(faulty.folder / "run")


def test_an_evaluation_that_is_too_large_is_made_smaller(faulty: Workplace) -> None:
    summary = train(faulty, "evaluates_too_much", epochs=1)
    assert summary.step_downs == ()
    assert summary.metrics == {"error": 2.0}  # of 32, 16, 8, 4, 2 samples at once
    assert sum("tried again with" in text for text in faulty.said) == 4


def test_an_evaluation_without_a_size_is_left_out(faulty: Workplace) -> None:
    summary = train(faulty, "evaluates_far_too_much", epochs=2)
    assert summary.metrics == {"error": None}
    assert summary.steps == 12
    assert any("was left out" in text and "batch_size" in text for text in faulty.said)


def test_a_table_made_in_an_evaluation_costs_inference_mode(faulty: Workplace) -> None:
    summary = train(faulty, "caches_in_evaluation", epochs=3)
    assert [(one.cause, one.action) for one in summary.step_downs] == [("inference-tensor", "gradients-kept")]
    assert summary.steps == 18


def test_an_evaluation_that_needs_gradients_gets_them(faulty: Workplace) -> None:
    summary = train(faulty, "needs_gradients", epochs=1)
    assert summary.step_downs == ()
    assert summary.metrics["error"]
    assert any("inference mode" in text for text in faulty.said)


def test_a_resumed_run_keeps_its_steps_down(faulty: Workplace) -> None:
    train(faulty, "out_of_memory", epochs=2)
    before = json.loads((faulty.folder / "run" / "run.json").read_text())
    summary = train(faulty, "out_of_memory", epochs=3, resume=True)
    assert summary.config == BASELINE.replace(micro_batch_size=4, gradient_accumulation_steps=2)
    assert len(summary.step_downs) == 1
    after = json.loads((faulty.folder / "run" / "run.json").read_text())
    assert after["step_downs"] == before["step_downs"]


def test_a_device_that_only_answers_with_an_error_costs_a_process_and_no_record(
    faulty: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_asked: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(session, "release_cached", answer)
    monkeypatch.setattr(Checkpoints, "save", answer)  # it is told of where the device is waited for, not in the step
    with pytest.raises(FreshProcessNeeded, match="illegal memory access"):
        train(faulty, "quiet", epochs=1)
    [step_down] = read_record(faulty.folder / "run" / "run.json", RunPlan).step_downs
    assert (step_down.cause, step_down.action, step_down.resumed_step) == ("device-error", "again", 0)


def test_what_no_step_down_mends_is_the_targets_error(faulty: Workplace) -> None:
    make_profile(faulty.folder, "noisy_workload.py:failing", BF16).save(faulty.folder / "best.json")
    with pytest.raises(TargetError, match="raised FileNotFoundError"):
        run_training(TrainingOptions(profile="best.json"), "noisy_workload.py:failing", folder=faulty.folder)


def test_averaged_weights_are_evaluated_and_resumed(faulty: Workplace) -> None:
    train(faulty, "quiet", out="straight", epochs=2)
    train(faulty, "quiet", epochs=1)
    train(faulty, "quiet", epochs=2, resume=True)
    ours, theirs = (read_state(faulty.folder / name)["averaged"] for name in ("straight", "run"))
    assert ours.keys() == theirs.keys()
    assert ours["n_averaged"] == 12
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_metrics(faulty.folder / "straight")[-1]["error"] == read_metrics(faulty.folder / "run")[-1]["error"]
