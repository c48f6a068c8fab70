"""How an effective batch is shared out: the same samples in each optimizer step, however many processes there are.

    a step of one process        | 0 1 2 3 | 4 5 6 7 |       micro batch 4, accumulation 2
    the same step of two         | 0 1 | 4 5 |  rank 0       micro batch 2, accumulation 2
                                 | 2 3 | 6 7 |  rank 1

What the ranks take at the same time are neighbours: together they are a micro batch of one process, where that divides.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.config import TrainConfig


@dataclass(frozen=True)
class Part:
    """One micro batch of one rank.

    Attributes:
        first: position of its first sample in the epoch's order.
        count: samples that count.
        fillers: samples that are computed and do not count, where the rank has none that do: what processes do
            together, as gathering a shard, all of them have to.
    """

    first: int
    count: int
    fillers: int = 0


def cut_step(step_first: int, step_count: int, config: TrainConfig, rank: int, world_size: int) -> list[Part]:
    """Return the micro batches of one rank in one optimizer step, at least one; all ranks have as many.

    Args:
        step_first: position of the step's first sample in the epoch's order.
        step_count: samples of the step: an effective batch, or what is left at the epoch's end.
        config: settings of each process.
        rank: the process.
        world_size: how many there are.
    """
    together, parts = config.micro_batch_size * world_size, list[Part]()
    for first in range(0, step_count, together):
        count = min(together, step_count - first)
        low, high = (count * edge // world_size for edge in (rank, rank + 1))
        is_idle = high == low
        parts.append(Part(step_first + first, 0, fillers=1) if is_idle else Part(step_first + first + low, high - low))
    return parts
