"""A loader worker's death is told by the loader, not by an exception in the middle of a step.

PyTorch's handler of SIGCHLD raises wherever the training happens to be: between two parameters of an optimizer step,
or while a checkpoint is written. Without it the loader finds the death itself, the next time it waits for a batch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def is_lost_worker(error: BaseException | None) -> bool:
    """Return whether an error is a worker's end, found at its pipe before the loader has looked for it.

    What a dataset raises in a worker comes with the worker's own traceback (`torch._utils.ExceptionWrapper`).
    """
    return isinstance(error, ConnectionError | EOFError) and "Original Traceback" not in str(error)


@contextmanager
def deferred_worker_deaths() -> Iterator[Callable[[], None]]:
    """Keep PyTorch's handler away; yields a function to call after batches were fetched, when it may be back.

    Off the main thread, where PyTorch installs no handler either, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGCHLD)
    users = before if callable(before) and not getattr(before, "__module__", "").startswith("torch.") else None

    def handle(number: int, frame: FrameType | None) -> None:
        if users is not None:
            users(number, frame)

    def defer() -> None:
        if signal.getsignal(signal.SIGCHLD) is not handle:
            signal.signal(signal.SIGCHLD, handle)

    defer()
    try:
        yield defer
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
