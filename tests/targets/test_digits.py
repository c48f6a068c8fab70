from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotune.errors import TargetError
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload, Metric

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def loaded() -> LoadedWorkload:
    before = list(sys.path)
    found = load_workload("workload.py:workload", folder=FOLDER)
    sys.path[:] = before
    return found


@pytest.fixture(scope="module")
def example(loaded: LoadedWorkload) -> ModuleType:
    return sys.modules[type(loaded.workload).__module__]


@pytest.fixture
def workload(loaded: LoadedWorkload, example: ModuleType) -> Any:
    pytest.importorskip("sklearn")
    return loaded.workload


def test_it_is_a_workload(loaded: LoadedWorkload) -> None:
    assert loaded.metrics == (Metric(name="accuracy", direction="maximize"),)
    assert loaded.baseline.micro_batch_size == 64
    assert loaded.drop_last


def test_held_out_images_are_not_trained_on(workload: Any, example: ModuleType) -> None:
    images, labels = example.load_images()
    assert images.shape == (1797, 1, 8, 8)
    assert 0.0 == images.min() < images.max() == 1.0
    assert len(workload.train_dataset()) == 1797 - 360
    held_out = labels[: example.HELD_OUT_IMAGES]
    assert held_out.bincount(minlength=10).min() >= 20


def test_the_order_is_fixed_and_draws_no_random_numbers(workload: Any, example: ModuleType) -> None:
    before = torch.get_rng_state()
    first = example.load_images.__wrapped__()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert all(torch.equal(a, b) for a, b in zip(first, example.load_images.__wrapped__(), strict=True))


def test_a_sample_draws_from_torch_only(workload: Any) -> None:
    dataset = workload.train_dataset()
    dataset[0]
    torch_state, numpy_state, random_state = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    image, label = dataset[0]
    assert image.shape == (1, 32, 32)
    assert image.dtype == torch.float32
    assert isinstance(label, int)
    assert not torch.equal(torch_state, torch.get_rng_state())
    assert str(numpy_state) == str(np.random.get_state(legacy=False))
    assert random_state == random.getstate()


def test_augmentation_is_new_each_time_and_repeats_with_the_seed(workload: Any) -> None:
    dataset = workload.train_dataset()
    torch.manual_seed(5)
    one, two = dataset[3][0], dataset[3][0]
    torch.manual_seed(5)
    assert torch.equal(one, dataset[3][0])
    assert not torch.equal(one, two)


def test_augmentation_keeps_the_digit_recognisable(
    workload: Any, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "NOISE_STD", 0.0)
    dataset = workload.train_dataset()
    torch.manual_seed(0)
    brightness = torch.stack([dataset[index][0].mean() for index in range(100)])
    plain = example.load_images()[0][360:460].mean(dim=(1, 2, 3))
    torch.testing.assert_close(brightness, plain, rtol=0.25, atol=0.0)


def test_the_schedule_falls_to_zero_and_stays_there(workload: Any, example: ModuleType) -> None:
    optimizer = workload.build_optimizer(nn.Linear(1, 1))
    factor = workload.build_scheduler(optimizer).lr_lambdas[0]
    total = example.EPOCHS * ((1797 - 360) // 64)
    assert factor(0) == 1.0
    assert factor(total // 2) == pytest.approx(0.5, abs=0.01)
    assert factor(total) == factor(2 * total) == pytest.approx(0.0)


def test_it_learns(loaded: LoadedWorkload, workload: Any) -> None:
    torch.manual_seed(0)
    model = workload.build_model()
    with torch.no_grad():
        assert 0.0 <= loaded.evaluate(model.eval(), torch.device("cpu"))["accuracy"] <= 0.35
    model.train()
    optimizer = workload.build_optimizer(model)
    dataset = workload.train_dataset()
    losses = []
    for step in range(30):
        samples = [dataset[(32 * step + k) % len(dataset)] for k in range(32)]
        images, labels = torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
        loss = workload.compute_loss(model, (images, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.3, abs=0.4)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
    with torch.no_grad():
        assert loaded.evaluate(model.eval(), torch.device("cpu"))["accuracy"] > 0.5


def test_missing_scikit_learn_is_said_with_the_command_to_run(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TargetError, match="needs scikit-learn") as caught:
        example.load_images.__wrapped__()
    assert caught.value.hint == "pip install scikit-learn"
