"""Deep knowledge tracing, one question at a time: a memory network whose loop over time is the bottleneck."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from answers import AnswerSequences, load_answers, pad_answers
from autotune import TrainConfig
from autotune.errors import TargetError
from memory_network import CLIP_NORM, LEARNING_RATE, SHAPES, Implementation, MemoryNetwork, answer_loss
from ordinal_metrics import evaluate_answers


class KnowledgeTracingWorkload:
    """Predicts the category of a student's next answer from the answers before it."""

    baseline = TrainConfig(micro_batch_size=64)
    metrics = {
        "categorical_accuracy": "maximize",
        "ordinal_accuracy": "maximize",
        "kappa": "maximize",
        "mae": "minimize",
    }
    gradient_clip_norm = CLIP_NORM
    collate = staticmethod(pad_answers)
    # Not in knob_numerics: one of them is another model, so trainings and metrics have to judge.
    knobs = {"implementation": ("sequential", "parallel-reads", "wrong-parallel")}
    implementation: Implementation = "sequential"

    def __init__(self, folder: Path | None, size: str) -> None:
        self._folder, self._size = folder, size

    def build_model(self) -> nn.Module:
        log = load_answers(self._folder, self._size)
        return MemoryNetwork(
            questions=log.questions,
            categories=log.categories,
            shape=SHAPES[self._size],
            implementation=self.implementation,
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=LEARNING_RATE)

    def train_dataset(self) -> AnswerSequences:
        return load_answers(self._folder, self._size).training

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        questions, categories = batch
        return answer_loss(model(questions, categories), categories)

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int) -> dict[str, float]:
        log = load_answers(self._folder, self._size)
        return evaluate_answers(model, log, device=device, batch_size=batch_size)


def read_size() -> str:
    """Return the size that the environment asks for.

    Raises:
        TargetError: there is no such size.
    """
    size = os.environ.get("EXAMPLE_SIZE") or "cpu"
    if size not in SHAPES:
        raise TargetError(f"EXAMPLE_SIZE is {size!r}", hint=f"it is one of {', '.join(SHAPES)}")
    return size


def read_folder() -> Path | None:
    """Return the folder of the user's own answers; None to simulate them."""
    folder = os.environ.get("EXAMPLE_DATA")
    return Path(folder) if folder else None


workload = KnowledgeTracingWorkload(read_folder(), read_size())
