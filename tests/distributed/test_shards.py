"""Checkpoints of a sharded training, in a group of one process: whole or not there, data alone, read either way."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shared_workloads
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from autotune.distributed.shards import METADATA_FILE, _DataUnpickler
from autotune.distributed.training import RankTraining
from autotune.distributed.world import World, joined_world
from autotune.engine.loop import Training
from autotune.engine.sharing import refuse_sharding
from autotune.errors import CheckpointError
from autotune.records.codec import read_record, write_record
from autotune.records.layout import MANIFEST_FILE
from autotune.records.run import CheckpointManifest
from autotune.targets.workload import LoadedWorkload, check_workload
from autotune.train.loop.checkpoint import Checkpoints, read_verified
from autotune.train.loop.state import Progress, find_non_finite

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("GLOO_SOCKET_IFNAME", "lo")):
            patch.setenv(name, value)
        with joined_world(tmp_path_factory.mktemp("world") / "meeting", 30.0) as joined:
            if why_not := refuse_sharding(CPU):
                pytest.skip(why_not)
            yield joined


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", fingerprint="0123456789ab")


def load(name: str) -> LoadedWorkload:
    return check_workload(getattr(shared_workloads, name)(), label=name, fingerprint="")


def make_sharded(world: World) -> RankTraining:
    loaded = load("Sharded")
    return RankTraining(loaded, loaded.baseline, world=world, seed=3)


def make_alone() -> Training:
    loaded = load("Stacked")
    return Training(loaded, loaded.baseline, device=CPU, seed=3)


def take_steps(training: Training, steps: int = 2) -> list[float]:
    return [float(training.step().loss) for _ in range(steps)]


def test_a_sharded_training_goes_on_from_its_checkpoint(world: World, checkpoints: Checkpoints) -> None:
    training = make_sharded(world)
    take_steps(training)
    path = checkpoints.save(training, Progress(2, 24), {"note": 1})
    assert {*read_record(path / MANIFEST_FILE, CheckpointManifest).shards} == {METADATA_FILE, "__0_0.distcp"}
    expected = take_steps(training)
    fresh = make_sharded(world)
    restored = checkpoints.load(fresh)
    assert (restored.progress, restored.notes["note"], restored.problems) == (Progress(2, 24), 1, ())
    assert take_steps(fresh) == expected


def test_either_kind_is_read_by_either_training(world: World, checkpoints: Checkpoints) -> None:
    sharded, alone = make_sharded(world), make_alone()
    for training in (sharded, alone):
        take_steps(training)
    checkpoints.save(sharded, Progress(2, 24), {})
    read = make_alone()
    checkpoints.load(read)
    assert take_steps(read) == pytest.approx(take_steps(sharded), rel=1e-6)
    checkpoints.save(alone, Progress(3, 36), {})
    back = make_sharded(world)
    assert checkpoints.load(back).progress == Progress(3, 36)
    assert take_steps(back) == pytest.approx(take_steps(alone), rel=1e-6)


def test_tied_weights_are_written_once_and_read_as_one(world: World, checkpoints: Checkpoints) -> None:
    path = checkpoints.save(make_sharded(world), Progress(0, 0), {})
    model = read_verified(path)["model"]
    assert model["leave.weight"] is model["enter.weight"]
    assert model["enter.weight"].shape == (4, 4)


def test_the_best_one_has_all_files(world: World, checkpoints: Checkpoints) -> None:
    path = checkpoints.save(make_sharded(world), Progress(1, 12), {})
    best = checkpoints.keep_best(path)
    assert {file.name for file in best.iterdir()} == {file.name for file in path.iterdir()}
    assert read_verified(best)["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [METADATA_FILE, "__0_0.distcp"])
@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
@pytest.mark.fault(
    "35", injected="a file of a sharded checkpoint cut, gone, or with other bytes", outcome="the one before; said"
)
def test_a_damaged_file_falls_back_to_the_one_before(
    world: World, checkpoints: Checkpoints, name: str, how: str
) -> None:
    training = make_sharded(world)
    checkpoints.save(training, Progress(1, 12), {})
    file = checkpoints.save(training, Progress(2, 24), {}) / name
    content = file.read_bytes()
    file.unlink()
    if how != "gone":
        file.write_bytes(content[:-9] if how == "cut" else content[:40] + bytes([content[40] ^ 1]) + content[41:])
    restored = checkpoints.load(make_sharded(world))
    assert restored.progress.step == 1
    assert restored.problems == (f"step-00000002 is damaged: {name} does not match its manifest",)


@pytest.mark.fault(
    "25", injected="ENOSPC while a process writes its shards", outcome="the old checkpoints; the next save works"
)
def test_a_full_disk_leaves_the_earlier_ones(
    world: World, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_sharded(world)
    checkpoints.save(training, Progress(1, 12), {})

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "/full")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", fail)
        with pytest.raises(OSError, match="No space left on device") as caught:
            checkpoints.save(training, Progress(2, 24), {})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/full")
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]
    assert checkpoints.save(training, Progress(2, 24), {}).is_dir()


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.fault(
    "36", injected="a pickle that runs a command as .metadata, its checksum right", outcome="nothing is run"
)
def test_metadata_that_would_run_is_not_loaded(
    world: World, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    training = make_sharded(world)
    checkpoints.save(training, Progress(1, 12), {})
    path = checkpoints.save(training, Progress(2, 24), {})
    replace_metadata(path, pickle.dumps(_Evil()))
    restored = checkpoints.load(make_sharded(world))
    assert restored.progress.step == 1
    assert "cannot be loaded: UnpicklingError" in restored.problems[0]
    assert not (tmp_path / "evil").exists()


def replace_metadata(path: Path, content: bytes) -> None:
    (path / METADATA_FILE).write_bytes(content)
    manifest = read_record(path / MANIFEST_FILE, CheckpointManifest)
    shards = manifest.shards | {METADATA_FILE: hashlib.sha256(content).hexdigest()}
    write_record(path / MANIFEST_FILE, manifest.replace(shards=shards))


@pytest.mark.parametrize("value", [_Evil(), os.path.join, torch.load, torch.nn.Linear, torch.Tensor, pickle.loads])
def test_metadata_names_records_alone(value: Any, tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(value))
    with (tmp_path / METADATA_FILE).open("rb") as file, pytest.raises(pickle.UnpicklingError, match="has no place"):
        _DataUnpickler(file).load()


def test_metadata_names_no_file_elsewhere(world: World, checkpoints: Checkpoints) -> None:
    path = checkpoints.save(make_sharded(world), Progress(1, 12), {})
    with (path / METADATA_FILE).open("rb") as file:
        metadata = _DataUnpickler(file).load()
    for place in metadata.storage_data.values():
        place.relative_path = "../../secret"
    replace_metadata(path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="names files elsewhere"):
        read_verified(path)


def test_an_infinity_in_a_shard_is_found(world: World) -> None:
    training = make_sharded(world)
    assert find_non_finite(training) is None
    with torch.no_grad():
        training.model.blocks[1][0].bias.to_local()[2] = torch.inf  # type: ignore[index, union-attr]
    assert find_non_finite(training) == "blocks.1.0.bias"
