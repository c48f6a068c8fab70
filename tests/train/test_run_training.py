"""A training that is stopped, resumed or killed ends as one that never was; profiles are checked, never followed."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from noisy_workload import SAMPLES
from torch.utils.data._utils import signal_handling
from train_world import (
    CONFIG,
    StopAfter,
    Workplace,
    find_differences,
    make_profile,
    read_metrics,
    read_state,
)

from autotune.errors import BusyError, CheckpointError, MachineError, ProfileError, TargetError, UsageError
from autotune.records.codec import read_record
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.run import RunPlan, TrainingSummary
from autotune.train import run
from autotune.train.loop import checkpoint
from autotune.train.policy import TrainPolicy
from autotune.train.runs import folder

STEPS_PER_EPOCH = math.ceil(SAMPLES / 8)

LOADERS = {
    "in process": CONFIG,
    "2 workers": CONFIG.replace(num_workers=2, prefetch_factor=3),
    "2 lasting workers": CONFIG.replace(num_workers=2, persistent_workers=True),
    "accumulated": CONFIG.replace(micro_batch_size=4, gradient_accumulation_steps=2),
    "accumulated, 2 workers": CONFIG.replace(micro_batch_size=4, gradient_accumulation_steps=2, num_workers=2),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def train_in_pieces(workplace: Workplace, pieces: list[int], **options: Any) -> TrainingSummary:
    """Train, stopping after so many steps each time, then resume to the end."""
    resume = False
    for steps in pieces:
        workplace.train(stop=StopAfter(steps), resume=resume, **options)
        resume = True
    return workplace.train(resume=resume, **options)


def assert_same_end(first: Path, second: Path) -> None:
    assert find_differences(read_state(first), read_state(second)) == []


def assert_each_step_once(folder: Path, *, metric: str = "error") -> None:
    lines = read_metrics(folder)
    counted = Counter((line["step"], metric in line) for line in lines)
    assert set(counted.values()) == {1}, counted
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)


# Stopped and resumed


@pytest.mark.slow_cases(
    "with_momentum-2 workers",
    "noisy-accumulated, 2 workers",
    "noisy-2 lasting workers",
    "with_momentum-2 lasting workers",
    "with_momentum-accumulated, 2 workers",
)
@pytest.mark.parametrize("config", LOADERS.values(), ids=LOADERS.keys())
@pytest.mark.parametrize("toy", ["noisy", "with_momentum", pytest.param("collating", marks=pytest.mark.slow)])
def test_a_stopped_training_ends_as_one_never_stopped(workplace: Workplace, config: Any, toy: str) -> None:
    workplace.toy = toy
    workplace.save_profile(config)
    straight = workplace.train(epochs=3, out="straight")
    assert straight.steps == 3 * STEPS_PER_EPOCH
    assert straight.samples == 3 * SAMPLES
    # In mid epoch, twice in a row, at an epoch's end, in the last step.
    pieces = [2, 1, STEPS_PER_EPOCH - 3, STEPS_PER_EPOCH + 4, 1]
    pieced = train_in_pieces(workplace, pieces, epochs=3, out="pieced")
    assert_same_end(workplace.folder / "straight", workplace.folder / "pieced")
    assert_each_step_once(workplace.folder / "pieced")
    same = ("steps", "epochs", "samples", "loss", "metrics")
    assert [getattr(pieced, name) for name in same] == [getattr(straight, name) for name in same]


@pytest.mark.parametrize("toy", ["unjudged", "noisy"])
def test_epochs_that_are_too_short_for_a_checkpoint_each_have_fewer_and_end_the_same(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, toy: str
) -> None:
    saved: list[int] = []
    plain = checkpoint.Checkpoints.save

    def save(self: Any, training: Any, progress: Any, notes: Any) -> Path:
        saved.append(progress.step)
        return plain(self, training, progress, notes)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    workplace.toy, rarely = toy, TrainPolicy(epoch_checkpoints=1, epoch_checkpoint_share=0.0)
    workplace.save_profile()
    straight = workplace.train(epochs=4, out="straight", policy=rarely)
    assert saved[0] == STEPS_PER_EPOCH
    assert saved[-1] == 4 * STEPS_PER_EPOCH
    assert toy == "noisy" or len(saved) == 2
    if toy == "noisy":
        assert straight.best is not None
        assert straight.best.step in saved
    train_in_pieces(workplace, [2, STEPS_PER_EPOCH + 3], epochs=4, out="pieced", policy=rarely)
    assert_same_end(workplace.folder / "straight", workplace.folder / "pieced")
    assert_each_step_once(workplace.folder / "pieced")


def test_slow_steps_are_shown_and_saved_before_the_tenth(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(out="straight")
    workplace.train(out="shown", policy=TrainPolicy(show_seconds=0.0))
    assert [line["step"] for line in read_metrics(workplace.folder / "straight")] == [STEPS_PER_EPOCH] * 2
    assert [line["step"] for line in read_metrics(workplace.folder / "shown")] == [2, 3, 4, 5, *[STEPS_PER_EPOCH] * 2]
    workplace.train(out="saved", checkpoint_seconds=0.001, stop=StopAfter(4), checkpoints_kept=9)
    saved = sorted(path.name for path in (workplace.folder / "saved" / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000003", "step-00000004"]
    workplace.train(out="saved", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "shown")
    assert_same_end(workplace.folder / "straight", workplace.folder / "saved")


def test_an_evaluation_changes_nothing(workplace: Workplace) -> None:
    for toy in ("noisy", "unjudged"):
        workplace.toy = toy
        workplace.save_profile()
        workplace.train(epochs=3, out=toy)
    assert not any("error" in line for line in read_metrics(workplace.folder / "unjudged"))
    assert_same_end(workplace.folder / "noisy", workplace.folder / "unjudged")


@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.fault("39", injected="stops at random steps", outcome="the end is bit for bit that of a run never stopped")
def test_stops_at_random_steps_change_nothing(workplace: Workplace, seed: int) -> None:
    generator = random.Random(seed)
    workplace.save_profile()
    total = generator.randint(10, 40)
    pieces = []
    while sum(pieces) < total - 1:
        pieces.append(generator.randint(1, 7))
    workplace.train(steps=total, out="straight", seed=seed)
    train_in_pieces(workplace, pieces[:-1], steps=total, out="pieced", seed=seed)
    assert_same_end(workplace.folder / "straight", workplace.folder / "pieced")
    assert_each_step_once(workplace.folder / "pieced")


def test_the_comparison_can_tell_two_trainings_apart(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=4, out="first")
    workplace.train(steps=4, out="second", seed=1)
    different = find_differences(read_state(workplace.folder / "first"), read_state(workplace.folder / "second"))
    assert any(".model.0.weight" in where for where in different)


def test_metrics_of_a_training_in_pieces_are_those_of_one_in_a_piece(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=23, out="straight")
    train_in_pieces(workplace, [4, STEPS_PER_EPOCH - 4, 11], steps=23, out="pieced")
    plain = ("step", "epoch", "loss", "learning_rate", "error")

    def read(name: str) -> dict[tuple[Any, ...], None]:
        return dict.fromkeys(tuple(line.get(key) for key in plain) for line in read_metrics(workplace.folder / name))

    # A stop adds a line where it came; an evaluation that it left out is made up for.
    assert read("straight").keys() <= read("pieced").keys()
    assert sum("error" in line for line in read_metrics(workplace.folder / "straight")) == 4


@pytest.mark.slow
def test_workers_that_go_first_cost_no_step(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOISY_FOLDER", str(workplace.folder))
    workplace.toy = "loses_its_workers"
    workplace.save_profile(CONFIG.replace(num_workers=1, prefetch_factor=1))
    workplace.train(epochs=4, out="straight")
    mark = workplace.folder / "lose-workers"
    polls = 0

    def stop_told_late() -> bool:
        nonlocal polls
        polls += 1
        if polls == 9:
            mark.touch()
        return polls > 16  # by then the workers have gone, and the training waits for the signal

    stopped = workplace.train(epochs=4, out="stopped", stop=stop_told_late)
    assert 9 <= stopped.steps < 16
    mark.unlink()
    workplace.train(epochs=4, out="stopped", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "stopped")


@pytest.mark.slow_cases("5")
@pytest.mark.parametrize("step", [1, 5, STEPS_PER_EPOCH])
@pytest.mark.fault(
    "9",
    injected="loader workers gone in the middle of a step",
    outcome="no step is torn; the end is bit for bit the same",
)
def test_workers_that_die_in_mid_step_do_not_tear_it(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setenv("NOISY_FOLDER", str(workplace.folder))
    workplace.toy = "loses_its_workers_computing"
    workplace.save_profile(CONFIG.replace(num_workers=2))
    workplace.train(epochs=2, out="straight")
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)  # as in a fresh process
    mark = workplace.folder / "lose-workers"
    if step == 1:
        mark.touch()
    before_the_last = StopAfter(step - 1)

    def stop_told_late() -> bool:
        was_there = mark.exists()
        if before_the_last():
            mark.touch()
        return was_there

    stopped = workplace.train(epochs=2, out="stopped", stop=stop_told_late)
    assert stopped.steps == step
    mark.unlink()
    workplace.train(epochs=2, out="stopped", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "stopped")


@pytest.mark.slow
@pytest.mark.fault("39", injected="a stop in the middle of an evaluation", outcome="made up for on resume")
def test_an_evaluation_that_a_stop_cuts_short_is_made_up_for(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOISY_FOLDER", str(workplace.folder))
    workplace.toy = "evaluates_with_workers"
    workplace.save_profile()
    workplace.train(epochs=2, out="straight")
    mark = workplace.folder / "lose-workers"
    polls = 0

    def stop_told_late() -> bool:
        nonlocal polls
        polls += 1
        if polls == STEPS_PER_EPOCH:
            mark.touch()
        return polls > STEPS_PER_EPOCH

    stopped = workplace.train(epochs=2, out="stopped", stop=stop_told_late)
    assert stopped.steps == STEPS_PER_EPOCH
    assert any("--resume" in text for text in stopped.warnings)
    mark.unlink()
    workplace.train(epochs=2, out="stopped", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "stopped")
    assert_each_step_once(workplace.folder / "stopped")
    assert sum("error" in line for line in read_metrics(workplace.folder / "stopped")) == 2


@pytest.mark.slow
def test_workers_that_die_for_another_reason_are_given_up_after_a_second_death(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOISY_FOLDER", str(workplace.folder))
    workplace.toy = "loses_its_workers"
    workplace.save_profile(CONFIG.replace(num_workers=1, prefetch_factor=1))
    workplace.train(epochs=2, out="straight")
    mark = workplace.folder / "lose-workers"

    def touch() -> bool:
        mark.touch()
        return False

    summary = workplace.train(epochs=2, stop=touch, out="stepped")
    assert [one.action for one in summary.step_downs] == ["again", "no-workers"]
    assert summary.finished
    assert summary.config is not None
    assert summary.config.num_workers == 0
    assert_same_end(workplace.folder / "straight", workplace.folder / "stepped")


@pytest.mark.fault(
    "35", injected="the newest state.pt 100 bytes short", outcome="said; the end is bit for bit the same"
)
def test_a_damaged_newest_checkpoint_is_said_and_the_end_is_the_same(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(epochs=3, out="straight")
    workplace.train(epochs=3, out="damaged", stop=StopAfter(STEPS_PER_EPOCH + 3))
    newest = workplace.folder / "damaged" / "checkpoints" / f"step-{STEPS_PER_EPOCH + 3:08d}" / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    summary = workplace.train(epochs=3, out="damaged", resume=True)
    assert any(newest.parent.name in text and "the one before it is used" in text for text in summary.warnings)
    assert_same_end(workplace.folder / "straight", workplace.folder / "damaged")
    assert_each_step_once(workplace.folder / "damaged")


def test_a_finished_run_can_be_resumed_and_is_as_it_was(workplace: Workplace) -> None:
    workplace.save_profile()
    first = workplace.train(epochs=2, out="run")
    lines = read_metrics(workplace.folder / "run")
    again = workplace.train(out="run", resume=True)
    assert read_metrics(workplace.folder / "run") == lines
    assert first.metrics.keys() == {"error"}
    assert (again.steps, again.loss, again.metrics) == (first.steps, first.loss, first.metrics)
    assert again.samples_per_second is not None  # of all sessions
    assert Path(again.checkpoint).is_dir()


def test_a_finished_run_can_be_made_longer(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=15, out="straight")
    workplace.train(steps=8, out="longer")
    workplace.train(steps=15, out="longer", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "longer")


def test_a_resume_without_a_length_keeps_the_runs_own(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=15, out="run", stop=StopAfter(2))
    assert workplace.train(out="run", resume=True).steps == 15
    plan = read_record(workplace.folder / "run" / "run.json", RunPlan)
    assert (plan.steps, plan.epochs) == (15, None)


@pytest.mark.fault("51", injected="a dataset without a length", outcome="trained; a resume is warned about")
def test_only_a_resumed_stream_of_samples_is_warned_about(workplace: Workplace) -> None:
    workplace.toy = "streaming"
    workplace.save_profile()
    first = workplace.train(epochs=2, out="run", stop=StopAfter(3))
    assert not any("iterable" in text for text in first.warnings)
    second = workplace.train(out="run", resume=True)
    assert any("iterable" in text for text in second.warnings)
    assert second.steps == 2 * STEPS_PER_EPOCH


@pytest.mark.fault("29", injected="half a line at the end of metrics.jsonl", outcome="mended; each step stands once")
def test_metrics_cut_short_by_a_kill_are_mended(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(epochs=2, out="run", stop=StopAfter(STEPS_PER_EPOCH + 1))
    with (workplace.folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "epoch": 1, "samples": 64, "loss": 1.0}\n{"step": 9, "ep')
    workplace.train(out="run", resume=True)
    assert_each_step_once(workplace.folder / "run")
    steps = {line["step"] for line in read_metrics(workplace.folder / "run")}
    assert STEPS_PER_EPOCH + 1 in steps
    assert not steps & {8, 9}


# Folders


def test_runs_are_numbered_and_the_newest_is_resumed(workplace: Workplace) -> None:
    workplace.save_profile()
    runs = workplace.folder / "runs"
    # Neither a copy, nor another target's run, nor a file counts.
    for name in ("noisy-workload-py-noisy-001.bak1", "noisy-workload-py-noisy-2nd-007", "noisy-workload-py-noisy-9x9"):
        (runs / name).mkdir(parents=True)
    folders = [Path(workplace.train(steps=3, stop=StopAfter(1)).folder).name for _ in range(2)]
    assert folders == ["noisy-workload-py-noisy-001", "noisy-workload-py-noisy-002"]
    (runs / folders[1]).rename(runs / "noisy-workload-py-noisy-999")
    assert Path(workplace.train(steps=3, stop=StopAfter(1)).folder).name == "noisy-workload-py-noisy-1000"
    assert Path(workplace.train(resume=True).folder).name == "noisy-workload-py-noisy-1000"


def test_a_number_that_another_training_takes_first_is_not_shared(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.save_profile()
    workplace.train(steps=1)
    monkeypatch.setattr(folder, "_find_numbered", lambda *_: {})
    assert Path(workplace.train(steps=1).folder).name == "noisy-workload-py-noisy-002"


def test_a_folder_in_use_is_not_overwritten(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=3, out="run")
    with pytest.raises(UsageError, match="holds a run already"):
        workplace.train(steps=3, out="run")
    (workplace.folder / "run" / "run.json").unlink()
    with pytest.raises(UsageError, match="holds a run already"):
        workplace.train(steps=3, out="run")


@pytest.mark.fault("31", injected="a second training in one run folder", outcome="refused")
def test_two_trainings_do_not_share_a_run(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=3, out="run")
    with folder.locked_run(workplace.folder / "run"), pytest.raises(BusyError, match="another training is at work in"):
        workplace.train(out="run", resume=True)
    assert workplace.train(out="run", resume=True, steps=4).steps == 4


def test_a_run_that_ended_before_its_first_checkpoint_begins_as_it_did(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(epochs=2, out="straight")
    workplace.train(epochs=2, out="run")
    shutil.rmtree(workplace.folder / "run" / "checkpoints")
    (workplace.folder / "run" / "summary.json").unlink()  # it was killed
    workplace.train(out="run", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "run")
    assert_each_step_once(workplace.folder / "run")


def test_a_resume_needs_neither_profile_nor_seed(workplace: Workplace) -> None:
    workplace.save_profile(CONFIG.replace(num_workers=1))
    workplace.train(epochs=2, out="straight", seed=3)
    workplace.train(epochs=2, out="run", seed=3, stop=StopAfter(4))
    summary = workplace.train(out="run", resume=True, profile=None)
    assert (summary.origin, summary.config) == ("profile", CONFIG.replace(num_workers=1))
    assert_same_end(workplace.folder / "straight", workplace.folder / "run")


def test_without_a_profile_the_targets_own_settings_are_used(workplace: Workplace) -> None:
    summary = workplace.train(steps=2, profile=None)
    assert (summary.origin, summary.config) == ("baseline", CONFIG)


def test_resuming_needs_a_run_and_a_checkpoint(workplace: Workplace) -> None:
    workplace.save_profile()
    with pytest.raises(UsageError, match="there is no run in"):
        workplace.train(steps=3, resume=True)
    with pytest.raises(UsageError, match="there is no run in"):
        workplace.train(steps=3, resume=True, out="nowhere")
    workplace.train(steps=3, out="run")
    for file in (workplace.folder / "run" / "checkpoints").glob("*/state.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        workplace.train(steps=3, out="run", resume=True)


def test_resuming_with_other_settings_seed_or_source_is_refused(workplace: Workplace) -> None:
    workplace.save_profile()
    workplace.train(steps=9, out="run", stop=StopAfter(2))
    with pytest.raises(ProfileError, match=r"the seed of .* changed"):
        workplace.train(out="run", resume=True, seed=1)
    workplace.save_profile(CONFIG.replace(micro_batch_size=4))
    with pytest.raises(ProfileError, match=r"the profile's settings of .* changed"):
        workplace.train(out="run", resume=True)
    workplace.save_profile()
    source = workplace.folder / "noisy_workload.py"
    source.write_text(source.read_text() + "\n# edited\n")
    with pytest.raises(ProfileError, match=r"the target of .* changed"):
        workplace.train(out="run", resume=True)


def test_steps_and_epochs_together_are_refused(workplace: Workplace) -> None:
    workplace.save_profile()
    with pytest.raises(UsageError, match="both --steps and --epochs"):
        workplace.train(steps=3, epochs=3)


def test_one_epoch_is_the_default(workplace: Workplace) -> None:
    workplace.save_profile()
    assert workplace.train().steps == STEPS_PER_EPOCH


# What fails


@pytest.mark.fault(
    "15", injected="a loss of nan at step 9", outcome="the target's error, with the step and the checkpoint before it"
)
def test_a_loss_that_is_not_finite_is_the_targets_error(workplace: Workplace) -> None:
    workplace.toy = "diverging"
    workplace.save_profile()
    with pytest.raises(TargetError, match="the loss is nan at step 9") as caught:
        workplace.train(steps=30)
    assert f"step-{STEPS_PER_EPOCH:08d} is from before" in caught.value.hint


def test_what_the_users_code_raises_is_the_targets_error(workplace: Workplace) -> None:
    workplace.toy = "failing"
    workplace.save_profile()
    with pytest.raises(TargetError, match=r"step 3 raised FileNotFoundError: .*labels\.csv") as caught:
        workplace.train(steps=30)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_metric_that_is_not_a_number_is_left_out(workplace: Workplace) -> None:
    workplace.toy = "without_score"
    workplace.save_profile()
    summary = workplace.train(steps=3, out="run")
    assert summary.metrics == {"error": None}
    assert read_metrics(workplace.folder / "run")[-1]["error"] is None


def test_each_metric_has_its_key_and_is_known_again_after_a_stop(workplace: Workplace) -> None:
    workplace.toy = "twice_judged"
    workplace.save_profile()
    straight = workplace.train(epochs=2, out="straight")
    evaluations = [line for line in read_metrics(workplace.folder / "straight") if "error" in line]
    assert [line["epoch"] for line in evaluations] == [1, 2]
    assert {key: evaluations[-1][key] for key in ("error", "undefined", "size")} == straight.metrics
    assert list(straight.metrics) == ["error", "undefined", "size"]
    assert straight.metrics["undefined"] is None
    assert 0 < straight.metrics["size"] != evaluations[0]["size"]
    again = workplace.train(out="straight", resume=True)
    assert again.metrics == straight.metrics
    train_in_pieces(workplace, [STEPS_PER_EPOCH, 1], epochs=2, out="pieced")
    pieced = [line for line in read_metrics(workplace.folder / "pieced") if "error" in line]
    assert [line["error"] for line in pieced] == [line["error"] for line in evaluations]


@pytest.mark.fault(
    "25",
    injected="ENOSPC in the second checkpoint",
    outcome="the machine's error; the resumed run ends bit for bit alike",
)
def test_a_full_disk_is_the_machines_error_and_the_run_goes_on_later(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.save_profile()
    workplace.train(epochs=3, out="straight")
    saves = 0
    plain = checkpoint._write_state

    def fill_up(*arguments: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_state", fill_up)
        with pytest.raises(MachineError, match="No space left on device") as caught:
            workplace.train(epochs=3, out="full")
    assert "free some space" in caught.value.hint
    workplace.train(epochs=3, out="full", resume=True)
    assert_same_end(workplace.folder / "straight", workplace.folder / "full")
    assert_each_step_once(workplace.folder / "full")


def test_a_run_folder_that_cannot_be_made_is_said(workplace: Workplace) -> None:
    workplace.save_profile()
    (workplace.folder / "file").write_text("")
    with pytest.raises(MachineError, match="file") as caught:
        workplace.train(steps=1, out="file")
    assert "check the path" in caught.value.hint


# Profiles


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        plain = json.loads(path.read_text())
        change(plain)
        path.write_text(json.dumps(plain))

    return apply


def _replace(old: str, new: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return apply


MARKER = "executed"
BAD_PROFILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "there is no answer"),
    "newer": (_edit(lambda plain: plain.update(schema_version=99)), "schema 99, this one reads 1"),
    "empty": (lambda path: path.write_text(""), "not valid JSON"),
    "torn": (lambda path: path.write_text(path.read_text()[:200]), "not valid JSON"),
    "not an object": (lambda path: path.write_text("[1, 2]"), "best.json"),
    "binary": (lambda path: path.write_bytes(os.urandom(500)), "not valid JSON"),
    "large": (lambda path: path.write_text(path.read_text() + " " * 2**20), "larger than"),
    "deep": (lambda path: path.write_text("[" * 5000 + "]" * 5000), "best.json"),
    "a class to build": (
        _edit(lambda plain: plain.update(_target_="os.system", args=[f"touch {MARKER}"])),
        "_target_",
    ),
    "a class to build, inside": (
        _edit(lambda plain: plain["config"].update({"__class__": "os.system", "class_path": f"touch {MARKER}"})),
        "config",
    ),
    "an import": (_edit(lambda plain: plain["config"].update(precision="os:system")), "precision"),
    "a huge batch": (_edit(lambda plain: plain["config"].update(micro_batch_size=10**9)), "micro_batch_size"),
    "a batch as text": (_edit(lambda plain: plain["config"].update(micro_batch_size="8")), "micro_batch_size"),
    "a path": (_edit(lambda plain: plain["config"].update(host_allocator="../../evil.so")), "host_allocator"),
    "not a number": (_replace('"estimate": 1.3', '"estimate": NaN'), "NaN"),
    "a key twice": (_replace('"micro_batch_size": 8', '"micro_batch_size": 8, "micro_batch_size": 9'), "stands twice"),
    "another target": (
        _edit(lambda plain: plain.update(target={"label": "other.py:net\x1b[31m", "fingerprint": "0" * 12})),
        "was measured on other.py:net",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BAD_PROFILES.values(), ids=BAD_PROFILES.keys())
@pytest.mark.fault(
    "37", injected="instructions, paths, wrong types in a profile", outcome="exit 7; nothing is followed"
)
def test_a_bad_profile_is_refused_and_never_followed(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object], words: str
) -> None:
    monkeypatch.chdir(workplace.folder)
    workplace.save_profile()
    spoil(workplace.folder / "best.json")
    with pytest.raises(ProfileError) as caught:
        workplace.train(steps=1)
    assert words in caught.value.message
    assert caught.value.exit_code == 7
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000
    assert not (workplace.folder / MARKER).exists()
    assert not (workplace.folder / "runs").exists()


@pytest.mark.fault("37", injected="a target in a profile", outcome="never imported")
def test_the_target_never_comes_from_the_profile(workplace: Workplace) -> None:
    other = workplace.folder / "evil.py"
    other.write_text(f"open({str(workplace.folder / MARKER)!r}, 'w')\n")
    workplace.save_profile(target=make_profile(workplace.folder, "evil.py:workload").target)
    with pytest.raises(ProfileError, match=r"was measured on evil\.py:workload"):
        workplace.train(steps=1)
    assert not (workplace.folder / MARKER).exists()


def _differences(workplace: Workplace, profile: Profile) -> list[str]:
    fields = {
        "hardware": profile.hardware.replace(cpu_name="Another\x1b[2J CPU"),
        "software": profile.software.replace(torch="1.2.3+other"),
        "target": ProfileTarget(label=profile.target.label, fingerprint="m-" + "0" * 12),
    }
    found = []
    for name, value in fields.items():
        workplace.save_profile(**{name: value})
        warnings = workplace.train(steps=1).warnings
        assert len(warnings) == 1
        assert warnings[0].isprintable()
        found.append(warnings[0])
    return found


@pytest.mark.fault(
    "38", injected="a profile of another machine, torch, source", outcome="warned about, with the difference"
)
def test_another_machine_torch_or_source_is_only_warned_about(workplace: Workplace) -> None:
    profile = workplace.save_profile()
    assert workplace.train(steps=1).warnings == ()
    hardware, software, source = _differences(workplace, profile)
    assert "other hardware (Another[2J CPU" in hardware
    assert "torch 1.2.3+other" in software
    assert "has changed since the search" in source


@pytest.mark.fault("52", injected="a profile of an earlier version", outcome="told as such")
def test_a_profile_of_an_older_version_is_told_as_such(workplace: Workplace) -> None:
    """Its fingerprint is of one file: that it is another one now says nothing of the target."""
    profile = workplace.save_profile()
    workplace.save_profile(target=ProfileTarget(label=profile.target.label, fingerprint="0" * 12))
    (warning,) = workplace.train(steps=1).warnings
    assert "of an older version, which did not look at what noisy_workload.py:noisy imports: search again" in warning


def test_a_renamed_target_with_the_same_source_is_accepted(workplace: Workplace) -> None:
    profile = workplace.save_profile()
    workplace.save_profile(target=ProfileTarget(label="old_name.py:noisy", fingerprint=profile.target.fingerprint))
    assert workplace.train(steps=1).warnings == ()


def test_an_allocator_that_is_not_installed_is_refused(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run.read_hardware()
    monkeypatch.setattr(run, "read_hardware", lambda: plain.replace(host_allocators={}))
    workplace.save_profile(CONFIG.replace(host_allocator="jemalloc"))
    with pytest.raises(MachineError, match="jemalloc"):
        workplace.train(steps=1)


def test_an_allocator_that_came_too_late_is_said(workplace: Workplace) -> None:
    workplace.save_profile(CONFIG.replace(host_allocator="glibc-tuned"))
    (warning,) = workplace.train(steps=1).warnings
    assert "MALLOC_MMAP_THRESHOLD_=1073741824" in warning


def test_what_was_promised_and_what_came_is_told(workplace: Workplace) -> None:
    workplace.save_profile(CONFIG.replace(prefetch_factor=4, num_workers=1))
    summary = workplace.train(steps=12, out="run")
    assert summary.promised_samples_per_second == 1300.0
    assert summary.samples_per_second is not None
    assert summary.samples_per_second > 0.0
    assert read_record(workplace.folder / "run" / "summary.json", TrainingSummary) == summary
    workplace.save_profile(verdict="keep", speedup=None)
    assert workplace.train(steps=1).promised_samples_per_second == 1000.0
