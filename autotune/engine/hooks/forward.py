"""Models whose `forward` a script calls by itself, past the call that the hooks hang on: `model.forward(x)`.

What such a model calls looks as if the script called its parts one by one. So the model is looked for among the
functions that are running, and its `forward` is a call of it from then on: the same, as long as no hook hangs on it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""What a call runs beside `forward`."""


class ForwardCalls:
    """Makes calls of what was seen to be called by its `forward`.

    Args:
        is_followed: returns whether a call of a module that begins now is one that the hooks have to see.
    """

    def __init__(self, is_followed: Callable[[nn.Module], bool]) -> None:
        self._is_followed = is_followed
        self._models = WeakSet[nn.Module]()
        self._classes: dict[type[nn.Module], Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Leave the classes as they were at the end."""
        try:
            yield
        finally:
            for kind, own in self._classes.items():
                if own is None:
                    del kind.forward
                else:
                    kind.forward = own
            self._classes.clear()

    def follow_caller(self, part: nn.Module) -> bool:
        """Follow the model whose `forward` is running while a part of it is called, where there is one.

        Returns:
            Whether there is.
        """
        owner = _find_owner(part, sys._getframe(1))
        if owner is None:
            return False
        self._models.add(owner)
        if type(owner) not in self._classes:
            self._replace(type(owner))
        return True

    def _replace(self, kind: type[nn.Module]) -> None:
        plain, calls = kind.forward, self
        self._classes[kind] = vars(kind).get("forward")

        @wraps(plain)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or module not in calls._models or not calls._is_followed(module):
                return plain(module, *args, **kwargs)
            return module(*args, **kwargs)

        kind.forward = forward


def _find_owner(part: nn.Module, frame: FrameType | None) -> nn.Module | None:
    """Return the outermost model whose `forward` is running; None where none is."""
    owner = None
    while frame is not None:
        found = _read_module(frame)
        if found is not None and found is not part and _is_as_if_called(found):
            owner = found
        frame = frame.f_back
    return owner


def _read_module(frame: FrameType) -> nn.Module | None:
    """Return the module whose `forward` runs in a frame."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    return (
        module if isinstance(module, nn.Module) and _code_of(getattr(type(module), "forward", None)) is code else None
    )


def _code_of(function: Any) -> CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None)


def _is_as_if_called(module: nn.Module) -> bool:
    """Return whether a call of a module that has something to train does what its `forward` does, and no more."""
    if isinstance(module, nn.DataParallel) or any(getattr(module, name) for name in _HOOKS):
        return False
    return any(parameter.requires_grad for parameter in module.parameters())
