"""A look aside in the middle of a training that leaves no trace in it: it ends as one in which nobody looked.

    generators, gradients, buffers, attributes noted ── anything is computed ── all of them put back

What the user's code keeps elsewhere, in a global or a closure, is out of reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autotune.drift.record.object_state import Restore, snapshot_objects
from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.device import read_device_generator, restore_device_generator


@contextmanager
def side_computation(
    model: nn.Module, parameters: Iterable[Tensor], owner: object, device: torch.device
) -> Iterator[Restore]:
    """Compute something beside a training: in the end everything that its next step depends on is as it was.

    Put back are the random generators, the gradients, and whatever the model's modules, the owner and its plain helper
    objects keep in attributes: buffers, flags, counters, tensors, short lists and dictionaries, random generators.
    Gradients are None inside.

    Args:
        model: of the training.
        parameters: what it trains; some may not be the model's.
        owner: the user's object that computes the loss.
        device: where the model is.

    Yields:
        What puts everything but the gradients back at once, so that a second computation starts as the first one did.
    """
    leaves = {id(leaf): leaf for leaf in (*model.parameters(), *parameters)}
    gradients = [(leaf, leaf.grad) for leaf in leaves.values()]
    noted = [snapshot_generators(device), *snapshot_objects(model, owner, leaves)]

    def restore() -> None:
        for one in noted:
            one()

    try:
        for leaf in leaves.values():
            leaf.grad = None
        yield restore
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        restore()


def snapshot_generators(device: torch.device) -> Restore:
    """Return what puts the random generators of the CPU and of a device back to where they are now."""
    states = read_generators()
    device_state = read_device_generator(device)

    def restore() -> None:
        restore_generators(states)
        restore_device_generator(device_state, device)

    return restore
