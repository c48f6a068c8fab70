"""After a power cut at any moment, whatever was finished is there, and nothing half-written is taken for whole."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from noisy_workload import SAMPLES, Noisy
from power import Recorder, Tree, write_tree
from record_factory import make_result, make_state
from train_world import find_differences, open_workplace, read_metrics, read_state
from trial_world import make_spec

from autotune.engine.loop import Training
from autotune.errors import CheckpointError
from autotune.isolation.runner import TrialRunner
from autotune.records import TrainConfig, TrialResult, TrialSpec
from autotune.records.codec import write_text
from autotune.search.store.folder import create_search_folder, find_search_folder
from autotune.targets.workload import check_workload
from autotune.train.loop.checkpoint import Checkpoints
from autotune.train.loop.state import Progress

STEPS_PER_EPOCH = -(-SAMPLES // 8)
STEPS = STEPS_PER_EPOCH + 4
STATE = make_state()


def written(trees: Iterator[Tree], folder: Path) -> Iterator[Path]:
    """Yield each tree as a folder."""
    folder.mkdir(exist_ok=True)
    for number, tree in enumerate(trees):
        path = folder / f"crash-{number}"
        write_tree(tree, path)
        yield path


def record(root: Path, work: Callable[[], object]) -> Recorder:
    recorder = Recorder(root)
    with recorder.recording():
        work()
    return recorder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    return folder


def test_the_imitation_loses_what_was_not_synced(tmp_path: Path, root: Path) -> None:
    """Without the two syncs of `write_text` the file is empty, or torn, or the old one."""

    def write_carelessly() -> None:
        (root / "new").write_text("new")
        os.replace(root / "new", root / "file")

    (root / "file").write_text("old")
    careless = record(root, write_carelessly)
    found = {tree.get("file") for tree in careless.crashes(only_end=True)}
    assert found == {b"old", b"", b"n"}


@pytest.mark.fault(
    "28",
    injected="a power cut at each moment of a save",
    outcome="the old file or the new one; the new one once it is saved",
)
def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, root: Path) -> None:
    path = root / "best.json"
    path.write_text("old")
    recorder = record(root, lambda: write_text(path, "new" * 1000))
    texts = [(one / "best.json").read_text() for one in written(recorder.crashes(), tmp_path)]
    assert set(texts) == {"old", "new" * 1000}
    assert {tree["best.json"] for tree in recorder.crashes(only_end=True)} == {b"new" * 1000}


class Unrun(TrialRunner):
    """Writes the records of trials and starts none."""

    def _attempt(self, spec: TrialSpec, folder: Path, seconds: float) -> tuple[TrialResult, float]:
        return make_result(spec), 0.0


@pytest.mark.fault(
    "28", injected="a power cut at each moment of a search's records", outcome="every finished trial is there"
)
def test_a_finished_trial_is_not_lost(tmp_path: Path, root: Path) -> None:
    def search() -> None:
        place = create_search_folder(root, "toy.py:workload")
        place.write_state(STATE)
        with Unrun(place.trials, warm=False) as runner:
            for number in range(3):
                runner(make_spec("trains", number=number))

    recorder = record(root, search)
    counts = []
    for folder in written(recorder.crashes(), tmp_path):
        place = find_search_folder(folder) if (folder / ".autotune").exists() else None
        counts.append(-1 if place is None else len(place.read_trials()))
    assert set(counts) == {-1, 0, 1, 2, 3}
    for folder in written(recorder.crashes(only_end=True), tmp_path / "end"):
        place = find_search_folder(folder)
        assert place is not None
        assert [result.spec.number for result in place.read_trials()] == [0, 1, 2]


def make_training() -> Training:
    loaded = check_workload(Noisy(), label="noisy", fingerprint="0123456789ab")
    return Training(loaded, TrainConfig(micro_batch_size=8), device=torch.device("cpu"), seed=0)


@pytest.mark.fault(
    "28",
    injected="a power cut at each moment of three checkpoints",
    outcome="the last one that was saved, or one after it",
)
def test_a_checkpoint_that_was_saved_is_there(tmp_path: Path, root: Path) -> None:
    training = make_training()
    checkpoints = Checkpoints(root / "checkpoints", fingerprint="0123456789ab")
    saved = 0
    for step in (10, 20, 30):
        recorder = record(root, lambda step=step: checkpoints.save(training, Progress(step, 8 * step), {"meters": {}}))
        for number, folder in enumerate(written(recorder.crashes(), tmp_path / f"to-{step}")):
            found = load_step(folder / "checkpoints")
            assert found in (saved, step), (number, found)
        for folder in written(recorder.crashes(only_end=True), tmp_path / f"at-{step}"):
            assert load_step(folder / "checkpoints") == step
        saved = step


def load_step(folder: Path) -> int:
    """Return the step of the checkpoint that is restored; 0 for none."""
    try:
        return Checkpoints(folder, fingerprint="0123456789ab").load(make_training()).progress.step
    except CheckpointError:
        return 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.fault(
    "28",
    injected="a power cut at each moment of a training, then --resume",
    outcome="weights and losses end bit for bit as without it",
)
def test_a_training_goes_on_after_a_power_cut_as_if_there_had_been_none(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a target puts its folder there
    workplace = open_workplace(root)
    workplace.save_profile()
    runs = root / "runs"
    runs.mkdir()
    recorder = record(runs, lambda: workplace.train(steps=STEPS, out="runs/one"))
    straight = read_state(runs / "one"), read_losses(runs / "one")
    resumed_from = set()
    for tree in recorder.crashes():
        shutil.rmtree(runs)
        write_tree(tree, runs)
        one = tree.get("one", {})
        is_begun = isinstance(one, dict) and "run.json" in one
        resumed_from.add(find_newest(runs / "one"))
        workplace.train(steps=STEPS, out="runs/one", resume=is_begun)
        assert find_differences(straight[0], read_state(runs / "one")) == []
        assert straight[1] == read_losses(runs / "one")
    assert resumed_from == {0, STEPS_PER_EPOCH, STEPS}
    assert workplace.said == []


def find_newest(run: Path) -> int:
    """Return the step of the newest checkpoint of a run by name; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0)


def read_losses(run: Path) -> list[tuple[Any, ...]]:
    """Return what the lines of a run tell, but for what counts seconds."""
    return [tuple(line.get(key) for key in ("step", "samples", "loss", "error")) for line in read_metrics(run)]
