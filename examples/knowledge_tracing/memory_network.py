"""A memory that is read and written along a student's answers, and an item-response layer that predicts the next one.

    question ─▶ attention over the key slots ─▶ read ─▶ summary ─▶ ability ───────────────┐
        └──────────────────────────────────────────▶ discrimination, thresholds ──▶ GPCM logits
    question and its answer ─▶ erase and add vectors ─▶ write, at the same attention ─▶ the next read

Sources: Zhang et al. 2017, "Dynamic Key-Value Memory Networks for Knowledge Tracing" (the memory); Yeung 2019,
"Deep-IRT" (ability and difficulty from it); Muraki 1992, "A Generalized Partial Credit Model" (ordered categories).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Implementation = Literal["sequential", "parallel-reads", "wrong-parallel"]

PADDING = -100
"""Category of a step behind the end of a sequence; cross-entropy leaves it out."""

LEARNING_RATE, CLIP_NORM = 1e-2, 1.0
"""Adam's, and the largest gradient norm."""

_KEY_STD, _MEMORY_STD = 0.5, 0.1


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a memory network.

    Attributes:
        slots: of the memory; each is to stand for a concept.
        key_width: of a question's embedding and of a key.
        value_width: of a memory slot and of an answer's embedding.
        summary_width: of the summary that the item-response layer sees.
    """

    slots: int
    key_width: int
    value_width: int
    summary_width: int


SHAPES = {
    "cpu": NetworkShape(slots=16, key_width=32, value_width=32, summary_width=32),
    "gpu": NetworkShape(slots=50, key_width=100, value_width=200, summary_width=100),
}
"""By size of the training."""


class MemoryNetwork(nn.Module):
    """A dynamic key-value memory network with a generalised partial credit head.

    The parameters, their names and their initial values are the same for every implementation:

    - `sequential`: one step after the other, everything inside the loop.
    - `parallel-reads`: the same mathematics; only the memory's recurrence is left in the loop.
    - `wrong-parallel`: all steps at once, each reading the memory as it was before the first answer. A mistake that is
      easily made: the shapes fit and the loss falls, but the model never learns who it has before it.
    """

    def __init__(
        self, *, questions: int, categories: int, shape: NetworkShape, implementation: Implementation = "sequential"
    ) -> None:
        super().__init__()
        self.implementation = implementation
        self.categories = categories
        self.question_vectors = nn.Embedding(questions, shape.key_width)
        self.answer_vectors = nn.Embedding(questions * categories, shape.value_width)
        self.keys = nn.Parameter(_KEY_STD * torch.randn(shape.slots, shape.key_width))
        self.initial_memory = nn.Parameter(_MEMORY_STD * torch.randn(shape.slots, shape.value_width))
        self.erase = nn.Linear(shape.value_width, shape.value_width)
        self.add = nn.Linear(shape.value_width, shape.value_width)
        self.summary = nn.Linear(shape.value_width + shape.key_width, shape.summary_width)
        self.ability = nn.Linear(shape.summary_width, 1)
        self.discrimination = nn.Linear(shape.summary_width + shape.key_width, 1)
        self.thresholds = nn.Linear(shape.key_width, categories - 1)

    def forward(self, questions: Tensor, categories: Tensor) -> Tensor:
        """Return the logits of each answer, given the answers before it.

        Args:
            questions: int64 `[batch, steps]`.
            categories: int64 `[batch, steps]`; `PADDING` behind the end of a sequence.

        Returns:
            float `[batch, steps, categories]`; those of step t are from the questions up to t and the answers before.
        """
        answers = questions * self.categories + categories.clamp(min=0)
        if self.implementation == "sequential":
            return self._run_sequential(questions, answers)
        vectors = self.question_vectors(questions)
        weights = self._attend(vectors)
        if self.implementation == "parallel-reads":
            reads = self._read_along(weights, answers)
        else:
            reads = weights @ self.initial_memory
        return self._predict(reads, vectors)

    def _run_sequential(self, questions: Tensor, answers: Tensor) -> Tensor:
        memory = self.initial_memory.expand(len(questions), -1, -1)
        logits = []
        for step in range(questions.shape[1]):
            vectors = self.question_vectors(questions[:, step])
            weights = self._attend(vectors).unsqueeze(-1)
            read = (weights * memory).sum(dim=1)
            logits.append(self._predict(read, vectors))
            erased, added = (change.unsqueeze(1) for change in self._changes(answers[:, step]))
            memory = memory * (1 - weights * erased) + weights * added
        return torch.stack(logits, dim=1)

    def _read_along(self, weights: Tensor, answers: Tensor) -> Tensor:
        """Return what each step reads, `[batch, steps, value_width]`, from attention `[batch, steps, slots]`."""
        memory = self.initial_memory.expand(len(answers), -1, -1)
        erased, added = (change.unsqueeze(2).unbind(1) for change in self._changes(answers))
        columns = weights.unsqueeze(-1).unbind(1)
        reads = []
        for step, weight in enumerate(columns):
            reads.append(weight.transpose(1, 2) @ memory)
            # The same as memory * (1 - weight * erased) + weight * added, in two kernels. The memories of all steps
            # at once, which would leave one kernel in the loop, take longer to write than they save.
            change = torch.addcmul(added[step], erased[step], memory, value=-1)
            memory = torch.addcmul(memory, weight, change)
        return torch.cat(reads, dim=1)

    def _attend(self, vectors: Tensor) -> Tensor:
        """Return how much a question concerns each slot: `[..., key_width]` -> `[..., slots]`, sums to 1."""
        # In the parameters' precision also under autocast: the memory is a sum over many steps.
        return torch.softmax(F.linear(vectors, self.keys).to(self.keys.dtype), dim=-1)

    def _changes(self, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return which share a write erases and what it adds, both `[..., value_width]`."""
        vectors = self.answer_vectors(answers)
        erased, added = torch.sigmoid(self.erase(vectors)), torch.tanh(self.add(vectors))
        return erased.to(self.keys.dtype), added.to(self.keys.dtype)

    def _predict(self, reads: Tensor, vectors: Tensor) -> Tensor:
        summary = torch.tanh(self.summary(torch.cat((reads, vectors), dim=-1)))
        discrimination = F.softplus(self.discrimination(torch.cat((summary, vectors), dim=-1)))
        return gpcm_logits(self.ability(summary), discrimination, self.thresholds(vectors))


def gpcm_logits(ability: Tensor, discrimination: Tensor, thresholds: Tensor) -> Tensor:
    """Return the logits of the generalised partial credit model: category k has the sum over j <= k of a (theta - b_j).

    Args:
        ability: theta, `[..., 1]`.
        discrimination: a > 0, `[..., 1]`.
        thresholds: b, `[..., categories - 1]`: where category j becomes as likely as the one below it.

    Returns:
        `[..., categories]`; the lowest category's are 0. Source: Muraki 1992, equation 5.
    """
    steps = torch.cumsum(discrimination * (ability - thresholds), dim=-1)
    return F.pad(steps, (1, 0))


def answer_loss(logits: Tensor, categories: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats over the real answers, and how many they are.

    Args:
        logits: `[batch, steps, categories]`.
        categories: int64 `[batch, steps]`, `PADDING` where there is no answer.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide.flatten(0, 1), categories.flatten(), ignore_index=PADDING)
    return loss, (categories != PADDING).sum()
