"""The folder of a run, a workload's or a script's, and what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_plan

from autotune.errors import ProfileError, UsageError
from autotune.records.config import TrainConfig
from autotune.records.layout import PLAN_FILE, SCRIPT_FILE
from autotune.records.training_process import TrainingProgress
from autotune.train.loop.metrics import cut_metrics, read_last_step
from autotune.train.loop.session import Session
from autotune.train.recovery.steps_down import Choice, Fault, make_step_down
from autotune.train.report import summarize
from autotune.train.runs.folder import SCRIPT_RUN, WORKLOAD_RUN, RunFolder, RunKind, newest_whole_step, open_run

CONFIG = TrainConfig(micro_batch_size=64)
PLAN = make_plan(CONFIG)
STEP_DOWN = make_step_down(
    Fault("oom-host", "no memory", 7),
    Choice("fewer-samples", CONFIG.replace(micro_batch_size=32, gradient_accumulation_steps=2)),
    resumed_step=5,
    sentence="less at once",
)


@pytest.mark.parametrize(("kind", "name"), [(WORKLOAD_RUN, PLAN_FILE), (SCRIPT_RUN, SCRIPT_FILE)])
def test_a_run_of_either_kind_is_read_as_it_was_written(tmp_path: Path, kind: RunKind, name: str) -> None:
    folder = RunFolder(tmp_path, PLAN, kind)
    folder.write_plan(PLAN)
    folder.add_step_down(STEP_DOWN)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert open_run(tmp_path) == folder
    assert folder.plan.current_config.micro_batch_size == 32
    assert folder.read_summary() is None
    progress = TrainingProgress(steps=3, samples=192, training_samples=128, training_seconds=2.0)
    summary = summarize(folder.plan, progress, finished=True, elapsed_seconds=5.0)
    folder.write_summary(summary)
    assert open_run(tmp_path).read_summary() == summary
    assert (summary.samples_per_second, summary.step_downs) == (64.0, (STEP_DOWN,))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        open_run(tmp_path)
    (tmp_path / SCRIPT_FILE).write_text("{}")
    with pytest.raises(ProfileError):
        open_run(tmp_path)


def test_a_record_that_cannot_be_written_ends_a_workloads_training_only(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = RunFolder(gone, PLAN, SCRIPT_RUN)
    script.add_step_down(STEP_DOWN)
    assert script.plan.step_downs == (STEP_DOWN,)  # it is in force all the same
    workload = RunFolder(gone, PLAN, WORKLOAD_RUN)
    with pytest.raises(FileNotFoundError):
        workload.add_step_down(STEP_DOWN)
    assert workload.plan == PLAN


def test_the_newest_checkpoint_is_the_newest_with_a_manifest(tmp_path: Path) -> None:
    assert newest_whole_step(tmp_path) == 0
    for name, is_whole in (("step-00000009", True), ("step-00000120", True), ("step-00000300", False)):
        (tmp_path / name).mkdir()
        if is_whole:
            (tmp_path / name / "manifest.json").touch()
    assert newest_whole_step(tmp_path) == 120


def test_lines_that_a_death_cut_short_are_left_out(tmp_path: Path) -> None:
    assert (cut_metrics(tmp_path, 5), read_last_step(tmp_path)) == ([], 0)
    lines = [json.dumps({"step": step}) for step in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], "[" * 100_000, "7", *lines[1:], '{"step": 4']))
    assert read_last_step(tmp_path) == 30
    assert cut_metrics(tmp_path, 20) == [{"step": 10}, {"step": 20}]
    assert read_last_step(tmp_path) == 20


@pytest.mark.parametrize(("loss", "told"), [(0.5, 0.5), (float("inf"), None), (float("nan"), None), (None, None)])
def test_a_last_loss_that_is_not_finite_is_none_in_the_summary(loss: float | None, told: float | None) -> None:
    nothing: Any = None
    session = Session(nothing, nothing, nothing, nothing, nothing, 0.0, nothing, (), loss=loss)
    assert summarize(PLAN, session.measure_progress(), finished=True, elapsed_seconds=1.0).loss == told
