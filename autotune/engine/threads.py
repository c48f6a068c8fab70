"""Knob `num_threads`: intra-op CPU threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autotune.records.config import TrainConfig


@contextmanager
def intra_op_threads(config: TrainConfig) -> Iterator[None]:
    """Use the config's number of threads; None leaves PyTorch's default."""
    if config.num_threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute on the calling thread alone, without starting a pool of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
