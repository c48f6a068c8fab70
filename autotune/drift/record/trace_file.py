"""The file of a fidelity trial: rows of gradients and weight changes, written by the child and read by the parent."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout

TRACE_FILE = "captures.npz"
WEIGHTS_FILE = "weights.pt"

POINTS = ("initial", "later")


@dataclass(frozen=True)
class Point:
    """One point of a training, its weights held.

    Attributes:
        gradients: as the optimizer got them.
        updates: what it changed.
        learning_rates: float64 `[windows, groups]`.
    """

    gradients: GradientRows
    updates: GradientRows
    learning_rates: NDArray[np.float64]


@dataclass(frozen=True)
class GradientTrace:
    """What a fidelity trial wrote down.

    Attributes:
        layers: which columns belong to which parameter.
        points: the initial weights first.
    """

    layers: RowLayout
    points: tuple[Point, ...]


def write_trace(path: Path, captures: GradientTrace) -> None:
    """Write a trial's captures.

    Raises:
        OSError: the folder cannot be written.
    """
    layers = captures.layers
    arrays: dict[str, NDArray[np.generic]] = {
        "names": np.array(layers.names, dtype=np.str_),
        "widths": layers.widths,
        "elements": layers.elements,
    }
    for name, point in zip(POINTS, captures.points, strict=False):
        arrays[f"{name}_keys"] = point.gradients.keys
        arrays[f"{name}_gradients"] = point.gradients.rows
        arrays[f"{name}_updates"] = point.updates.rows
        arrays[f"{name}_rates"] = point.learning_rates
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_trace(path: str | Path) -> GradientTrace | None:
    """Return a trial's captures; None when the file is missing or torn."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names: Sequence[str] = arrays["names"].tolist()
            layers = RowLayout(tuple(names), arrays["widths"], arrays["elements"])
            points = tuple(_read_point(arrays, name) for name in POINTS if f"{name}_keys" in arrays)
    except (OSError, ValueError, LookupError, EOFError, TypeError, AttributeError, RuntimeError, zipfile.BadZipFile):
        return None
    return GradientTrace(layers, points)


def have_captures(path: str | Path | None) -> bool:
    """Return whether a trial's captures are still there."""
    return path is not None and Path(path).exists()


def discard_captures(path: str | Path) -> None:
    """Delete a trial's captures, and the weights beside them: for a large model both are large."""
    for file in (Path(path), Path(path).with_name(WEIGHTS_FILE)):
        file.unlink(missing_ok=True)


def find_weights(path: str | Path | None) -> str | None:
    """Return the file with the weights of the later point that a trial wrote; None when it wrote none."""
    weights = None if path is None else Path(path).with_name(WEIGHTS_FILE)
    return str(weights) if weights is not None and weights.exists() else None


def _read_point(arrays: np.lib.npyio.NpzFile, name: str) -> Point:
    keys = arrays[f"{name}_keys"]
    return Point(
        gradients=GradientRows(keys, arrays[f"{name}_gradients"]),
        updates=GradientRows(keys, arrays[f"{name}_updates"]),
        learning_rates=arrays[f"{name}_rates"],
    )
