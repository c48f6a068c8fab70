"""State that a model and the user's object keep in attributes, noted so that it can be put back.

owner, modules ── attributes ──▶ tensors, arrays, containers, generators: noted
                       └── plain objects of the user's own classes ── their attributes, and so on, a few deep
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autotune.targets.source.by_path import is_users

Restore = Callable[[], None]

_LONGEST = 10_000
"""Entries of a list or the like that is put back; longer ones are data rather than state."""
_LARGEST = 2**25
"""The same in elements of a tensor."""
_LARGEST_ARRAY = 2**20
_DEEPEST = 4
"""Objects and containers inside one another."""
_MOST_OBJECTS = 1000

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "autotune"}
"""Packages whose objects are no plain state: loggers, threads, optimizers."""


def snapshot_objects(model: nn.Module, owner: object, leaves: Collection[int]) -> Iterator[Restore]:
    """Yield what puts the state of the owner, of its helper objects and of all modules back to what it is now.

    Args:
        model: of the training.
        owner: the user's object that computes the loss.
        leaves: ids of the tensors that are trained; these are left alone.
    """
    walk = _Walk(leaves)
    yield from walk.snapshot_object(owner, depth=0)
    for module in model.modules():
        yield from walk.snapshot_object(module, depth=0)


class _Walk:
    """Goes through what an object holds, each thing once."""

    def __init__(self, leaves: Collection[int]) -> None:
        self._seen = set(leaves)
        self._objects = 0

    def snapshot_object(self, one: object, *, depth: int) -> Iterator[Restore]:
        if id(one) not in self._seen:
            self._seen.add(id(one))
            attributes: dict[str, Any] = getattr(one, "__dict__", {})
            yield _snapshot_entries(attributes)
            for value in list(attributes.values()):
                yield from self._snapshot(value, depth)

    def _snapshot(self, value: Any, depth: int) -> Iterator[Restore]:
        if value is None or isinstance(value, int | float | str | bytes) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            for module in value.modules():
                yield from self.snapshot_object(module, depth=depth)
        elif isinstance(value, dict | list | set | deque | tuple):
            yield from self._snapshot_container(value, depth)
        elif (restore := _snapshot_leaf(value)) is not None:
            self._seen.add(id(value))
            yield restore
        elif depth < _DEEPEST and self._objects < _MOST_OBJECTS and _is_plain(value):
            self._objects += 1
            yield from self.snapshot_object(value, depth=depth + 1)

    def _snapshot_container(self, value: Any, depth: int) -> Iterator[Restore]:
        if len(value) > _LONGEST:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            yield _snapshot_entries(value)
        elif not isinstance(value, tuple):
            yield _snapshot_items(value)
        if depth < _DEEPEST:
            for entry in list(value.values() if isinstance(value, dict) else value):
                yield from self._snapshot(entry, depth + 1)


def _snapshot_leaf(value: Any) -> Restore | None:
    """Return what puts back something that holds nothing else; None where it is not such a thing."""
    if isinstance(value, Tensor):
        return _snapshot_tensor(value) if _can_be_noted(value) else None
    if isinstance(value, np.ndarray):
        return _snapshot_array(value)
    if isinstance(value, torch.Generator):
        state = value.get_state().clone()
        return lambda: _drop(value.set_state(state))
    if isinstance(value, np.random.Generator):
        bits, found = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", found)
    if isinstance(value, np.random.RandomState):
        kept = value.get_state()
        return lambda: value.set_state(kept)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    return None


def _is_plain(value: Any) -> bool:
    """Return whether an object is one of the user's own classes rather than a class, a function, data or a tool."""
    if isinstance(value, type | Tensor | Dataset | DataLoader | torch.optim.Optimizer):
        return False
    name = type(value).__module__
    is_foreign = name.partition(".")[0] in _FOREIGN and not is_users(name)
    has_state = isinstance(getattr(value, "__dict__", None), dict)
    return has_state and (not is_foreign or isinstance(value, SimpleNamespace))


def _can_be_noted(tensor: Tensor) -> bool:
    # Elements that share memory, as an expanded tensor's, can be neither changed nor written back one by one.
    shares = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.is_leaf and not shares and not tensor.is_inference() and tensor.numel() <= _LARGEST


def _snapshot_tensor(tensor: Tensor) -> Restore:
    kept = tensor.detach().clone()

    def restore() -> None:
        # Always: neither `.data` nor every kernel that updates a running mean counts up the tensor's version.
        with torch.no_grad():
            tensor.copy_(kept)

    return restore


def _snapshot_array(array: Any) -> Restore | None:
    if array.size > _LARGEST_ARRAY or not array.flags.writeable or isinstance(array, np.memmap):
        return None
    kept = array.copy()
    return lambda: np.copyto(array, kept)


def _drop(_: object) -> None:
    """Return nothing."""


def _snapshot_entries(entries: dict[Any, Any]) -> Restore:
    kept = dict(entries)

    def restore() -> None:
        for name in [name for name in entries if name not in kept]:
            del entries[name]
        for name, value in kept.items():
            if name not in entries or entries[name] is not value:
                entries[name] = value

    return restore


def _snapshot_items(items: list[Any] | set[Any] | deque[Any]) -> Restore:
    kept = list(items)

    def restore() -> None:
        if len(items) != len(kept) or any(now is not then for now, then in zip(items, kept, strict=True)):
            items.clear()
            items.update(kept) if isinstance(items, set) else items.extend(kept)

    return restore
