"""Start a loader whose settings were changed, and draw what it would have drawn without the change, in the same order.

                    iter(loader)                              first next()
    no workers      sampler begins, one number for the loader  sampler draws the order
    workers         sampler begins, one number, sampler
                    begins once more, the order                -
    kept workers    sampler begins, the order                  -

Whatever a script draws between the two, and everything it draws later, depends on it: the order of the next epoch, of
another loader beside this one, dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

PlainIter = Callable[[DataLoader[Any]], Any]

_MOST_HELD, _MOST_PARTS = 2000, 100
"""Values of a data set, and of one container in it, that are looked at: there are data sets of a million."""

_CLOSED = (str, bytes, int, float, complex, torch.Tensor, torch.Generator, np.ndarray, type, ModuleType, FunctionType)
"""What is one value: changed within, or not at all."""

_ABSENT = object()


@dataclass
class OwnSettings:
    """How a script itself set a loader up.

    Attributes:
        num_workers: its workers.
        persistent_workers: it keeps them from epoch to epoch.
        epochs: how often it was iterated.
        held: what its data set and its collate function held when workers were started last.
    """

    num_workers: int
    persistent_workers: bool
    epochs: int = 0
    held: tuple[Any, ...] = ()


def start_changed(loader: DataLoader[Any], own: OwnSettings, plain_iter: PlainIter) -> Any:
    """Return an iterator over a loader that draws from every generator what it would with the script's settings.

    Args:
        loader: with its settings changed.
        own: what they were.
        plain_iter: PyTorch's `DataLoader.__iter__`.
    """
    own.epochs += 1
    if loader.persistent_workers and not own.persistent_workers:
        _renew_workers(loader, own)
    sampler = iter(loader._index_sampler)
    number = own.epochs
    if own.epochs == 1 or not (own.persistent_workers and own.num_workers > 0):
        number = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        if own.num_workers > 0:
            sampler = iter(loader._index_sampler)  # one that draws when it begins has drawn twice

    def begin() -> Any:
        with _given(loader, sampler, number):
            iterator = plain_iter(loader)
        iterator._index_sampler = loader._index_sampler
        return iterator

    if own.num_workers == 0:
        return LateIterator(loader, begin) if loader.num_workers > 0 else begin()
    iterator = begin()
    if loader.num_workers == 0:
        iterator._sampler_iter = chain(list(_first(iterator._sampler_iter)), iterator._sampler_iter)
    return iterator


def _renew_workers(loader: DataLoader[Any], own: OwnSettings) -> None:
    """Let kept workers go where the data set has been given something else: they hold a copy of what it was.

    A script that draws new negatives for each epoch, or sets its epoch's number, counts on workers that start anew.
    What is changed within an array, or deep within something large, is not seen.
    """
    held = _list_held(loader)
    if len(held) != len(own.held) or any(now is not before for now, before in zip(held, own.held, strict=True)):
        loader._iterator = None
    own.held = held


def _list_held(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what a loader's workers are given a copy of, the outermost first: values of attributes and containers."""
    found: list[Any] = [loader.dataset, loader.collate_fn]
    seen: set[int] = set()
    for one in found:  # which grows
        if len(found) > _MOST_HELD:
            break
        if id(one) not in seen and not isinstance(one, _CLOSED):
            seen.add(id(one))
            found += _open(one)
    return tuple(found[:_MOST_HELD])


def _open(one: Any) -> list[Any]:
    if isinstance(one, MethodType):
        return [one.__self__]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, Mapping):
        return list(one.values()) if type(one) is dict and len(one) <= _MOST_PARTS else []
    if isinstance(one, list | tuple):
        return list(one) if len(one) <= _MOST_PARTS else []
    slots = [name for kind in type(one).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    named = [value for name in slots if (value := getattr(one, name, _ABSENT)) is not _ABSENT]
    return [*getattr(one, "__dict__", {}).values(), *named]


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


class LateIterator:
    """An iterator whose workers start at the first batch."""

    def __init__(self, loader: DataLoader[Any], begin: Callable[[], Any]) -> None:
        self._loader, self._begin = loader, begin
        self._iterator: Any = None

    def __iter__(self) -> LateIterator:
        return self

    def __next__(self) -> Any:
        return next(self._started())

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._started(), name)

    def _started(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        return self._iterator


class _Given:
    """A sampler whose iteration has begun already."""

    def __init__(self, iterator: Iterator[Any], own: Any) -> None:
        self._iterator, self._own = iterator, own

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __len__(self) -> int:
        return len(self._own)


@contextmanager
def _given(loader: DataLoader[Any], sampler: Iterator[Any], number: int) -> Iterator[None]:
    """Let an iterator take up a sampler's iteration, and draw its own number from a generator of no importance."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own_sampler, own_generator = getattr(loader, name), loader.generator
    given = _Given(sampler, own_sampler)
    kept = getattr(loader, "_iterator", None)
    object.__setattr__(loader, name, given)
    loader.generator = torch.Generator().manual_seed(number)
    if kept is not None:
        kept._index_sampler = given
    try:
        yield
    finally:
        object.__setattr__(loader, name, own_sampler)
        loader.generator = own_generator


def _first(iterator: Iterator[Any]) -> Iterator[Any]:
    for item in iterator:
        yield item
        return
