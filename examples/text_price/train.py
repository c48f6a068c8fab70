"""Learn the prices of listings: the same training as a plain loop."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from autotune.errors import TargetError
from listings import Batch, collate
from price_regression import (
    CLIP_NORM,
    EPOCHS,
    SIZES,
    PriceData,
    build_optimizer,
    build_scheduler,
    choose_encoder,
    evaluate_smape,
    price_loss,
)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with listings.csv; left out: simulated listings")
    parser.add_argument("--size", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--encoder", choices=("own", "huggingface"))
    parser.add_argument("--padding", choices=("max-length", "longest", "grouped"), default="max-length")
    parser.add_argument("--feature-cache", choices=("true", "false"), default="false")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"the learning rate falls over the first {EPOCHS}")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1, help="micro batches of an optimizer step")
    parser.add_argument("--lr", type=float, help="left out: the size's own")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def place(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on the device."""
    return Batch(
        batch.token_ids.to(device), batch.features.to(device), batch.log_prices.to(device), tuple(batch.lengths)
    )


def train(options: argparse.Namespace) -> None:
    """Train, print the metric after each epoch and keep the last weights in text_price.pt."""
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES[options.size]
    data = PriceData(options.data, size)
    model = data.build_model(choose_encoder(options.encoder, size, asked_by="--encoder")).to(device)
    loader = DataLoader(
        data.training_set(cached=options.feature_cache == "true"),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        collate_fn=partial(collate, limit=size.limit),
    )
    optimizer = build_optimizer(model, options.lr or size.learning_rate)
    scheduler = build_scheduler(optimizer, steps_per_epoch=-(-len(loader) // options.accum))
    for epoch in range(options.epochs):
        model.train()
        batches = iter(loader)
        while window := list(islice(batches, options.accum)):
            # The last window of an epoch may have fewer batches, and the last batch fewer samples.
            samples = sum(len(batch.lengths) for batch in window)
            for batch in window:
                loss = price_loss(model, place(batch, device), options.padding)
                (loss * (len(batch.lengths) / samples)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        score = evaluate_smape(model, data.held_out, device, batch_size=4 * options.batch_size)
        print(json.dumps({"epoch": epoch + 1, "smape": round(score, 3)}), flush=True)
        torch.save(model.state_dict(), "text_price.pt")


def main() -> None:
    """Train; what cannot be used is said in a line."""
    try:
        train(read_options())
    except TargetError as error:
        print(f"train.py: {error.message}: {error.hint}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
