"""How an effective batch is shared out, and the order that all processes together visit the samples in."""

from __future__ import annotations

import pytest

from autotune.distributed.batches import cut_step
from autotune.distributed.loader import RankBatchSampler
from autotune.engine.dataloader import EpochBatchSampler, Order
from autotune.errors import UsageError
from autotune.records.config import TrainConfig, spread_config


def make_config(micro: int, accumulation: int) -> TrainConfig:
    return TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize(
    ("of_one", "size", "of_each"),
    [
        ((32, 1), 2, (16, 1)),
        ((32, 2), 2, (32, 1)),
        ((32, 4), 2, (32, 2)),
        ((10, 3), 2, (5, 3)),
        ((12, 1), 3, (4, 1)),
        ((8, 1), 8, (1, 1)),
        ((8, 4), 1, (8, 4)),
    ],
)
def test_the_effective_batch_counts_the_processes(of_one: tuple[int, int], size: int, of_each: tuple[int, int]) -> None:
    assert spread_config(make_config(*of_one), size) == make_config(*of_each)


@pytest.mark.parametrize(
    ("size", "hint"), [(3, "--nproc-per-node 2, or a baseline with an effective batch of 15 or 18")]
)
def test_a_batch_that_does_not_divide_is_refused_with_a_way_out(size: int, hint: str) -> None:
    with pytest.raises(
        UsageError, match="an effective batch of 16 samples cannot be shared out evenly over 3"
    ) as caught:
        spread_config(make_config(16, 1), size)
    assert hint in caught.value.hint


def test_more_processes_than_samples_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        spread_config(make_config(2, 1), 4)
    assert "--nproc-per-node 2" in caught.value.hint


def test_settings_come_back_from_another_number_of_processes() -> None:
    each = spread_config(make_config(24, 1), 4)
    assert spread_config(each, 2, before=4) == make_config(6, 2)
    assert spread_config(each, 1, before=4).effective_batch_size == 24


@pytest.mark.parametrize(("size", "whole"), [(1, 12), (2, 12), (3, 12), (4, 8)])
def test_a_step_is_cut_without_gap_or_overlap(size: int, whole: int) -> None:
    config = make_config(2, 12 // size // 2)
    assert config.effective_batch_size * size == whole
    for count in range(1, whole + 1):
        check_cut(config, size, count)


def check_cut(config: TrainConfig, size: int, count: int) -> None:
    together = 2 * size
    taken: list[int] = []
    lengths: set[int] = set()
    for rank in range(size):
        parts = cut_step(100, count, config, rank, size)
        assert parts, (count, rank)
        lengths.add(len(parts))
        assert all(part.count <= 2 for part in parts), (count, rank)
        assert all((part.count == 0) == (part.fillers == 1) for part in parts), (count, rank)
        # What the ranks take at the same time is within one micro batch of one process.
        assert len({(part.first - 100) // together for part in parts}) == len(parts), (count, rank)
        taken += [part.first + index for part in parts for index in range(part.count)]
    assert len(lengths) == 1, count  # what they do together, as gathering a shard, all of them do
    assert sorted(taken) == [100 + index for index in range(count)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("samples", "drop_last"), [(37, False), (37, True), (36, False), (5, False)])
def test_all_processes_visit_in_each_step_what_one_would(samples: int, drop_last: bool, size: int) -> None:
    order = Order(seed=4, shuffle=True, drop_last=drop_last)
    config = make_config(6, 2)
    single = EpochBatchSampler(samples, config, order, with_epoch=True)
    each = spread_config(config, size)
    ranks = [
        RankBatchSampler(samples, each, order, with_epoch=True, rank=rank, world_size=size) for rank in range(size)
    ]
    for one in (single, *ranks):
        one.epoch = 2

    def steps(sampler: EpochBatchSampler, accumulation: int) -> list[list[object]]:
        batches = [batch[: sampler.batch_length(index)] for index, batch in enumerate(sampler)]
        assert len(batches) == len(sampler)
        starts = range(0, len(batches), accumulation)
        return [[key for batch in batches[first : first + accumulation] for key in batch] for first in starts]

    by_rank = [steps(one, each.gradient_accumulation_steps) for one in ranks]
    whole = steps(single, 2)
    for index, step in enumerate(whole):
        assert sorted(key for rank in by_rank for key in rank[index]) == sorted(step)  # type: ignore[type-var]
    assert {len(one) for one in by_rank} == {len(whole)}
    for rank, sampler in enumerate(ranks):
        for index, step in enumerate(whole):
            own = len(by_rank[rank][index])
            assert own + sampler.count_elsewhere(index * each.gradient_accumulation_steps, own) == len(step)


def test_a_position_is_gone_on_from() -> None:
    order = Order(seed=1, shuffle=True, drop_last=False)
    sampler = RankBatchSampler(37, make_config(3, 2), order, with_epoch=False, rank=1, world_size=2)
    batches = list(sampler)
    sampler.start = 3
    assert list(sampler) == batches[3:]


def test_who_has_nothing_to_do_in_a_step_is_known() -> None:
    def make(rank: int, samples: int) -> RankBatchSampler:
        order = Order(seed=1, shuffle=True, drop_last=False)
        return RankBatchSampler(samples, make_config(6, 1), order, with_epoch=False, rank=rank, world_size=2)

    assert make(0, 37).has_idle_ranks
    assert make(1, 37).has_idle_ranks  # also where it is the other one
    assert not make(0, 38).has_idle_ranks
    assert len(list(make(0, 37))[-1]) == 1
