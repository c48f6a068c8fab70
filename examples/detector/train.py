"""Learn to find banknotes: the same training as a plain loop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from autotune.errors import TargetError
from banknotes import Banknotes, Batch, collate_banknotes
from detector_training import (
    SIZES,
    build_detector,
    build_optimizer,
    build_scheduler,
    compute_batch_loss,
    evaluate_detector,
    find_banknotes,
)

CHECKPOINT = "detector.pt"


def main() -> None:
    """Train, print the metrics of each epoch as a line of JSON, and save."""
    options = parse_options()
    size = SIZES[options.size]
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        data = find_banknotes(options.data, size)
        model = build_detector(size, num_classes=len(data.class_names)).to(device)
        optimizer = build_optimizer(model, learning_rate=options.lr or size.learning_rate)
        scheduler = build_scheduler(optimizer)
        loader = open_loader(data, options.batch_size or size.batch_size, workers=options.workers)
        for epoch in range(1, options.epochs + 1):
            loss = train_epoch(model, loader, optimizer, scheduler, accum=options.accum)
            print(json.dumps({"epoch": epoch, "train_loss": loss, "map50": validate(model, data, device)}), flush=True)
            torch.save(model.state_dict(), CHECKPOINT)
    except TargetError as reason:
        print(f"error: {describe_error(reason)}", file=sys.stderr)
        sys.exit(2)


def describe_error(error: TargetError) -> str:
    """Return an error as one line; with that of a loader's worker comes the worker's traceback, the reason last."""
    line = error.message.strip().splitlines()[-1].removeprefix(f"{TargetError.__module__}.{TargetError.__name__}: ")
    return f"{line} ({error.hint})" if error.hint else line


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with photographs in YOLO's format (default: drawn pictures)")
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--epochs", type=_positive, default=20)
    parser.add_argument("--batch-size", type=_positive, help="images in a forward pass (default: 4, 16 with gpu)")
    parser.add_argument("--accum", type=_positive, default=1, help="forward passes per optimizer step")
    parser.add_argument("--lr", type=float, help="learning rate after the warm-up")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def open_loader(data: Banknotes, batch_size: int, *, workers: int) -> DataLoader[Batch]:
    """Return the training batches in random order."""
    return DataLoader(
        data.train,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        collate_fn=collate_banknotes,
    )


def train_epoch(
    model: nn.Module,
    loader: DataLoader[Batch],
    optimizer: Optimizer,
    scheduler: LRScheduler,
    *,
    accum: int,
) -> float:
    """Train one epoch and return its mean loss; `accum` batches make one optimizer step.

    What is left at the end of the epoch and makes no whole step is dropped.
    """
    model.train()
    batches = iter(loader)
    losses: list[Tensor] = []
    while len(window := list(islice(batches, accum))) == accum:
        losses.append(accumulate_gradients(model, window))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if not losses:
        count = len(loader.dataset)  # type: ignore[arg-type]
        raise TargetError(
            f"{count} images make no step of {loader.batch_size} x {accum}",
            hint="choose a smaller --batch-size or --accum",
        )
    return float(torch.stack(losses).mean())


def accumulate_gradients(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Add up the gradients of a step's batches and return the mean loss over all their positive cells."""
    device = next(model.parameters()).device
    losses, counts = [], []
    for batch in batches:
        images, boxes, labels = (tensor.to(device) for tensor in batch)
        loss, count = compute_batch_loss(model, (images, boxes, labels))
        counts.append(count)
        losses.append(loss.detach() * count)
        # How many positive cells a step has is known only at its end: weigh relative to the first, correct afterwards.
        (loss * (count / counts[0])).backward()  # type: ignore[no-untyped-call]
    total = torch.stack(counts).sum()
    if len(batches) > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= counts[0] / total
    return torch.stack(losses).sum() / total


@torch.no_grad()
def validate(model: nn.Module, data: Banknotes, device: torch.device) -> float:
    """Return the mean average precision on the held-out pictures."""
    model.eval()
    return evaluate_detector(model, data.held_out, device=device, batch_size=16)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


if __name__ == "__main__":
    main()
