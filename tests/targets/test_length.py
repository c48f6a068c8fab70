"""Which words of a command say how long it trains."""

from __future__ import annotations

import pytest

from autotune.targets.source.length import differ_in_length_alone


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train.py --epochs 1000", "train.py --epochs 30"),
        ("train.py --epochs=1000 --lr 0.1", "train.py --epochs=30 --lr 0.1"),
        ("train.py --num-epochs 3", "train.py --num-epochs 5"),
        ("run.py --num_train_epochs 3.0", "run.py --num_train_epochs 5"),
        ("train.py trainer.max_epochs=3", "train.py trainer.max_epochs=5"),
        ("train.py --max_iters=2000", "train.py --max_iters=5000"),
        ("train.py --lr 0.1 --epochs 3", "train.py --lr 0.1"),  # a default is some number of epochs, too
        ("train.py config.py", "train.py config.py --max_iters=600"),
    ],
)
def test_another_number_of_epochs_is_another_length(one: str, other: str) -> None:
    assert differ_in_length_alone(one.split(), other.split())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train.py --epochs 30", "train.py --epochs 30"),  # nothing differs
        ("train.py --epochs 1000", "train.py --epochs 30 --lr 0.2"),
        ("train.py --lr 0.1 --epochs 30", "train.py --lr 0.2 --epochs 30"),
        ("train.py --steps 20", "train.py --steps 30"),  # of a sequence or a schedule, who knows
        ("train.py --epochs all", "train.py --epochs 30"),
        ("train.py --epochs=fast", "train.py --epochs=30"),
        ("train.py epochs 3", "train.py epochs 30"),  # a word of its own
        ("train.py --warmup_epochs 3", "train.py --warmup_epochs 30"),
    ],
)
def test_anything_else_is_another_training(one: str, other: str) -> None:
    assert not differ_in_length_alone(one.split(), other.split())
