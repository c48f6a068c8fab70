"""Rows of numbers captured window by window: whose they are, which windows two arms share, and whether they are finite.

A window is what one optimizer step trains on. A row holds a sample of the elements of every parameter's gradient, or of
its change; each sampled element weighs as many elements as it stands for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LARGEST_VALUE = 1e100  # its square still fits; beyond, a value is as bad as infinity
_COLUMNS_AT_ONCE = 65536  # bounds the memory for copies in float64


class Block(NamedTuple):
    """Columns of one layer that are handled at once."""

    layer: int
    """Its index."""
    columns: slice
    """Their place in a row."""
    weight: float
    """How many elements of the layer a column stands for."""


@dataclass(frozen=True)
class RowLayout:
    """Which columns of a row belong to which parameter.

    Attributes:
        names: of the parameters.
        widths: sampled elements of each, `[layers]`; columns follow one another in this order.
        elements: elements each really has, `[layers]`; a column weighs elements / width.

    Raises:
        ValueError: lengths that differ, or more elements sampled than there are.
    """

    names: tuple[str, ...]
    widths: NDArray[np.int64]
    elements: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.widths) == len(self.elements):
            raise ValueError(f"{len(self.names)} names, {len(self.widths)} widths and {len(self.elements)} elements")
        if np.any(self.widths < 0) or np.any(self.elements < self.widths):
            raise ValueError("a layer has fewer elements than were sampled of it")

    def split(self) -> Iterator[Block]:
        """Yield all columns in order, each once."""
        start = 0
        for layer, (width, elements) in enumerate(zip(self.widths.tolist(), self.elements.tolist(), strict=True)):
            for first in range(start, start + width, _COLUMNS_AT_ONCE):
                last = min(start + width, first + _COLUMNS_AT_ONCE)
                yield Block(layer, slice(first, last), elements / width)
            start += width


@dataclass(frozen=True)
class GradientRows:
    """One arm at one point of the training.

    Attributes:
        keys: samples seen when each window ended, `[windows]`; they pair the arms.
        rows: gradient, or change of weights, of each window, all at the same weights, `[windows, columns]`.

    Raises:
        ValueError: not one row per key, or a key that occurs twice.
    """

    keys: NDArray[np.int64]
    rows: NDArray[np.floating]

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or len(self.keys) != len(self.rows):
            raise ValueError(f"{len(self.keys)} keys do not fit rows of shape {self.rows.shape}")
        if len(np.unique(self.keys)) != len(self.keys):
            raise ValueError("a window occurs twice in one arm: windows are paired by their key")

    def in_order_of(self, keys: NDArray[np.int64]) -> GradientRows:
        """Return only the windows with these keys, in their order; all of them must be there."""
        if np.array_equal(self.keys, keys):
            return self  # rows can be hundreds of megabytes
        order = np.argsort(self.keys)
        return GradientRows(keys, self.rows[order[np.searchsorted(self.keys, keys, sorter=order)]])


def pair(layers: RowLayout, *arms: GradientRows) -> tuple[GradientRows, ...]:
    """Return the windows that all arms have, by rising key.

    Raises:
        ValueError: an arm's rows do not have the layers' columns.
    """
    columns = int(layers.widths.sum())
    for arm in arms:
        if arm.rows.shape[1] != columns:
            raise ValueError(f"rows have {arm.rows.shape[1]} columns, the layers {columns}")
    keys = functools.reduce(np.intersect1d, (arm.keys for arm in arms))
    return tuple(arm.in_order_of(keys) for arm in arms)


def find_flaw(arm: GradientRows, layers: RowLayout, *, beside: GradientRows | None = None) -> str | None:
    """Return, for people, where a value of an arm is not finite or absurdly large; None when all are fine.

    Args:
        arm: what is looked at.
        layers: its columns.
        beside: the same windows; where its value is no better the arm's does not count.
    """
    for layer, columns, _ in layers.split():
        bad = _is_bad(arm.rows[:, columns])
        if beside is not None:
            bad &= ~_is_bad(beside.rows[:, columns])
        if bad.any():
            window = int(np.flatnonzero(bad.any(axis=1))[0])
            return f"{layers.names[layer]} in {place_of(int(arm.keys[window]))}"
    return None


def place_of(key: int) -> str:
    """Return, for people, which window it is."""
    return f"the window that ends after {key} samples"


def sum_squares(
    rows: NDArray[np.floating], layers: RowLayout, *, minus: NDArray[np.floating] | None = None
) -> NDArray[np.float64]:
    """Return the weighted sums of squares of finite rows, or of their differences, `[layers, windows]`."""
    sums = np.zeros((len(layers.names), len(rows)))
    for layer, columns, weight in layers.split():
        values = rows[:, columns].astype(np.float64)
        if minus is not None:
            values -= minus[:, columns]
        sums[layer] += weight * np.einsum("ij,ij->i", values, values)
    return sums


def _is_bad(rows: NDArray[np.floating]) -> NDArray[np.bool_]:
    largest = min(_LARGEST_VALUE, float(np.finfo(rows.dtype).max))
    is_fine: NDArray[np.bool_] = np.abs(rows) <= largest  # a NaN compares as False
    return ~is_fine
