"""A log-additive Bayesian model of throughput over a space of knobs. Pure.

    log speed-up of a config = sum of its changes + sum of its interacting pairs + what is its own

    weights  w ~ N(prior mean, prior covariance)     one for each value that is not the baseline's, and for each pair
    reading  y ~ N(x·w, noise² / launches + own²)    own² only where several changes meet: a sum is a guess of these

How large both are differs from target to target: they are those under which what was read is likeliest, weighed with
what is usual (type-II maximum likelihood: Bishop, section 3.5).

Values of one ordered knob (8, 4, 2 samples) are correlated a priori: what one costs, its neighbour costs too. So are
changes of which that is said, as the modes of a compiler. The posterior is that of Bayesian linear regression (Bishop,
Pattern Recognition and Machine Learning, 2006, eq. 3.50); each reading changes it by one rank (Sherman & Morrison
1950), so that the thousandth costs what the first did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Change = tuple[str, object]
"""A knob and its value."""

OWN_SD = 0.04
"""Log: how far a config of several changes usually is from the sum of these, until the readings say so."""

_NOISES = (0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.10, 0.15)
_OWNS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.40)

_DOUBLING = 0.7
"""Standard deviation of the logs of both around what is usual: half or twice as much is common."""

_TUNED_AT = frozenset((3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64))
"""Configs that were read when both are looked for anew; later ones change little."""

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
        noise_sd: usual one, of one launch; the model finds out what it is here.
        alike: correlation of what any two of some changes bring, by these (None for any value but the baseline's, and
            of a knob that is ordered: there it is known); a change is of one group, the first.
    """

    effects: Mapping[Change, Effect]
    pairs: Mapping[tuple[Change, Change], Effect]
    noise_sd: float = 0.05
    alike: Mapping[tuple[Change, ...], float] = field(default_factory=dict)

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
        self._related: list[tuple[Rows, Vector]] = []
        for name, offered, index in zip(values, values.values(), own, strict=True):
            others = np.array([place for place in range(len(offered)) if place != index], dtype=np.int64)
            table = np.full(len(offered), -1, dtype=np.int64)
            table[others] = len(changes) + np.arange(len(others))
            self._tables.append(table)
            if _is_ordered(offered):
                self._related.append((table[others], _NEIGHBOURS ** np.abs(others[:, None] - others)))
            changes += [(name, offered[place]) for place in others.tolist()]
        self._relate(changes, prior.alike)
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

    def _relate(self, changes: Sequence[Change], alike: Mapping[tuple[Change, ...], float]) -> None:
        taken = {int(column) for columns, _ in self._related for column in columns}
        for group, correlation in alike.items():
            found = sorted({column for change in group for column in _find(changes, change)} - taken)
            taken.update(found)
            matrix = np.full((len(found), len(found)), correlation)
            np.fill_diagonal(matrix, 1.0)
            self._related.append((np.array(found, dtype=np.int64), matrix))

    def make_prior_covariance(self) -> Vector:
        """Return what is known of the weights before anything was read [columns, columns]."""
        covariance: Vector = np.diag(self.prior_sd**2)
        for columns, correlation in self._related:
            sds = self.prior_sd[columns]
            covariance[np.ix_(columns, columns)] = correlation * np.outer(sds, sds)
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
        noise_sd: usual one, of the log throughput of one launch.

    Attributes:
        spread: what readings are taken to differ by from the sums.
    """

    def __init__(self, features: Features, noise_sd: float) -> None:
        self._features = features
        self._usual = self.spread = Spread(noise_sd, OWN_SD)
        self._prior_covariance = features.make_prior_covariance()
        precision = np.linalg.inv(self._prior_covariance)
        self._root = np.linalg.cholesky((precision + precision.T) / 2)
        self._prior_shift: Vector = precision @ features.prior_mean
        self._readings: dict[tuple[int, ...], _Reading] = {}
        self._last_scores: deque[float] = deque(maxlen=_RECENT)
        self._forget()

    def _forget(self) -> None:
        self._shift: Vector = self._prior_shift.copy()
        size = self._features.count + 1  # the last one is of no column: what a row has less than the most
        self._covariance: Vector = np.zeros((size, size))
        self._covariance[:-1, :-1] = self._prior_covariance

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
        is_new = before is None
        if before is None:
            rows = np.array([key], dtype=np.int64)
            before = _Reading(self._features.encode(rows)[0], int(self._features.count_changes(rows)[0]))
            self._note_score(before, value)
        now = self._readings[key] = before.take(value)
        if is_new and len(self._readings) in _TUNED_AT:
            self._tune()
        else:
            self._update(before, now)

    def _update(self, before: _Reading, now: _Reading) -> None:
        precision, precision_before = self.spread.precision(now), self.spread.precision(before)
        self._shift[now.columns] += precision * now.mean - precision_before * before.mean
        across = self._covariance[:, now.columns].sum(axis=1)
        gained = precision - precision_before
        self._covariance -= np.outer(across, gained / (1.0 + gained * across[now.columns].sum()) * across)

    def _tune(self) -> None:
        """Take the noise, and what is a config's own, under which the readings are likeliest, and learn them anew."""
        changed = [one for one in self._readings.values() if one.changes]  # the baseline is read against itself
        likelihood = _Likelihood(self._features, self._prior_covariance, changed, self._usual)
        self.spread = max((Spread(noise, own) for noise in _NOISES for own in _OWNS), key=likelihood.log_density)
        self._forget()
        for one in self._readings.values():
            self._update(_Reading(one.columns, one.changes), one)

    def list_estimates(self) -> list[tuple[tuple[int, ...], float]]:
        """Return each config that was read, as the indices of its values, and its log speed-up by all readings.

        The mean of x·w + own given all of them: a reading counts as far as it is the config's own and not noise.
        """
        mean = self.mean
        found = []
        for key, one in self._readings.items():
            total = float(mean[one.columns].sum())
            found.append((key, total + self.spread.own_share(one) * (one.mean - total)))
        return found

    def find_best(self, least_gain: float = 0.0, able: Container[tuple[int, ...]] | None = None) -> float:
        """Return the largest sum of weights among the configs that were read, less what their changes have to bring.

        0 is the baseline's.

        Args:
            least_gain: that every change has to bring.
            able: configs that count, as the indices of their values; None for all.
        """
        mean = self.mean
        counted = (one for key, one in self._readings.items() if able is None or key in able)
        return max((float(mean[one.columns].sum()) - least_gain * one.changes for one in counted), default=0.0)

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

    def draw(self, rng: np.random.Generator, boldness: float = 1.0) -> Vector:
        """Return weights [columns] drawn from it: those of one world that the readings allow (Thompson 1933).

        By perturbing prior and readings and solving again (Papandreou & Yuille 2010): exact, without a decomposition.

        Args:
            rng: that draws.
            boldness: how far from the mean, as a share of the standard deviation.
        """
        shift = self._root @ rng.standard_normal(self._features.count)
        for one in self._readings.values():
            shift[one.columns] += math.sqrt(self.spread.precision(one)) * rng.standard_normal()
        return self._weigh(self._shift + boldness * shift)

    def _weigh(self, shift: Vector) -> Vector:
        weights: Vector = self.covariance @ shift
        return weights

    def _note_score(self, new: _Reading, value: float) -> None:
        means, sds = self.foretell(new.columns[None])
        variance = float(sds[0]) ** 2 + self.spread.own_variance(new) + self.spread.noise_sd**2
        self._last_scores.append((value - float(means[0])) / math.sqrt(variance))


@dataclass(frozen=True)
class _Reading:
    """The launches of one config.

    Attributes:
        columns: that it has.
        changes: knobs that are not the baseline's.
        launches: so far.
        mean: of their values.
        squares: sum of the squares of their distances from it (Welford 1962).
    """

    columns: Rows
    changes: int
    launches: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def take(self, value: float) -> _Reading:
        """Return it with one more launch."""
        launches, distance = self.launches + 1, value - self.mean
        mean = self.mean + distance / launches
        return _Reading(self.columns, self.changes, launches, mean, self.squares + distance * (value - mean))


@dataclass(frozen=True)
class Spread:
    """What readings differ by from the sums of their weights.

    Attributes:
        noise_sd: of one launch.
        own_sd: of a config with several changes.
    """

    noise_sd: float
    own_sd: float

    def own_variance(self, one: _Reading) -> float:
        """Return the variance of what is a config's own: nothing is, where one change is all there is."""
        return self.own_sd**2 if one.changes else 0.0

    def variance(self, one: _Reading) -> float:
        """Return the variance of the mean of its launches around the sum of the weights."""
        return self.own_variance(one) + self.noise_sd**2 / one.launches

    def precision(self, one: _Reading) -> float:
        """Return one over that; 0 without a launch."""
        return 1.0 / self.variance(one) if one.launches else 0.0

    def own_share(self, one: _Reading) -> float:
        """Return how much of its mean's distance from the sum is its own, not noise."""
        return self.own_variance(one) / self.variance(one)


class _Likelihood:
    """How likely readings are, the weights integrated out.

    Args:
        features: the columns and their prior.
        prior_covariance: of the weights [columns, columns].
        readings: of configs that are not the baseline.
        usual: spread, which counts as one opinion beside the readings.
    """

    def __init__(
        self, features: Features, prior_covariance: Vector, readings: Sequence[_Reading], usual: Spread
    ) -> None:
        self._readings, self._usual = readings, usual
        design = np.zeros((len(readings), features.count + 1))
        for place, one in enumerate(readings):
            design[place, one.columns] = 1.0
        rows = design[:, :-1]
        self._means = rows @ features.prior_mean
        self._covariance = rows @ prior_covariance @ rows.T

    def log_density(self, spread: Spread) -> float:
        """Return it up to a constant."""
        variances = [spread.variance(one) for one in self._readings]
        root = np.linalg.cholesky(self._covariance + np.diag(variances))
        scaled = np.linalg.solve(root, np.array([one.mean for one in self._readings]) - self._means)
        between = -0.5 * float(scaled @ scaled) - float(np.log(np.diag(root)).sum())
        repeats = sum(one.launches - 1 for one in self._readings)
        squares = math.fsum(one.squares for one in self._readings)
        within = -repeats * math.log(spread.noise_sd) - squares / (2 * spread.noise_sd**2)
        return between + within + self._opinion(spread)

    def _opinion(self, spread: Spread) -> float:
        usual = self._usual
        noise, own = math.log(spread.noise_sd / usual.noise_sd), math.log(spread.own_sd / usual.own_sd)
        return -(noise**2 + own**2) / (2 * _DOUBLING**2)


def sum_weights(weights: Vector, columns: Rows) -> Vector:
    """Return the sums [rows] of the weights of some columns [rows, most]."""
    sums: Vector = np.append(weights, 0.0)[columns].sum(axis=1)
    return sums


def _find(changes: Sequence[Change], wanted: Change) -> list[int]:
    """Return the columns of the changes that are meant by one of a prior."""
    return [place for place, change in enumerate(changes) if wanted[0] == change[0] and wanted[1] in (None, change[1])]


def _is_ordered(values: Sequence[object]) -> bool:
    return all(type(value) in (int, float) for value in values)
