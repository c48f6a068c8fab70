"""The loader knobs: workers, prefetch, pinning, persistence; and a data order that none of them can change.

Order and augmentation are functions of (seed, epoch, index) alone. The order is drawn by the batch sampler in the
training process. Where the dataset draws from global random generators, each sample seeds them first, so that a
sample is the same in any worker, at any micro batch size, and after a resume.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from autotune.lifeline import die_with_parent
from autotune.records.config import TrainConfig

SampleKey = int | tuple[int, int]

_FETCHED_SAMPLES = 16
_COLLATE_STREAM = 1


@dataclass(frozen=True)
class Order:
    """Which samples are visited, and in which order.

    Attributes:
        seed: of the permutation of each epoch.
        shuffle: draw a new permutation in each epoch; else ascending.
        drop_last: leave out the last, short effective batch of an epoch.
    """

    seed: int
    shuffle: bool
    drop_last: bool


class EpochBatchSampler:
    """Yield the micro batches of one epoch as lists of keys; the order depends on seed and epoch only.

    Attributes:
        epoch: the epoch to yield next.
        start: micro batches of that epoch to leave out, already trained on.
    """

    def __init__(self, sample_count: int, config: TrainConfig, order: Order, *, with_epoch: bool) -> None:
        self.epoch = 0
        self.start = 0
        self._micro_batch_size = config.micro_batch_size
        self._order = order
        self._with_epoch = with_epoch
        step = config.effective_batch_size
        self._used = sample_count - sample_count % step if order.drop_last and sample_count >= step else sample_count
        self._sample_count = sample_count

    def __len__(self) -> int:
        return -(-self._used // self._micro_batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        indices = self._permutation()
        size = self._micro_batch_size
        for first in range(self.start * size, self._used, size):
            chosen = indices[first : min(first + size, self._used)]
            yield [(self.epoch, index) for index in chosen] if self._with_epoch else list(chosen)

    def batch_length(self, position: int) -> int:
        """Return the number of samples in one micro batch of an epoch; the last may be short."""
        return min(self._micro_batch_size, self._used - position * self._micro_batch_size)

    def count_elsewhere(self, position: int, own: int) -> int:
        """Return the samples that other processes take in the optimizer step that begins at a micro batch: none here.

        Args:
            position: of the step's first micro batch.
            own: samples of the step that are taken here.
        """
        del position, own
        return 0

    def _permutation(self) -> Sequence[int]:
        if not self._order.shuffle:
            return range(self._sample_count)
        generator = torch.Generator().manual_seed(mix_seed(self._order.seed, self.epoch))
        order: list[int] = torch.randperm(self._sample_count, generator=generator).tolist()
        return order


class SeededDataset(Dataset[Any]):
    """A dataset whose randomness depends on (seed, epoch, index) alone; its samples come with their keys."""

    def __init__(self, dataset: Dataset[Any], *, seed: int, sources: Sequence[str]) -> None:
        self._dataset = dataset
        self._seed = seed
        self._sources = tuple(sources)

    def __getitem__(self, key: tuple[int, int]) -> tuple[tuple[int, int], Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], Any]]:
        """Return the samples of a batch: the generators are put back once for all of them."""
        samples = []
        with seeded(self._seed, ()):
            for key in keys:
                seed_generators(mix_seed(self._seed, *key), self._sources)
                samples.append((key, self._dataset[key[1]]))
        return samples


class SeededCollate:
    """A collate function whose randomness depends on the seed and the keys of a batch's first sample alone."""

    def __init__(self, collate: Callable[[list[Any]], Any], *, seed: int, sources: Sequence[str]) -> None:
        self._collate = collate
        self._seed = seed
        self._sources = tuple(sources)

    def __call__(self, keyed: list[tuple[tuple[int, int], Any]]) -> Any:
        """Return the batch of samples that came with their keys."""
        first_key = keyed[0][0]
        with seeded(mix_seed(self._seed, *first_key, _COLLATE_STREAM), self._sources):
            return self._collate([sample for _, sample in keyed])


class _ChosenLoader(DataLoader[Any]):
    """A loader whose number of workers was chosen by measurement."""

    def check_worker_number_rationality(self) -> None:
        """Say nothing: PyTorch's one worker a CPU knows nothing of samples that are waited for."""


def build_loader(
    dataset: Dataset[Any],
    config: TrainConfig,
    order: Order,
    *,
    collate: Callable[[list[Any]], Any] | None,
    random_sources: Sequence[str] = (),
    make_sampler: Callable[..., EpochBatchSampler] = EpochBatchSampler,
) -> tuple[DataLoader[Any], EpochBatchSampler | None]:
    """Return a loader with the config's settings, and its sampler (None for an iterable dataset).

    Args:
        dataset: the samples.
        config: the settings.
        order: which samples are visited when.
        collate: merges samples into a batch; None for PyTorch's own.
        random_sources: global generators that samples or collation draw from.
        make_sampler: makes the sampler of a map-style dataset.
    """
    workers: dict[str, Any] = {
        "num_workers": config.num_workers,
        "pin_memory": config.pin_memory,
        "collate_fn": collate,
    }
    if config.num_workers > 0:
        workers |= {"prefetch_factor": config.prefetch_factor, "persistent_workers": config.persistent_workers}
        # A worker stuck in a sample outlives a killed training otherwise: PyTorch's own watchdog never gets its turn.
        workers["worker_init_fn"] = partial(_die_with_training, os.getpid())
    # A generator of its own keeps the loader from drawing its workers' seed from the training's random stream.
    workers["generator"] = torch.Generator().manual_seed(order.seed)
    if isinstance(dataset, IterableDataset):
        return _ChosenLoader(dataset, batch_size=config.micro_batch_size, drop_last=order.drop_last, **workers), None
    sampler = make_sampler(len(dataset), config, order, with_epoch=bool(random_sources))  # type: ignore[arg-type]
    if random_sources:
        dataset = SeededDataset(dataset, seed=order.seed, sources=random_sources)
        plain = collate or default_collate
        workers["collate_fn"] = SeededCollate(plain, seed=order.seed, sources=random_sources)
    return _ChosenLoader(dataset, batch_sampler=sampler, **workers), sampler


def _die_with_training(training: int, _worker: int) -> None:
    die_with_parent(training)


def mix_seed(*parts: int) -> int:
    """Return a 63-bit seed from integers; nearby inputs give unrelated outputs (the SplitMix64 finaliser)."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int, sources: Sequence[str]) -> None:
    """Seed some of the global generators `torch` (the CPU's), `numpy` and `random`."""
    if "torch" in sources:
        torch.default_generator.manual_seed(seed)
    if "numpy" in sources:
        np.random.seed(seed & 0xFFFFFFFF)
    if "random" in sources:
        random.seed(seed)


@contextmanager
def seeded(seed: int, sources: Sequence[str]) -> Iterator[None]:
    """Seed some global generators; in the training process they are put back afterwards."""
    before = None if get_worker_info() is not None else read_generators()
    seed_generators(seed, sources)
    try:
        yield
    finally:
        if before is not None:
            restore_generators(before)


def read_generators() -> dict[str, Any]:
    """Return the states of the global CPU generators, by name."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put the global CPU generators back to earlier states."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])


def find_random_sources(dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> tuple[str, ...]:
    """Return which global generators samples and collation draw from, found by fetching and collating the first few.

    Empty for an iterable dataset, whose samples cannot be seeded one by one.
    """
    if isinstance(dataset, IterableDataset):
        return ()
    before = read_generators()
    samples = [dataset[index] for index in range(min(_FETCHED_SAMPLES, len(dataset)))]  # type: ignore[arg-type]
    if samples:
        (collate or default_collate)(samples)
    after = read_generators()
    restore_generators(before)
    return moved_generators(before, after)


def moved_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the global CPU generators whose states differ."""
    moved = {
        "torch": not torch.equal(before["torch"], after["torch"]),
        "numpy": before["numpy"][2] != after["numpy"][2] or not np.array_equal(before["numpy"][1], after["numpy"][1]),
        "random": before["random"] != after["random"],
    }
    return tuple(name for name, has_moved in moved.items() if has_moved)


def move_batch(batch: Any, place: Callable[[torch.Tensor], torch.Tensor], device: torch.device | None = None) -> Any:
    """Return a batch on the device.

    Args:
        batch: tensors in dictionaries, lists, tuples and dataclasses, or objects with a `to(device)` of their own.
        place: called with every tensor found.
        device: handed to such an object's `to`; None leaves it where it is.
    """

    def move(value: Any) -> Any:
        return move_batch(value, place, device)

    if isinstance(batch, torch.Tensor):
        return place(batch)
    if isinstance(batch, Mapping):
        moved = {key: move(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return moved
        same_kind = copy.copy(batch)  # collators return dictionaries that also answer `batch.input_ids`
        for key, value in moved.items():
            same_kind[key] = value  # one by one: a model's output class of transformers refuses `update`
        return same_kind
    if device is not None and callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(move, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _move_fields(batch, move)
    return batch


def _move_fields(batch: Any, move: Callable[[Any], Any]) -> Any:
    moved = copy.copy(batch)
    for field in dataclasses.fields(batch):  # set past `frozen`; `replace` would call the class's own start again
        object.__setattr__(moved, field.name, move(getattr(batch, field.name)))
    return moved


def read_batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the samples of a loader's batches; None where only the batches themselves can tell.

    A loader that was given a batch sampler, as accelerate's are, has no batch size itself.
    """
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor found in a batch, or of the first array where there is no tensor.

    Raises:
        ValueError: the batch holds neither.
    """
    pending, arrays = [batch], list[np.ndarray]()
    while pending:
        item = pending.pop(0)
        if isinstance(item, torch.Tensor) and item.ndim > 0:
            return int(item.shape[0])
        if isinstance(item, np.ndarray) and item.ndim > 0:
            arrays.append(item)
        if isinstance(item, Mapping):
            pending = [*item.values(), *pending]
        elif isinstance(item, list | tuple):
            pending = [*item, *pending]
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            pending = [*(getattr(item, one.name) for one in dataclasses.fields(item)), *pending]
    if arrays:
        return len(arrays[0])
    raise ValueError("the batch holds no tensor and no array, so its samples cannot be counted")
