"""The training's parts that script and workload share: sizes, data, loss, optimizer, schedule, metric."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from autotune.errors import TargetError
from listings import Batch, ListingDataset, Listings, collate, load_listings, load_pieces, load_tokens
from price_encoder import EncoderKind, EncoderShape, PriceModel, build_encoder, has_transformers
from word_pieces import WordPieces

Padding = Literal["max-length", "longest", "grouped"]

EPOCHS = 20
"""The learning rate falls over so many, however long a training takes."""
WEIGHT_DECAY = 0.01
WARM_UP_STEPS = 20
FINAL_LEARNING_RATE_SHARE = 0.1
CLIP_NORM = 1.0
LOSS_BEND = 0.5
"""Of the log price: errors beyond it count linearly, so that a listing that is priced absurdly cannot rule a batch."""


@dataclass(frozen=True)
class Size:
    """How large a training is.

    Attributes:
        simulated: listings, where none are given.
        vocabulary: most pieces.
        limit: tokens of a text; what is longer is cut.
        layers: transformer blocks of the encoder.
        width: of a token's vector.
        heads: of the attention.
        learning_rate: of AdamW.
    """

    simulated: int
    vocabulary: int
    limit: int
    layers: int
    width: int
    heads: int
    learning_rate: float


SIZES = {
    "cpu": Size(simulated=4608, vocabulary=2000, limit=192, layers=4, width=160, heads=4, learning_rate=5e-4),
    "gpu": Size(simulated=24_000, vocabulary=8000, limit=384, layers=12, width=768, heads=12, learning_rate=1e-4),
}


class PriceData:
    """Listings read once and their vocabulary, as both kinds of training take them.

    Args:
        folder: holds the user's `listings.csv`; None for simulated listings.
        size: of the training.
    """

    def __init__(self, folder: Path | None, size: Size) -> None:
        self.folder = folder
        self.size = size

    @cached_property
    def parts(self) -> tuple[Listings, Listings]:
        """The listings to train on and those held out."""
        return load_listings(self.folder, simulated=self.size.simulated)

    @cached_property
    def pieces(self) -> WordPieces:
        """The vocabulary of the training part."""
        return load_pieces(self.parts[0], size=self.size.vocabulary)

    def training_set(self, *, cached: bool) -> ListingDataset:
        """Return the listings to train on, split into pieces once and for all or at every access."""
        listings, _ = self.parts
        tokens = load_tokens(listings, self.pieces, limit=self.size.limit) if cached else None
        return ListingDataset(listings, self.pieces, limit=self.size.limit, tokens=tokens)

    @cached_property
    def held_out(self) -> ListingDataset:
        """The held-out listings; they are split into pieces once in any case."""
        _, listings = self.parts
        tokens = load_tokens(listings, self.pieces, limit=self.size.limit)
        return ListingDataset(listings, self.pieces, limit=self.size.limit, tokens=tokens)

    def build_model(self, kind: EncoderKind) -> PriceModel:
        """Return a freshly initialised model."""
        size, (listings, _) = self.size, self.parts
        shape = EncoderShape(len(self.pieces), size.limit, size.layers, size.width, size.heads)
        return PriceModel(
            build_encoder(kind, shape),
            features=len(listings.columns),
            typical_log_price=float(listings.log_prices.median()),
        )


def choose_size(name: str, *, asked_by: str) -> Size:
    """Return a size by its name.

    Raises:
        TargetError: there is none of that name.
    """
    if name not in SIZES:
        raise TargetError(f"{asked_by} is {name!r}", hint=f"it is one of {', '.join(SIZES)}")
    return SIZES[name]


def choose_encoder(name: str | None, size: Size, *, asked_by: str) -> EncoderKind:
    """Return which encoder is meant; by default that of transformers for the large size, where it is installed.

    Importing an encoder of transformers takes as long as importing torch once more, at every start of a process.

    Raises:
        TargetError: there is none of that name.
    """
    kinds: dict[str | None, EncoderKind] = {"own": "own", "huggingface": "huggingface"}
    if name in kinds:
        return kinds[name]
    if name:
        raise TargetError(f"{asked_by} is {name!r}", hint="it is one of own, huggingface")
    return "huggingface" if size == SIZES["gpu"] and has_transformers() else "own"


def price_loss(model: nn.Module, batch: Batch, padding: Padding = "max-length") -> Tensor:
    """Return the mean smooth L1 error of the log prices.

    Args:
        model: takes token_ids and features.
        batch: its padding is masked out by the model, so cutting it off changes a result by rounding alone.
        padding: what is computed on: the batch as it is, cut to its longest text, or in groups of similar length.
    """
    count = len(batch.lengths)
    total = torch.zeros((), device=batch.token_ids.device)
    for rows in cut_rows(batch.lengths, padding):
        length = batch.token_ids.shape[1] if padding == "max-length" else batch.lengths[rows.start]
        predicted = model(batch.token_ids[rows, :length], batch.features[rows])
        errors = F.smooth_l1_loss(predicted.float(), batch.log_prices[rows], beta=LOSS_BEND, reduction="sum")
        total = total + errors / count
    return total


def cut_rows(lengths: tuple[int, ...], padding: Padding) -> Iterator[slice]:
    """Yield the rows that are computed together; in a group the longest text is less than twice the shortest.

    Args:
        lengths: of the texts, in descending order.
        padding: all rows are one group unless it is `grouped`.
    """
    start = 0
    for row, length in enumerate(lengths):
        if padding == "grouped" and 2 * length <= lengths[start]:
            yield slice(start, row)
            start = row
    yield slice(start, len(lengths))


def evaluate_smape(model: nn.Module, held_out: ListingDataset, device: torch.device, *, batch_size: int) -> float:
    """Return the SMAPE in per cent of a model in evaluation mode."""
    # From the longest to the shortest: a batch then has hardly any padding.
    samples = sorted((held_out[index] for index in range(len(held_out))), key=lambda sample: -len(sample.token_ids))
    predicted, log_prices = [], []
    with torch.no_grad():
        for start in range(0, len(samples), batch_size):
            batch = collate(samples[start : start + batch_size], limit=len(samples[start].token_ids))
            predicted.append(model(batch.token_ids.to(device), batch.features.to(device)).float().cpu())
            log_prices.append(batch.log_prices)
    return smape(torch.cat(predicted).exp(), torch.cat(log_prices).exp())


def smape(predicted: Tensor, actual: Tensor) -> float:
    """Return the symmetric mean absolute percentage error of positive prices: 0 to 200 per cent.

    Source: Makridakis 1993; each error is divided by the mean of both prices.
    """
    return float((200 * (predicted - actual).abs() / (predicted + actual)).double().mean())


def build_optimizer(model: nn.Module, learning_rate: float) -> AdamW:
    """Return AdamW over all parameters."""
    return AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)


def build_scheduler(optimizer: torch.optim.Optimizer, *, steps_per_epoch: int) -> LambdaLR:
    """Return a linear warm-up and a cosine over `EPOCHS` epochs to a tenth, which is kept from then on."""

    def factor(step: int) -> float:
        done = min(1.0, step / (EPOCHS * steps_per_epoch))
        cosine = (1 + math.cos(math.pi * done)) / 2
        fallen = FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine
        return min(1.0, (step + 1) / WARM_UP_STEPS) * fallen

    return LambdaLR(optimizer, factor)
