from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from autotune.probe.data.generators import draws_itself, holds_generator, workers_draw_alike


class Drawn(Dataset[Tensor]):
    """Samples that are drawn from a generator of their own."""

    def __init__(self, rng: Any, draw: Callable[[Any], float]) -> None:
        self.rng, self.draw, self.idle = rng, draw, random.Random(1)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), self.draw(self.rng)])


class SeedsEachSample(Drawn):
    """Samples whose transform is seeded from the dataset's generator, as MONAI's image and mask are."""

    def __init__(self, rng: Any, draw: Callable[[Any], float]) -> None:
        super().__init__(rng, draw)
        self.flip, self.turn = np.random.RandomState(0), np.random.RandomState(0)

    def __getitem__(self, index: int) -> Tensor:
        seed = int(self.draw(self.rng) * 1e6)
        self.flip.seed(seed)
        self.turn.seed(seed)
        return torch.tensor([float(index), self.flip.rand(), self.turn.rand()])


class SeedsInWorkers(Drawn):
    """Samples from a generator that each worker makes for itself."""

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        if worker is not None and self.rng is not None:
            self.rng, self.mine = None, random.Random(worker.seed)
        return torch.tensor(self.draw(self.mine if self.rng is None else self.rng))


class DrawsTwice(Drawn):
    """Samples from two generators, of which the workers' seeding knows one."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.draw(self.rng), self.idle.random()])


class Uncounted(Drawn):
    """Samples whose number only a sampler knows."""

    def __len__(self) -> int:
        raise TypeError("no length")


class Broken(Drawn):
    """Samples that cannot be read in a worker."""

    def __getitem__(self, index: int) -> Tensor:
        raise OSError("no such file")


class Hidden(Dataset[Tensor]):
    """Samples that are drawn from a generator out of sight, as that of a transform in a closure."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), self.draw(index)])


def draw_numpy(rng: Any) -> float:
    return float(rng.random())


def draw_torch(rng: torch.Generator) -> float:
    return torch.rand(1, generator=rng).item()


def reseed(_worker: int) -> None:
    worker = get_worker_info()
    dataset: Any = worker.dataset  # type: ignore[union-attr]
    dataset = dataset.dataset if isinstance(dataset, Subset) else dataset
    dataset.rng = np.random.default_rng(worker.seed)  # type: ignore[union-attr]


def seed_alike(_worker: int) -> None:
    get_worker_info().dataset.rng = np.random.default_rng(7)  # type: ignore[union-attr]


KINDS = [
    pytest.param(lambda: random.Random(1), draw_numpy, id="random"),
    pytest.param(lambda: np.random.default_rng(1), draw_numpy, id="numpy"),
    pytest.param(lambda: np.random.RandomState(1), lambda rng: float(rng.rand()), id="numpy-legacy"),
    pytest.param(lambda: torch.Generator().manual_seed(1), draw_torch, id="torch"),
]


@pytest.mark.parametrize(("make", "draw"), KINDS)
def test_workers_that_start_with_copies_draw_alike(make, draw):
    dataset = Drawn(make(), draw)
    assert holds_generator(dataset)
    assert workers_draw_alike(DataLoader(dataset, num_workers=2))


def test_workers_that_are_seeded_alike_draw_alike():
    dataset = Drawn(np.random.default_rng(1), draw_numpy)
    assert workers_draw_alike(DataLoader(dataset, num_workers=2, worker_init_fn=seed_alike))


@pytest.mark.parametrize("kind", [Drawn, SeedsEachSample])
def test_workers_that_are_seeded_apart_draw_apart(kind):
    loader = DataLoader(Subset(kind(np.random.default_rng(1), draw_numpy), [3, 1, 0]), worker_init_fn=reseed)
    before = loader.dataset.dataset.rng.bit_generator.state
    assert not workers_draw_alike(loader)
    assert loader.dataset.dataset.rng.bit_generator.state == before


def test_workers_that_are_seeded_apart_in_part_draw_alike():
    assert workers_draw_alike(DataLoader(DrawsTwice(np.random.default_rng(1), draw_numpy), worker_init_fn=reseed))


def test_a_dataset_may_seed_its_workers_itself():
    assert not workers_draw_alike(DataLoader(SeedsInWorkers(random.Random(1), draw_numpy), num_workers=2))


@pytest.mark.parametrize("kind", [Broken, Uncounted])
def test_in_doubt_they_draw_alike(kind):
    loader = DataLoader(kind(random.Random(1), draw_numpy), batch_sampler=[[0]], num_workers=2)
    assert workers_draw_alike(loader)


@pytest.mark.parametrize("held", [random.Random(1), [{"deep": np.random.default_rng(1)}], torch.Generator()])
def test_a_generator_is_found_in_what_a_dataset_is_made_of(held):
    dataset = Drawn(held, draw_numpy)
    dataset.idle = None
    assert holds_generator(dataset)
    dataset.rng = None
    assert not holds_generator(dataset)


def test_a_generator_out_of_sight_shows_in_its_samples():
    rng = np.random.default_rng(1)
    hidden = Hidden(lambda _: rng.random())
    assert not holds_generator(hidden)
    assert draws_itself(hidden)
    before = random.getstate(), torch.get_rng_state()
    seen = [draws_itself(Hidden(draw)) for draw in (float, lambda _: random.random(), lambda _: torch.rand(1).item())]
    assert seen == [False] * 3
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_sample_that_cannot_be_fetched_again_tells_nothing():
    once = iter([1.0])
    assert not draws_itself(Hidden(lambda _: next(once)))


def test_workers_that_draw_alike_out_of_sight_make_the_same_samples():
    rng = np.random.default_rng(1)
    assert workers_draw_alike(DataLoader(Hidden(lambda _: rng.random()), num_workers=2))
    own: dict[int, np.random.Generator] = {}

    def draw(_index: int) -> float:
        worker = get_worker_info()
        number = 0 if worker is None else worker.seed
        return own.setdefault(number, np.random.default_rng(number)).random()

    assert not workers_draw_alike(DataLoader(Hidden(draw), num_workers=2))
