"""Tell spoofed from bona fide speech: the same training as a plain loop."""

import argparse
import json
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autotune.errors import TargetError
from equal_error_rate import equal_error_rate, score_clips
from se_resnet import ARCHITECTURES, SEResNet, weighted_cross_entropy
from speech import open_clips

CHECKPOINT = "anti_spoofing.pt"


def train_epoch(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    class_weights: tuple[float, float],
    accum: int,
) -> list[float]:
    """Train one epoch and return the mean loss of each optimizer step; `accum` micro batches make one.

    What is left at the end of the epoch and makes no whole step is dropped.
    """
    model.train()
    device = next(model.parameters()).device
    losses: list[Tensor] = []
    for index, (spectrograms, labels) in enumerate(loader):
        loss = weighted_cross_entropy(model(spectrograms.to(device)), labels.to(device), class_weights)
        (loss / accum).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        if (index + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()
    steps = len(losses) // accum
    return torch.stack(losses[: steps * accum]).view(steps, accum).mean(dim=1).tolist() if steps else []


def train(options: argparse.Namespace) -> None:
    """Train, print the validation after each epoch as a line of JSON, and save."""
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    architecture = ARCHITECTURES[options.size]
    training = open_clips(options.data, "train", crop_seconds=architecture.crop_seconds)
    held_out = open_clips(options.data, "dev", crop_seconds=architecture.crop_seconds)
    if len(training) < options.batch_size * options.accum:
        raise TargetError(
            f"{len(training)} training clips make no step of {options.batch_size} x {options.accum}",
            hint="lower --batch-size or --accum, or add clips",
        )
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True, drop_last=True)
    model = SEResNet(architecture).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    class_weights = training.class_weights()
    for epoch in range(options.epochs):
        losses = train_epoch(model, loader, optimizer, class_weights=class_weights, accum=options.accum)
        model.eval()
        with torch.inference_mode():
            scores, labels = score_clips(model, held_out, device=device, batch_size=4 * options.batch_size)
        eer = equal_error_rate(scores, labels)
        print(json.dumps({"epoch": epoch + 1, "loss": sum(losses) / len(losses), "eer": eer}), flush=True)
        torch.save(model.state_dict(), CHECKPOINT)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a countermeasure against spoofed speech.")
    parser.add_argument("--data", help="folder in ASVspoof's layout; default: generated speech")
    parser.add_argument("--size", choices=sorted(ARCHITECTURES), default="cpu")
    parser.add_argument("--epochs", type=count, default=20)
    parser.add_argument("--batch-size", type=count, default=32)
    parser.add_argument("--accum", type=count, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main() -> None:
    """Read the command line and train."""
    try:
        train(read_options())
    except TargetError as error:
        print(f"error: {error.message}: {error.hint}", file=sys.stderr)
        sys.exit(2)


def count(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


if __name__ == "__main__":
    main()
