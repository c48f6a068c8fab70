"""Windows that come from no loader: what is looked at is not handed out."""

from __future__ import annotations

import torch

from autotune.engine.windows import GivenWindows, ResidentWindows, Window


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
