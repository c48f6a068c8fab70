"""Train the memory network on students' answers: the same training as a plain loop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from answers import AnswerLog, Answers, load_answers, pad_answers
from autotune.errors import TargetError
from memory_network import CLIP_NORM, LEARNING_RATE, PADDING, SHAPES, Implementation, MemoryNetwork, answer_loss
from ordinal_metrics import evaluate_answers

CHECKPOINT = "knowledge_tracing.pt"


def train_epoch(
    model: nn.Module, batches: Iterable[Answers], optimizer: torch.optim.Optimizer, *, accum: int, device: torch.device
) -> Iterator[Tensor]:
    """Train one epoch, `accum` micro batches per optimizer step; yield the mean loss of each step.

    The micro batches of a step weigh by their answers, so that it is the step of one large batch.
    """
    model.train()
    iterator = iter(batches)
    while window := list(islice(iterator, accum)):
        answers = sum(int((categories != PADDING).sum()) for _, categories in window)
        total = torch.zeros((), device=device)
        for questions, categories in window:
            placed = categories.to(device)
            loss, count = answer_loss(model(questions.to(device), placed), placed)
            share = loss * (count / answers)
            share.backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total


@torch.no_grad()
def validate(model: nn.Module, log: AnswerLog, *, device: torch.device, batch_size: int) -> dict[str, float]:
    """Return the metrics on held-out students."""
    model.eval()
    return evaluate_answers(model, log, device=device, batch_size=batch_size)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with answers.csv (default: simulated answers)")
    parser.add_argument("--size", choices=list(SHAPES), default="cpu")
    parser.add_argument("--implementation", choices=get_args(Implementation), default="sequential")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "accum"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be at least 1")
    return options


def train(options: argparse.Namespace) -> None:
    """Train, print the metrics after each epoch, save.

    Raises:
        TargetError: the answers cannot be read.
    """
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log = load_answers(options.data, options.size)
    model: nn.Module = MemoryNetwork(
        questions=log.questions,
        categories=log.categories,
        shape=SHAPES[options.size],
        implementation=options.implementation,
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loader = DataLoader(log.training, batch_size=options.batch_size, shuffle=True, collate_fn=pad_answers)
    for epoch in range(options.epochs):
        losses = torch.stack(list(train_epoch(model, loader, optimizer, accum=options.accum, device=device)))
        metrics = validate(model, log, device=device, batch_size=4 * options.batch_size)
        print(json.dumps({"epoch": epoch + 1, "loss": float(losses.mean()), **metrics}), flush=True)
        torch.save(model.state_dict(), CHECKPOINT)


def main() -> int:
    """Return the exit code of a training by the command line's options."""
    try:
        train(read_options())
    except TargetError as error:
        print(f"train.py: {error.message}; {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
