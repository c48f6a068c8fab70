"""Data made from a seed: classes of images, ragged sequences of tokens, points of a function, histories of learners.

No number of samples is a multiple of 16, the batch size everywhere here, so that every epoch ends in a short batch.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, get_worker_info

CLASSES = 10
IMAGE_SHAPE = (3, 16, 16)
TOKENS = 32
PADDED_LENGTH = 40
IGNORED = -100
QUESTIONS, ANSWERS, HISTORY_LENGTH = 8, 4, 32
FEATURES = 8

_SAMPLES = 1000


@functools.cache
def images() -> TensorDataset:
    """Return noisy pictures of ten classes, one in ten with a random label: `([3, 16, 16], class)`."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, *IMAGE_SHAPE, generator=generator)
    shown = torch.randint(CLASSES, (_SAMPLES,), generator=generator)
    noise = torch.randn(_SAMPLES, *IMAGE_SHAPE, generator=generator)
    mislabelled = torch.rand(_SAMPLES, generator=generator) < 0.1
    labels = torch.where(mislabelled, torch.randint(CLASSES, (_SAMPLES,), generator=generator), shown)
    return TensorDataset(0.25 * patterns[shown] + noise, labels)


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """The same pictures, with noise by torch, a brightness by numpy and a flip by random in each visit."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = images()[index]
        image = (image + 0.1 * torch.randn(IMAGE_SHAPE)) * float(np.random.uniform(0.8, 1.2))
        return (image.flip(-2) if random.random() < 0.1 else image), label


class NoiseOfWorker(Dataset[tuple[Tensor, Tensor]]):
    """The same pictures, with noise from a generator that each loading process makes for itself."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._generator is None:
            worker = get_worker_info()
            self._generator = torch.Generator().manual_seed(0 if worker is None else worker.seed)
        image, label = images()[index]
        return image + 0.1 * torch.randn(IMAGE_SHAPE, generator=self._generator), label


@functools.cache
def ragged_sequences() -> TensorDataset:
    """Return sequences of a random grammar: `(tokens, next tokens)`, each int64 `[40]`; the padding is ignored.

    Three of four are a few tokens long, the others ten times that: a mean over sequences is not one over tokens.
    """
    generator = torch.Generator().manual_seed(2)
    short = torch.randint(3, 7, (_SAMPLES,), generator=generator)
    long = torch.randint(30, PADDED_LENGTH + 1, (_SAMPLES,), generator=generator)
    lengths = torch.where(torch.rand(_SAMPLES, generator=generator) < 0.75, short, long)
    walks = _random_walks(generator)
    is_padding = torch.arange(PADDED_LENGTH) >= lengths.unsqueeze(1)
    return TensorDataset(walks[:, :-1].masked_fill(is_padding, 0), walks[:, 1:].masked_fill(is_padding, IGNORED))


def _random_walks(generator: torch.Generator) -> Tensor:
    """Return walks int64 `[samples, 41]` in which every token has four that may follow."""
    followers = torch.randint(TOKENS, (TOKENS, 4), generator=generator)
    walks = torch.randint(TOKENS, (_SAMPLES, PADDED_LENGTH + 1), generator=generator)
    choices = torch.randint(4, (_SAMPLES, PADDED_LENGTH), generator=generator)
    for position in range(PADDED_LENGTH):
        walks[:, position + 1] = followers[walks[:, position], choices[:, position]]
    return walks


@functools.cache
def points(outputs: int = 1, unit: float = 1.0) -> TensorDataset:
    """Return noisy points of a smooth function: `([8], [outputs])`, the outputs about as large as the unit."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(_SAMPLES, FEATURES, generator=generator)
    mixing = torch.randn(FEATURES, outputs, generator=generator) / 2
    noise = torch.randn(_SAMPLES, outputs, generator=generator)
    return TensorDataset(features, unit * (torch.sin(features @ mixing) + 0.2 * noise))


@functools.cache
def learners() -> TensorDataset:
    """Return histories of learners: `(questions, answers)`, each int64 `[32]`; an answer is a grade from 0 to 3."""
    return _answer_questions(_SAMPLES, seed=4)


@functools.cache
def held_out_learners() -> TensorDataset:
    """Return histories of 128 others."""
    return _answer_questions(128, seed=5)


def _answer_questions(count: int, *, seed: int) -> TensorDataset:
    """Return histories of learners.

    A learner has a hidden level per question, which is the grade. Each answer takes it one up, and from the top down to
    0; one in ten draws it anew. So the last answer to a question tells the next one, and all of them in another order
    tell little.
    """
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(QUESTIONS, ANSWERS, generator=torch.Generator().manual_seed(6)) + 0.5

    def draw_levels() -> Tensor:
        return torch.multinomial(chances, count, replacement=True, generator=generator).T

    levels, learner = draw_levels(), torch.arange(count)
    questions = torch.randint(QUESTIONS, (count, HISTORY_LENGTH), generator=generator)
    leaps = torch.rand(count, HISTORY_LENGTH, generator=generator) < 0.1
    answers = torch.empty_like(questions)
    for position in range(HISTORY_LENGTH):
        asked, level = questions[:, position], levels[learner, questions[:, position]]
        answers[:, position] = level
        levels[learner, asked] = torch.where(leaps[:, position], draw_levels()[learner, asked], (level + 1) % ANSWERS)
    return TensorDataset(questions, answers)
