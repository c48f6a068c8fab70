"""What a loader hands over, as digests: the same samples in the same order, with the same types, shapes and bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from autotune.engine.dataloader import EpochBatchSampler
from autotune.engine.windows import Windows
from autotune.records.trial import DataTrace

FIRST_BATCHES = 64
"""Effective batches compared at the start of an epoch."""

_ENDS = 2
_MOST_SECONDS = 6.0
_LEAST_BATCHES = 4


def record_data(windows: Windows, sampler: EpochBatchSampler | None, accumulation: int) -> DataTrace:
    """Return what a loader hands over: the first batches, the end of the first epoch, the beginning of the second.

    Args:
        windows: at the start of their first epoch.
        sampler: of the loader; None for an iterable dataset, of which only the first batches are looked at.
        accumulation: micro batches of an effective batch.
    """
    began = time.monotonic()
    noted: list[tuple[str, str]] = []
    for batches in _read_windows(windows, FIRST_BATCHES):
        noted.append(digest_batches(batches))
        if time.monotonic() - began > _MOST_SECONDS and len(noted) >= _LEAST_BATCHES:
            break
    if sampler is None:
        return DataTrace(batches=tuple(digest for digest, _ in noted), shapes=tuple(shape for _, shape in noted))
    count = -(-len(sampler) // accumulation)
    windows.move_to(epoch=0, batches_done=max(0, count - _ENDS) * accumulation)
    ends = [digest_batches(batches) for batches in islice(_read_windows(windows, _ENDS + 1), _ENDS + 1)]
    sampler.epoch, sampler.start = 0, 0
    keys = [key for batch in sampler for key in batch]
    return DataTrace(
        batches=tuple(digest for digest, _ in noted),
        shapes=tuple(shape for _, shape in noted),
        ends=tuple(digest for digest, _ in ends),
        end_shapes=tuple(shape for _, shape in ends),
        order=hashlib.sha256(repr(keys).encode()).hexdigest()[:16],
        samples=len(keys),
        repeated=sum(times - 1 for times in Counter(keys).values()),
    )


def digest_batches(batches: Sequence[Any]) -> tuple[str, str]:
    """Return a digest of the contents of some batches, and their types and shapes in words."""
    digest, shapes = hashlib.sha256(), []
    for part in _walk(list(batches)):
        if isinstance(part, _Name):
            digest.update(repr(part.name).encode())
            continue
        shape, content = _describe(part)
        shapes.append(shape)
        digest.update(shape.encode() + content)
    return digest.hexdigest()[:16], " + ".join(shapes)


class _Name(NamedTuple):
    """A key of a mapping within a batch."""

    name: Any


def _describe(part: Any) -> tuple[str, bytes]:
    """Return the type and shape of a leaf of a batch in words, and its bytes."""
    if isinstance(part, torch.Tensor):
        tensor = part.detach().cpu()
        tensor = (tensor if tensor.layout == torch.strided else tensor.to_dense()).contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}", content
    if isinstance(part, np.ndarray):
        plain = part.dtype != object
        return f"{part.dtype}{list(part.shape)}", np.ascontiguousarray(part).tobytes() if plain else _write(
            part.tolist()
        )
    return type(part).__name__, _write(part)


def _write(value: Any) -> bytes:
    # What an object of any other class says of itself may hold its address, which differs from run to run.
    told = isinstance(value, str | bytes | int | float | complex | bool | None | np.generic | list)
    return repr(value).encode() if told else b""


def _read_windows(windows: Windows, count: int) -> Iterator[list[Any]]:
    for _ in range(count):
        yield windows.next_window().batches


def _walk(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield _Name(key)
            yield from _walk(value[key], seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _walk(part, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), seen)
    elif not isinstance(value, torch.Tensor | type) and getattr(value, "__dict__", None) and id(value) not in seen:
        yield from _walk(vars(value), seen | {id(value)})
    else:
        yield value
