"""What runs inside a piece of a training: its floating-point operations, and whether it calls attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


@dataclass
class Operations:
    """What was seen.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention.
        attention: scaled_dot_product_attention was called.
        calls: of PyTorch's functions and methods, from Python.
    """

    flops: int = 0
    attention: bool = False
    calls: int = 0


@contextmanager
def watched_operations() -> Iterator[Operations]:
    """Watch everything inside; complete at its end."""
    seen = Operations()
    with _AttentionWatch() as watch, FlopCounterMode(display=False) as counter:
        yield seen
    seen.flops, seen.attention, seen.calls = counter.get_total_flops(), watch.seen, watch.calls


class _AttentionWatch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.calls = 0

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.seen = self.seen or function is nn.functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))
