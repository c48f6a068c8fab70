"""The order of the data and its augmentation: functions of (seed, epoch, index), whatever the loader's settings."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_workloads import AugmentedImages, Numbers, NumberStream
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from autotune.engine.dataloader import (
    EpochBatchSampler,
    Order,
    SeededDataset,
    build_loader,
    count_samples,
    find_random_sources,
    mix_seed,
    move_batch,
    read_batch_size,
    read_generators,
    restore_generators,
    seed_generators,
)
from autotune.engine.hooks.loaders import apply_loader_knobs
from autotune.engine.windows import Windows
from autotune.records import TrainConfig

SHUFFLED = Order(seed=5, shuffle=True, drop_last=False)


def order_of(config: TrainConfig, order: Order, *, samples: int = 22, epochs: int = 2) -> list[list[int]]:
    """Return the indices visited in each epoch, one list an epoch."""
    loader, sampler = build_loader(Numbers(samples), config, order, collate=None)
    assert sampler is not None
    visited = []
    for epoch in range(epochs):
        sampler.epoch = epoch
        visited.append([round(100 * float(x)) for features, _ in loader for x in features[:, 0]])
    return visited


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(micro_batch_size=1, gradient_accumulation_steps=8),
        TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2),
        TrainConfig(micro_batch_size=8, num_workers=1),
        TrainConfig(micro_batch_size=8, num_workers=2, prefetch_factor=3),
        TrainConfig(micro_batch_size=2, gradient_accumulation_steps=4, num_workers=2, persistent_workers=True),
    ],
    ids=["micro 1", "micro 4", "1 worker", "2 workers", "persistent"],
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_does_not_depend_on_micro_batches_or_workers(config: TrainConfig, drop_last: bool) -> None:
    order = Order(seed=5, shuffle=True, drop_last=drop_last)
    assert order_of(config, order) == order_of(TrainConfig(micro_batch_size=8), order)


def test_every_epoch_is_a_new_permutation_and_every_seed_another() -> None:
    config = TrainConfig(micro_batch_size=8)
    epochs = order_of(config, SHUFFLED, epochs=4)
    assert all(sorted(epoch) == list(range(22)) for epoch in epochs)
    other = order_of(config, Order(seed=6, shuffle=True, drop_last=False), epochs=4)
    assert len({tuple(epoch) for epoch in [*epochs, *other]}) == 8
    assert order_of(config, Order(seed=5, shuffle=False, drop_last=False)) == 2 * [list(range(22))]


def test_the_permutation_takes_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    order_of(TrainConfig(num_workers=1), SHUFFLED)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("samples", "micro", "steps", "lengths"),
    [
        (22, 8, 1, [8, 8]),
        (22, 4, 2, [4, 4, 4, 4]),
        (24, 4, 2, [4] * 6),
        (22, 3, 2, [3] * 6),
        (7, 8, 1, [7]),  # less than one batch: nothing would be left
        (7, 4, 2, [4, 3]),
    ],
)
def test_dropping_the_last_batch_means_the_effective_one(
    samples: int, micro: int, steps: int, lengths: list[int]
) -> None:
    config = TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=steps)
    order = Order(seed=5, shuffle=True, drop_last=True)
    sampler = EpochBatchSampler(samples, config, order, with_epoch=False)
    assert [len(batch) for batch in sampler] == lengths
    assert len(sampler) == len(lengths)
    assert [sampler.batch_length(position) for position in range(len(lengths))] == lengths


def test_a_sampler_starts_inside_an_epoch() -> None:
    sampler = EpochBatchSampler(22, TrainConfig(micro_batch_size=4), SHUFFLED, with_epoch=True)
    sampler.epoch = 3
    whole = list(sampler)
    assert {key[0] for batch in whole for key in batch} == {3}  # type: ignore[index]
    sampler.start = 2
    assert list(sampler) == whole[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_window_ends_with_its_epoch(workers: int) -> None:
    config = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2, num_workers=workers)
    loader, sampler = build_loader(Numbers(13), config, SHUFFLED, collate=None)
    windows = Windows(loader, sampler, 2)
    found = [windows.next_window() for _ in range(4)]
    assert [(window.counts, window.ends_epoch) for window in found] == 2 * [([4, 4], False), ([4, 1], True)]
    seen = [round(100 * float(x)) for window in found[:2] for features, _ in window.batches for x in features[:, 0]]
    assert sorted(seen) == list(range(13))


def test_mixed_seeds_do_not_collide() -> None:
    grid = list(itertools.product(range(4), range(25), range(500)))
    seeds = {mix_seed(*parts) for parts in grid}
    assert len(seeds) == len(grid)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > len(grid) - 4  # numpy takes 32 bits; 0.3 chance pairs expected
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_mixed_seeds_tell_positions_and_lengths_apart() -> None:
    parts = [(0,), (0, 0), (0, 0, 0), (1, 0), (0, 1), (1,), (2, 3, 4), (4, 3, 2), (3, 2, 4), (2**62,), (2**40, 1)]
    assert len({mix_seed(*part) for part in parts}) == len(parts)


def test_nearby_seeds_differ_in_about_half_their_bits() -> None:
    distances = [(mix_seed(0, 0, index) ^ mix_seed(0, 0, index + 1)).bit_count() for index in range(500)]
    assert 30 < sum(distances) / len(distances) < 33
    assert min(distances) > 10


def test_a_seeded_sample_depends_on_seed_epoch_and_index_only() -> None:
    images = AugmentedImages()
    sources = find_random_sources(images)
    dataset = SeededDataset(images, seed=3, sources=sources)
    first = dataset[1, 4][1][0]
    assert dataset[1, 4][0] == (1, 4)
    torch.manual_seed(99)
    dataset[0, 2]
    assert torch.equal(dataset[1, 4][1][0], first)
    others = [dataset[2, 4][1][0], SeededDataset(images, seed=4, sources=sources)[1, 4][1][0]]
    assert not any(torch.equal(other, first) for other in others)


def mask_at_random(samples: list[Any]) -> Tensor:
    """Collate as masked language models do: what is hidden is drawn when the batch is made."""
    batch = torch.stack([torch.as_tensor(sample) for sample in samples])
    return batch * (torch.rand(batch.shape) > 0.5) * float(np.random.rand()) * random.random()


class Plain(Dataset[Tensor]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def test_a_collate_function_that_draws_is_found_too() -> None:
    assert find_random_sources(Plain()) == ()
    assert find_random_sources(Plain(), mask_at_random) == ("torch", "numpy", "random")


def collated_batches(workers: int, seed: int = 5) -> list[Tensor]:
    order = Order(seed=seed, shuffle=True, drop_last=False)
    config = TrainConfig(micro_batch_size=4, num_workers=workers)
    sources = ("torch", "numpy", "random")
    loader, sampler = build_loader(Plain(), config, order, collate=mask_at_random, random_sources=sources)
    assert sampler is not None
    batches = []
    for epoch in range(2):
        sampler.epoch = epoch
        batches += list(loader)
    return batches


@pytest.mark.parametrize("workers", [1, 2])
def test_a_collate_function_that_draws_gives_the_same_batches_with_any_workers(workers: int) -> None:
    expected, found = collated_batches(0), collated_batches(workers)
    assert len(expected) == len(found) == 12
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not torch.equal(expected[0], collated_batches(0, seed=6)[0])
    assert not torch.equal(expected[0], expected[6])


class OwnMove:
    """A batch object that moves itself, as graph libraries have them."""

    def __init__(self) -> None:
        self.moved_to: Any = None

    def to(self, device: Any) -> OwnMove:
        self.moved_to = device
        return self


@dataclasses.dataclass
class Sides:
    left: Tensor
    right: list[Tensor]


def test_objects_and_dataclasses_are_moved() -> None:
    device = torch.device("cpu")
    assert move_batch([OwnMove()], lambda tensor: tensor, device)[0].moved_to == device
    moved = move_batch(Sides(torch.zeros(1), [torch.zeros(1)]), lambda tensor: tensor + 1, device)
    assert moved == Sides(torch.ones(1), [torch.ones(1)])
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert torch.equal(move_batch(packed, lambda tensor: tensor + 1, device).batch_sizes, packed.batch_sizes)


def test_a_seeded_sample_leaves_the_trainings_generators_alone() -> None:
    dataset = SeededDataset(AugmentedImages(), seed=3, sources=("torch", "numpy", "random"))
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    dataset[0, 0]
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


class Drawing(Dataset[Tensor]):
    def __init__(self, *sources: str) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        draw = {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "random": random.random}
        return torch.tensor([float(draw[source]()) for source in self.sources] or [0.0])


ALL = ("torch", "numpy", "random")


@pytest.mark.parametrize("sources", [part for size in range(4) for part in itertools.combinations(ALL, size)])
def test_random_sources_are_found_and_left_as_they_were(sources: tuple[str, ...]) -> None:
    random.seed(8)
    expected = random.random()
    random.seed(8)
    assert find_random_sources(Drawing(*sources)) == sources
    assert random.random() == expected


def test_a_stream_has_no_sources_that_could_be_seeded() -> None:
    assert find_random_sources(NumberStream(3)) == ()


@pytest.mark.parametrize("source", ALL)
def test_only_the_named_generators_are_seeded(source: str) -> None:
    before = read_generators()
    try:
        seed_generators(7, (source,))
        after = read_generators()
        moved = {
            "torch": not torch.equal(before["torch"], after["torch"]),
            "numpy": not np.array_equal(before["numpy"][1], after["numpy"][1]),
            "random": before["random"] != after["random"],
        }
        assert [name for name, has_moved in moved.items() if has_moved] == [source]
    finally:
        restore_generators(before)


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Encoding(OrderedDict[str, Any]):
    """As a tokenizer returns it: a dictionary that also answers to attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def test_every_tensor_of_a_nested_batch_is_placed() -> None:
    one = torch.ones(2)
    batch = {"a": [one, (one, "text")], "b": Pair(one, {"c": one, "d": 3}), "e": None}
    moved = move_batch(batch, lambda tensor: tensor + 1)
    two = torch.full((2,), 2.0)
    assert isinstance(moved["b"], Pair)
    assert isinstance(moved["a"], list)
    assert isinstance(moved["a"][1], tuple)
    assert (moved["a"][1][1], moved["b"].right["d"], moved["e"]) == ("text", 3, None)
    placed = [moved["a"][0], moved["a"][1][0], moved["b"].left, moved["b"].right["c"]]
    assert all(torch.equal(tensor, two) for tensor in placed)
    assert torch.equal(batch["b"].right["c"], one)  # type: ignore[union-attr]


def test_a_dictionary_keeps_its_kind() -> None:
    encoding = Encoding(input_ids=torch.ones(2), length=2)
    moved = move_batch(encoding, lambda tensor: tensor + 1)
    assert type(moved) is Encoding
    assert torch.equal(moved.input_ids, torch.full((2,), 2.0))
    assert torch.equal(encoding.input_ids, torch.ones(2))
    grouped: defaultdict[str, Any] = defaultdict(list, x=torch.ones(1))
    assert move_batch(grouped, torch.neg)["missing"] == []
    assert move_batch(MappingProxyType({"x": torch.ones(1)}), torch.neg) == {"x": torch.tensor([-1.0])}


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4, 1), torch.zeros(9)), 4),
        ({"ids": [["text"], torch.zeros(5)], "n": torch.tensor(1)}, 5),
        ([torch.tensor(1.0), Pair(torch.zeros(6), None)], 6),
        (torch.zeros(0, 3), 0),
        ([np.zeros((7, 2)), torch.zeros(8)], 8),
        ([np.float32(1.0), np.zeros(()), {"ids": np.zeros((7, 2))}], 7),
    ],
)
def test_samples_are_counted_by_the_first_tensor_or_array(batch: Any, count: int) -> None:
    assert count_samples(batch) == count


def test_samples_of_a_dataclass_are_counted_by_its_fields() -> None:
    @dataclasses.dataclass
    class Batch:
        name: str
        ids: Tensor

    assert count_samples(Batch("text", torch.zeros(5, 2))) == 5


@pytest.mark.parametrize("batch", [["text"], {}, torch.tensor(1.0)])
def test_a_batch_that_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="holds no tensor and no array"):
        count_samples(batch)


def test_the_loader_has_the_configs_settings() -> None:
    config = TrainConfig(micro_batch_size=4, num_workers=2, prefetch_factor=5, persistent_workers=True)
    loader, _ = build_loader(Numbers(8), config, SHUFFLED, collate=list)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 5, True)
    assert loader.collate_fn is list
    alone, _ = build_loader(Numbers(8), config.replace(num_workers=0, persistent_workers=True), SHUFFLED, collate=None)
    assert (alone.num_workers, alone.prefetch_factor, alone.persistent_workers) == (0, None, False)
    assert next(iter(alone))[0].shape == (4, 4)


def test_workers_chosen_by_measurement_are_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.warns(UserWarning, match="worker processes in total"):
        own = DataLoader(Numbers(8), num_workers=2)
    loader, _ = build_loader(Numbers(8), TrainConfig(micro_batch_size=4, num_workers=2), SHUFFLED, collate=None)
    assert len(list(loader)) == 2
    apply_loader_knobs(own, TrainConfig(micro_batch_size=1, num_workers=3), frozenset({"num_workers"}))
    assert len(list(own)) == 8


def test_a_loader_with_a_batch_sampler_has_its_batch_size() -> None:
    data = TensorDataset(torch.zeros(10, 2))
    order = SequentialSampler(data)
    assert read_batch_size(DataLoader(data, batch_size=4)) == 4
    assert read_batch_size(DataLoader(data, batch_sampler=BatchSampler(order, 3, drop_last=False))) == 3
    assert read_batch_size(DataLoader(data, batch_sampler=[[0, 1], [2]])) is None  # type: ignore[arg-type]
    assert read_batch_size(DataLoader(data, batch_size=None)) is None
