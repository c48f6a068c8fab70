"""Lines that ask for a value are found; those of PyTorch, of an optimizer and of a loader are not the user's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from autotune.probe.step.syncs import SyncFinder

CPU = torch.device("cpu")


def ask(value: torch.Tensor) -> None:
    for _ in range(2):
        float(value)
    if value > 0:
        value.nonzero()


def find_line(text: str) -> str:
    lines, first = inspect.getsourcelines(ask)
    return f"tests/probe/step/test_syncs.py:{first + next(at for at, line in enumerate(lines) if text in line)}"


def test_lines_are_named_the_one_that_asks_most_first() -> None:
    with SyncFinder(CPU) as finder:
        ask(torch.ones(()))
    assert finder.places == (find_line("float(value)"), find_line("if value > 0"), find_line("nonzero()"))


def test_on_a_gpu_a_value_of_the_host_is_none_to_wait_for() -> None:
    with SyncFinder(torch.device("cuda")) as finder:
        ask(torch.ones(()))
    assert finder.places == ()


def test_an_index_of_an_array_is_asked_for_by_the_line_that_uses_it(tmp_path: Path) -> None:
    rows = np.memmap(tmp_path / "rows", dtype=np.uint8, mode="w+", shape=(4,))
    with SyncFinder(CPU) as finder:
        _ = rows[torch.tensor(1) : torch.tensor(2)]
    assert [place.partition(":")[0] for place in finder.places] == ["tests/probe/step/test_syncs.py"]


def test_results_are_those_without_it() -> None:
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(4, 2), torch.randn(3, 4)
    plain = model(batch)
    with SyncFinder(CPU):
        seen = model(batch)
        seen.sum().backward()
    assert torch.equal(plain, seen)
    assert model.weight.grad is not None


def test_an_optimizers_questions_and_a_loaders_are_left_out() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1), foreach=False)
    weight.grad = torch.ones(3)
    loader: Any = DataLoader([torch.ones(()) for _ in range(4)], collate_fn=lambda batch: [float(one) for one in batch])
    with SyncFinder(CPU) as finder:
        optimizer.step()
        list(loader)
    assert finder.places == ()
