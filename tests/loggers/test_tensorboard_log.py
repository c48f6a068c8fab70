"""TensorBoard's own reader finds in the event files what metrics.jsonl was given, once for each step."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autotune.errors import MachineError
from autotune.loggers.tensorboard_log import TENSORBOARD_FOLDER, TensorBoardLog


def make_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step,
        "epoch": step // 20,
        "samples": 8 * step,
        "loss": 2.0 / step,
        "learning_rate": 0.1,
        "samples_per_second": 100.0 + step,
        "data_wait_fraction": 0.25,
    }
    return line | changes


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each point by tag, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder / TENSORBOARD_FOLDER), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: sorted((event.step, event.value) for event in accumulator.Scalars(tag))  # files of one second: any order
        for tag in accumulator.Tags()["scalars"]
    }


def write(folder: Path, steps: range, *, resumed_step: int = 0, **changes: Any) -> None:
    with TensorBoardLog(folder, resumed_step=resumed_step, least_seconds=0.0) as log:
        for step in steps:
            log(make_line(step, **changes))


def test_each_line_is_a_point_under_a_sensible_tag(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path, least_seconds=0.0) as log:
        for step in (10, 20, 30):
            log(make_line(step, mfu=0.5))
            if step == 20:
                log({"step": 20, "epoch": 1, "error": 0.125, "undefined": None, "beyond": math.inf})
    found = read_events(tmp_path)
    assert {*found} == {
        "train/epoch",
        "train/loss",
        "train/learning_rate",
        "speed/samples_per_second",
        "speed/data_wait_fraction",
        "speed/mfu",
        "evaluation/error",
    }
    assert found["train/loss"] == [(step, pytest.approx(2.0 / step)) for step in (10, 20, 30)]
    assert found["speed/samples_per_second"] == [(10, 110.0), (20, 120.0), (30, 130.0)]
    assert found["evaluation/error"] == [(20, 0.125)]


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(10, 60, 10), loss=1.0)
    write(tmp_path, range(30, 50, 10), resumed_step=20, loss=2.0)
    assert read_events(tmp_path)["train/loss"] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]


@pytest.mark.parametrize("is_told", [True, False])
def test_steps_that_are_trained_again_count_anew(tmp_path: Path, is_told: bool) -> None:
    with TensorBoardLog(tmp_path, least_seconds=0.0) as log:
        for step in (10, 20, 25, 30):
            log(make_line(step, loss=1.0))
        if is_told:
            log.rewind(20)
        for step in (30, 40) if is_told else (25, 30, 40):
            log(make_line(step, loss=2.0))
    again = [(30, 2.0), (40, 2.0)] if is_told else [(25, 2.0), (30, 2.0), (40, 2.0)]
    assert read_events(tmp_path)["train/loss"] == [(10, 1.0), (20, 1.0), *again]


def test_lines_in_quick_succession_are_thinned_and_the_last_one_kept(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path, least_seconds=3600.0) as log:
        for step in range(10, 100, 10):
            log(make_line(step))
        log({"step": 90, "epoch": 4, "error": 0.5})
        for step in range(100, 130, 10):
            log(make_line(step))
    found = read_events(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [10, 90, 120]
    assert found["evaluation/error"] == [(90, 0.5)]


def test_what_is_held_back_is_forgotten_with_the_steps_it_is_of(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path, least_seconds=3600.0) as log:
        log(make_line(10, loss=1.0))
        log(make_line(40, loss=1.0))
        log.rewind(20)
        log(make_line(30, loss=2.0))
    assert read_events(tmp_path)["train/loss"] == [(10, 1.0), (30, 2.0)]


def test_a_flush_has_everything_on_disk(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, least_seconds=3600.0)
    for step in (10, 20):
        log(make_line(step))
    log.flush()
    assert [step for step, _ in read_events(tmp_path)["train/loss"]] == [10, 20]
    log.close()
    log(make_line(30))
    assert [step for step, _ in read_events(tmp_path)["train/loss"]] == [10, 20]


def test_without_tensorboard_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MachineError, match="tensorboard is not installed") as caught:
        TensorBoardLog(tmp_path)
    assert caught.value.hint.startswith("pip install tensorboard")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / TENSORBOARD_FOLDER).write_text("")
    with pytest.raises(MachineError, match=TENSORBOARD_FOLDER):
        TensorBoardLog(tmp_path)


def test_a_full_disk_ends_the_curves_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    with TensorBoardLog(tmp_path, least_seconds=0.0, warn=warnings.append) as log:
        log(make_line(10))

        def fill_up(*_arguments: object, **_options: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("torch.utils.tensorboard.writer.SummaryWriter.add_scalar", fill_up)
            log(make_line(20))
        log(make_line(30))
    assert len(warnings) == 1
    assert "end at step 20" in warnings[0]
    assert "No space left on device" in warnings[0]
