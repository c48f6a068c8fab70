"""Make two trainings comparable step by step: no dropout, and a model in float64 as a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.engine.dataloader import move_batch

_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Let every dropout pass everything, those in attention and between recurrent layers too.

    The functions are exchanged, not the modules' modes: a model in evaluation mode would also normalise differently.
    """
    with ExitStack() as stack:
        for name in _DROPOUTS:
            _exchange(stack, F, name, _let_pass)
        _exchange(stack, torch, "dropout", _let_pass)
        _exchange(stack, F, "scaled_dot_product_attention", _attend_fully(F.scaled_dot_product_attention))
        for kind in (nn.RNN, nn.LSTM, nn.GRU):
            _exchange(stack, kind, "forward", _without_own_dropout(kind.forward))
        yield


def make_reference(model: nn.Module) -> None:
    """Compute a model in float64, in place; it still takes and returns what it did, so that the loss goes on as it is.

    What its forward makes for itself, like the first state of a recurrent net, is in float64 too, and so are constants
    that its modules keep as plain attributes (TabNet's groups of features).

    Raises:
        ValueError: the model reduces its gradients between processes, by hooks that another type would lose.
        RuntimeError: the device has no float64.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError("a DistributedDataParallel model cannot be computed in another type once it is built")
    model.double()
    _widen_constants(model)
    outside: list[torch.dtype] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        outside.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return move_batch((args, kwargs), widen)  # type: ignore[no-any-return]

    def leave(_module: nn.Module, _args: Any, returned: Any) -> Any:
        torch.set_default_dtype(outside.pop())
        return move_batch(returned, narrow)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


def _widen_constants(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, Tensor) and not value.requires_grad:
                setattr(module, name, widen(value))


def widen(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor as float64, any other as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor


def narrow(tensor: Tensor) -> Tensor:
    """Return a float64 tensor as float32, any other as it is."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _exchange(stack: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


def _let_pass(input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return input


def _attend_fully(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return plain(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attend


def _without_own_dropout(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        own, module.dropout = module.dropout, 0.0
        try:
            return plain(module, *args, **kwargs)
        finally:
            module.dropout = own

    return forward
