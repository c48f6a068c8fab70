"""A loader alone, with no training beside it: how fast it can be, how even, how long an epoch takes to start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autotune.measure.memory import worker_bytes
from autotune.probe.memory.shapes import list_tensors
from autotune.probe.time_shares import OutOfTimeError, time_limit
from autotune.records.facts import DataFacts

_ROUNDS_FOR_A_TAIL = 20
_MOST_BATCHES = 400
_LOOKED_AT = 16
"""Batches whose shapes are noted."""
_GRACE = 4.0
"""A loader that has not given enough after this many times its time is left alone."""


@dataclass(frozen=True)
class LoaderTimes:
    """A loader without a training.

    Attributes:
        epoch_start_seconds: to the first batch of an epoch.
        seconds_per_batch: once every worker is busy; None when the epoch is too short to tell.
        slow_batch_ratio: 95th percentile over median of rounds in which every worker gives one; None with too few.
        batch_bytes: of the tensors in one.
        batch_shapes: different shapes among the first ones.
        worker_bytes: of one worker; None without.
    """

    epoch_start_seconds: float
    seconds_per_batch: float | None
    slow_batch_ratio: float | None
    batch_bytes: int
    batch_shapes: int
    worker_bytes: int | None

    def add_to(self, data: DataFacts, batches_per_step: float) -> DataFacts:
        """Return the facts with these among them.

        Args:
            data: what is known otherwise.
            batches_per_step: micro batches of an optimizer step.
        """
        per_batch = self.seconds_per_batch
        return data.replace(
            batch_bytes=self.batch_bytes,
            batch_shapes=self.batch_shapes,
            loader_seconds_per_step=None if per_batch is None else per_batch * batches_per_step,
            epoch_start_seconds=self.epoch_start_seconds,
            slow_batch_ratio=self.slow_batch_ratio,
            worker_bytes=self.worker_bytes,
        )


def drain_loader(loader: DataLoader[Any], *, budget_seconds: float) -> LoaderTimes | None:
    """Return what a loader does alone; None when it fails or takes too long for a first batch.

    Batches that its workers have ready before anybody asks are not counted.

    Args:
        loader: any; it is iterated anew.
        budget_seconds: to measure in.
    """
    if budget_seconds <= 0:
        return None
    try:
        with time_limit(_GRACE * budget_seconds + 5.0):
            return _drain(loader, budget_seconds)
    except (Exception, OutOfTimeError):  # a dataset may fail in any way; the training itself has shown that it works
        return None


def _drain(loader: DataLoader[Any], budget_seconds: float) -> LoaderTimes | None:
    began = time.perf_counter()
    iterator = iter(loader)
    batch = next(iterator, None)
    if batch is None:
        return None
    epoch_start = time.perf_counter() - began
    held = worker_bytes() if loader.num_workers else None  # workers that are done with a short epoch end
    ahead = loader.num_workers * (loader.prefetch_factor or 0) + 2
    try:
        ahead = min(ahead, len(loader) // 2)
    except TypeError:
        pass  # the length of a stream is not known
    tensors = list_tensors(batch)
    shapes = {_list_shapes(tensors)}
    seconds = _time_batches(iterator, ahead, budget_seconds, shapes)
    return LoaderTimes(
        epoch_start_seconds=epoch_start,
        seconds_per_batch=statistics.fmean(seconds) if seconds else None,
        slow_batch_ratio=_find_tail(seconds, max(1, loader.num_workers)),
        batch_bytes=sum(tensor.nbytes for tensor in tensors),
        batch_shapes=len(shapes),
        worker_bytes=held,
    )


def _list_shapes(tensors: Iterable[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _find_tail(seconds: list[float], workers: int) -> float | None:
    """Return the 95th percentile over the median of rounds in which every worker gives a batch."""
    rounds = [sum(seconds[place : place + workers]) for place in range(0, len(seconds) - workers + 1, workers)]
    if len(rounds) < _ROUNDS_FOR_A_TAIL:
        return None
    median = statistics.median(rounds)
    return statistics.quantiles(rounds, n=20)[-1] / median if median > 0 else None


def _time_batches(
    iterator: Iterator[Any], ahead: int, budget_seconds: float, shapes: set[tuple[torch.Size, ...]]
) -> list[float]:
    """Return the seconds of each batch after the first `ahead`; add the shapes of the first ones."""
    seconds: list[float] = []
    began = last = time.perf_counter()
    for place, batch in enumerate(iterator, start=1):
        now = time.perf_counter()
        if place > ahead:
            seconds.append(now - last)
        if place < _LOOKED_AT:
            shapes.add(_list_shapes(list_tensors(batch)))
            now = time.perf_counter()  # looking at it is none of the next one's time
        last = now
        if now - began > budget_seconds or len(seconds) >= _MOST_BATCHES:
            break
    return seconds
