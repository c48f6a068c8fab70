"""A workload's samples, fetched one by one in this process: what they cost, what they draw from, where they lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from autotune.engine.data_fingerprint import build_dataset, fingerprint_data
from autotune.engine.dataloader import find_random_sources
from autotune.machine.disk import opened_files
from autotune.probe.cpu_share import CpuShare
from autotune.probe.memory_shapes import list_tensors
from autotune.records.config import TrainConfig
from autotune.records.facts import DataFacts
from autotune.targets.workload import LoadedWorkload

_FETCH_SECONDS = 0.5
_MOST_FETCHES = 64
_BATCH_SECONDS = 0.7
_MOST_SAMPLE_BYTES = 32 * 2**20
"""Samples beyond are the first ones again: they are held beside the training, whose memory is to be seen."""
_MOST_KEPT = 16
"""Samples that are held while the training is timed, and its memory with it."""


@dataclass(frozen=True)
class Samples:
    """What was fetched in one process.

    Attributes:
        facts: about the data.
        fetched: some of the samples.
        files: that were opened for them.
    """

    facts: DataFacts
    fetched: list[Any]
    files: list[Path]


def look_at_data(loaded: LoadedWorkload, baseline: TrainConfig) -> Samples:
    """Return what fetching some samples in this process shows."""
    collate = loaded.collate or default_collate
    with opened_files() as files:
        dataset: Any = build_dataset(loaded)
        iterable = isinstance(dataset, IterableDataset)
        sources = find_random_sources(dataset, loaded.collate)
        seconds, cpu_fraction, fetched = _time_samples(dataset, baseline.micro_batch_size, collate, iterable=iterable)
    facts = DataFacts(
        sample_count=None if iterable else len(dataset),
        seconds_per_sample=seconds,
        cpu_fraction=cpu_fraction,
        random_sources=sources,
        iterable=iterable,
        fingerprint=fingerprint_data(dataset, loaded.collate, sources),
    )
    return Samples(facts, fetched, list(files))


def _time_samples(
    dataset: Any, batch: int, collate: Callable[[list[Any]], Any], *, iterable: bool
) -> tuple[float, float | None, list[Any]]:
    """Return the seconds a sample takes in one process, the share in which a CPU worked, and some of the samples."""
    stream = iter(dataset) if iterable else (dataset[index] for index in range(len(dataset)))
    began, share = time.perf_counter(), CpuShare()
    samples: list[Any] = []
    for sample in stream:
        samples.append(sample)
        if len(samples) >= max(batch, _MOST_FETCHES) or time.perf_counter() - began > _FETCH_SECONDS:
            break
    if not samples:
        return 0.0, None, []
    collate(samples[:batch])
    seconds, worked = share.read()
    return seconds / len(samples), worked, samples[:_MOST_KEPT]


class SampleBatches:
    """Batches of real samples of any size; few samples are repeated."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, most: int) -> None:
        self._collate = collate or default_collate
        stream = iter(dataset) if isinstance(dataset, IterableDataset) else (dataset[i] for i in range(len(dataset)))
        began, held = time.perf_counter(), 0
        self._samples: list[Any] = []
        for sample in islice(stream, most):
            self._samples.append(sample)
            held += sum(tensor.nbytes for tensor in list_tensors(sample))
            if time.perf_counter() - began > _BATCH_SECONDS or held > _MOST_SAMPLE_BYTES:
                break

    def make(self, size: int) -> Any:
        """Return a batch on the host."""
        return self._collate(list(islice(cycle(self._samples), size)))
