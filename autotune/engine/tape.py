"""What a loader hands over, as digests: the same samples in the same order, with the same types, shapes and bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from autotune.engine.dataloader import EpochBatchSampler
from autotune.engine.windows import Windows
from autotune.records.trial import Tape

FIRST_BATCHES = 64
"""Effective batches compared at the start of an epoch."""

_ENDS = 2
_MOST_SECONDS = 6.0
_LEAST_BATCHES = 4


def record_tape(windows: Windows, sampler: EpochBatchSampler | None, accumulation: int) -> Tape:
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
        return Tape(batches=tuple(digest for digest, _ in noted), shapes=tuple(shape for _, shape in noted))
    count = -(-len(sampler) // accumulation)
    windows.move_to(epoch=0, batches_done=max(0, count - _ENDS) * accumulation)
    ends = [digest_batches(batches) for batches in islice(_read_windows(windows, _ENDS + 1), _ENDS + 1)]
    sampler.epoch, sampler.start = 0, 0
    keys = [key for batch in sampler for key in batch]
    return Tape(
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
        if isinstance(part, torch.Tensor):
            tensor = part.detach().cpu().contiguous()
            shapes.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
            content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        elif isinstance(part, np.ndarray):
            shapes.append(f"{part.dtype}{list(part.shape)}")
            content = np.ascontiguousarray(part).tobytes()
        else:
            shapes.append(type(part).__name__)
            content = repr(part).encode() if isinstance(part, str | bytes | int | float | bool | None) else b""
        digest.update(shapes[-1].encode() + content)
    return digest.hexdigest()[:16], " + ".join(shapes)


def _read_windows(windows: Windows, count: int) -> Iterator[list[Any]]:
    for _ in range(count):
        yield windows.next_window().batches


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _walk(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name))
    else:
        yield value
