"""Where a training asks for a value, so that a GPU would be waited for: file and line of the user's own code."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.engine.device import on_accelerator

_SYNCHRONIZING = frozenset({"_local_scalar_dense", "nonzero", "unique_dim", "_unique2"})

_NUMPY = str(Path(np.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parents[2]) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_LOADERS = os.path.join(_TORCH, "utils", "data", "")

_MOST_PLACES = 3


class SyncFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation while it is entered, and notes the lines that ask for a value.

    The optimizer's own questions and a loader's are left out, as in the profile. An operation takes some microseconds
    longer, so no step that is timed may run under it, and none that is compiled.

    Args:
        device: where the training is. On a GPU a value of the host's own is none to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_gpu = on_accelerator(device)
        self._counts: Counter[str] = Counter()

    @property
    def places(self) -> tuple[str, ...]:
        """The lines that asked most often, as `file:line`, the first of them first."""
        return tuple(place for place, _ in self._counts.most_common(_MOST_PLACES))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is."""
        asks = func.overloadpacket.__name__ in _SYNCHRONIZING
        asks = asks and not (self._on_gpu and args[0].device.type == "cpu")
        if asks or _copies_to_host(func, args, kwargs or {}):
            place = _find_line(sys._getframe(1))
            if place is not None:
                self._counts[place] += 1
        return func(*args, **(kwargs or {}))


def _copies_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether values of a device are copied to the host, which waits: `.cpu()`, `.tolist()`."""
    name = func.overloadpacket.__name__
    if name == "_to_copy":
        to, waits = kwargs.get("device"), not kwargs.get("non_blocking", False)
        return waits and to is not None and to.type == "cpu" and on_accelerator(args[0].device)
    if name != "copy_":
        return False
    waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    return waits and not on_accelerator(args[0].device) and on_accelerator(args[1].device)


def _find_line(frame: FrameType | None) -> str | None:
    """Return the innermost line of neither PyTorch, NumPy nor ours; None where there is none, or it is left out."""
    found: str | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LOADERS) or (found is None and file.startswith(_OPTIMIZERS)):
            return None
        if found is None and not file.startswith(("<", _TORCH, _NUMPY, _OWN)):
            found = f"{_shorten(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def _shorten(file: str) -> str:
    """Return a file as seen from the working folder; its name and folder where it is elsewhere."""
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else os.path.join(path.parent.name, path.name)
