"""What runs inside a piece of a training: its floating-point operations, and whether it calls attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from autotune.engine.device import read_generator


@dataclass
class Operations:
    """What was seen.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention.
        attention: scaled_dot_product_attention was called.
        calls: of PyTorch's functions and methods, from Python.
        draws_random: the device's generator has moved, as by dropout; False where no device was named.
    """

    flops: int = 0
    attention: bool = False
    calls: int = 0
    draws_random: bool = False


_OF_WATCHING = ("torch dispatch mode present", "no implementation found for 'torch.ops.higher_order")
"""In errors of what is compiled within a call, or computes by an operator of a higher order, where it is counted."""


@contextmanager
def watched_operations(device: torch.device | None = None) -> Iterator[Operations]:
    """Watch everything inside; complete at its end.

    Args:
        device: whose random generator is watched; None for none.
    """
    seen = Operations()
    before = None if device is None else read_generator(device)
    with _AttentionWatch() as watch, FlopCounterMode(display=False, custom_mapping=_SPARSE_AWARE) as counter:
        yield seen
    seen.flops, seen.attention, seen.calls = counter.get_total_flops(), watch.seen, watch.calls
    seen.draws_random = device is not None and before is not None and not torch.equal(before, read_generator(device))


class _AttentionWatch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.calls = 0

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.seen = self.seen or function is nn.functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def refuses_to_be_watched(error: BaseException) -> bool:
    """Return whether something failed only because it was watched, as FlexAttention does: nothing is known of it."""
    return isinstance(error, RuntimeError | TypeError) and any(words in str(error) for words in _OF_WATCHING)


def _count_mm(left: torch.Tensor, right: torch.Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Return the operations of a matrix product, two for each value of a sparse matrix and each column or row."""
    if left.layout != torch.strided:
        return 2 * left._nnz() * right.shape[1]
    if right.layout != torch.strided:
        return 2 * right._nnz() * left.shape[0]
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _count_addmm(_added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_args: Any, **_kwargs: Any) -> int:
    return _count_mm(left, right)


_SPARSE_AWARE = {torch.ops.aten.mm: _count_mm, torch.ops.aten.addmm: _count_addmm}
for _count in _SPARSE_AWARE.values():
    # How FlopCounterMode hands over the tensors themselves: their shapes do not tell that one is sparse.
    _count._get_raw = True  # type: ignore[attr-defined]
