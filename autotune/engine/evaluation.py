"""Evaluation of a training: its averaged weights where it has them, at a batch size of its own, leaving no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.device import read_device_generator, restore_device_generator
from autotune.engine.loop import Training
from autotune.engine.precision import autocast
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload


def evaluate(
    loaded: LoadedWorkload,
    training: Training,
    config: TrainConfig,
    *,
    batch_size: int | None = None,
    inference: bool = False,
) -> dict[str, float]:
    """Return the workload's metrics by name, in the config's precision and without gradients.

    Model and random generators are put back to where they were: a training goes on the same whether it was evaluated
    or not.

    Args:
        loaded: the workload.
        training: whose model is evaluated: the averaged one if the workload builds one.
        config: the settings.
        batch_size: for a workload whose `evaluate` takes one; None for the workload's own choice.
        inference: use inference mode, whose tensors can never be part of a training; else only leave out gradients.

    Raises:
        TargetError: the workload cannot evaluate.
    """
    device = training.device
    mode = torch.inference_mode() if inference else torch.no_grad()

    def call(model: nn.Module) -> dict[str, float]:
        with _evaluating(model, device):
            return loaded.evaluate(model, device, batch_size=batch_size)

    with mode, autocast(config, device):
        return training.call_model(call)


@contextmanager
def _evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    generators = read_generators()
    device_generator = read_device_generator(device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():  # one by one: a part that the workload froze stays in evaluation mode
            module.training = mode
        restore_generators(generators)
        restore_device_generator(device_generator, device)
