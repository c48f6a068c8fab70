from __future__ import annotations

import cProfile
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from autotune.probe.data import look
from autotune.probe.data.generators import OWN_GENERATOR
from autotune.probe.data.look import count_held, find_pickling_trouble, look_at_data
from autotune.probe.sources.script import _fetch_some, _look_at_samples
from autotune.records.config import TrainConfig


class Counted(Dataset[Tensor]):
    """Twenty samples, each with one number drawn."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), np.random.rand()])


class Uncounted(Dataset[Tensor]):
    """Samples whose number only a sampler knows."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(2)


class Keeping(Counted):
    """Samples that are made once."""

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        return self.made.setdefault(index, torch.zeros(2))


class Stream(IterableDataset[Tensor]):
    """Samples without an end."""

    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(2)


class Rotation:
    """A transform that takes nearly all of a sample's time."""

    def __call__(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for _ in range(30):
            image = image @ image.T / image.size
        return image


class Rotated(Counted):
    """Samples that a slow transform makes expensive."""

    def __init__(self) -> None:
        self.rotate = Rotation()

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rotate(np.eye(64)))

    def __len__(self) -> int:
        return 4096


def test_the_transform_that_takes_most_of_a_sample_is_named() -> None:
    facts = look_at_data(Rotated, None, batch_size=4, fingerprints=False).facts
    line = Rotation.__call__.__code__.co_firstlineno
    assert facts.hot_call == f"Rotation.__call__ (test_look.py:{line})"
    assert 0.5 <= (facts.hot_call_fraction or 0.0) <= 1.0


def test_where_no_more_samples_are_there_none_is_named() -> None:
    facts = look_at_data(Counted, None, batch_size=4, fingerprints=False).facts  # all of them were timed
    assert (facts.hot_call, facts.hot_call_fraction) == ("", None)


def test_another_profiler_is_left_at_work() -> None:
    other = cProfile.Profile()
    other.enable()
    try:
        assert look_at_data(Rotated, None, batch_size=4, fingerprints=False).facts.hot_call == ""
    finally:
        other.disable()
    assert any(entry.code is Rotation.__call__.__code__ for entry in other.getstats())


def test_samples_are_counted_timed_and_kept() -> None:
    samples = look_at_data(Counted, None, batch_size=4, fingerprints=True)
    facts = samples.facts
    assert (facts.sample_count, facts.iterable, facts.random_sources) == (20, False, ("numpy",))
    assert facts.seconds_per_sample > 0
    assert (facts.fingerprint or "").startswith("20:")
    assert len(samples.fetched) == 16
    assert look_at_data(Counted, None, batch_size=4, fingerprints=False).facts.fingerprint is None


def test_the_first_batch_counts_only_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warming(Counted):
        def __getitem__(self, index: int) -> Tensor:
            now[0] += 5.0 if index == 0 else 0.01
            return torch.zeros(1)

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(look, "_FETCH_SECONDS", 60.0)
    assert look_at_data(Warming, None, batch_size=4, fingerprints=False).facts.seconds_per_sample == pytest.approx(0.01)
    monkeypatch.setattr(look, "_FETCH_SECONDS", 1.0)
    assert look_at_data(Warming, None, batch_size=4, fingerprints=False).facts.seconds_per_sample == pytest.approx(5.0)


def test_a_rest_is_not_collated_after_whole_batches() -> None:
    sizes: list[int] = []

    def collate(batch: list[Tensor]) -> Tensor:
        sizes.append(len(batch))
        return torch.stack(batch)

    samples = look_at_data(Counted, collate, batch_size=8, fingerprints=False)
    assert (sizes[-2:], len(samples.fetched)) == ([8, 8], 16)
    look_at_data(Counted, collate, batch_size=64, fingerprints=False)
    assert sizes[-1] == 20  # there is nothing else


def test_a_stream_is_looked_at_for_a_moment() -> None:
    facts = look_at_data(Stream, None, batch_size=4, fingerprints=False).facts
    assert (facts.sample_count, facts.iterable) == (None, True)
    assert facts.seconds_per_sample > 0


def test_samples_that_cannot_be_fetched_one_by_one_are_told_of_a_script() -> None:
    loader = DataLoader(Uncounted(), batch_sampler=[[0, 1], [2]])
    samples, trouble = _fetch_some(loader, 2)
    assert (samples.facts.sample_count, samples.facts.seconds_per_sample, samples.fetched) == (None, 0.0, [])
    assert trouble.startswith("its samples could not be fetched one by one (TypeError: ")


def test_a_dataset_with_a_generator_of_its_own_is_trouble_where_there_are_no_workers() -> None:
    dataset: Dataset[Tensor] = Counted()
    samples, trouble = _look_at_samples(DataLoader(dataset), TrainConfig())
    assert (samples.facts.random_sources, samples.facts.workers_draw_alike, trouble) == (("numpy",), False, "")
    dataset.held = random.Random(1)  # type: ignore[attr-defined]
    samples, trouble = _look_at_samples(DataLoader(dataset), TrainConfig())
    assert samples.facts.random_sources == ("numpy", OWN_GENERATOR)
    assert "a random generator of its own" in trouble
    samples, trouble = _look_at_samples(DataLoader(dataset, num_workers=2), TrainConfig(num_workers=2))
    assert (samples.facts.workers_draw_alike, trouble) == (True, "")


def test_a_dataset_that_keeps_what_it_has_read_holds_more() -> None:
    keeping, plain = Keeping(), Counted()
    for dataset in (Subset(ConcatDataset([plain, keeping]), range(10, 30)), plain):
        before = count_held(dataset)
        for index in range(15):
            dataset[index]
        assert count_held(dataset) - before == (5 if dataset is not plain else 0)


def test_a_dataset_that_cannot_be_pickled_is_trouble() -> None:
    dataset = Counted()
    dataset.held = lambda: None  # type: ignore[attr-defined]
    assert "cannot be pickled" in find_pickling_trouble(dataset)
