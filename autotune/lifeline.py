"""Ties the life of a process to the one that started it (Linux; elsewhere these functions do nothing)."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent: process that started this one, as it knows itself: asked here, a parent that has died would not show.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent went before the call, so the kernel's promise came too late.
        os._exit(1)


def adopt_orphans(wanted: bool = True) -> bool:
    """Become, or stop being, the new parent of descendants whose own parent dies, so that none escapes a sweep.

    Returns:
        Whether this process was so before.
    """
    before = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


def _prctl(option: int, value: Any) -> None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        return
