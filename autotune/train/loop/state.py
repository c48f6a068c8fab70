"""Everything a training is made of at a step boundary, as tensors and plain containers; captured and put back.

No stateful loader is needed for the position in the data: order and augmentation are functions of seed, epoch and
index alone (`engine/dataloader.py`), so epoch and batches done say it all. torchdata's StatefulDataLoader would bring
back the order, but not the random state of the workers, and its state is only good for one number of workers.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.distributed.training import RankTraining
from autotune.distributed.world import Command
from autotune.engine.dataloader import mix_seed, read_generators, restore_generators
from autotune.engine.loop import Training, seed_everything
from autotune.engine.shards import local_part
from autotune.errors import TargetError

_SWITCHES = ("fused", "foreach")


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        step: optimizer steps taken.
        samples: samples trained on.
    """

    step: int = 0
    samples: int = 0


def capture_state(
    training: Training, progress: Progress, notes: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return what a checkpoint holds.

    Args:
        training: at a step boundary.
        progress: where it stands.
        notes: what else to remember, plain containers: meters, what the drift guard has seen.
        others: random generators of the other ranks, in order.
    """
    parts = {
        "model": training.model.state_dict(),
        "averaged": None if training.averaged is None else training.averaged.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": None if training.scheduler is None else training.scheduler.state_dict(),
        "scaler": None if training.scaler is None else training.scaler.state_dict(),
        "precision": training.config.precision,
        "micro_batch_size": training.config.micro_batch_size,
        "epoch": training.windows.epoch,
        "batches_done": training.windows.batches_done,
        "step": progress.step,
        "samples": progress.samples,
        "world_size": _find_place(training)[1],
        **capture_generators(training),
        "others": list(others),
        "notes": dict(notes),
    }
    return {name: _to_plain(part) for name, part in parts.items()}


def capture_generators(training: Training) -> dict[str, Any]:
    """Return the random generators of this process, as plain data."""
    generators = read_generators()
    name, keys, position, has_gauss, gauss = generators["numpy"]
    if training.device.type != "cuda":
        on_device = []
    elif isinstance(training, RankTraining):
        on_device = [torch.cuda.get_rng_state(training.device)]  # the other devices are other ranks'
    else:
        on_device = torch.cuda.get_rng_state_all()
    return {
        "torch_rng": generators["torch"],
        "cuda_rng": on_device,
        "numpy_rng": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python_rng": generators["random"],
    }


def gather_generators(training: Training) -> list[dict[str, Any]]:
    """Return the random generators of the other ranks, in order; the leader alone may ask.

    Raises:
        RankLostError: one of them is gone.
    """
    if not isinstance(training, RankTraining):
        return []
    training.world.tell(Command.STATE)
    found = training.world.gather(None)[1:]
    training.announce_pause()  # the checkpoint is yet to be written
    return found


def _find_place(training: Training) -> tuple[int, int]:
    """Return the rank of this process and how many there are."""
    return (training.world.rank, training.world.size) if isinstance(training, RankTraining) else (0, 1)


def require_loadable(training: Training) -> None:
    """Make sure that what a checkpoint is going to hold can be loaded as data only; no tensor is copied for it.

    Raises:
        TargetError: a part of it cannot.
    """
    for name, part in capture_state(training, Progress(), {}).items():
        buffer = io.BytesIO()
        try:
            torch.save(_without_tensors(part), buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # torch and pickle raise many types for what they refuse
            text = " ".join(str(error).split())[:120]
            raise TargetError(
                f"the state of the {name} cannot be loaded as data: {type(error).__name__}: {text}",
                hint="keep numbers, strings, lists, dictionaries and tensors in it",
            ) from None


def restore_state(training: Training, state: Mapping[str, Any]) -> Progress:
    """Put a training, built with the same settings or with those of a step down, to where a checkpoint was.

    Raises:
        RuntimeError, ValueError, LookupError, TypeError, AttributeError: the state does not fit this training.
    """
    training.model.load_state_dict(state["model"])
    _load_optimizer(training, state["optimizer"])
    _require_same_parts(training, state)
    for part, name in (
        (training.averaged, "averaged"),
        (training.scheduler, "scheduler"),
        (training.scaler, "scaler"),
    ):
        # A scaler is fresh where the step down was to or from fp16.
        if part is not None and state[name] is not None:
            part.load_state_dict(state[name])
    training.windows.move_to(epoch=int(state["epoch"]), batches_done=_count_batches(training, state))
    _restore_generators(training, state)
    return Progress(step=int(state["step"]), samples=int(state["samples"]))


def find_non_finite(training: Training) -> str | None:
    """Return the name of a parameter, or the one of its optimizer, that holds an infinity or NaN; None without one.

    Of a sharded model every rank looks at its shards; the leader alone may ask.
    """
    if not isinstance(training, RankTraining) or not training.is_sharded:
        return find_own_non_finite(training)
    training.world.tell(Command.CHECK)
    found = training.world.gather(own := find_own_non_finite(training))
    training.announce_pause()
    return own or next((name for name in found if name is not None), None)


def find_own_non_finite(training: Training) -> str | None:
    """Return the name of what holds an infinity or NaN in this process; arguments as of `find_non_finite`."""
    listed = ((name, local_part(value)) for name, value in _list_tensors(training))
    named = [(name, value) for name, value in listed if value.is_floating_point()]
    if not named:
        return None
    finite = torch.stack([torch.isfinite(value).all().to(training.device) for _, value in named])
    return None if bool(finite.all()) else named[int(finite.long().argmin())][0]


def _to_plain(value: Any) -> Any:
    """Return a state with Python's numbers in place of numpy's, which cannot be loaded as data."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        plain = type(value)((_to_plain(key), _to_plain(part)) for key, part in value.items())
        if hasattr(value, "_metadata"):  # versions of the modules: without them a module takes its state for an old one
            plain._metadata = value._metadata
        return plain
    if type(value) in (list, tuple):
        return type(value)(_to_plain(part) for part in value)
    return value


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        return {key: _without_tensors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(part) for part in value]
    return value


def _list_tensors(training: Training) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    for name, parameter in training.model.named_parameters():
        yield name, parameter.detach()
    for parameter, values in training.optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"{names.get(id(parameter), 'a parameter')}'s {key}", value


def _load_optimizer(training: Training, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state, but not the implementation it was saved under, which a step down may have changed."""
    own, found = training.optimizer.param_groups, saved["param_groups"]
    if len(own) != len(found):
        raise ValueError(f"{len(found)} parameter groups, and the optimizer has {len(own)}")
    groups = [
        group | {name: mine[name] for name in _SWITCHES if name in mine and name in group}
        for group, mine in zip(found, own, strict=True)
    ]
    training.optimizer.load_state_dict({**saved, "param_groups": groups})
    for parameter, values in training.optimizer.state.items():
        for key, value in values.items():
            # A moment keeps the layout of its parameter, which another memory format has changed.
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _require_same_parts(training: Training, state: Mapping[str, Any]) -> None:
    same_precision = state["precision"] == training.config.precision
    for part, name, must in (
        (training.averaged, "averaged", True),
        (training.scheduler, "scheduler", True),
        (training.scaler, "scaler", same_precision),
    ):
        if must and (part is None) != (state[name] is None):
            raise ValueError(f"{'it has' if part is None else 'it lacks'} the state of: {name}")


def _count_batches(training: Training, state: Mapping[str, Any]) -> int:
    """Return the position in the epoch in this training's micro batches: steps end where one of any size does."""
    done = int(state["batches_done"]) * int(state["micro_batch_size"]) * int(state.get("world_size", 1))
    together = training.config.micro_batch_size * _find_place(training)[1]
    if done % together:
        raise ValueError(f"{done} samples of the epoch are no multiple of {together}")
    return done // together


def _restore_generators(training: Training, checkpoint: Mapping[str, Any]) -> None:
    rank, size = _find_place(training)
    if rank and size != checkpoint.get("world_size", 1):
        seed_everything(mix_seed(int(checkpoint["step"]), rank))  # of a rank that there was not, or for other samples
        return
    state = checkpoint["others"][rank - 1] if rank else checkpoint
    name, keys, position, has_gauss, gauss = state["numpy_rng"]
    version, internal, gauss_next = state["python_rng"]
    restore_generators(
        {
            "torch": state["torch_rng"],
            "numpy": (name, keys.numpy().astype(np.uint32), position, has_gauss, gauss),
            "random": (version, tuple(internal), gauss_next),
        }
    )
    if state["cuda_rng"] and isinstance(training, RankTraining):
        torch.cuda.set_rng_state(state["cuda_rng"][0], training.device)
    elif state["cuda_rng"] and torch.cuda.is_available():
        # As many as both have: `set_rng_state_all` fails where a checkpoint is from a machine with more GPUs.
        for index, own in enumerate(state["cuda_rng"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(own, index)
