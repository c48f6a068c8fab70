"""A log-additive Bayesian model of throughput over a space of knobs. Pure.

    log speed-up of a config = sum of its changes + sum of its interacting pairs + what is its own

    weights  w ~ N(prior mean, prior covariance)     one for each value that is not the baseline's, and for each pair
    reading  y ~ N(x·w, noise² / launches + own²)    own² only where several changes meet: a sum is a guess of these

Values of one ordered knob (8, 4, 2 samples) are correlated a priori: what one costs, its neighbour costs too. The
posterior is that of Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 2006, eq. 3.50); each
reading changes it by one rank (Sherman & Morrison 1950), so that the thousandth costs what the first did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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

_LEAST_SD = 1e-6
"""Of a prior: what is known for sure would leave no matrix to invert."""


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

_RECENT = 5
"""Configs whose readings say whether the model fits."""


class Features:
    """Columns of the model over a space: one per change, one per pair that is said to interact.

    Args:
        values: by knob, in order.
        baseline: value by knob; it has no column.
        prior: of the weights.

    Attributes:
        count: of columns.
        prior_mean: [columns].
        prior_sd: [columns].
    """

    def __init__(self, values: Mapping[str, Sequence[object]], baseline: Mapping[str, object], prior: Prior) -> None:
        own = [list(values[name]).index(baseline[name]) for name in values]
        self._own = np.array(own, dtype=np.int64)
        changes: list[Change] = []
        self._tables: list[Rows] = []
        self._ordered: list[tuple[int, Rows]] = []
        for name, offered, index in zip(values, values.values(), own, strict=True):
            others = np.array([place for place in range(len(offered)) if place != index], dtype=np.int64)
            table = np.full(len(offered), -1, dtype=np.int64)
            table[others] = len(changes) + np.arange(len(others))
            self._tables.append(table)
            if _is_ordered(offered):
                self._ordered.append((len(changes), others))
            changes += [(name, offered[place]) for place in others.tolist()]
        self._pairs = [
            (first, second, effect)
            for (one, other), effect in prior.pairs.items()
            for first in _find(changes, one)
            for second in _find(changes, other)
        ]
        effects = [*(prior.find(*change) for change in changes), *(effect for *_, effect in self._pairs)]
        self.count = len(effects)
        self.prior_mean: Vector = np.array([effect.mean for effect in effects])
        self.prior_sd: Vector = np.maximum([effect.sd for effect in effects], _LEAST_SD)

    def make_prior_covariance(self) -> Vector:
        """Return what is known of the weights before anything was read [columns, columns]."""
        covariance: Vector = np.diag(self.prior_sd**2)
        for start, places in self._ordered:
            part = slice(start, start + len(places))
            near = _NEIGHBOURS ** np.abs(places[:, None] - places)
            covariance[part, part] = near * np.outer(self.prior_sd[part], self.prior_sd[part])
        return covariance

    def encode(self, rows: Rows) -> Rows:
        """Return the columns that configs have [rows, most], `count` where one has fewer than the most.

        Args:
            rows: each given as the indices of its values [rows, knobs].
        """
        singles = [table[rows[:, axis]] for axis, table in enumerate(self._tables)]
        columns = np.stack(singles, axis=1) if singles else np.zeros((len(rows), 0), dtype=np.int64)
        pairs = np.full((len(rows), len(self._pairs)), -1, dtype=np.int64)
        first_pair = self.count - len(self._pairs)
        for place, (one, other, _) in enumerate(self._pairs):
            both = (columns == one).any(axis=1) & (columns == other).any(axis=1)
            pairs[both, place] = first_pair + place
        found = np.sort(np.concatenate([columns, pairs], axis=1))[:, ::-1]
        most = int((found >= 0).sum(axis=1).max(initial=0))
        return np.where(found[:, :most] < 0, self.count, found[:, :most])

    def count_changes(self, rows: Rows) -> Rows:
        """Return how many knobs of each config [rows] are not the baseline's."""
        changed: Rows = (rows != self._own).sum(axis=1)
        return changed


class LogAdditiveModel:
    """What readings so far say of the weights.

    Args:
        features: the columns and their prior.
        noise_sd: of the log throughput of one launch.
    """

    def __init__(self, features: Features, noise_sd: float) -> None:
        self._features, self._noise_sd = features, noise_sd
        covariance = features.make_prior_covariance()
        precision = np.linalg.inv(covariance)
        self._root = np.linalg.cholesky((precision + precision.T) / 2)
        self._shift: Vector = precision @ features.prior_mean
        size = features.count + 1  # the last one is of no column: what a row has less than the most
        self._covariance: Vector = np.zeros((size, size))
        self._covariance[:-1, :-1] = covariance
        self._readings: dict[tuple[int, ...], _Reading] = {}
        self._last_scores: deque[float] = deque(maxlen=_RECENT)

    @property
    def mean(self) -> Vector:
        """Of the weights [columns]."""
        return self._weigh(self._shift)

    @property
    def covariance(self) -> Vector:
        """Of the weights [columns, columns]."""
        return self._covariance[:-1, :-1]

    def add(self, row: Sequence[int], value: float) -> None:
        """Learn from one launch.

        Args:
            row: the config, as the indices of its values [knobs].
            value: log speed-up over the baseline that it read.
        """
        key = tuple(row)
        before = self._readings.get(key)
        if before is None:
            rows = np.array([key], dtype=np.int64)
            before = _Reading(self._features.encode(rows)[0], int(self._features.count_changes(rows)[0]), 0, 0.0)
            self._note_score(before, value)
        now = replace(before, launches=before.launches + 1, total=before.total + value)
        self._readings[key] = now
        precision, precision_before = now.precision(self._noise_sd), before.precision(self._noise_sd)
        self._shift[now.columns] += precision * now.mean - precision_before * before.mean
        across = self._covariance[:, now.columns].sum(axis=1)
        gained = precision - precision_before
        self._covariance -= np.outer(across, gained / (1.0 + gained * across[now.columns].sum()) * across)

    def find_best(self, least_gain: float = 0.0) -> float:
        """Return the largest sum of weights among the configs that were read, less what their changes have to bring.

        0 is the baseline's.

        Args:
            least_gain: that every change has to bring.
        """
        mean = self.mean
        sums = (float(mean[one.columns].sum()) - least_gain * one.changes for one in self._readings.values())
        return max(sums, default=0.0)

    @property
    def misfit(self) -> float:
        """How far the last configs were from what was foretold of them: root mean square of their standard scores.

        About 1 where the model holds; 0 with too few readings to tell.
        """
        if len(self._readings) < 2 * _RECENT:
            return 0.0
        return math.sqrt(math.fsum(score**2 for score in self._last_scores) / _RECENT)

    def foretell(self, columns: Rows) -> tuple[Vector, Vector]:
        """Return mean and standard deviation [rows] of the sums of some columns [rows, most]."""
        variances = np.zeros(len(columns))
        for one in range(columns.shape[1]):
            for other in range(one):
                variances += 2 * self._covariance[columns[:, one], columns[:, other]]
            variances += self._covariance[columns[:, one], columns[:, one]]
        return sum_weights(self.mean, columns), np.sqrt(np.maximum(variances, 0.0))

    def foretell_difference(self, columns: Rows, others: Rows) -> tuple[float, float]:
        """Return mean and standard deviation of the sum of some columns less that of others."""
        signs = np.zeros(self._features.count + 1)
        np.add.at(signs, columns, 1.0)
        np.add.at(signs, others, -1.0)
        own = signs[:-1]
        return float(own @ self.mean), math.sqrt(max(0.0, float(own @ self.covariance @ own)))

    def draw(self, rng: np.random.Generator) -> Vector:
        """Return weights [columns] drawn from it: those of one world that the readings allow (Thompson 1933).

        By perturbing prior and readings and solving again (Papandreou & Yuille 2010): exact, without a decomposition.
        """
        shift = self._shift + self._root @ rng.standard_normal(self._features.count)
        for one in self._readings.values():
            shift[one.columns] += math.sqrt(one.precision(self._noise_sd)) * rng.standard_normal()
        return self._weigh(shift)

    def _weigh(self, shift: Vector) -> Vector:
        weights: Vector = self.covariance @ shift
        return weights

    def _note_score(self, new: _Reading, value: float) -> None:
        means, sds = self.foretell(new.columns[None])
        variance = float(sds[0]) ** 2 + new.own + self._noise_sd**2
        self._last_scores.append((value - float(means[0])) / math.sqrt(variance))


@dataclass(frozen=True)
class _Reading:
    """The launches of one config.

    Attributes:
        columns: that it has.
        changes: knobs that are not the baseline's.
        launches: so far.
        total: of their values.
    """

    columns: Rows
    changes: int
    launches: int
    total: float

    @property
    def own(self) -> float:
        """Variance of what is its own: nothing is, where one change is all there is."""
        return OWN_SD**2 if self.changes > 1 else 0.0

    @property
    def mean(self) -> float:
        return self.total / self.launches if self.launches else 0.0

    def precision(self, noise_sd: float) -> float:
        """Return one over the variance of their mean around the sum of the weights; 0 without any."""
        return 1.0 / (self.own + noise_sd**2 / self.launches) if self.launches else 0.0


def sum_weights(weights: Vector, columns: Rows) -> Vector:
    """Return the sums [rows] of the weights of some columns [rows, most]."""
    sums: Vector = np.append(weights, 0.0)[columns].sum(axis=1)
    return sums


def _find(changes: Sequence[Change], wanted: Change) -> list[int]:
    """Return the columns of the changes that are meant by one of a prior."""
    return [place for place, change in enumerate(changes) if wanted[0] == change[0] and wanted[1] in (None, change[1])]


def _is_ordered(values: Sequence[object]) -> bool:
    return all(type(value) in (int, float) for value in values)
