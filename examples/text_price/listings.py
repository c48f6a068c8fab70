"""Listings: a csv file of texts, prices and figures in, batches of piece numbers padded to one length out."""

from __future__ import annotations

import csv
import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from autotune.errors import TargetError
from disk_cache import find_cached
from simulated_listings import write_listings
from word_pieces import PADDING_ID, SPECIAL_PIECES, WordPieces, learn_vocabulary

FILE = "listings.csv"
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 512
LEAST_LISTINGS = 20

_FORMAT_HINT = "a header line with the columns text, price and any columns of numbers, then one listing a line"
# A change of the simulation or of the reading makes files of its own.
_CACHE_VERSION = 2
_MOST_VOCABULARY_TEXTS = 20_000


class Sample(NamedTuple):
    """One listing: piece numbers int64 `[length]`, standardised figures `[features]`, and the log price."""

    token_ids: Tensor
    features: Tensor
    log_price: float


class Batch(NamedTuple):
    """Listings in descending order of length, so that any leading rows are the longest.

    The lengths are plain numbers: whoever cuts the padding off needs no answer of the device.
    """

    token_ids: Tensor
    """int64 `[batch, limit]`, padded with zeros."""
    features: Tensor
    """float32 `[batch, features]`."""
    log_prices: Tensor
    """float32 `[batch]`."""
    lengths: tuple[int, ...]
    """Real tokens of each row."""


@dataclass(frozen=True)
class Listings:
    """Texts with their figures.

    Attributes:
        texts: of the listings.
        features: float32 `[listings, features]`, standardised over the training part.
        log_prices: float32 `[listings]`, natural logarithm.
        columns: names of the features.
    """

    texts: tuple[str, ...]
    features: Tensor
    log_prices: Tensor
    columns: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of listings."""
        return len(self.texts)

    def take(self, chosen: Tensor) -> Listings:
        """Return some of them by their positions, int64 `[chosen]`."""
        texts = tuple(self.texts[index] for index in chosen.tolist())
        return replace(self, texts=texts, features=self.features[chosen], log_prices=self.log_prices[chosen])


class ListingDataset(Dataset[Sample]):
    """Listings as piece numbers.

    A text is split into pieces each time it is asked for, unless `tokens` has them all.
    """

    def __init__(self, listings: Listings, pieces: WordPieces, *, limit: int, tokens: Tokens | None = None) -> None:
        self.listings = listings
        self._pieces = pieces
        self._limit = limit
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self.listings)

    def __getitem__(self, index: int) -> Sample:
        token_ids = (
            torch.tensor(self._pieces.encode(self.listings.texts[index], limit=self._limit))
            if self._tokens is None
            else self._tokens[index]
        )
        return Sample(token_ids, self.listings.features[index], float(self.listings.log_prices[index]))


class Tokens:
    """The piece numbers of many texts, one after the other in int32."""

    def __init__(self, flat: Tensor, ends: Tensor) -> None:
        self.flat = flat
        self.ends = ends

    def __getitem__(self, index: int) -> Tensor:
        """Return those of one text, int64 `[length]`."""
        start = int(self.ends[index - 1]) if index else 0
        return self.flat[start : int(self.ends[index])].long()


def collate(samples: list[Sample], *, limit: int) -> Batch:
    """Return samples as a batch padded to `limit`, the longest first."""
    ordered = sorted(samples, key=lambda sample: -len(sample.token_ids))
    token_ids = torch.full((len(ordered), limit), PADDING_ID)
    for row, sample in enumerate(ordered):
        token_ids[row, : len(sample.token_ids)] = sample.token_ids
    return Batch(
        token_ids,
        torch.stack([sample.features for sample in ordered]),
        torch.tensor([sample.log_price for sample in ordered], dtype=torch.float32),
        tuple(len(sample.token_ids) for sample in ordered),
    )


def load_listings(folder: Path | None, *, simulated: int) -> tuple[Listings, Listings]:
    """Return the listings to train on and those held out, always the same.

    Args:
        folder: holds `listings.csv`; None for simulated listings, which are written to the cache at first use.
        simulated: how many of those.

    Raises:
        TargetError: the folder or the file is missing or cannot be read, or a line cannot be used.
    """
    try:
        path = _find_file(folder, simulated)
        listings = read_listings(path)
    except OSError as reason:
        what = reason.filename or folder or "the cache"
        raise TargetError(f"{what} cannot be read: {reason.strerror}", hint=f"{FILE} has {_FORMAT_HINT}") from None
    # The file's neighbours may be alike: shuffled, both parts are.
    order = torch.randperm(len(listings), generator=torch.Generator().manual_seed(0))
    held_out = min(MOST_HELD_OUT, int(HELD_OUT_SHARE * len(listings)))
    training = order[held_out:]
    listings = replace(listings, features=_standardise(listings.features, training))
    return listings.take(training), listings.take(order[:held_out])


def _find_file(folder: Path | None, simulated: int) -> Path:
    if folder is None:
        name = f"listings-{_CACHE_VERSION}-{simulated}.csv"
        return find_cached(name, lambda temporary: write_listings(temporary, count=simulated))
    if not folder.is_dir():
        raise TargetError(f"there is no folder {str(folder)!r}", hint=f"name one that holds {FILE}: {_FORMAT_HINT}")
    return folder / FILE


def read_listings(path: Path) -> Listings:
    """Return the listings of a csv file, their figures as they stand there.

    Raises:
        OSError: the file cannot be read.
        TargetError: the file is missing, is no UTF-8 or has too few lines, or a line cannot be used.
    """
    if not path.is_file():
        raise TargetError(f"{str(path.parent)!r} has no {FILE}", hint=f"it has {_FORMAT_HINT}")
    texts, log_prices, features = [], [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            columns = _check_header(path, list(reader.fieldnames or []))
            for row in reader:
                where = f"{path.name}, line {reader.line_num}"
                texts.append(_read_text(row, where))
                log_prices.append(math.log(_read_number(row, "price", where)))
                features.append([_read_number(row, name, where) for name in columns])
        except (csv.Error, UnicodeDecodeError) as reason:
            raise TargetError(f"{path.name}, line {reader.line_num + 1}: {reason}", hint=_FORMAT_HINT) from None
    if len(texts) < LEAST_LISTINGS:
        raise TargetError(f"{path} has {len(texts)} listings", hint=f"at least {LEAST_LISTINGS} are needed")
    figures = torch.tensor(features, dtype=torch.float64).reshape(len(texts), len(columns))
    return Listings(tuple(texts), figures, torch.tensor(log_prices, dtype=torch.float32), columns)


def load_pieces(listings: Listings, *, size: int) -> WordPieces:
    """Return the vocabulary of some texts, learned at first use and kept in the cache.

    Args:
        listings: to learn from, the training part.
        size: most pieces in the vocabulary.
    """

    def learn(temporary: Path) -> None:
        pieces = learn_vocabulary(listings.texts[:_MOST_VOCABULARY_TEXTS], size=size)
        temporary.write_text("\n".join(pieces), encoding="utf-8")

    path = find_cached(f"pieces-{_CACHE_VERSION}-{size}-{_digest(listings.texts)}.txt", learn)
    pieces = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if tuple(pieces[: len(SPECIAL_PIECES)]) != SPECIAL_PIECES:
        raise TargetError(f"{path} is damaged", hint="delete it: it is made anew")
    return WordPieces(pieces)


def load_tokens(listings: Listings, pieces: WordPieces, *, limit: int) -> Tokens:
    """Return the piece numbers of all texts, computed at first use and kept in the cache.

    Args:
        listings: whose texts.
        pieces: the vocabulary.
        limit: most tokens of a text.
    """
    name = f"tokens-{_CACHE_VERSION}-{limit}-{_digest((*pieces.pieces, *listings.texts))}.pt"

    def encode(temporary: Path) -> None:
        encoded = [pieces.encode(text, limit=limit) for text in listings.texts]
        flat = torch.tensor([number for ids in encoded for number in ids], dtype=torch.int32)
        torch.save([flat, torch.tensor([len(ids) for ids in encoded]).cumsum(0)], temporary)

    path = find_cached(name, encode)
    try:
        flat, ends = torch.load(path, weights_only=True)
    except Exception:  # a file that is torn, as a machine leaves it that went down, fails in many ways
        flat, ends = torch.load(find_cached(name, encode, anew=True), weights_only=True)
    return Tokens(flat, ends)


def _digest(texts: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()[:16]


def _check_header(path: Path, columns: list[str]) -> tuple[str, ...]:
    """Return the columns of numbers."""
    for needed in ("text", "price"):
        if needed not in columns:
            raise TargetError(f"{path} has no column {needed!r} but {', '.join(columns) or 'none'}", hint=_FORMAT_HINT)
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise TargetError(f"{path} has the column {twice[0]!r} twice", hint="every column once")
    return tuple(name for name in columns if name not in ("text", "price"))


def _read_text(row: dict[str, str], where: str) -> str:
    if None in row or None in row.values():
        raise TargetError(
            f"{where} has more or fewer values than the header", hint='write a "," inside a text in quotes'
        )
    if not row["text"].strip():
        raise TargetError(f"{where} has no text", hint="every listing has one; leave the line out")
    return row["text"]


def _read_number(row: dict[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        hint = "fill in a number, or leave the line out" if row[name].strip() == "" else "write a number such as 12.50"
        raise TargetError(f"{where}: {name} is {row[name]!r}, not a number", hint=hint)
    if name == "price" and value <= 0:
        raise TargetError(f"{where}: price is {row[name]}", hint="a price is greater than 0; leave the line out")
    return value


def _standardise(figures: Tensor, training: Tensor) -> Tensor:
    """Return signed logarithms of figures, which are often skewed, with mean 0 and deviation 1 over a part of them.

    A column that is constant there has no deviation to divide by, and may differ elsewhere: it is only shifted.
    """
    if not figures.shape[1]:
        return figures.float()
    logs = figures.sign() * figures.abs().log1p()
    part = logs[training]
    deviations = part.std(0, correction=0)
    return ((logs - part.mean(0)) / torch.where(deviations > 1e-6, deviations, 1.0)).float()
