"""What a tape tells of a loader: every change of samples, order, types, shapes and values, and of the epoch's end."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from engine_workloads import AugmentedImages, Numbers, NumberStream
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from autotune.engine import data_trace
from autotune.engine.data_trace import FIRST_BATCHES, digest_batches, record_data
from autotune.engine.dataloader import Order, build_loader, find_random_sources
from autotune.engine.windows import Windows
from autotune.errors import TargetError
from autotune.records import TrainConfig
from autotune.records.trial import DataTrace

ORDER = Order(seed=0, shuffle=True, drop_last=False)
CONFIG = TrainConfig(micro_batch_size=8)


@pytest.fixture(autouse=True)
def _as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine workers for twenty epochs take longer to start than a tape may."""
    monkeypatch.setattr(data_trace, "_MOST_SECONDS", float("inf"))


def open_windows(dataset: Any, config: TrainConfig = CONFIG, order: Order = ORDER) -> Windows:
    sources = find_random_sources(dataset)
    loader, sampler = build_loader(dataset, config, order, collate=None, random_sources=sources)
    return Windows(loader, sampler, config.gradient_accumulation_steps)


def tape_of(dataset: Any, config: TrainConfig = CONFIG, order: Order = ORDER) -> DataTrace:
    windows = open_windows(dataset, config, order)
    return record_data(windows, windows.sampler, config.gradient_accumulation_steps)


class Changed(Dataset[Any]):
    """Another dataset with one change to each of its samples."""

    def __init__(self, dataset: Any, change: Callable[[int, Any], Any]) -> None:
        self.dataset, self.change = dataset, change

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.change(index, self.dataset[index])


# The tape of a loader


@pytest.mark.slow_cases("augmented-changes2", "plain-changes2")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        {"num_workers": 1, "prefetch_factor": 1},
    ],
)
@pytest.mark.parametrize("dataset", [Numbers(60), AugmentedImages(22)], ids=["plain", "augmented"])
def test_workers_hand_over_the_same_as_the_training_process(dataset: Any, changes: dict[str, Any]) -> None:
    assert tape_of(dataset, CONFIG.replace(**changes)) == tape_of(dataset)


def test_a_tape_that_takes_too_long_begins_as_a_whole_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tape_of(Numbers(60))
    monkeypatch.setattr(data_trace, "_MOST_SECONDS", -1.0)
    cut = tape_of(Numbers(60))
    assert len(cut.batches) == 4
    assert (whole.batches[:4], whole.ends) == (cut.batches, cut.ends)


def test_a_tape_is_the_same_twice_and_that_of_another_seed_is_not() -> None:
    assert tape_of(AugmentedImages(22)) == tape_of(AugmentedImages(22))
    other = tape_of(AugmentedImages(22), order=Order(seed=1, shuffle=True, drop_last=False))
    assert not {*other.batches} & {*tape_of(AugmentedImages(22)).batches}


def test_what_a_tape_holds() -> None:
    tape = tape_of(Numbers(60))
    assert len(tape.batches) == len(tape.shapes) == FIRST_BATCHES
    assert tape.shapes[:8] == ("float32[8, 4] + float32[8]",) * 7 + ("float32[4, 4] + float32[4]",)
    assert len({*tape.batches[:8]}) == 8
    assert tape.ends[:2] == tape.batches[6:8]  # the last two of the first epoch
    assert tape.ends[2] == tape.batches[8]  # and the first one of the second
    assert tape.end_shapes == (*tape.shapes[6:8], tape.shapes[8])
    assert (tape.samples, tape.repeated, len(tape.order)) == (60, 0, 16)


def test_of_a_long_epoch_the_start_and_the_end_are_looked_at() -> None:
    seen: list[int] = []
    dataset = Changed(Numbers(8 * (FIRST_BATCHES + 100) + 3), lambda index, sample: seen.append(index) or sample)
    tape = tape_of(dataset, order=Order(seed=0, shuffle=False, drop_last=False))
    assert len(tape.batches) == FIRST_BATCHES
    assert tape.end_shapes[1:] == ("float32[3, 4] + float32[3]", "float32[8, 4] + float32[8]")
    middle = {*range(8 * (FIRST_BATCHES + 1), 8 * (FIRST_BATCHES + 99))}
    assert not middle & {*seen[16:]}  # the first ones find out what the samples draw from


def test_an_epoch_of_one_short_batch_has_a_tape() -> None:
    tape = tape_of(Numbers(5))
    assert {*tape.shapes, *tape.end_shapes} == {"float32[5, 4] + float32[5]"}
    assert (len(tape.ends), tape.samples) == (3, 5)


@pytest.mark.parametrize("accumulation", [1, 3, 4])
@pytest.mark.parametrize("samples", [60, 62, 64])
def test_effective_batches_are_counted_and_the_end_is_that_of_the_epoch(samples: int, accumulation: int) -> None:
    config = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=accumulation)
    tape = tape_of(Numbers(samples), config)
    windows = -(-samples // (4 * accumulation))
    assert len(tape.batches) == FIRST_BATCHES
    assert tape.ends == (*tape.batches[windows - 2 : windows], tape.batches[windows])
    assert tape.samples == samples


def test_a_dropped_end_shows() -> None:
    whole, cut = (tape_of(Numbers(60), order=Order(seed=0, shuffle=True, drop_last=drop)) for drop in (False, True))
    assert (whole.samples, cut.samples) == (60, 56)
    assert whole.order != cut.order
    assert whole.end_shapes != cut.end_shapes
    assert whole.batches[:7] == cut.batches[:7]


def test_another_order_shows_even_where_all_samples_are_alike() -> None:
    alike = TensorDataset(torch.zeros(60, 4))
    shuffled, ascending = (tape_of(alike, order=Order(seed=0, shuffle=one, drop_last=False)) for one in (True, False))
    assert shuffled.batches == ascending.batches
    assert shuffled.order != ascending.order


class Repeating:
    """A sampler that takes some samples twice and leaves others out."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        self.epoch = self.start = 0
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.batches[self.start :])

    def batch_length(self, position: int) -> int:
        return len(self.batches[position])

    def count_elsewhere(self, position: int, own: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("batches", "repeated"),
    [([[0, 1], [2, 3]], 0), ([[0, 1], [1, 3]], 1), ([[0, 0], [0, 0]], 3), ([[0, 1], [0, 1]], 2)],
)
def test_samples_that_come_more_than_once_are_counted(batches: Any, repeated: int) -> None:
    sampler: Any = Repeating(batches)
    loader = torch.utils.data.DataLoader(Numbers(4), batch_sampler=sampler)
    tape = record_data(Windows(loader, sampler, 1), sampler, 1)
    assert (tape.samples, tape.repeated) == (4, repeated)


CHANGES: dict[str, Callable[[int, Any], Any]] = {
    "value": lambda index, sample: (sample[0] + (1e-6 if index == 59 else 0.0), sample[1]),
    "sign of a zero": lambda index, sample: (sample[0], sample[1] * (-1.0 if index == 59 else 1.0)),
    "type": lambda _index, sample: (sample[0].double(), sample[1]),
    "shape": lambda _index, sample: (sample[0].reshape(2, 2), sample[1]),
    "order of the parts": lambda _index, sample: (sample[1], sample[0]),
    "one part less": lambda _index, sample: sample[:1],
    "number in place of a tensor": lambda _index, sample: (sample[0], float(sample[1])),
}


def zero_targets(_index: int, sample: Any) -> Any:
    return sample[0], torch.tensor(0.0)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_sample_shows(change: str) -> None:
    plain = Changed(Numbers(60), zero_targets)
    changed = tape_of(Changed(plain, CHANGES[change]))
    assert (changed.batches, changed.shapes) != (tape_of(plain).batches, tape_of(plain).shapes)


def test_the_same_values_in_another_layout_are_the_same() -> None:
    images = TensorDataset(torch.randn(20, 3, 4, 4))
    laid_out = Changed(images, lambda _index, sample: (sample[0].permute(1, 2, 0).contiguous().permute(2, 0, 1),))
    assert tape_of(laid_out) == tape_of(images)


def test_random_samples_that_are_not_seeded_show() -> None:
    def blur(_index: int, sample: Any) -> Any:
        return sample[0] + random.SystemRandom().random(), sample[1]

    dataset = Changed(Numbers(60), blur)
    assert tape_of(dataset).batches != tape_of(dataset).batches
    assert tape_of(dataset).shapes == tape_of(dataset).shapes


def test_an_iterable_dataset_is_looked_at_from_its_start() -> None:
    tape = tape_of(NumberStream(60))
    assert tape.batches == tape_of(Numbers(60), order=Order(seed=0, shuffle=False, drop_last=False)).batches
    assert (tape.ends, tape.end_shapes, tape.order, tape.samples, tape.repeated) == ((), (), "", None, 0)


def test_a_longer_stream_shows_where_it_ends() -> None:
    assert tape_of(NumberStream(60)).batches != tape_of(NumberStream(61)).batches


class Nothing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize("dataset", [TensorDataset(torch.zeros(0, 4)), Nothing()], ids=["map", "iterable"])
@pytest.mark.fault("51", injected="an empty dataset", outcome="no tape")
def test_an_empty_dataset_has_no_tape(dataset: Any) -> None:
    with pytest.raises(TargetError, match="the training set is empty"):
        tape_of(dataset)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(60), AugmentedImages(22)], ids=["plain", "augmented"])
def test_the_loader_can_be_read_from_the_start_again(dataset: Any, workers: int) -> None:
    config = CONFIG.replace(num_workers=workers)
    windows = open_windows(dataset, config)
    tape = record_data(windows, windows.sampler, 1)
    assert (windows.sampler.epoch, windows.sampler.start) == (0, 0)
    windows.move_to(epoch=0, batches_done=0)
    again = [digest_batches(windows.next_window().batches)[0] for _ in range(12)]
    assert again == list(tape.batches[:12])


# The digest of batches


@dataclass
class Example:
    x: Tensor
    label: str
    weight: float = 1.0
    hidden: list[int] = field(default_factory=list)


Point = namedtuple("Point", ["x", "y"])


class Attributes(UserDict):  # type: ignore[type-arg]
    """A mapping that is no dictionary, as tokenizers return it."""


class Bag:
    """A batch of a class of one's own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


ONES = torch.ones(2, 3)
# name -> a batch, and batches of which each differs from it
DIFFERENT: dict[str, tuple[Any, list[Any]]] = {
    "tensor": (ONES, [2 * ONES, ONES.double(), ONES.int(), torch.ones(3, 2), torch.ones(6), torch.ones(2, 4), None]),
    "bool": (ONES.bool(), [ONES.to(torch.uint8), torch.tensor([[True, True, True], [True, True, False]])]),
    "bf16": (ONES.bfloat16(), [ONES.half(), (1.01 * ONES).bfloat16()]),
    "scalar tensor": (torch.tensor(1), [torch.tensor(2), torch.tensor([1]), 1]),
    "empty tensor": (torch.zeros(0, 3), [torch.zeros(0, 4), torch.zeros(1, 3)]),
    "complex": (torch.complex(ONES, ONES), [torch.complex(ONES, -ONES)]),
    "dict": ({"a": ONES, "b": 2}, [{"a": ONES, "b": 3}, {"a": 2 * ONES, "b": 2}, {"a": ONES}]),
    "mapping": (Attributes(a=ONES), [Attributes(a=2 * ONES), Attributes(a=ONES, b=ONES)]),
    "list": ([ONES, [1, 2]], [[ONES, [2, 1]], [ONES, [1]], [ONES, 1, 2, 3]]),
    "tuple": ((ONES, 0 * ONES), [(0 * ONES, ONES)]),
    "named tuple": (Point(ONES, 1), [Point(ONES, 2), Point(2 * ONES, 1)]),
    "dataclass": (
        Example(ONES, "cat"),
        [Example(ONES, "dog"), Example(2 * ONES, "cat"), Example(ONES, "cat", 2.0), Example(ONES, "cat", 1.0, [3])],
    ),
    "numpy": (np.ones((2, 3)), [2 * np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 3), np.float32)]),
    "numpy strings": (np.array(["cat", "dog"]), [np.array(["cat", "cow"]), np.array(["cats", "dog"])]),
    "text": (["cat", "dog"], [["cat", "cow"], ["dog", "cat"], ["catdog"], ["cat", b"dog"]]),
    "numbers": ([1, 2.0, True, None], [[1, 2.5, True, None], [1.0, 2.0, True, None], [1, 2.0, False, None], [1, 2.0]]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_whatever_a_batch_is_made_of_a_difference_shows(name: str) -> None:
    batch, others = DIFFERENT[name]
    assert digest_batches([batch]) == digest_batches([batch])
    digests = [digest_batches([one])[0] for one in (batch, *others)]
    assert len({*digests}) == len(digests)


def test_the_words_tell_types_and_shapes() -> None:
    batch = {"x": ONES, "n": np.zeros(3), "more": (torch.tensor(1), "text", 2, None)}
    assert digest_batches([batch])[1] == "float32[2, 3] + float64[3] + int64[] + str + int + NoneType"


def test_micro_batches_are_told_from_one_batch() -> None:
    assert digest_batches([ONES, ONES]) != digest_batches([torch.ones(4, 3)])
    assert digest_batches([ONES, 2 * ONES]) != digest_batches([2 * ONES, ONES])


def test_a_tensor_that_is_a_view_or_needs_a_gradient_is_read_by_its_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    assert digest_batches([base.t()]) == digest_batches([base.t().contiguous()])
    assert digest_batches([base[:, ::2]]) == digest_batches([base[:, ::2].clone()])
    assert digest_batches([base.clone().requires_grad_()]) == digest_batches([base])


def test_what_is_not_a_number_is_a_value_like_others() -> None:
    nan = torch.tensor([float("nan"), float("inf")])
    assert digest_batches([nan]) == digest_batches([nan.clone()])
    assert digest_batches([nan]) != digest_batches([nan.flip(0)])


def test_a_numpy_scalar_is_read_by_its_value() -> None:
    assert digest_batches([np.float32(1.0)]) != digest_batches([np.float32(2.0)])


def test_an_array_of_objects_is_read_by_its_values() -> None:
    first, second = (np.array(["".join(["c", "at"]), 10**20 + 1], dtype=object) for _ in range(2))
    assert digest_batches([first]) == digest_batches([second])


def test_a_sparse_tensor_is_read_by_its_values() -> None:
    assert digest_batches([ONES.to_sparse()]) != digest_batches([2 * ONES.to_sparse()])


def test_an_object_of_a_class_of_ones_own_is_read_by_its_values() -> None:
    assert digest_batches([Bag(ONES)]) != digest_batches([Bag(2 * ONES)])


def test_the_names_in_a_mapping_show() -> None:
    assert digest_batches([{"x": ONES, "y": 2 * ONES}]) != digest_batches([{"y": ONES, "x": 2 * ONES}])


def as_objects(*values: Any) -> np.ndarray[Any, Any]:
    """Return an array of objects, whatever they are."""
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="an array of objects is printed: addresses, and no more than the ends"
)
@pytest.mark.parametrize("made_of", ["objects of a class of one's own", "arrays of different lengths"])
def test_an_array_of_objects_is_read_by_the_values_of_these(made_of: str) -> None:
    def make(middle: float) -> Any:
        long = np.zeros(5000)
        long[2500] = middle
        return as_objects(*(map(Bag, long) if "class" in made_of else (long, long[:3])))

    assert digest_batches([make(1.0)]) == digest_batches([make(1.0)])
    assert digest_batches([make(1.0)]) != digest_batches([make(2.0)])


def test_an_object_that_refers_to_itself_is_read_once() -> None:
    bag = Bag(ONES)
    bag.owner = bag
    digest_batches([bag])
