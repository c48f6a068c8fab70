"""A look aside in the middle of a training that leaves no trace in it: it ends as one in which nobody looked.

    generators, gradients, buffers, attributes noted ── anything is computed ── all of them put back

What the user's code keeps elsewhere, in a global or a closure, is out of reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotune.engine.dataloader import read_generators, restore_generators

_LONGEST = 10_000
"""Entries of a list or the like that is put back; longer ones are data rather than state."""
_LARGEST = 2**25
"""The same in elements of a tensor."""

PutBack = Callable[[], None]


@contextmanager
def aside(model: nn.Module, parameters: Iterable[Tensor], owner: object, device: torch.device) -> Iterator[None]:
    """Compute something beside a training: in the end everything that its next step depends on is as it was.

    Put back are the random generators, the gradients, and whatever the model's modules and the owner keep in
    attributes: buffers, flags, counters, tensors, short lists and dictionaries. Gradients are None inside.

    Args:
        model: of the training.
        parameters: what it trains; some may not be the model's.
        owner: the user's object that computes the loss.
        device: where the model is.
    """
    leaves = {id(leaf): leaf for leaf in (*model.parameters(), *parameters)}
    gradients = [(leaf, leaf.grad) for leaf in leaves.values()]
    noted = [note_generators(device), *_note_owners(model, owner, leaves)]
    try:
        for leaf in leaves.values():
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        for put_back in noted:
            put_back()


def note_generators(device: torch.device) -> PutBack:
    """Return what puts the random generators of the CPU and of a device back to where they are now."""
    states = read_generators()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        restore_generators(states)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)

    return put_back


def _note_owners(model: nn.Module, owner: object, leaves: Collection[int]) -> Iterator[PutBack]:
    owners = {id(owner): owner, **{id(module): module for module in model.modules()}}
    for value in getattr(owner, "__dict__", {}).values():
        if isinstance(value, nn.Module):
            owners |= {id(module): module for module in value.modules()}
    for one in owners.values():
        attributes: dict[str, Any] = getattr(one, "__dict__", {})
        yield _note_entries(attributes)
        for value in attributes.values():
            yield from _note_contents(value, leaves)


def _note_contents(value: Any, leaves: Collection[int]) -> Iterator[PutBack]:
    """Yield what puts the contents of a tensor or of a container back; nothing for anything else."""
    if isinstance(value, Tensor):
        if id(value) not in leaves and _can_be_noted(value):
            yield _note_tensor(value)
    elif isinstance(value, dict | list | set | deque) and len(value) <= _LONGEST:
        yield _note_entries(value) if isinstance(value, dict) else _note_items(value)
        for entry in value.values() if isinstance(value, dict) else value:
            if isinstance(entry, Tensor):
                yield from _note_contents(entry, leaves)


def _can_be_noted(tensor: Tensor) -> bool:
    # Elements that share memory, as an expanded tensor's, can be neither changed nor written back one by one.
    shares = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.is_leaf and not shares and not tensor.is_inference() and tensor.numel() <= _LARGEST


def _note_tensor(tensor: Tensor) -> PutBack:
    kept = tensor.detach().clone()

    def put_back() -> None:
        # Always: neither `.data` nor every kernel that updates a running mean counts up the tensor's version.
        with torch.no_grad():
            tensor.copy_(kept)

    return put_back


def _note_entries(entries: dict[Any, Any]) -> PutBack:
    kept = dict(entries)

    def put_back() -> None:
        for name in [name for name in entries if name not in kept]:
            del entries[name]
        for name, value in kept.items():
            if name not in entries or entries[name] is not value:
                entries[name] = value

    return put_back


def _note_items(items: list[Any] | set[Any] | deque[Any]) -> PutBack:
    kept = list(items)

    def put_back() -> None:
        if len(items) != len(kept) or any(now is not then for now, then in zip(items, kept, strict=True)):
            items.clear()
            items.update(kept) if isinstance(items, set) else items.extend(kept)

    return put_back
