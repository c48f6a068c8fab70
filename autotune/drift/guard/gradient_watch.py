"""Compares the gradients of single micro batches with the baseline's; a suspicion is settled by many in a row.

    look ── within the limits ──▶ the next look, much later
      └── beyond, and the next two as well, or the 16th look ──▶ a round: 16 micro batches at 16 steps, compared
            round ── fine ──▶ as before      round ── too high, yet not shown ──▶ the same round, twice as long
              └── inferior ──▶ rounds again, until luck is out ──▶ shown

A round errs with at most 5 %, at numerics that are just on the limit. The j-th judgement is believed when r rounds in a
row agree, 0.05^r <= RISK · 6 / (π² j²): the sum over all of them is RISK, so a week of looks errs as seldom as an hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout, sum_squares
from autotune.drift.compare.gradients import (
    BIAS_FAILS,
    LAYER_BIAS_FAILS,
    LAYER_NOISE_FAILS,
    NOISE_FAILS,
    SMALLEST_SHARE,
    compare,
)
from autotune.drift.record.numerics import GradientPair, PairedGradients
from autotune.records.quality import GradientEquivalence

WINDOWS, MOST_WINDOWS = 16, 64
"""Micro batches of a round, at first and where it leaves open what looks bad."""
SUSPICIONS = 3
"""Looks in a row that are beyond a limit before a round is gone through."""
ROUND_EVERY = 16
"""Looks between two rounds without a suspicion: a bias that drowns in one micro batch's noise shows only there."""
RISK = 0.01
"""Of a wrong alarm in a whole training, from all rounds together."""

_ROUND_RISK = 0.05
_HARMLESS = 1.5  # times what a round has shown to be nothing
_BEYOND_ALL = 1e12  # a difference from a gradient that is exactly zero; figures in a file are finite

Figures = dict[str, float]
"""error, scale (signed), layer error, layer scale: of one micro batch."""

_LIMITS: Figures = {
    "error": NOISE_FAILS,
    "scale": BIAS_FAILS,
    "layer_error": LAYER_NOISE_FAILS,
    "layer_scale": LAYER_BIAS_FAILS,
}


class Seen(NamedTuple):
    """What one look has shown."""

    state: Literal["fine", "open", "shown"]
    """fine: within the limits; open: more has to be seen at the next step; shown: not the baseline's."""
    reason: str = ""
    """Why it is shown, part of a sentence."""


class GradientWatch:
    """Takes one micro batch after another.

    Attributes:
        checks: micro batches compared.
        largest_error: largest squared relative difference of one of them; None before the first.
        last: the last comparison over a round; None before the first.
    """

    def __init__(self, gradients: PairedGradients, *, samples_per_step: int, scales_loss: bool) -> None:
        """Prepare to look.

        Args:
            gradients: computes them.
            samples_per_step: of the training, to tell where a micro batch was.
            scales_loss: a loss scaler answers for gradients that overflow.
        """
        names, widths, elements = zip(*gradients.layers, strict=True)
        self._layers = RowLayout(tuple(names), np.array(widths, dtype=np.int64), np.array(elements, dtype=np.int64))
        self._gradients, self._samples_per_step, self._scales_loss = gradients, samples_per_step, scales_loss
        self.checks, self.largest_error = 0, 0.0
        self.last: GradientEquivalence | None = None
        self._limits = dict(_LIMITS)
        self._looks = self._judgements = self._agreeing = 0
        self._size = WINDOWS
        self._rows: list[tuple[int, NDArray[Any], NDArray[Any]]] | None = None
        self._worst: Figures = {}
        self._suspected: set[str] | None = None
        self._is_asked = False

    @property
    def is_in_round(self) -> bool:
        """More has to be seen at once."""
        return self._rows is not None

    def look(self, batch: Any, *, step: int) -> Seen:
        """Compare one micro batch's gradients.

        Raises:
            Exception: what computing them raises.
        """
        pair = self._gradients.compute(batch, repeats=self._is_repeated())
        ours, theirs = (arm.numpy() for arm in pair)
        if not np.isfinite(theirs).all():
            return Seen("fine")  # it is the data or the weights, and the loss will tell
        if not np.isfinite(ours).all():
            if self._scales_loss:
                return Seen("fine")
            return Seen("shown", "a gradient is not finite, and the baseline's is")
        self.checks += 1
        figures = measure_figures(pair, self._layers)
        self.largest_error = max(self.largest_error, figures["error"])
        if self._rows is None:
            self._looks += 1
            is_planned, self._is_asked = self._is_asked or self._looks % ROUND_EVERY == 0, False
            if not is_planned and not find_beyond(figures, self._limits):
                return Seen("fine")
            self._agreeing, self._size, self._rows, self._worst = 0, WINDOWS, [], {}
            self._suspected = None if is_planned else find_beyond(figures, self._limits)
        return self._add_row(step, figures, ours, theirs)

    def force_round(self) -> None:
        """Let the next look begin a round, whatever it shows by itself."""
        self._is_asked = True

    def capture(self) -> dict[str, Any]:
        """Return the state as numbers, texts and dictionaries; a round that has begun is begun again."""
        last = None if self.last is None else self.last.model_dump_json()
        counts = (self.checks, self._looks - self.is_in_round, self._judgements)
        return {
            "counts": list(counts),
            "largest_error": self.largest_error,
            "limits": dict(self._limits),
            "last": last,
            "is_asked": self._is_asked,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a captured state."""
        self.checks, self._looks, self._judgements = state["counts"]
        self.largest_error, self._limits = float(state["largest_error"]), dict(state["limits"])
        self.last = None if state["last"] is None else GradientEquivalence.model_validate_json(state["last"])
        self._rows, self._suspected, self._agreeing = None, None, 0
        self._is_asked = bool(state["is_asked"])

    def _is_repeated(self) -> bool:
        """Return whether the next look is to compute the baseline's twice: at first, and early in a round."""
        if self._rows is None:
            return self._looks == 0 or self._is_asked or (self._looks + 1) % ROUND_EVERY == 0
        return len(self._rows) == 1

    def _add_row(self, step: int, figures: Figures, ours: NDArray[Any], theirs: NDArray[Any]) -> Seen:
        assert self._rows is not None
        self._rows.append((step * self._samples_per_step, ours, theirs))
        self._worst = {name: max(abs(value), self._worst.get(name, 0.0)) for name, value in figures.items()}
        if self._suspected is not None:
            self._suspected &= find_beyond(figures, self._limits)
            if not self._suspected:
                self._rows = None
                return Seen("fine")
            if len(self._rows) == SUSPICIONS:
                self._suspected = None
        return self._judge_round(step) if len(self._rows) == self._size else Seen("open")

    def _judge_round(self, step: int) -> Seen:
        assert self._rows is not None
        keys, ours, theirs = zip(*self._rows, strict=True)
        own, baseline = (GradientRows(np.array(keys, dtype=np.int64), np.stack(arm)) for arm in (ours, theirs))
        point = f"steps {keys[0] // self._samples_per_step} to {step}"
        self.last = compare(own, baseline, self._layers, subject="gradients", point=point)
        if not self._agreeing:
            self._judgements += 1
        if self.last.verdict == "inferior":
            self._agreeing, self._rows = self._agreeing + 1, []
            is_shown = self._agreeing >= rounds_needed(self._judgements)
            return Seen("shown", self.last.reason) if is_shown else Seen("open")
        is_bad = _looks_bad(self.last)
        if is_bad and self._size < MOST_WINDOWS:
            self._size *= 2
            return Seen("open")
        self._rows = None
        if not is_bad:  # else the next look may go on to a round at once: it waits until that is paid for
            for name, value in self._worst.items():
                if value < _BEYOND_ALL:  # of one batch without a gradient nothing is known
                    self._limits[name] = max(self._limits[name], _HARMLESS * value)
        return Seen("fine")


def _looks_bad(found: GradientEquivalence) -> bool:
    """Return whether a comparison that proves nothing estimates what would fail."""
    noise = 0.0 if found.noise is None else found.noise.estimate
    steering = found.bias if found.steering is None else found.steering
    is_biased = steering is not None and steering.estimate > BIAS_FAILS
    is_open = found.verdict == "inconclusive"
    return is_open and (noise > NOISE_FAILS or is_biased or (found.worst_bias or 0.0) > LAYER_BIAS_FAILS)


def rounds_needed(judgement: int) -> int:
    """Return how many rounds in a row have to agree at the j-th judgement, counted from 1."""
    return math.ceil(math.log(RISK * 6.0 / (math.pi * judgement) ** 2) / math.log(_ROUND_RISK))


def find_beyond(figures: Figures, limits: Figures) -> set[str]:
    """Return which figures are beyond their limits, and on which side."""
    return {f"{name}{'+' if value > 0.0 else '-'}" for name, value in figures.items() if abs(value) > limits[name]}


def measure_figures(pair: GradientPair, layers: RowLayout) -> Figures:
    """Return how far apart the gradients of one micro batch are.

    error is |own - baseline|² / |baseline|², scale <own, baseline> / |baseline|² - 1; those of the layers are the
    largest of any layer with a ten thousandth of the squared gradient.
    """
    ours, theirs = (arm.numpy()[None, :].astype(np.float64) for arm in pair)
    errors, sizes = sum_squares(ours, layers, minus=theirs)[:, 0], sum_squares(theirs, layers)[:, 0]
    both = sum_squares(ours + theirs, layers)[:, 0]
    # |a + b|² = |a - b|² + 4 <a, b>
    products = (both - errors) / 4.0
    total = float(sizes.sum())
    if total == 0.0:
        return dict.fromkeys(_LIMITS, 0.0 if float(errors.sum()) == 0.0 else _BEYOND_ALL)
    matters = sizes > SMALLEST_SHARE * total
    return {
        "error": float(errors.sum()) / total,
        "scale": float(products.sum()) / total - 1.0,
        "layer_error": float((errors[matters] / sizes[matters]).max()),
        "layer_scale": float(np.abs(products[matters] / sizes[matters] - 1.0).max()),
    }
