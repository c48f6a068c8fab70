"""The micro batches of one optimizer step after another, at a position that can be saved and returned to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from autotune.engine.dataloader import EpochBatchSampler, count_samples
from autotune.errors import TargetError

_LOOK_SECONDS = 5.0  # PyTorch's own interval between two looks at its workers
_TIMED_OUT = "DataLoader timed out after"
_END = object()


@dataclass(frozen=True)
class Window:
    """The micro batches of one optimizer step.

    Attributes:
        batches: as the loader collated them, on the host.
        counts: true samples in each.
        ends_epoch: they are the last of their epoch.
        elsewhere: samples of the same step that other processes take.
    """

    batches: list[Any]
    counts: list[int]
    ends_epoch: bool
    elsewhere: int = 0

    @property
    def samples(self) -> int:
        """Of the whole step."""
        return sum(self.counts) + self.elsewhere


class Windows:
    """The micro batches of one optimizer step after another, epoch after epoch.

    Attributes:
        epoch: the epoch of the window to come.
        batches_done: micro batches of that epoch handed out so far.
        sampler: of the loader; None for an iterable dataset.
        loader: they come from.
        accumulation: micro batches of an effective batch.
    """

    def __init__(self, loader: DataLoader[Any], sampler: EpochBatchSampler | None, accumulation: int) -> None:
        self.epoch = 0
        self.batches_done = 0
        self.loader = loader
        self.sampler = sampler
        self.accumulation = accumulation
        self._iterator: Iterator[Any] | None = None
        self._held: list[Any] = []
        self._is_counted: bool | None = None
        self._patience_seconds = 0.0

    def limit_waiting(self, seconds: float) -> None:
        """Wait no longer than this for a loader's worker; one that has died is found within seconds either way."""
        if self.loader.num_workers:
            self._patience_seconds = seconds
            self.loader.timeout = min(_LOOK_SECONDS, seconds)

    def move_to(self, *, epoch: int, batches_done: int) -> None:
        """Continue at a position inside an epoch."""
        self.epoch, self.batches_done = epoch, batches_done
        self._iterator, self._held = None, []

    def next_window(self) -> Window:
        """Return the micro batches of the next optimizer step.

        Raises:
            TargetError: the dataset is empty.
        """
        if self._iterator is None:
            self._iterator = self._open_epoch()
        window = [*self._held, *self._take(self.accumulation - len(self._held))]
        if not window:
            raise TargetError("the training set is empty", hint="train_dataset() must hold at least one sample")
        counts = [self._count(batch, self.batches_done + i) for i, batch in enumerate(window)]
        elsewhere = 0 if self.sampler is None else self.sampler.count_elsewhere(self.batches_done, sum(counts))
        self.batches_done += len(window)
        # One batch of look-ahead tells whether the epoch is over, so that a new one opens with its own window.
        self._held = self._take(1) if len(window) == self.accumulation else []
        ends_epoch = not self._held
        if ends_epoch:
            self.epoch, self.batches_done, self._iterator = self.epoch + 1, 0, None
        return Window(batches=window, counts=counts, ends_epoch=ends_epoch, elsewhere=elsewhere)

    def peek(self) -> Any | None:
        """Return the first micro batch of the next window without handing it out; None at the end of an epoch."""
        return self._held[0] if self._held else None

    def _open_epoch(self) -> Iterator[Any]:
        if self.sampler is None:
            iterator = iter(self.loader)
            for _ in range(self.batches_done):
                next(iterator, None)
            return iterator
        self.sampler.epoch, self.sampler.start = self.epoch, self.batches_done
        return iter(self.loader)

    def _take(self, count: int) -> list[Any]:
        return list(islice(iter(self._fetch, _END), count))

    def _fetch(self) -> Any:
        """Return the next batch, or `_END`.

        The loader's own timeout would also be the time it takes to find that a worker has died, so it is kept short,
        and waited for again: a loader that has timed out can be asked once more.
        """
        assert self._iterator is not None
        began = time.monotonic()
        while True:
            try:
                return next(self._iterator, _END)
            except RuntimeError as error:
                if not self._patience_seconds or _TIMED_OUT not in str(error):
                    raise
                waited = time.monotonic() - began
                if waited >= self._patience_seconds:
                    raise RuntimeError(f"{_TIMED_OUT} {waited:.0f} seconds: a worker hangs") from None

    def _count(self, batch: Any, position: int) -> int:
        return self._count_unsampled(batch) if self.sampler is None else self.sampler.batch_length(position)

    def _count_unsampled(self, batch: Any) -> int:
        """Return the length of a batch's first tensor, or the loader's batch size if its first batch has another one.

        An iterable dataset has no sampler to ask.
        """
        try:
            counted = count_samples(batch)
        except ValueError:
            counted = 0
        size = self.loader.batch_size
        if size is None:
            return counted or 1
        if self._is_counted is None:
            self._is_counted = counted == size
        return counted if self._is_counted and counted else size


class GivenWindows(Windows):
    """Windows made beforehand, each once."""

    def __init__(self, windows: Iterable[Window]) -> None:
        self.epoch = 0
        self.batches_done = 0
        self._windows = iter(windows)
        self._ahead: Window | None = None

    def next_window(self) -> Window:
        """Return the next window."""
        window, self._ahead = self._ahead, None
        return next(self._windows) if window is None else window

    def peek(self) -> Any | None:
        """Return the first micro batch of the next window without handing it out; None after the last one."""
        if self._ahead is None:
            self._ahead = next(self._windows, None)
        return None if self._ahead is None else self._ahead.batches[0]


class ResidentWindows(Windows):
    """The same window again and again, already on the device: a training without its loader."""

    def __init__(self, window: Window, placed: list[Any]) -> None:
        self.epoch = 0
        self.batches_done = 0
        self._window = Window(batches=placed, counts=window.counts, ends_epoch=False)

    def next_window(self) -> Window:
        """Return the window."""
        return self._window

    def peek(self) -> Any:
        """Return the first micro batch of the window."""
        return self._window.batches[0]
