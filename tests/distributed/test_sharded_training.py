"""`autotune train --nproc-per-node 2` with a shard of the model in each process: resumed, moved, damaged, killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_shared_training import Place, await_steps, find_differences, find_rank, make_place, read_lines, read_losses

from autotune.distributed.shards import METADATA_FILE
from autotune.errors import CheckpointError
from autotune.train.loop.checkpoint import read_verified
from autotune.train.options import TrainingOptions
from autotune.train.run import run_training

EPOCHS = 3


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a place with runs that were never stopped: `one` of a single process, `two` of sharded ones."""
    place = make_place(tmp_path_factory.mktemp("sharded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        run_training(TrainingOptions(epochs=EPOCHS, out="one"), "shared_workloads.py:stacked", folder=place.folder)
    status, _, said = place.train("sharded", "--epochs", str(EPOCHS), "--out", "two")
    assert status == 0, said
    assert "Warning" not in said
    return place


def read_newest(run: Path) -> dict[str, Any]:
    return read_verified(max((run / "checkpoints").glob("step-*")))


def assert_same_weights(one: dict[str, Any], other: dict[str, Any], rtol: float = 1e-4) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=1e-5)


@pytest.mark.slow
def test_a_sharded_training_is_that_of_one_process(straight: Place) -> None:
    one, two = (straight.folder / name for name in ("one", "two"))
    assert read_losses(two) == pytest.approx(read_losses(one), rel=1e-4)
    metrics = [[line["error"] for line in read_lines(run) if "error" in line] for run in (one, two)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)
    states = [read_newest(run) for run in (one, two)]
    for state in states:  # of forward passes, which are fewer where two processes share them
        del state["model"]["count"]
    assert_same_weights(states[0]["model"], states[1]["model"])
    assert [*states[1]["optimizer"]["state"]] == [*states[0]["optimizer"]["state"]]
    for own, other in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert_same_weights(own, other, rtol=1e-3)
    newest = max((two / "checkpoints").glob("step-*"))
    assert sorted(file.name for file in newest.iterdir()) == [
        *(".metadata", "__0_0.distcp", "__1_0.distcp"),
        *("manifest.json", "state.pt"),
    ]
    rest = torch.load(newest / "state.pt", weights_only=True)
    assert (rest["model"], rest["tied"]) == ({}, {"leave.weight": "enter.weight"})


@pytest.mark.slow
def test_the_weights_at_the_end_are_whole(straight: Place) -> None:
    from safetensors.torch import load_file

    weights = [load_file(straight.folder / name / "model.safetensors") for name in ("one", "two")]
    assert weights[0]["blocks.0.0.weight"].shape == (7, 4)
    assert_same_weights(*({name: one for name, one in each.items() if name != "count"} for each in weights))


@pytest.mark.slow
def test_a_resumed_sharded_run_ends_bit_for_bit_as_one_never_stopped(straight: Place) -> None:
    status, _, said = straight.train("sharded", "--steps", "6", "--out", "resumed")
    assert status == 0, said
    status, _, said = straight.train("sharded", "--epochs", str(EPOCHS), "--out", "resumed", "--resume", ranks=None)
    assert status == 0, said
    states = [read_newest(straight.folder / name) for name in ("two", "resumed")]
    assert states[0]["world_size"] == 2
    assert find_differences(*states) == []


@pytest.mark.slow
@pytest.mark.fault("42", injected="2, 1, 2 processes, a shard each", outcome="the loss curve of one process; said")
def test_a_sharded_run_goes_on_with_another_number_of_processes(straight: Place) -> None:
    for ranks, epochs in (("2", 1), ("1", 2), ("2", EPOCHS)):
        more = [] if epochs == 1 else ["--resume"]
        status, _, said = straight.train("sharded", "--epochs", str(epochs), "--out", "moved", *more, ranks=ranks)
        assert status == 0, said
        assert ("not bit for bit" in said) == bool(more)
    kept = {path.name: (path / METADATA_FILE).exists() for path in (straight.folder / "moved/checkpoints").iterdir()}
    assert {True, False} <= {*kept.values()}  # one process has written one file
    moved, one = (read_losses(straight.folder / name) for name in ("moved", "one"))
    assert moved == {step: pytest.approx(one[step], rel=1e-3) for step in moved}
    assert max(moved) == max(one)


@pytest.mark.slow
@pytest.mark.fault("35", injected="a shard of the newest checkpoint is damaged", outcome="the one before; said")
def test_a_damaged_shard_is_found_and_the_checkpoint_before_is_used(straight: Place) -> None:
    shutil.copytree(straight.folder / "two", straight.folder / "damaged")
    newest = max((straight.folder / "damaged" / "checkpoints").glob("step-*"))
    shard = newest / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"is damaged: __1_0\.distcp does not match its manifest"):
        read_verified(newest)
    status, _, said = straight.train("sharded", "--epochs", str(EPOCHS), "--out", "damaged", "--resume", ranks=None)
    assert status == 0, said
    assert "__1_0.distcp does not match its manifest; the one before it is used" in said
    states = [read_newest(straight.folder / name) for name in ("two", "damaged")]
    assert find_differences(*states) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault("41", injected="SIGKILL to one process with a shard", outcome="named; fresh ones go on")
def test_a_killed_process_of_a_sharded_training_is_replaced(place: Place, rank: int) -> None:
    words = ("--epochs", "2", "--out", "run", "--checkpoint-every", "1s")
    with place.start("slowly_sharded", *words) as process:
        await_steps(place.folder / "run", 4, process)
        os.kill(find_rank(process, rank).pid, signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert f"process {rank} of 2 was killed by SIGKILL" in said
    assert max(read_losses(place.folder / "run")) == 8
    assert json.loads((place.folder / "run" / "summary.json").read_text())["step_downs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("averaged", "distributed_strategy fsdp: build_averaged_model() keeps whole weights"),
        ("reaching", "a parameter of a repeated block is used outside of its forward"),
    ],
)
def test_what_cannot_be_sharded_is_refused(place: Place, name: str, sentence: str) -> None:
    status, _, said = place.train(name, "--steps", "3")
    assert status == 2, said
    assert sentence in said
    assert "use distributed_strategy ddp" in said
    assert (place.folder / "runs").exists() == (name == "reaching")  # that shows in a step
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("stops", ["0:loss:6", "1:loss:6", "1:optimizer:4"])
@pytest.mark.fault("41", injected="one of two processes with a shard each is stopped", outcome="named; --resume")
def test_a_hanging_process_of_a_sharded_training_is_named(
    place: Place, stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPS", stops)
    words = ("--epochs", "3", "--out", "run", "--rank-timeout", "5s")
    status, _, said = place.train("stopping_sharded", *words)
    assert status == 5, said
    assert f"process {stops[0]} of 2 has not answered within 5 s; the training was ended" in said
    assert "Traceback" not in said
    monkeypatch.delenv("STOPS")
    status, _, said = place.train("stopping_sharded", *words, "--resume", ranks=None)
    assert status == 0, said
    assert max(read_losses(place.folder / "run")) == 12
