"""Say in a few words what a training set is: how many samples it has, and what some of them hold.

A sample is fetched twice, its generators seeded alike: one that comes out differently is no mark of its data set.
Integers count to the last bit, floating-point numbers only as far as two machines that compute a sample agree on it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from autotune.engine.data_trace import digest_batches
from autotune.engine.dataloader import mix_seed, move_batch, seeded
from autotune.targets.workload import LoadedWorkload

GENERATORS = ("torch", "numpy", "random")
"""The global ones that a data set may draw from."""

_POSITIONS = 6
_MOST_SECONDS = 3.0
_MOST_ROWS = 16
_MOST_ELEMENTS = 2**14
_RESOLUTION = 1e-3
"""Relative; where rounding differs by 1e-7 from machine to machine, one mark in ten thousand moves."""
_GOLDEN_RATIO = 0.6180339887498949
_SEED = 0


def build_dataset(loaded: LoadedWorkload) -> Dataset[Any]:
    """Return a workload's training samples, built as in every other process: seeded, and no generator is moved."""
    with seeded(_SEED, GENERATORS):
        return loaded.workload.train_dataset()


@dataclass(frozen=True)
class DataMark:
    """What a data set is.

    Attributes:
        fingerprint: `SAMPLES:DIGEST`, e.g. `50000:0123456789ab`, the digest over six samples from the first to the
            last; None for what has no such mark: an iterable data set, one whose samples are other ones each time,
            cannot be fetched alone or take too long.
        repeats: a sample that is fetched twice, the global generators seeded alike, is the same; None where that is
            not known.
    """

    fingerprint: str | None = None
    repeats: bool | None = None


def mark_data(dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None, sources: Sequence[str]) -> DataMark:
    """Return what a data set is; it costs twelve fetches at most and leaves the global generators as they are.

    Args:
        dataset: as `build_dataset` returns it.
        collate: merges samples into a batch; None for PyTorch's own.
        sources: global generators that samples or collation draw from, see `find_random_sources`.
    """
    if isinstance(dataset, IterableDataset):
        return DataMark()
    merge, deadline = collate or default_collate, time.monotonic() + _MOST_SECONDS
    try:
        with seeded(_SEED, GENERATORS):  # also those that the first samples did not draw from
            samples = len(dataset)  # type: ignore[arg-type]
            digests = [_digest_some(dataset, samples, merge, sources, deadline) for _ in range(2)]
    except Exception:  # a sample alone may be more than a data set has to bear; the training shows what is wrong
        return DataMark()
    if None in digests:
        return DataMark()
    repeats = digests[0] == digests[1]
    return DataMark(f"{samples}:{digests[0]}" if repeats else None, repeats)


def _digest_some(
    dataset: Any, samples: int, collate: Callable[[list[Any]], Any], sources: Sequence[str], deadline: float
) -> str | None:
    """Return twelve hex digits over one batch of some samples; None when there are none, or the time is up."""
    chosen = []
    for position in sorted({number * (samples - 1) // (_POSITIONS - 1) for number in range(_POSITIONS) if samples}):
        with seeded(mix_seed(_SEED, position), sources):
            chosen.append(dataset[position])
        if time.monotonic() > deadline:
            return None
    if not chosen:
        return None
    with seeded(mix_seed(_SEED, samples), sources):
        batch = collate(chosen)
    _, shapes = digest_batches([batch])
    content, _ = digest_batches([move_batch(batch, _coarsen)])
    return hashlib.sha256(f"{shapes}\n{content}".encode()).hexdigest()[:12] if shapes else None


def _coarsen(tensor: Tensor) -> Tensor:
    """Return a tensor of integers as it is, and of floating-point numbers whole ones that tell them apart.

    Of each row, usually a sample, they are its projection on a fixed direction, relative to its norm, the logarithm of
    that norm, and how many elements are not finite. Of a long row evenly spaced elements count.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    dense = tensor.detach().cpu() if tensor.layout == torch.strided else tensor.detach().to_dense().cpu()
    values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    rows = len(dense) if dense.dim() and len(dense) <= _MOST_ROWS else 1
    values = values.reshape(rows, -1)
    values = values[:, :: max(1, values.shape[1] // _MOST_ELEMENTS)].double()
    finite = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    # Squares of what a double holds may be more than a double holds.
    largest = finite.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    scaled = finite / largest
    norm = scaled.square().sum(1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    direction = torch.arange(1, values.shape[1] + 1, dtype=torch.float64).mul_(_GOLDEN_RATIO).remainder_(1.0).sub_(0.5)
    marks = torch.cat([scaled @ direction[:, None] / norm, norm.log() + largest.log()], 1)
    return torch.cat([marks.div(_RESOLUTION).round().long(), (~values.isfinite()).sum(1, keepdim=True)], 1)
