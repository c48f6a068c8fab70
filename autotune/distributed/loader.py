"""The share of one rank in the training's order: a function of seed, epoch and rank alone."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.distributed.batches import Part, cut_step
from autotune.engine.dataloader import EpochBatchSampler, Order, SampleKey
from autotune.records.config import TrainConfig


class RankBatchSampler(EpochBatchSampler):
    """Yield one rank's micro batches of one epoch; all ranks together visit what one process would, in its order.

    `start` and positions count the rank's own micro batches.
    """

    def __init__(
        self, sample_count: int, config: TrainConfig, order: Order, *, with_epoch: bool, rank: int, world_size: int
    ) -> None:
        whole = config.replace(gradient_accumulation_steps=config.gradient_accumulation_steps * world_size)
        super().__init__(sample_count, whole, order, with_epoch=with_epoch)
        self._step = whole.effective_batch_size
        self._accumulation = config.gradient_accumulation_steps
        self._parts: list[Part] = []
        rest = self._used % (config.micro_batch_size * world_size)
        self.has_idle_ranks = 0 < rest < world_size
        """In an epoch's last step some rank, maybe another one, computes a sample that does not count."""
        for first in range(0, self._used, self._step):
            self._parts += cut_step(first, min(self._step, self._used - first), config, rank, world_size)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        indices = self._permutation()
        for part in self._parts[self.start :]:
            chosen = indices[part.first : part.first + part.count + part.fillers]
            yield [(self.epoch, index) for index in chosen] if self._with_epoch else list(chosen)

    def batch_length(self, position: int) -> int:
        """Return the samples in one of the rank's micro batches of an epoch that count."""
        return self._parts[position].count

    def count_elsewhere(self, position: int, own: int) -> int:
        """Return the samples that other ranks take in the optimizer step that begins at one of the rank's batches."""
        first = position // self._accumulation * self._step
        return min(self._step, self._used - first) - own
