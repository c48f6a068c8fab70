"""A training's samples, fetched one by one in this process: what they cost, what they draw from, where they lie."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from autotune.engine.data_fingerprint import mark_data
from autotune.engine.dataloader import find_random_sources
from autotune.machine.disk import opened_files
from autotune.probe.data.cpu_share import CpuShare
from autotune.probe.data.hot_call import find_hot_call
from autotune.records.facts import DataFacts

_FETCH_SECONDS = 0.5
_MOST_BATCHES = 16
_MOST_KEPT = 16
"""Samples that are held while the training is timed, and its memory with it."""

_SLOW_SAMPLE_SECONDS = 1.0
"""Of what takes longer no more are fetched to see why."""

_MOST_PICKLED_BYTES = 2**29
_MOST_PARTS = 100

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Samples:
    """What was fetched in one process.

    Attributes:
        facts: about the data.
        fetched: some of the samples.
        files: that were opened for them.
        keeps_read: the dataset holds more afterwards.
    """

    facts: DataFacts
    fetched: list[Any] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    keeps_read: bool = False


def look_at_data(
    open_dataset: Callable[[], Any], collate: Collate | None, *, batch_size: int, fingerprints: bool
) -> Samples:
    """Return what fetching some samples in this process shows.

    Args:
        open_dataset: returns the training set; the files it opens are looked at as well.
        collate: makes a batch of samples; None for PyTorch's own.
        batch_size: samples of a micro batch.
        fingerprints: digest some of the samples, which every opening of the training set gives alike.

    Raises:
        Exception: whatever the dataset's code raises.
    """
    with opened_files() as files:
        dataset = open_dataset()
        iterable = isinstance(dataset, IterableDataset)
        sources = find_random_sources(dataset, collate)
        stream = iter(dataset) if iterable else (dataset[index] for index in range(len(dataset)))
        seconds, cpu_fraction, fetched = _time_samples(stream, batch_size, collate or default_collate)
        hot = find_hot_call(stream) if seconds < _SLOW_SAMPLE_SECONDS else None  # of others, which no cache has
    facts = DataFacts(
        sample_count=None if iterable else len(dataset),
        seconds_per_sample=seconds,
        cpu_fraction=cpu_fraction,
        random_sources=sources,
        iterable=iterable,
        hot_call="" if hot is None else hot.name,
        hot_call_fraction=None if hot is None else hot.fraction,
        fingerprint=mark_data(dataset, collate, sources).fingerprint if fingerprints else None,
    )
    return Samples(facts, fetched, list(files))


def _time_samples(stream: Iterator[Any], batch_size: int, collate: Collate) -> tuple[float, float | None, list[Any]]:
    """Return the seconds a sample takes in one process, the share in which a CPU worked, and some of the samples.

    Batches are made of them until the time is up. The first one finds nothing in a cache: it counts where it is alone.
    """
    began, share = time.perf_counter(), CpuShare()
    kept: list[Any] = []
    seconds: list[float] = []
    while len(seconds) < _MOST_BATCHES and time.perf_counter() - began < _FETCH_SECONDS:
        started, batch = time.perf_counter(), list[Any]()
        for sample in stream:
            batch.append(sample)
            if len(batch) >= batch_size or time.perf_counter() - began > _FETCH_SECONDS:
                break
        if not batch:
            break
        kept += batch[: _MOST_KEPT - len(kept)]
        if seconds and len(batch) < batch_size:
            break  # a rest: some collate functions take none, and its few samples are no batch's
        collate(batch)
        seconds.append((time.perf_counter() - started) / len(batch))
    worked = share.read()[1] if seconds else None
    return statistics.fmean(seconds[1:] or seconds) if seconds else 0.0, worked, kept


def count_held(dataset: Any) -> int:
    """Return how many items a dataset has in its lists, dicts and sets, those of the datasets that it is made of too.

    One that keeps what it has read holds more after it was read from.
    """
    found, parts = 0, [dataset]
    for part in parts:  # which grows
        for value in getattr(part, "__dict__", {}).values():
            found += len(value) if isinstance(value, dict | list | set) else 0
            inner = value if isinstance(value, list | tuple) and len(value) <= _MOST_PARTS else [value]
            parts += [one for one in inner if isinstance(one, Dataset) and len(parts) < _MOST_PARTS]
    return found


def find_pickling_trouble(dataset: Any) -> str:
    """Return why a dataset may not be shared among worker processes; empty when it can be pickled."""
    try:
        pickle.Pickler(_Nowhere()).dump(dataset)
    except _EnoughError:
        return ""
    except Exception as error:
        what = " ".join(str(error).split())[:120]
        return f"its dataset cannot be pickled ({what}): what it holds open may not be shared among workers"
    return ""


class _EnoughError(Exception):
    """So much was pickled that the rest will pickle too."""


class _Nowhere:
    def __init__(self) -> None:
        self._written = 0

    def write(self, data: Any) -> int:
        self._written += len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if self._written > _MOST_PICKLED_BYTES:
            raise _EnoughError
        return 0
