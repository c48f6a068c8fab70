"""More trainings that meet a fate, beside those of tests/isolation/toy_workloads.py."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from toy_workloads import Points, Toy, hang_for_good, leave_trace

LINE_BYTES = 100 * 2**20
WIDTH = 2**19


class FloodsInOneLine(Toy):
    """Prints a hundred megabytes that no line ends."""

    is_done = False

    def meet_fate(self) -> None:
        if not self.is_done:
            self.is_done = True
            block = memoryview(b"." * 2**20)
            for _ in range(LINE_BYTES // len(block)):
                written = 0
                while written < len(block):
                    written += os.write(1, block[written:])
            print("\nthe last line", flush=True)


class _Locked(Points):
    """Holds a lock in another thread when its workers are forked: they wait for it for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            time.sleep(1000.0)

    def meet_fate(self) -> None:
        leave_trace("reached")
        with self._lock:
            pass


class _Wide(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(index % 7)), torch.zeros(())


class HasWideSamples(Toy):
    """A batch of it is 16 MiB."""

    def train_dataset(self) -> Dataset[Any]:
        return _Wide()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().compute_loss(model, (batch[0][:, :4], batch[1]))


class CannotBeForked(Toy):
    def train_dataset(self) -> Dataset[Any]:
        dataset = _Locked()
        threading.Thread(target=dataset.hold, daemon=True).start()
        return dataset


class StopsItself(Toy):
    def meet_fate(self) -> None:
        leave_trace("reached")
        os.kill(os.getpid(), signal.SIGSTOP)
        hang_for_good()


class ChangesDefaults(Toy):
    """Changes everything that a later training in the same process would feel."""

    def meet_fate(self) -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(random.randrange(2**31))
        np.random.seed(int(time.time()))
        multiprocessing.set_start_method("spawn", force=True)
        os.environ["OMP_NUM_THREADS"] = "7"
        os.chdir("/")
        torch.nn.Linear.forward = lambda self, x: x  # type: ignore[method-assign, assignment]


class NeedsMoreThanThereIs(Toy):
    """Fills the memory until the kernel ends it."""

    def meet_fate(self) -> None:
        kept = []
        while True:
            block = bytearray(64 * 2**20)
            block[::4096] = b"x" * len(block[::4096])
            kept.append(block)


floods_in_one_line = FloodsInOneLine()
cannot_be_forked = CannotBeForked()
stops_itself = StopsItself()
changes_defaults = ChangesDefaults()
needs_more_than_there_is = NeedsMoreThanThereIs()
has_wide_samples = HasWideSamples()
