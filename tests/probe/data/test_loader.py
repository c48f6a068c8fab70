from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from record_factory import make_data
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.probe.data.loader import _find_tail, drain_loader

HANG_SECONDS = 60.0
FACTS = make_data(sample_count=64, seconds_per_sample=0.0)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int = 64, *, seconds: float = 0.0, fails_at: int = -1) -> None:
        self.count, self.seconds, self.fails_at = count, seconds, fails_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.fails_at:
            raise RuntimeError("a broken sample")
        if self.seconds:
            time.sleep(self.seconds)
        return torch.zeros(16), torch.zeros((), dtype=torch.long)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(4)


def load(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"batch_size": 4, **options})


def test_a_batch_is_weighed_and_timed() -> None:
    times = drain_loader(load(Rows(seconds=0.002)), budget_seconds=5.0)
    assert times is not None
    assert times.batch_bytes == 4 * (16 * 4 + 8)
    assert times.seconds_per_batch is not None
    assert 0.008 <= times.seconds_per_batch < 0.2
    assert times.worker_bytes is None


class Texts(Rows):
    """Rows that are of another length in each batch."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(8 + index // 4), torch.zeros((), dtype=torch.long)


@pytest.mark.parametrize(("dataset", "shapes"), [(Rows(64), 1), (Rows(22), 2), (Texts(64), 16), (Texts(400), 16)])
def test_different_shapes_are_counted(dataset: Rows, shapes: int) -> None:
    times = drain_loader(load(dataset), budget_seconds=5.0)
    assert times is not None
    assert times.batch_shapes == shapes
    assert times.add_to(FACTS, 1.0).batch_shapes == shapes


def test_what_a_collator_hands_out_may_be_a_mapping_of_its_own() -> None:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> UserDict[str, Tensor]:
        return UserDict(ids=torch.stack([ids for ids, _ in rows]))

    times = drain_loader(load(Texts(64), collate_fn=collate), budget_seconds=5.0)
    assert times is not None
    assert times.batch_shapes == 16
    assert times.batch_bytes > 0


def test_workers_are_weighed_and_gone_afterwards() -> None:
    import psutil

    before = {child.pid for child in psutil.Process().children()}
    times = drain_loader(load(Rows(), num_workers=1), budget_seconds=0.2)
    assert times is not None
    assert times.worker_bytes is not None
    assert times.worker_bytes > 2**20
    assert times.epoch_start_seconds > 0
    assert {child.pid for child in psutil.Process().children()} <= before


def test_what_workers_had_ready_is_not_counted() -> None:
    slow = load(Rows(160, seconds=0.005), num_workers=1, prefetch_factor=8)
    times = drain_loader(slow, budget_seconds=20.0)  # its epoch is over before
    assert times is not None
    assert times.seconds_per_batch is not None
    assert times.seconds_per_batch >= 0.015


def test_a_stream_has_no_length_and_is_timed() -> None:
    times = drain_loader(load(Stream()), budget_seconds=5.0)
    assert times is not None
    assert times.seconds_per_batch is not None


def test_an_epoch_of_one_batch_tells_its_start_alone() -> None:
    times = drain_loader(load(Rows(4)), budget_seconds=0.1)
    assert times is not None
    assert times.seconds_per_batch is None
    assert times.add_to(FACTS, 2).loader_seconds_per_step is None


def test_a_step_takes_the_batches_of_its_accumulation() -> None:
    times = drain_loader(load(Rows()), budget_seconds=5.0)
    assert times is not None
    assert times.seconds_per_batch is not None
    assert times.add_to(FACTS, 3).loader_seconds_per_step == pytest.approx(3 * times.seconds_per_batch)


def test_a_loader_that_fails_tells_nothing() -> None:
    assert drain_loader(load(Rows(fails_at=0)), budget_seconds=0.1) is None
    assert drain_loader(load(Rows(0)), budget_seconds=0.1) is None
    assert drain_loader(load(Rows()), budget_seconds=0.0) is None


def test_a_loader_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.probe.data.loader._GRACE", -40.0)  # 1 s in all
    began = time.monotonic()
    assert drain_loader(load(Rows(seconds=HANG_SECONDS)), budget_seconds=0.1) is None
    assert time.monotonic() - began < HANG_SECONDS


def test_tail_is_that_of_rounds_of_all_workers() -> None:
    assert _find_tail([0.0, 1.0] * 40, workers=2) == pytest.approx(1.0)
    assert _find_tail([1.0] * 36 + [4.0] * 4, workers=1) == pytest.approx(4.0)
    assert _find_tail([1.0] * 10, workers=1) is None
    assert _find_tail([], workers=4) is None
    assert _find_tail([0.0] * 40, workers=1) is None
