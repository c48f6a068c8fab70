from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from autotune.engine.data_fingerprint import build_dataset, mark_data
from autotune.engine.dataloader import find_random_sources, moved_generators, read_generators
from autotune.targets.workload import LoadedWorkload, check_workload

SAMPLES = 101


class Listed(Dataset[Any]):
    """Samples made by a function; counts how often one is fetched."""

    def __init__(self, make: Callable[[int], Any], samples: int = SAMPLES) -> None:
        self.fetched: list[int] = []
        self._make, self._samples = make, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return self._make(index)


def plain(index: int) -> tuple[Tensor, int]:
    return torch.linspace(-1.0, 1.0, 7) * (index + 1), index % 3


def augmented(index: int) -> Tensor:
    return torch.randn(5) + float(np.random.standard_normal()) + random.gauss(0.0, 1.0) + index


def fingerprint(dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> str | None:
    return mark_data(dataset, collate, find_random_sources(dataset, collate)).fingerprint


def test_it_tells_the_number_of_samples_and_some_digits() -> None:
    found = fingerprint(Listed(plain))
    assert found is not None
    assert found.startswith(f"{SAMPLES}:")
    assert len(found.partition(":")[2]) == 12


@pytest.mark.parametrize("make", [plain, augmented])
def test_it_is_the_same_in_every_process_whatever_was_drawn_before(make: Callable[[int], Any]) -> None:
    found = fingerprint(Listed(make))
    torch.randn(3), np.random.standard_normal(5), random.random()
    assert found is not None
    assert fingerprint(Listed(make)) == found


@pytest.mark.parametrize("changed", [0, 20, SAMPLES - 1])
@pytest.mark.parametrize("make", [plain, augmented])
def test_another_value_in_the_first_the_last_or_one_between_is_seen(make: Callable[[int], Any], changed: int) -> None:
    def other(index: int) -> Any:
        sample = make(index)
        values = sample[0] if isinstance(sample, tuple) else sample
        values[2] += 1.0 if index == changed else 0.0
        return sample

    assert fingerprint(Listed(other)) not in (None, fingerprint(Listed(make)))


def test_another_label_is_seen() -> None:
    relabelled = Listed(lambda index: (plain(index)[0], index % 3 if index else 2))
    assert fingerprint(relabelled) not in (None, fingerprint(Listed(plain)))


def test_another_scale_type_shape_or_number_of_samples_is_seen() -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda values: values * 1.01,
        lambda values: values.double(),
        lambda values: values[None],
        lambda values: values.flip(0),
        lambda values: torch.where(values > 0.9, float("nan"), values),
    ]
    found = {fingerprint(Listed(lambda index, change=change: change(plain(index)[0]))) for change in changes}
    found |= {
        fingerprint(Listed(lambda index: plain(index)[0])),
        fingerprint(Listed(lambda i: plain(i)[0], SAMPLES + 1)),
    }
    assert None not in found
    assert len(found) == len(changes) + 2


def test_rounding_as_of_another_machine_is_no_other_data_set() -> None:
    images = torch.rand(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rounded = images * (1 + 1e-7 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(images, rounded)
    assert fingerprint(TensorDataset(images)) == fingerprint(TensorDataset(rounded))


@pytest.mark.parametrize("value", [0.0, float("inf"), 1e300, 1e-300, 1j])
def test_every_number_can_be_told(value: complex) -> None:
    found = fingerprint(Listed(lambda _index: torch.full((3,), value, dtype=torch.complex128)))
    assert found is not None
    assert found != fingerprint(Listed(lambda _index: torch.full((3,), 2.0 + 1j, dtype=torch.complex128)))


def test_it_costs_twelve_fetches_and_moves_no_generator() -> None:
    dataset = Listed(augmented)
    before = read_generators()
    assert mark_data(dataset, None, ("torch", "numpy", "random")).fingerprint is not None
    assert dataset.fetched == [0, 20, 40, 60, 80, 100] * 2
    assert moved_generators(before, read_generators()) == ()


def test_sources_that_were_not_found_change_nothing_of_that() -> None:
    before = read_generators()
    found = mark_data(Listed(augmented), None, ()).fingerprint
    assert moved_generators(before, read_generators()) == ()
    torch.randn(3), np.random.standard_normal(5), random.random()
    assert found is not None
    assert mark_data(Listed(augmented), None, ()).fingerprint == found


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_short_data_set_is_told_too(samples: int) -> None:
    dataset = Listed(plain, samples)
    assert (mark_data(dataset, None, ()).fingerprint or "").startswith(f"{samples}:")
    assert len(dataset.fetched) == 2 * samples


def test_what_can_only_be_merged_by_the_users_own_function_is_told() -> None:
    ragged = Listed(lambda index: torch.ones(1 + index % 3))
    assert mark_data(ragged, None, ()).fingerprint is None
    assert mark_data(ragged, lambda samples: torch.nn.utils.rnn.pad_sequence(samples), ()).fingerprint is not None


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a stream is not read")


class Counting(Listed):
    """Has a state of its own: no sample comes twice."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return torch.tensor(len(self.fetched))


def broken(index: int) -> Any:
    raise FileNotFoundError(2, "No such file or directory", f"{index}.png")


@pytest.mark.parametrize(
    "dataset",
    [
        Stream(),
        Listed(broken),
        Listed(plain, 0),
        Counting(plain),
        Listed(lambda index: object()),
    ],
    ids=["stream", "broken", "empty", "unsteady", "odd"],
)
def test_what_has_no_mark_has_none_and_raises_nothing(dataset: Dataset[Any]) -> None:
    assert mark_data(dataset, None, ()).fingerprint is None


def test_samples_that_take_too_long_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("autotune.engine.data_fingerprint.time.monotonic", lambda: float(next(seconds)))
    dataset = Listed(plain)
    assert mark_data(dataset, None, ()).fingerprint is None
    assert len(dataset.fetched) <= 6


class Drawn:
    """Its data set is drawn from a global generator when it is built."""

    def build_model(self) -> Any: ...

    def build_optimizer(self, model: Any) -> Any: ...

    def compute_loss(self, model: Any, batch: Any) -> Any: ...

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.from_numpy(np.random.standard_normal((20, 3))), torch.randn(20))


def test_a_data_set_that_is_drawn_when_it_is_built_is_the_same_each_time() -> None:
    loaded: LoadedWorkload = check_workload(Drawn(), label="drawn", fingerprint="0" * 12)
    before = read_generators()
    found = fingerprint(build_dataset(loaded))
    assert moved_generators(before, read_generators()) == ()
    torch.randn(1), np.random.standard_normal(1)
    assert found is not None
    assert fingerprint(build_dataset(loaded)) == found
