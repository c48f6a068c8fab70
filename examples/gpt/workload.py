"""A small GPT that learns to write Python, byte by byte, from the standard library's own source.

    *.py of the standard library -> split by file -> training and validation bytes -> windows of 64 -> Transformer

It needs no download, and a step takes a fraction of a second on two CPU cores. The text depends on the Python version
only: files are taken in the order of their hashes, so a bounded part of them is a fair sample of the whole.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from autotune import TrainConfig
from autotune.errors import TargetError

VOCABULARY_SIZE = 256
WINDOW_LENGTH = 64
"""Bytes the model sees at once."""
WIDTH, HEADS, DEPTH = 256, 4, 2

# 32,768 windows: an epoch is 1,024 steps at the baseline's batch size.
_TRAIN_BYTES = 32_768 * WINDOW_LENGTH + 1
_VALIDATION_BYTES = 2**20
_LEAST_BYTES = 2**14
_VALIDATION_SHARE = 0.1
_EVALUATED_WINDOWS = 512
_LEARNING_RATE, _FINAL_FRACTION, _WARMUP_STEPS = 1e-3, 0.1, 50

# Third-party packages, tests, and files that are tables rather than programs.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)


class GptWorkload:
    """A byte-level language model of Python source, with the plain settings of a first training script.

    Attributes:
        baseline: batches of 32, everything else PyTorch's default.
        metric: bits per byte on files the model was not trained on; 8 is knowing nothing.
        gradient_clip_norm: largest gradient norm.
    """

    baseline = TrainConfig(micro_batch_size=32)
    metric = ("bits_per_byte", "minimize")
    gradient_clip_norm = 1.0

    def __init__(self, folder: Path | None = None) -> None:
        """Remember where the source is; nothing is read yet.

        Args:
            folder: holds the `*.py` files to learn; None for the standard library.
        """
        self._folder = folder

    def build_model(self) -> nn.Module:
        """Return a freshly initialised model."""
        return ByteGPT()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW; matrices decay, biases and normalisation weights do not."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return AdamW(groups, lr=_LEARNING_RATE, betas=(0.9, 0.95))

    def build_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Return a linear warm-up and a cosine decay over the first epoch."""
        total = len(self.train_dataset()) // self.baseline.effective_batch_size
        return LambdaLR(optimizer, functools.partial(learning_rate_factor, total_steps=total))

    def train_dataset(self) -> ByteWindows:
        """Return the training windows.

        Raises:
            TargetError: this Python has no source text of its standard library.
        """
        return ByteWindows(self._read_corpus().train)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        tokens, targets = batch
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        """Return the mean cross-entropy in bits per byte over a fixed sample of the validation windows."""
        windows = ByteWindows(self._read_corpus().validation)
        # Evenly spaced, so that every validation file has its share in a bounded time.
        chosen = range(0, len(windows), -(-len(windows) // _EVALUATED_WINDOWS))
        # The training's batch size: a compiled model then meets no new shape.
        size = self.baseline.micro_batch_size
        nats = 0.0
        for first in range(0, len(chosen), size):
            samples = [windows[index] for index in chosen[first : first + size]]
            tokens, targets = (torch.stack(part).to(device) for part in zip(*samples, strict=True))
            nats += float(self.compute_loss(model, (tokens, targets))) * len(samples)
        return nats / len(chosen) / math.log(2)

    def _read_corpus(self) -> Corpus:
        return read_corpus(self._folder or Path(sysconfig.get_paths()["stdlib"]))


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of a text; a sample is `(bytes, the bytes one further on)`, each int64 `[WINDOW_LENGTH]`."""

    def __init__(self, text: Tensor) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // WINDOW_LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        first = index * WINDOW_LENGTH
        window = self._text[first : first + WINDOW_LENGTH + 1].long()
        return window[:-1], window[1:]


class ByteGPT(nn.Module):
    """A pre-norm decoder-only Transformer over bytes: int64 `[batch, time]` -> logits `[batch, time, 256]`."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, WIDTH)
        self.position_embedding = nn.Embedding(WINDOW_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY_SIZE, bias=False)
        self._initialise_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte at every position."""
        hidden = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _initialise_weights(self) -> None:
        # GPT-2's: the layers that write to the residual stream start smaller, so that its variance does not grow.
        residual_std = 0.02 / math.sqrt(2 * DEPTH)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim >= 2:
                writes_to_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_to_residual else 0.02)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the residual stream `[batch, time, width]` with this block's part added."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        expanded: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + expanded

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention_in(hidden).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.attention_out(attended.transpose(1, 2).flatten(2))
        return projected


def learning_rate_factor(step: int, *, total_steps: int) -> float:
    """Return the share of the peak learning rate at an optimizer step: up linearly, down along a cosine, then flat."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    progress = min(1.0, (step - _WARMUP_STEPS) / max(1, total_steps - _WARMUP_STEPS))
    return _FINAL_FRACTION + (1 - _FINAL_FRACTION) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Corpus:
    """The text that is learned.

    Attributes:
        train: uint8 `[bytes]`, files joined by a zero byte.
        validation: the same, of other files.
    """

    train: Tensor
    validation: Tensor


@functools.cache
def read_corpus(folder: Path) -> Corpus:
    """Return the Python source below a folder, split by file; read once per process.

    Raises:
        TargetError: there is too little of it, or a file cannot be read.
    """
    train, validation = split_files(folder)
    return Corpus(
        train=_join_files(train, folder=folder, most_bytes=_TRAIN_BYTES),
        validation=_join_files(validation, folder=folder, most_bytes=_VALIDATION_BYTES),
    )


def split_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the training and the validation files below a folder, each in the order of their paths' hashes."""
    hashed = sorted((hashlib.sha256(path.as_posix().encode()).digest(), path) for path in _find_sources(folder))
    bound = round(_VALIDATION_SHARE * 2**16)
    is_held_out = [int.from_bytes(digest[-2:], "big") < bound for digest, _ in hashed]
    train = [folder / path for (_, path), held_out in zip(hashed, is_held_out, strict=True) if not held_out]
    validation = [folder / path for (_, path), held_out in zip(hashed, is_held_out, strict=True) if held_out]
    return train, validation


def _find_sources(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in files:
            path = Path(parent, name)
            # Distributions put links to files in there, some to nowhere.
            if name.endswith(".py") and path.is_file():
                yield path.relative_to(folder)


def _join_files(paths: list[Path], *, folder: Path, most_bytes: int) -> Tensor:
    text = bytearray()
    for path in paths:
        if len(text) >= most_bytes:
            break
        try:
            text += path.read_bytes() + b"\0"
        except OSError as reason:
            raise TargetError(
                f"the GPT example cannot read {path}: {reason.strerror or reason}",
                hint="make it readable, or give GptWorkload a folder of *.py files",
            ) from None
    if len(text) < _LEAST_BYTES:
        raise TargetError(
            f"the GPT example learns Python's own source text and found too little of it in {folder}",
            hint="use a Python that comes with its *.py files, or give GptWorkload a folder of them",
        )
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8)


workload = GptWorkload()
