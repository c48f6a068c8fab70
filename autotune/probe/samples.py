"""A workload's samples, fetched one by one in this process: what they cost, what they draw from, where they lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from autotune.engine.dataloader import find_random_sources
from autotune.probe.machine.disk import opened_files
from autotune.records.config import TrainConfig
from autotune.records.facts import DataFacts
from autotune.targets.workload import LoadedWorkload

_FETCH_SECONDS = 0.5
_MOST_FETCHES = 64
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
        dataset: Any = loaded.workload.train_dataset()
        iterable = isinstance(dataset, IterableDataset)
        sources = find_random_sources(dataset, loaded.collate)
        seconds, fetched = _time_samples(dataset, baseline.micro_batch_size, collate, iterable=iterable)
    facts = DataFacts(
        sample_count=None if iterable else len(dataset),
        seconds_per_sample=seconds,
        random_sources=sources,
        iterable=iterable,
    )
    return Samples(facts, fetched, list(files))


def _time_samples(
    dataset: Any, batch: int, collate: Callable[[list[Any]], Any], *, iterable: bool
) -> tuple[float, list[Any]]:
    """Return the seconds a sample takes in one process, and the samples fetched for it."""
    stream = iter(dataset) if iterable else (dataset[index] for index in range(len(dataset)))
    began = time.perf_counter()
    samples: list[Any] = []
    for sample in stream:
        samples.append(sample)
        if len(samples) >= max(batch, _MOST_FETCHES) or time.perf_counter() - began > _FETCH_SECONDS:
            break
    if not samples:
        return 0.0, []
    collate(samples[:batch])
    return (time.perf_counter() - began) / len(samples), samples[:_MOST_KEPT]
