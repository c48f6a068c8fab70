"""Whether a batch may be split, found with the workload's own loss; and what the probe and the space make of it."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from record_factory import make_hardware, make_spec
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from autotune.drift.compare.additivity import REORDERING_FACTOR, SMALLEST_LIMIT
from autotune.engine.dataloader import find_random_sources
from autotune.engine.loop import Training
from autotune.knobs import Facts
from autotune.probe.additivity import measure_additivity
from autotune.probe.sources.workload import probe_workload
from autotune.records import TargetFacts, TrainConfig
from autotune.records.facts import Additivity
from autotune.space import SPLIT_KNOBS, build_space, numerics_of
from autotune.targets.workload import LoadedWorkload, check_workload

CPU = torch.device("cpu")
BATCH = TrainConfig(micro_batch_size=16, num_threads=1)
IGNORED = -100


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(workload: Any) -> LoadedWorkload:
    return check_workload(workload, label="toy.py:workload", fingerprint="0" * 12)


def measure(workload: Any, config: TrainConfig = BATCH) -> Additivity | None:
    sources = find_random_sources(workload.train_dataset(), getattr(workload, "collate", None))
    return measure_additivity(load(workload), config, CPU, seed=0, random_sources=sources)


def found_of(workload: Any, config: TrainConfig = BATCH) -> Additivity:
    found = measure(workload, config)
    assert found is not None
    return found


class Images:
    """Classifies small images; how they are normalised, and what is dropped, can be chosen."""

    baseline = BATCH

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity, *, dropout: float = 0.0, samples: int = 60) -> None:
        self.norm, self.dropout, self.samples = norm, dropout, samples

    def build_model(self) -> nn.Module:
        convolution = nn.Conv2d(3, 8, 3)
        return nn.Sequential(
            convolution, self.norm(), nn.ReLU(), nn.Dropout(self.dropout), nn.Flatten(), nn.Linear(8 * 16, 5)
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(self.samples, 3, 6, 6, generator=generator)
        return TensorDataset(images, torch.randint(5, (self.samples,), generator=generator))

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that every generator has a hand in."""

    def __init__(self, images: Dataset[Any]) -> None:
        self.images = images

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        image = (image + 0.5 * torch.randn(3, 6, 6)) * float(np.random.uniform(0.5, 1.5))
        return (image.flip(-1) if random.random() < 0.5 else image), label


class AugmentedImages(Images):
    def train_dataset(self) -> Dataset[Any]:
        return Augmented(super().train_dataset())


class Contrastive(Images):
    """Tells each image from the others of its batch."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features = F.normalize(model(batch[0]), dim=1)
        others = F.normalize(model(batch[0].flip(-1)), dim=1)
        return F.cross_entropy(features @ others.T / 0.1, torch.arange(len(features)))


class SquareOfTheMean(Images):
    """Is no mean over samples at all."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        return super().compute_loss(model, batch).square()


class Summed(Images):
    """Forgets to divide by the number of samples."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="sum")


class Tokens(Images):
    """Predicts tokens of sequences that are not equally long."""

    counts = True

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, 8), nn.Dropout(self.dropout), nn.Linear(8, 12))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(12, (self.samples, 20), generator=generator)
        lengths = torch.randint(1, 20, (self.samples, 1), generator=generator)
        targets = tokens.roll(-1, dims=1).masked_fill(torch.arange(20) >= lengths, IGNORED)
        return TensorDataset(tokens, targets)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        tokens, targets = batch
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return (loss, (targets != IGNORED).sum()) if self.counts else loss


class UncountedTokens(Tokens):
    counts = False


def group_norm() -> nn.Module:
    return nn.GroupNorm(2, 8)


def batch_norm() -> nn.Module:
    return nn.BatchNorm2d(8)


ADDITIVE: dict[str, Images] = {
    "a mean over samples": Images(),
    "group norm": Images(group_norm),
    "dropout": Images(group_norm, dropout=0.5),
    "random augmentation": AugmentedImages(),
    "random augmentation and dropout": AugmentedImages(dropout=0.3),
    "a mean over tokens with their count": Tokens(),
    "a mean over tokens with their count, and dropout": Tokens(dropout=0.3),
}
NOT_ADDITIVE: dict[str, Images] = {
    "a mean over tokens without their count": UncountedTokens(),
    "batch norm": Images(batch_norm),
    "a loss over pairs": Contrastive(),
    "the square of a mean": SquareOfTheMean(),
    "a sum": Summed(),
}
SHAPES = {
    "whole": BATCH,
    "accumulated": BATCH.replace(micro_batch_size=8, gradient_accumulation_steps=2),
    "sample by sample": BATCH.replace(micro_batch_size=1, gradient_accumulation_steps=16),
    "two": BATCH.replace(micro_batch_size=2),
    "larger than the data": BATCH.replace(micro_batch_size=100),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ADDITIVE)
def test_a_batch_is_its_parts(name: str, shape: str) -> None:
    found = found_of(ADDITIVE[name], SHAPES[shape])
    assert found.holds
    assert found.error < 1e-5
    assert found.limit == SMALLEST_LIMIT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NOT_ADDITIVE)
def test_a_batch_that_is_not_its_parts_is_found_with_the_size_of_the_error(name: str, shape: str) -> None:
    found = found_of(NOT_ADDITIVE[name], SHAPES[shape])
    assert not found.holds
    assert found.error > 0.002
    assert found.reordering < 1e-5


@pytest.mark.parametrize(
    ("micro", "steps", "parts"),
    [(16, 1, 3), (15, 1, 3), (5, 1, 5), (4, 1, 2), (3, 1, 3), (2, 1, 2), (8, 2, 6), (1, 4, 2)],
)
def test_a_batch_is_taken_apart_into_unequal_parts(micro: int, steps: int, parts: int) -> None:
    config = BATCH.replace(micro_batch_size=micro, gradient_accumulation_steps=steps)
    assert found_of(Images(), config).parts == parts


def test_the_error_is_that_of_gradients_computed_by_hand() -> None:
    workload = UncountedTokens()
    training = Training(load(workload), BATCH, device=CPU, seed=0)
    order = [index for batch in training.windows.sampler for index in batch][: 3 * 16]
    samples = [workload.train_dataset()[index] for index in order]

    def gradient_of(batch: list[Any]) -> Tensor:
        tokens, targets = (torch.stack(column) for column in zip(*batch, strict=True))
        loss = workload.compute_loss(training.model, (tokens, targets))
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(training.model.parameters()))])

    differences = sizes = 0.0
    for first in range(0, 48, 16):
        batch = samples[first : first + 16]
        whole = gradient_of(batch)
        parts = sum(len(part) / 16 * gradient_of(part) for part in (batch[:7], batch[7:14], batch[14:]))
        differences += float((parts - whole).square().sum())
        sizes += float(whole.square().sum())
    assert found_of(workload).error == pytest.approx((differences / sizes) ** 0.5, rel=1e-4)


class Cancelling(Images):
    """Neighbours are the same image and nearly cancel each other: what is left of their sum hangs on its order."""

    shuffle = False

    def train_dataset(self) -> Dataset[Any]:
        images, labels = super().train_dataset()[:]  # type: ignore[index]
        signs = torch.tensor([3e4, -3e4 + 1.0]).repeat(len(images))
        return TensorDataset(images.repeat_interleave(2, 0), labels.repeat_interleave(2), signs)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels, signs = batch
        return (signs * F.cross_entropy(model(images), labels, reduction="none")).mean()


def test_what_reordering_alone_does_widens_the_limit() -> None:
    found = found_of(Cancelling())
    assert SMALLEST_LIMIT / REORDERING_FACTOR < found.reordering < 1.0
    assert found.limit == pytest.approx(REORDERING_FACTOR * found.reordering)
    assert found.error > SMALLEST_LIMIT / 10


class NotFinite(Images):
    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        return loss * float("nan") if len(batch[0]) < 16 else loss


def test_parts_without_a_finite_gradient_are_no_parts() -> None:
    found = found_of(NotFinite())
    assert not found.holds
    assert found.error == 1e6


class Stream(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))


class Streamed(Images):
    def train_dataset(self) -> Dataset[Any]:
        return Stream(super().train_dataset())


class NeverSteps(SGD):
    """Looks like an optimizer, and its step is none of torch's."""

    def __getattribute__(self, name: str) -> Any:
        return (lambda: None) if name == "step" else super().__getattribute__(name)


class NotStepped(Images):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return NeverSteps(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(Images(), BATCH.replace(micro_batch_size=1), id="a batch of one sample"),
        pytest.param(Streamed(), BATCH, id="an iterable dataset"),
        pytest.param(NotStepped(), BATCH, id="an optimizer that never steps"),
    ],
)
def test_where_nothing_can_be_compared_there_is_no_answer(workload: Any, config: TrainConfig) -> None:
    assert measure(workload, config) is None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_is_measured_in_full_precision_whatever_the_baselines(precision: Any) -> None:
    exact = found_of(Images())
    cast = found_of(Images(), BATCH.replace(precision=precision, activation_checkpointing="off"))
    assert cast == exact


def test_the_global_generators_and_dropout_are_as_they_were() -> None:
    before = F.dropout
    found_of(AugmentedImages(dropout=0.5))
    assert F.dropout is before


def test_a_data_set_smaller_than_a_part_is_split_all_the_same() -> None:
    assert not found_of(Images(batch_norm, samples=10), BATCH.replace(micro_batch_size=32)).holds


class MaskedPairs(Contrastive):
    """Blanks pixels at random when a batch is put together, so that its parts differ whatever the loss."""

    def collate(self, samples: list[Any]) -> Any:
        images, labels = default_collate(samples)
        return images * (torch.rand(images.shape) > 0.3), labels


def test_what_reordering_alone_does_too_much_of_shows_nothing() -> None:
    found = measure(MaskedPairs())
    assert found is None or not found.holds, found


# What the probe makes of it


def probe(workload: Any) -> TargetFacts:
    limits = {"time_limit_seconds": 6.0, "warmup_cap_seconds": 0.1, "measure_seconds": 0.05, "ceilings_seconds": 0.3}
    spec = make_spec(None, number=0, purpose="probe", device="cpu", **limits)
    result = probe_workload(spec, load(workload), CPU, started=time.monotonic(), keep=lambda _partial: None)
    assert result.facts is not None
    return result.facts


PROBED = {
    "additive": Images(group_norm),
    "pairs": Contrastive(),
    "batch norm": Images(batch_norm),
    "tokens": UncountedTokens(),
}


@functools.cache
def probe_named(name: str) -> TargetFacts:
    return probe(PROBED[name])


of_each = pytest.mark.parametrize("name", PROBED)
in_short = pytest.mark.slow_cases("pairs", "tokens")  # their losses are measured above without a probe


@in_short
@of_each
def test_the_probe_tells_what_a_split_is_on_this_target(name: str) -> None:
    facts = probe_named(name)
    if name == "batch norm":
        assert facts.additivity is None  # known without computing anything
    else:
        assert facts.additivity is not None
        assert facts.additivity.holds is (name == "additive")
    split = facts.baseline.replace(micro_batch_size=8, gradient_accumulation_steps=2)
    expected = "rounding" if name == "additive" else "semantic"
    assert numerics_of(split, facts.baseline, facts.numerics) == expected
    assert {facts.numerics.get(knob) for knob in SPLIT_KNOBS} == {None if name == "additive" else "semantic"}


@in_short
@of_each
def test_the_space_offers_no_split_that_is_another_training_and_says_why(name: str) -> None:
    facts = probe_named(name)
    space = build_space(Facts(target=facts, hardware=make_hardware()))
    reasons = {one.value: one.reason for one in space.ruled_out if one.knob == "micro_batch_size"}
    if name == "additive":
        assert space.choices["micro_batch_size"] == (16, 8, 4, 2, 1)
        assert reasons.keys() == {32, 64}
        return
    assert "micro_batch_size" not in space.choices
    told = "BatchNorm normalises over the micro batch"
    if name != "batch norm":
        assert facts.additivity is not None
        told = f"not that of its parts: {100 * facts.additivity.error:.2g} % (limit 0.01 %)"
    assert {size for size, reason in reasons.items() if told in reason} == {8, 4, 2, 1}


@in_short
@of_each
def test_the_space_offers_every_batch_that_the_user_allows(name: str) -> None:
    space = build_space(Facts(target=probe_named(name), hardware=make_hardware(), allowed=frozenset({"batch"})))
    assert space.choices["micro_batch_size"] == (16, 8, 4, 2, 1, 32, 64)
