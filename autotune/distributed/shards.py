"""A sharded training's checkpoint, by torch.distributed.checkpoint: each process writes its own shards.

    __0_0.distcp, __1_0.distcp      model.NAME and optimizer.INDEX.KEY: what each process has of every tensor
    .metadata                       where each part of each tensor is
    state.pt                        everything else, as in the checkpoint of one process

Where a sharded training reads it, of any number of processes, each takes what it needs of each file; else all of it is
put together on the host. Torch's `get_state_dict` would create the optimizer's state by a step of the user's optimizer:
the names here need none.
"""

from __future__ import annotations

import errno
import hashlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.distributed.training import RankTraining
from autotune.distributed.world import Command
from autotune.engine.loop import Training
from autotune.engine.shards import is_shard, make_empty, take_shard
from autotune.errors import CheckpointError

METADATA_FILE = ".metadata"
_PARTS = ("model", "optimizer")


def save_shards(training: RankTraining, folder: Path) -> tuple[dict[str, str], list[Any]]:
    """Have every rank write its shards; return each file's checksum, and what the other ranks have added.

    Args:
        training: that this process leads, at a step boundary.
        folder: of the checkpoint, that all of them see.

    Raises:
        OSError: a disk is full or cannot be written, of any rank.
        RankLostError: one of them is gone.
    """
    training.world.tell(Command.SAVE)
    training.world.share(str(folder))
    answers = write_own_shards(training, folder, None)
    training.announce_pause()  # the rest of the checkpoint is yet to be written
    for told in answers:
        if told["error"] is not None:
            raise OSError(*told["error"])
    digests = {name: digest for told in answers for name, digest in told["files"].items()}
    return digests | {METADATA_FILE: checksum(folder / METADATA_FILE)}, [told["more"] for told in answers[1:]]


def write_own_shards(training: RankTraining, folder: Path, more: Any) -> list[dict[str, Any]]:
    """Write what this rank has of the model and its optimizer; return what all ranks tell, on the leader.

    Args:
        training: at a step boundary.
        folder: of the checkpoint.
        more: plain data of this rank's that go into the rest of the checkpoint.

    Raises:
        RankLostError: another rank is gone.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    world, error = training.world, None
    # What is whole everywhere is the leader's to write.
    own = {name: value for name, value in _list_tensors(training) if world.leads or is_shard(value)}
    try:
        with world.watching():
            save(own, storage_writer=FileSystemWriter(folder), process_group=world.answers)
    except CheckpointException as failed:
        error = _find_disk_error(failed)
    files = {file.name: checksum(file) for file in folder.glob(f"__{world.rank}_*")} if error is None else {}
    return world.gather({"error": error, "files": files, "more": more})


def read_shards(path: Path, state: Mapping[str, Any], training: Training | None) -> dict[str, Any]:
    """Return a checkpoint's state with its tensors: sharded as a training's own are, or whole on the host.

    Args:
        path: of the checkpoint, which is complete.
        state: what its state file holds.
        training: that it is read for; None for whole tensors.

    Raises:
        CheckpointError: it holds something else than tensors.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    reader = _make_reader(path)
    metadata = reader.read_metadata()
    likes = dict(_list_likes(training)) if training is not None and training.is_sharded else {}
    tensors = {name: _prepare(name, entry, likes) for name, entry in metadata.state_dict_metadata.items()}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    # Each process by itself: what it reads is for no other one.
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return _join(state, tensors)


def shard_state(state: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Return the state of an unsharded training with this rank's part of each tensor.

    Args:
        state: as one process has written it.
        training: that is sharded.
    """
    likes = dict(_list_likes(training))
    model = {name: take_shard(value, likes[f"model.{name}"]) for name, value in state["model"].items()}
    moments = {
        index: {
            key: take_shard(value, likes.get(f"optimizer.{index}.", value)) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for index, values in state["optimizer"]["state"].items()
    }
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}}


def without_tensors(state: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Return a training's state without what its shards have, and which weights are one and the same."""
    moments = {
        index: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["optimizer"]["state"].items()
    }
    model = {name: value for name, value in state["model"].items() if not isinstance(value, Tensor)}
    optimizer = {**state["optimizer"], "state": moments}
    return {**state, "model": model, "tied": _find_tied(training), "optimizer": optimizer}


def _find_tied(training: Training) -> dict[str, str]:
    """Return the other names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    named = training.model.named_parameters(remove_duplicate=False)
    return {name: known for name, leaf in named if (known := first.setdefault(id(leaf), name)) != name}


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _list_tensors(training: Training) -> Iterator[tuple[str, Tensor]]:
    tied = _find_tied(training)
    for name, value in training.model.state_dict().items():
        if isinstance(value, Tensor) and name not in tied:
            yield f"model.{name}", value
    for index, values in training.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"optimizer.{index}.{key}", value


def _list_likes(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Yield what tensors of a checkpoint are sharded like: the model's own, and `optimizer.INDEX.` for any moment."""
    for name, value in training.model.state_dict().items():
        yield f"model.{name}", value
    parameters = (leaf for group in training.optimizer.param_groups for leaf in group["params"])
    for index, leaf in enumerate(parameters):
        yield f"optimizer.{index}.", leaf


def _prepare(name: str, entry: Any, likes: Mapping[str, Tensor]) -> Tensor:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(entry, TensorStorageMetadata) or name.partition(".")[0] not in _PARTS:
        raise CheckpointError(f"{name[:80]!r} of a checkpoint's shards is no tensor of a training")
    kind = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    like = likes.get(name) if name.startswith("model.") else likes.get(f"{name.rpartition('.')[0]}.")
    return make_empty(kind if like is None else like, kind)


def _join(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    model, moments = dict(state["model"]), {index: dict(one) for index, one in state["optimizer"]["state"].items()}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        if part == "model":
            model[rest] = value
        else:
            index, _, key = rest.partition(".")
            moments.setdefault(int(index), {})[key] = value
    model |= {name: model[first] for name, first in state["tied"].items()}
    return {**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}}


def _make_reader(path: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    class Reader(FileSystemReader):
        """Reads what is data alone, and no file beside the checkpoint's own."""

        def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
            with (path / METADATA_FILE).open("rb") as file:
                metadata = _DataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise CheckpointError(f"{path / METADATA_FILE} is not torch's")
            names = {getattr(place, "relative_path", "") for place in metadata.storage_data.values()}
            if any(Path(name).name != name for name in names):
                raise CheckpointError(f"{path / METADATA_FILE} names files elsewhere")
            return metadata

    return Reader(path)


class _DataUnpickler(pickle.Unpickler):
    """Loads the records of torch.distributed.checkpoint's metadata, and nothing that could run."""

    _RECORDS = "torch.distributed.checkpoint.metadata"
    _NAMES = (
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("collections", "OrderedDict")),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata, or a type of tensors.

        Raises:
            UnpicklingError: it is anything else.
        """
        is_known = "." not in name and (module in (self._RECORDS, "torch") or (module, name) in self._NAMES)
        found = super().find_class(module, name) if is_known else None  # nothing else is even imported
        is_record = module == self._RECORDS and isinstance(found, type) and found.__module__ == module
        if is_record or (module == "torch" and isinstance(found, torch.dtype)) or (module, name) in self._NAMES:
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _find_disk_error(failed: Any) -> tuple[Any, ...]:
    """Return number, words and file of what a disk has refused, of any rank; or else why nothing was written."""
    causes = [one[0] if isinstance(one, tuple) else one for one in failed.failures.values()]
    for cause in causes:
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is not None:
            return (cause.errno, cause.strerror or str(cause), cause.filename)
    return (errno.EIO, " ".join(f"{type(one).__name__}: {one}" for one in causes)[:200], None)
