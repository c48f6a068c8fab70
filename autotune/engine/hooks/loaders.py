"""Hooks on DataLoader: which loaders a script trains from, what they cost, and the loader knobs set on those alone."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune.engine.dataloader import count_samples, moved_generators, read_batch_size, read_generators
from autotune.engine.hooks.iteration import OwnSettings, PlainIter, start_changed
from autotune.engine.hooks.models import look_for_no_models
from autotune.engine.hooks.steps import PhaseTimer, StepWatch
from autotune.lifeline import die_with_parent
from autotune.records.config import TrainConfig

LOADER_KNOBS = frozenset({"num_workers", "prefetch_factor", "persistent_workers", "pin_memory"})

_WATCHED_DRAWS = 16


def describe_loader(loader: DataLoader[Any]) -> str:
    """Return what tells a script's loaders apart and stays the same from run to run, whatever the batch size."""
    dataset, length = loader.dataset, _read_length(loader)
    samplers = (getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler, loader.sampler)
    sampler = next(one for one in samplers if one is not None)  # a sampler need not have a length, nor be true
    return f"{type(dataset).__qualname__}[{'?' if length is None else length}] by {type(sampler).__qualname__}"


def _read_length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except Exception:  # a length that cannot be told is no reason to end somebody's training
        return None


def _read_sizes(loader: DataLoader[Any]) -> tuple[int, ...]:
    """Return the samples of a full batch, and of one that holds the whole dataset; none where only batches can tell."""
    has_plain_batches = loader.batch_size is not None or isinstance(loader.batch_sampler, BatchSampler)
    size, length = read_batch_size(loader) if has_plain_batches else None, _read_length(loader)
    return () if size is None else (size,) if length is None else (size, min(size, length))


def apply_loader_knobs(loader: DataLoader[Any], config: TrainConfig, changed: frozenset[str]) -> None:
    """Set the changed loader knobs on a loader before it starts to iterate; its order and random numbers stay."""
    if "pin_memory" in changed:
        loader.pin_memory = config.pin_memory
    if not changed & LOADER_KNOBS or isinstance(loader.dataset, IterableDataset):
        return
    workers = config.num_workers if "num_workers" in changed else loader.num_workers
    prefetch = config.prefetch_factor if changed & {"num_workers", "prefetch_factor"} else loader.prefetch_factor
    persistent = config.persistent_workers if "persistent_workers" in changed else loader.persistent_workers
    # DataLoader refuses some of these once it is built, because it would not check them again.
    for name, value in (
        ("num_workers", workers),
        ("prefetch_factor", prefetch if workers else None),
        ("persistent_workers", persistent and workers > 0),
        ("timeout", loader.timeout if workers else 0),
    ):
        object.__setattr__(loader, name, value)
    if "num_workers" in changed:  # chosen by measurement, while PyTorch would warn of more than one a CPU
        object.__setattr__(loader, "check_worker_number_rationality", _accept)


def _accept() -> None:
    """Say nothing about the number of workers."""


class LoaderHooks:
    """Follows every loader of a script.

    Attributes:
        random_sources: generators of the training process that moved while a batch was fetched.
        on_batch: called with the key of a loader and each of its batches; None to look at none.
    """

    def __init__(
        self,
        watch: StepWatch,
        timer: PhaseTimer,
        prepare: Callable[[DataLoader[Any]], None],
        turn: Callable[[bool], None],
        *,
        inspects: bool = False,
    ) -> None:
        """Follow loaders.

        Args:
            watch: told what they yield.
            timer: told when they are waited for.
            prepare: sets a training loader's knobs before it iterates.
            turn: called with True when a training loader starts an epoch, with False when another one does.
            inspects: keep loaders alive, to look at them when the script has ended.
        """
        self.random_sources: set[str] = set()
        self.on_batch: Callable[[str, Any], None] | None = None
        self._watch, self._timer, self._prepare, self._turn = watch, timer, prepare, turn
        self._keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._loaders: dict[str, weakref.ref[DataLoader[Any]]] = {}
        self._inspected: dict[str, DataLoader[Any]] | None = {} if inspects else None
        self._sizes: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._started: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._counts: dict[str, bool] = {}
        self._own: weakref.WeakKeyDictionary[DataLoader[Any], OwnSettings] = weakref.WeakKeyDictionary()
        self._left_to_watch = _WATCHED_DRAWS
        self._is_starting = False

    @property
    def training_loader(self) -> DataLoader[Any] | None:
        """The loader that the script trains from, the first by name of several; None without one."""
        key = self._first_key
        return None if key is None else self._loaders[key]()

    @property
    def training_loaders(self) -> list[DataLoader[Any]]:
        """Every loader that the script trains from, as far as it is still there."""
        keys = sorted(self._watch.training_loaders & self._loaders.keys())
        return [loader for loader in (self._loaders[key]() for key in keys) if loader is not None]

    @property
    def restarted_at(self) -> float | None:
        """When the script last began to train on that loader again, by `perf_counter`; None before."""
        return self._watch.restarted_at.get(self._first_key or "")

    @property
    def _first_key(self) -> str | None:
        return min(self._watch.training_loaders & self._loaders.keys(), default=None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook every loader of the process."""
        plain_iter, plain_get, plain_next = DataLoader.__iter__, DataLoader._get_iterator, _BaseDataLoaderIter.__next__
        hooks = self

        def hooked_iter(loader: DataLoader[Any]) -> Any:
            return hooks._start(loader, plain_iter)

        def hooked_get(loader: DataLoader[Any]) -> Any:
            # A loader that is iterated without PyTorch's `__iter__` keeps one iterator for every epoch, as YOLO's does.
            return plain_get(loader) if hooks._is_starting else hooks._start(loader, plain_get)

        def hooked_next(iterator: Any) -> Any:
            return hooks._fetch(iterator, plain_next)

        DataLoader.__iter__ = hooked_iter  # type: ignore[method-assign]
        DataLoader._get_iterator = hooked_get  # type: ignore[method-assign, assignment]
        _BaseDataLoaderIter.__next__ = hooked_next  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DataLoader.__iter__ = plain_iter  # type: ignore[method-assign]
            DataLoader._get_iterator = plain_get  # type: ignore[method-assign]
            _BaseDataLoaderIter.__next__ = plain_next  # type: ignore[method-assign]

    def _start(self, loader: DataLoader[Any], plain_iter: PlainIter) -> Any:
        key = describe_loader(loader)
        own = self._own.setdefault(loader, OwnSettings(loader.num_workers, loader.persistent_workers))
        known = self._watch.training_loaders
        if key in known:
            self._watch.loader_restarted(key, time.perf_counter())
            self._prepare(loader)
            self._turn(True)
        elif known:
            self._turn(False)
        _tie_workers(loader)
        # Another one like that which is trained from may evaluate on the same data.
        if key not in self._watch.stepped_loaders or self._loaders[key]() is None:
            self._loaders[key] = weakref.ref(loader)
            if self._inspected is not None:
                self._inspected[key] = loader

        def follow(loader: DataLoader[Any]) -> Any:
            return self._follow(loader, key, plain_iter)

        is_changed = (own.num_workers, own.persistent_workers) != (loader.num_workers, loader.persistent_workers)
        return start_changed(loader, own, follow) if is_changed else follow(loader)

    def _follow(self, loader: DataLoader[Any], key: str, plain_iter: PlainIter) -> Any:
        self._timer.enter("data")
        self._is_starting = True
        try:
            iterator = plain_iter(loader)
        finally:
            self._is_starting = False
            self._timer.leave()
        self._keys[iterator] = key
        self._sizes[iterator] = _read_sizes(loader)
        self._started.pop(iterator, None)
        return iterator

    def _fetch(self, iterator: Any, plain_next: Callable[[Any], Any]) -> Any:
        key = self._keys.get(iterator)
        # The first batch may draw the order of the epoch; what draws after it is the samples or their order.
        before = read_generators() if self._left_to_watch > 0 and iterator in self._started else None
        self._timer.enter("data")
        try:
            batch = plain_next(iterator)
        finally:
            self._timer.leave()
        if key is None:  # of a loader that is none of PyTorch's, as fastai's
            return batch
        self._started[iterator] = True
        if before is not None and key in self._watch.training_loaders:
            self._left_to_watch -= 1
            self.random_sources.update(moved_generators(before, read_generators()))
        if self.on_batch is not None:
            self.on_batch(key, batch)
        hear = self._watch.loader_ran_ahead if self._timer.is_beside else self._watch.loader_yielded
        hear(key, self._count_samples(key, batch, self._sizes.get(iterator, ())))
        return batch

    def _count_samples(self, key: str, batch: Any, sizes: tuple[int, ...]) -> int:
        """Return the first dimension of a batch, or the loader's batch size if its first batch has another one."""
        counted = _count(batch)
        if not sizes:
            return counted or 1
        if self._counts.setdefault(key, counted in sizes) and counted is not None:
            return counted
        return sizes[0]


class _WorkerStart:
    """What a worker does first: it ties its life to the training's, and drops its hooks; then what the script wants.

    Args:
        training: the process that starts it; None for a fork server, which ends with the training itself.
        own: the script's own function.
    """

    def __init__(self, training: int | None, own: Callable[[int], None] | None) -> None:
        self.training, self.own = training, own

    def __call__(self, worker: int) -> None:
        die_with_parent(os.getppid() if self.training is None else self.training)
        look_for_no_models()
        if self.own is not None:
            self.own(worker)


def _tie_workers(loader: DataLoader[Any]) -> None:
    if threading.current_thread() is not threading.main_thread() or loader.num_workers == 0:
        return  # the kernel ties a process to the thread that started it, and this one may end before its workers do
    start = loader.worker_init_fn
    if isinstance(start, _WorkerStart) and start.training in (None, os.getpid()):
        return
    own = start.own if isinstance(start, _WorkerStart) else start  # of another process: the script has forked since
    context = loader.multiprocessing_context or multiprocessing.get_context()
    training = None if context.get_start_method() == "forkserver" else os.getpid()
    object.__setattr__(loader, "worker_init_fn", _WorkerStart(training, own))


def _count(batch: Any) -> int | None:
    try:
        return count_samples(batch)
    except ValueError:
        return None
