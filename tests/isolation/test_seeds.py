"""Generators that a script makes without a seed are the same in each launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trial_world import make_spec

from autotune.isolation.runner import TrialRunner

MAKES = """
import random
import tempfile
import numpy as np
from torch.utils.data import DataLoader, Dataset
from autotune.isolation.script_entry import inject_seed

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + np.random.default_rng().random()

inject_seed(1)
made = [random.Random().random(), random.Random(3).random(), np.random.default_rng().random(), np.random.rand()]
made += [np.random.RandomState().rand(), np.random.default_rng().random(), np.random.default_rng(3).random()]
again = random.Random(5)
again.seed()
made.append(again.random())
made += [float(number) for batch in DataLoader(Numbers(), batch_size=2, num_workers=2) for number in batch]
print(made)
print(tempfile.mktemp())
"""


def make_numbers() -> tuple[list[float], str]:
    program = [sys.executable, "-c", MAKES]
    numbers, name = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    return [float(number) for number in numbers.strip("[]").split(",")], name


def test_what_is_made_without_a_seed_is_the_same_in_each_launch() -> None:
    (first, one), (second, other) = make_numbers(), make_numbers()
    assert first == second
    assert one != other  # names of temporary files
    parts = [number % 1 for number in first]
    assert len({*parts}) == len(parts)


def test_trials_of_a_workload_that_draws_without_a_seed_have_the_same_losses(tmp_path: Path) -> None:
    with TrialRunner(tmp_path / "trials") as runner:
        curves = [
            runner(make_spec("draws_without_seed", number=number).replace(seeds=(seed,))).curves
            for number, seed in enumerate((1, 1, 2))
        ]
    losses = [one.losses for (one,) in curves]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
