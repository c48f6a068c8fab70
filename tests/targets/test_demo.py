from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autotune.targets import demo
from autotune.targets.demo import FigureNetwork, learning_rate_factor, workload
from autotune.targets.demo_pictures import FIGURES, PICTURE_SIZE, draw_picture, measure_distance
from autotune.targets.workload import Metric, check_workload

pytestmark = pytest.mark.usefixtures("one_thread")


def draw_batch(first: int, *, size: int = 32) -> tuple[Tensor, Tensor]:
    samples = [workload.train_dataset()[index] for index in range(first, first + size)]
    return torch.stack([picture for picture, _ in samples]), torch.tensor([figure for _, figure in samples])


def test_it_is_a_workload() -> None:
    loaded = check_workload(workload, label="demo", fingerprint="0")
    assert loaded.metrics == (Metric(name="accuracy", direction="maximize"),)
    assert loaded.baseline.effective_batch_size == 32
    assert loaded.baseline.num_workers == 0
    assert loaded.gradient_clip_norm == 1.0
    assert loaded.drop_last


@pytest.mark.parametrize("figure", FIGURES)
def test_a_picture_is_normalised_float32(figure: str) -> None:
    picture = draw_picture(figure, np.random.default_rng(3))
    assert picture.shape == (3, PICTURE_SIZE, PICTURE_SIZE)
    assert picture.dtype == np.float32
    assert abs(picture.mean()) < 1e-3
    assert picture.std() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("figure", FIGURES)
def test_the_figure_is_darker_than_its_ground(figure: str) -> None:
    pictures = np.stack([draw_picture(figure, np.random.default_rng(seed)) for seed in range(24)])
    border = np.concatenate([pictures[:, :, :3].ravel(), pictures[:, :, -3:].ravel()]).mean()
    assert np.percentile(pictures, 5) < border - 1


def test_no_two_figures_are_alike() -> None:
    axis = np.linspace(-1, 1, 64, dtype=np.float32)
    x, y = np.meshgrid(axis, axis)
    inside = [measure_distance(figure, x, y) < 0 for figure in FIGURES]
    assert all(0.1 < part.mean() < 0.9 for part in inside)
    assert all((inside[i] != inside[k]).mean() > 0.04 for i in range(8) for k in range(i))


def test_a_sample_draws_from_torch_only() -> None:
    dataset = workload.train_dataset()
    states = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    dataset[0]
    assert not torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (str(np.random.get_state(legacy=False)), random.getstate())


def test_pictures_are_new_each_time_and_repeat_with_the_seed() -> None:
    dataset = workload.train_dataset()
    torch.manual_seed(5)
    one, two = dataset[3][0], dataset[3][0]
    torch.manual_seed(5)
    assert torch.equal(one, dataset[3][0])
    assert not torch.equal(one, two)
    assert dataset[3][1] == 3 == dataset[11][1]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_picture_is_the_same_whatever_the_number_of_threads() -> None:
    one = draw_picture("flower", np.random.default_rng(1))
    torch.set_num_threads(3)
    assert np.array_equal(one, draw_picture("flower", np.random.default_rng(1)))


def test_plain_workers_draw_different_pictures() -> None:
    torch.manual_seed(0)
    loader = DataLoader(workload.train_dataset(), batch_size=1, sampler=[0, 8], num_workers=2)
    first, second = (picture for picture, _ in loader)
    assert not torch.equal(first, second)


def test_it_can_be_sent_to_another_process() -> None:
    torch.manual_seed(1)
    expected = workload.train_dataset()[5][0]
    torch.manual_seed(1)
    assert torch.equal(pickle.loads(pickle.dumps(workload)).train_dataset()[5][0], expected)


def test_held_out_pictures_are_fixed_and_draw_no_random_numbers() -> None:
    before = torch.get_rng_state()
    pictures, figures = demo.draw_held_out()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert torch.equal(pictures, demo.draw_held_out.__wrapped__()[0])
    assert figures.bincount(minlength=len(FIGURES)).tolist() == [len(figures) // len(FIGURES)] * len(FIGURES)


def test_weights_come_from_the_global_generator() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(workload.build_model().state_dict()["head.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    factors = [learning_rate_factor(step, total_steps=1000) for step in range(1200)]
    peak = factors.index(1.0)
    assert 0 < factors[0] <= 0.05
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak + 1 :] == sorted(factors[peak + 1 :], reverse=True)
    assert factors[1000] == factors[-1] == 0


def test_the_schedule_lasts_one_epoch_of_optimizer_steps() -> None:
    scheduler = workload.build_scheduler(workload.build_optimizer(FigureNetwork()))
    steps = len(workload.train_dataset()) // 32
    assert scheduler.lr_lambdas[0](steps) == 0
    assert scheduler.lr_lambdas[0](steps // 2) > 0.4


@pytest.mark.slow
def test_it_learns() -> None:
    torch.manual_seed(0)
    model = workload.build_model()
    with torch.no_grad():
        assert workload.evaluate(model.eval(), torch.device("cpu")) < 0.3
    optimizer = workload.build_optimizer(model.train())
    losses = []
    for step in range(70):
        loss = workload.compute_loss(model, draw_batch(32 * step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.3, abs=0.6)
    assert sum(losses[-5:]) / 5 < 0.4 * losses[0]
    with torch.no_grad():
        assert workload.evaluate(model.eval(), torch.device("cpu")) > 0.6
