"""Windows that come from no loader: what is looked at is not handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.engine.windows import GivenWindows, ResidentWindows, Window, Windows


def window(*values: float) -> Window:
    return Window([torch.tensor([value]) for value in values], [1] * len(values), ends_epoch=False)


def test_a_look_at_given_windows_takes_none_away() -> None:
    windows = GivenWindows([window(1.0, 2.0), window(3.0)])
    assert windows.peek() == windows.peek() == torch.tensor([1.0])
    assert windows.next_window().batches == [torch.tensor([1.0]), torch.tensor([2.0])]
    assert windows.peek() == torch.tensor([3.0])
    assert windows.next_window().batches == [torch.tensor([3.0])]
    assert windows.peek() is None


def test_a_look_at_a_resident_window_is_at_the_placed_batch() -> None:
    windows = ResidentWindows(window(1.0), [torch.tensor([2.0])])
    assert windows.peek() == windows.next_window().batches[0] == torch.tensor([2.0])


class Stream(IterableDataset[int]):
    """Ten numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("collate", "counts"),
    [
        (torch.tensor, [[4], [4], [2]]),
        (lambda samples: tuple(torch.zeros(3) for _ in samples), [[4], [4], [4]]),  # of the first one's channels
        (lambda samples: object(), [[4], [4], [4]]),
    ],
)
def test_what_no_sampler_counts_is_counted_by_the_batch_where_its_first_one_is_as_long_as_the_loaders(
    collate: Callable[[list[int]], Any], counts: list[list[int]]
) -> None:
    windows = Windows(DataLoader(Stream(), batch_size=4, collate_fn=collate), None, 1)
    assert [windows.next_window().counts for _ in range(3)] == counts
