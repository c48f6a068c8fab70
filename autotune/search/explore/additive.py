"""A log-additive Bayesian model of throughput over a space of knobs. Pure.

    log speed-up of a config = sum of its changes + sum of its interacting pairs + what is its own

    weights  w ~ N(prior mean, prior covariance)     one for each value that is not the baseline's, and for each pair
    reading  y ~ N(x·w, noise² / launches + own²)    own² only where several changes meet: a sum is a guess of these

Values of one ordered knob (8, 4, 2 samples) are correlated a priori: what one costs, its neighbour costs too. The
posterior is that of Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 2006, eq. 3.50).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Change = tuple[str, object]
"""A knob and its value."""

OWN_SD = 0.04
"""Log: how far a config of several changes is from the sum of these; simulated pairs differ by that much."""

_NEIGHBOURS = 0.7
"""Prior correlation of two neighbouring values of an ordered knob."""

_UNKNOWN_SD = 0.10


@dataclass(frozen=True)
class Effect:
    """What a change or a pair of changes is taken to do to the log throughput before it was seen.

    Attributes:
        mean: log speed-up.
        sd: standard deviation.
    """

    mean: float = 0.0
    sd: float = _UNKNOWN_SD


@dataclass(frozen=True)
class Prior:
    """What is known beforehand.

    Attributes:
        effects: by change, or by knob with None for its value.
        pairs: by two changes; None for any value but the baseline's.
    """

    effects: Mapping[Change, Effect]
    pairs: Mapping[tuple[Change, Change], Effect]

    def find(self, name: str, value: object) -> Effect:
        """Return what is known of a change: of its value, else of its knob, else nothing."""
        return self.effects.get((name, value)) or self.effects.get((name, None)) or Effect()


NOTHING_KNOWN = Prior({}, {})


class Features:
    """Columns of the model over a space: one per change, one per pair that is said to interact.

    Args:
        values: by knob, in order.
        baseline: value by knob; it has no column.
        prior: of the weights.

    Attributes:
        prior_mean: [columns].
        prior_covariance: [columns, columns].
    """

    def __init__(self, values: Mapping[str, Sequence[object]], baseline: Mapping[str, object], prior: Prior) -> None:
        self._names = list(values)
        self._own = [list(values[name]).index(baseline[name]) for name in self._names]
        changes = [
            (axis, index)
            for axis, name in enumerate(self._names)
            for index in range(len(values[name]))
            if index != self._own[axis]
        ]
        named = {(axis, index): (self._names[axis], values[self._names[axis]][index]) for axis, index in changes}
        self._changes = changes
        self._pairs, pair_effects = [], []
        for (first, second), effect in prior.pairs.items():
            for one, other in itertools.permutations(changes, 2):
                if _fits(first, named[one]) and _fits(second, named[other]):
                    self._pairs.append((one, other))
                    pair_effects.append(effect)
        effects = [prior.find(*named[change]) for change in changes]
        every = [*effects, *pair_effects]
        self.prior_mean: Vector = np.array([effect.mean for effect in every])
        self.prior_covariance: Vector = np.diag([effect.sd**2 for effect in every])
        for (i, (axis, index)), (j, (other_axis, other_index)) in itertools.permutations(enumerate(changes), 2):
            if axis == other_axis and _is_ordered(values[self._names[axis]]):
                near = _NEIGHBOURS ** abs(index - other_index)
                self.prior_covariance[i, j] = near * effects[i].sd * effects[j].sd

    def encode(self, rows: Rows) -> Vector:
        """Return the columns [rows, columns] of configs [rows, knobs], each given as the indices of its values."""
        singles = [rows[:, axis] == index for axis, index in self._changes]
        at = dict(zip(self._changes, singles, strict=True))
        pairs = [at[one] & at[other] for one, other in self._pairs]
        if not singles:
            return np.zeros((len(rows), 0))
        return np.stack([*singles, *pairs], axis=1).astype(np.float64)

    def count_changes(self, rows: Rows) -> Vector:
        """Return how many knobs of each config [rows] are not the baseline's."""
        changed: Vector = (rows != np.array(self._own)).sum(axis=1).astype(np.float64)
        return changed


@dataclass(frozen=True)
class Posterior:
    """The weights after some readings.

    Attributes:
        mean: [columns].
        covariance: [columns, columns].
    """

    mean: Vector
    covariance: Vector

    def draw(self, rng: np.random.Generator) -> Vector:
        """Return weights drawn from it: those of one world that the readings allow (Thompson 1933)."""
        drawn: Vector = rng.multivariate_normal(self.mean, self.covariance, method="eigh")
        return drawn

    def sd(self, columns: Vector) -> Vector:
        """Return the standard deviation of the sums [rows] of some columns [rows, columns]."""
        variances: Vector = ((columns @ self.covariance) * columns).sum(axis=1)
        return np.sqrt(np.maximum(variances, 0.0))


def fit(features: Features, rows: Rows, means: Vector, launches: Vector, noise_sd: float) -> Posterior:
    """Return what readings say of the weights.

    Args:
        features: the columns and their prior.
        rows: configs that were timed [configs, knobs].
        means: log speed-up over the baseline of each, mean over its launches [configs].
        launches: of each [configs].
        noise_sd: of the log throughput of one launch.
    """
    precision = np.linalg.inv(features.prior_covariance)
    shift = precision @ features.prior_mean
    if len(rows):
        columns = features.encode(rows)
        weights = 1.0 / reading_variance(features, rows, launches, noise_sd)
        precision = precision + columns.T @ (columns * weights[:, None])
        shift = shift + columns.T @ (weights * means)
    covariance = np.linalg.inv(precision)
    return Posterior(covariance @ shift, (covariance + covariance.T) / 2)


def reading_variance(features: Features, rows: Rows, launches: Vector, noise_sd: float) -> Vector:
    """Return the variance [configs] of the mean reading of each config around the sum of its weights."""
    own = np.where(features.count_changes(rows) > 1, OWN_SD**2, 0.0)
    variance: Vector = noise_sd**2 / launches + own
    return variance


def misfit(features: Features, rows: Rows, means: Vector, launches: Vector, noise_sd: float, last: int) -> float:
    """Return how far the last readings are from what the earlier ones foretold: root mean square of standard scores.

    About 1 where the model holds; 0 with too few readings to tell. Arguments as of `fit`, in the order of time.
    """
    if len(rows) < 2 * last:
        return 0.0
    before = fit(features, rows[:-last], means[:-last], launches[:-last], noise_sd)
    columns = features.encode(rows[-last:])
    variance = before.sd(columns) ** 2 + reading_variance(features, rows[-last:], launches[-last:], noise_sd)
    scores = (means[-last:] - columns @ before.mean) / np.sqrt(variance)
    return math.sqrt(float(np.mean(scores**2)))


def _fits(wanted: Change, change: Change) -> bool:
    return wanted[0] == change[0] and wanted[1] in (None, change[1])


def _is_ordered(values: Sequence[object]) -> bool:
    return all(type(value) in (int, float) for value in values)
