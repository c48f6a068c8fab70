"""Models whose `forward` a script calls by itself, past the call that the hooks hang on: `model.forward(x)`.

What such a model calls looks as if the script called its parts one by one. So the model is looked for among the
functions that are running, and from the next step on its `forward` is a call of it: the same, for no hook hung on it.
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

_at_work: list[ForwardCalls] = []


class ForwardCalls:
    """Makes calls of what was seen to be called by its `forward`.

    Args:
        is_followed: returns whether a call of a module that begins now is one that the hooks have to see.
    """

    def __init__(self, is_followed: Callable[[nn.Module], bool]) -> None:
        self._is_followed = is_followed
        self._found, self._models = WeakSet[nn.Module](), WeakSet[nn.Module]()
        self._classes: dict[type[nn.Module], Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Leave the classes as they were at the end."""
        _at_work.append(self)
        try:
            yield
        finally:
            _at_work.remove(self)
            for kind, own in self._classes.items():
                if own is None:
                    del kind.forward
                else:
                    kind.forward = own
            self._classes.clear()

    def find_caller(self, part: nn.Module) -> bool:
        """Return whether a part is called by a running `forward` of a model, which is followed from the next step on.

        Not of one that is followed already: its `forward` was got hold of before, or is what trains it.
        """
        owner = _find_owner(part, sys._getframe(1))
        if owner is None or owner in self._models:
            return False
        self._found.add(owner)
        return True

    def end_step(self) -> None:
        """Follow what was found from now on: in the midst of a step one half of it would have other settings."""
        for owner in self._found:
            self._models.add(owner)
            if type(owner) not in self._classes:
                self._replace(type(owner))
        self._found.clear()

    def is_call(self, module: nn.Module) -> bool:
        """Return whether `forward` of a module, which is called now, is to be a call of it."""
        return module in self._models and self._is_followed(module)

    def _replace(self, kind: type[nn.Module]) -> None:
        plain = kind.forward
        self._classes[kind] = vars(kind).get("forward")

        @wraps(plain)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run_forward(plain, module, args, kwargs)

        kind.forward = forward


def run_forward(plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's `forward`, by a call of the module where that is followed.

    A class that is pickled by its code takes this function along by its name, and none of the hooks.
    """
    if torch.compiler.is_compiling() or not any(one.is_call(module) for one in _at_work):
        return plain(module, *args, **kwargs)
    return module(*args, **kwargs)


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
    if not isinstance(module, nn.Module):
        return None
    return module if _code_of(getattr(type(module), "forward", None)) is code else None


def _code_of(function: Any) -> CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None)


def _is_as_if_called(module: nn.Module) -> bool:
    """Return whether a call of a module that has something to train does what its `forward` does, and no more."""
    kind = type(module)
    if issubclass(kind, nn.DataParallel) or kind.__call__ is not nn.Module.__call__ or "forward" in vars(module):
        return False
    is_bare = not any(getattr(module, name) for name in _HOOKS)
    return is_bare and any(parameter.requires_grad for parameter in module.parameters())
