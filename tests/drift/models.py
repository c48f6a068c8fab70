"""Small models of the kinds that people train: a step takes a few milliseconds on one CPU core."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from synthetic import ANSWERS, CLASSES, FEATURES, PADDED_LENGTH, QUESTIONS, TOKENS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


class ConvNet(nn.Module):
    """Three convolutions, each normalised: `[batch, 3, 16, 16]` -> logits `[batch, 10]`."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        # The convolutions keep their biases, as many hand-written nets do: before a BatchNorm their gradients are zero
        # but for rounding, which is where a comparison of gradients layer by layer goes wrong.
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(width, following, 3, stride=2, padding=1), norm(following), nn.ReLU())
                for width, following in pairwise(widths)
            )
        )
        self.head = nn.Linear(4 * widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images).flatten(1))
        return logits


class Block(nn.Module):
    """Causal attention and a perceptron, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attend(self.attention_norm(hidden)))
        thought: Tensor = self.dropout(self.perceptron(self.perceptron_norm(hidden)))
        return hidden + thought

    def attend(self, hidden: Tensor) -> Tensor:
        parts = self.attention_in(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        dropped = self.dropout.p if self.training else 0.0
        # What pads a sequence stands behind it, where no token looks.
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        mixed: Tensor = self.attention_out(attended.transpose(1, 2).flatten(2))
        return mixed


class CausalTransformer(nn.Module):
    """Two blocks over tokens: int64 `[batch, 40]` -> logits `[batch, 40, 32]`.

    Attributes:
        forgets_masks: compute the blocks again in the backward pass, with dropout masks drawn anew.
    """

    def __init__(self, *, dropout: float = 0.0, forgets_masks: bool = False) -> None:
        super().__init__()
        width = 48
        self.forgets_masks = forgets_masks
        self.token_embedding = nn.Embedding(TOKENS, width)
        self.position_embedding = nn.Embedding(PADDED_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads=4, dropout=dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.forgets_masks and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Regressor(nn.Module):
    """A perceptron: `[batch, 8]` -> `[batch, outputs]`, in the unit of what it predicts."""

    def __init__(self, outputs: int = 1, unit: float = 1.0) -> None:
        super().__init__()
        self.unit = unit
        self.hidden = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, outputs)

    def forward(self, features: Tensor) -> Tensor:
        # In float32: the mistake of the half-precision control is its backward pass, not its predictions.
        predicted: Tensor = self.head(self.hidden(features))
        return self.unit * (predicted if predicted.dtype == torch.float64 else predicted.float())


class KeyValueMemory(nn.Module):
    """Predicts a learner's next answers from a memory of the last: int64 `[batch, time]` twice -> logits over grades.

        question -> key -> which slots     read the slots -> grade     (question, answer) -> what to erase and to add

    Attributes:
        implementation: `sequential`; `hoisted`, which is the same and computes beforehand whatever does not depend on
            the memory; or `parallel`, which reads the initial memory at every position and so forgets all answers.
    """

    def __init__(self, implementation: str = "sequential") -> None:
        super().__init__()
        slots, key_width, width = QUESTIONS, 16, 32
        self.implementation = implementation
        self.question_embedding = nn.Embedding(QUESTIONS, key_width)
        self.answer_embedding = nn.Embedding(QUESTIONS * ANSWERS, width)
        self.slot_keys = nn.Parameter(torch.randn(slots, key_width))
        self.initial_memory = nn.Parameter(0.1 * torch.randn(slots, width))
        self.erase, self.add = nn.Linear(width, width), nn.Linear(width, width)
        self.summary = nn.Linear(width + key_width, 32)
        self.ability = nn.Linear(32, 1)
        self.discrimination = nn.Linear(32, 1)
        self.thresholds = nn.Linear(key_width, ANSWERS - 1)

    def forward(self, questions: Tensor, answers: Tensor) -> Tensor:
        keys = self.question_embedding(questions)
        answered = self.answer_embedding(questions * ANSWERS + answers)
        read = {"sequential": self.read_in_order, "hoisted": self.read_hoisted, "parallel": self.read_at_once}
        return self.grade(read[self.implementation](keys, answered), keys)

    def read_in_order(self, keys: Tensor, answered: Tensor) -> Tensor:
        """Return what is in the memory for each question when it is asked, `[batch, time, width]`."""
        memory = self.initial_memory.expand(len(keys), -1, -1)
        reads = []
        for key, answer in zip(keys.unbind(1), answered.unbind(1), strict=True):
            address = self.find_slots(key).unsqueeze(-1)
            reads.append((address * memory).sum(1))
            memory = self.write(memory, address, self.erase(answer).sigmoid(), self.add(answer).tanh())
        return torch.stack(reads, dim=1)

    def read_hoisted(self, keys: Tensor, answered: Tensor) -> Tensor:
        addresses = self.find_slots(keys).unsqueeze(-1)
        erasing, adding = self.erase(answered).sigmoid(), self.add(answered).tanh()
        memory = self.initial_memory.expand(len(keys), -1, -1)
        reads = []
        steps = zip(addresses.unbind(1), erasing.unbind(1), adding.unbind(1), strict=True)
        for address, erased, added in steps:
            reads.append((address * memory).sum(1))
            memory = self.write(memory, address, erased, added)
        return torch.stack(reads, dim=1)

    def read_at_once(self, keys: Tensor, _answered: Tensor) -> Tensor:
        return self.find_slots(keys) @ self.initial_memory

    def find_slots(self, keys: Tensor) -> Tensor:
        return (keys @ self.slot_keys.T).softmax(dim=-1)

    def write(self, memory: Tensor, address: Tensor, erased: Tensor, added: Tensor) -> Tensor:
        return memory * (1 - address * erased.unsqueeze(1)) + address * added.unsqueeze(1)

    def grade(self, reads: Tensor, keys: Tensor) -> Tensor:
        """Return logits `[batch, time, 4]` of a generalised partial credit model."""
        summary = self.summary(torch.cat([reads, keys], dim=-1)).tanh()
        distance = self.ability(summary) - self.thresholds(keys)
        steps = F.softplus(self.discrimination(summary)) * distance
        return F.pad(steps.cumsum(dim=-1), (1, 0))
