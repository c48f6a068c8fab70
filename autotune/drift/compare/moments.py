"""Moments of paired windows, the jackknife over them and its intervals: rows of numbers in, numbers out, no torch.

    g_i = the baseline's row of window i,  c_i = the candidate's,  e_i = c_i - g_i     M windows, weighted columns
    mean(e_(-i)) = mean(e) - d_i / (M - 1),  d_i = e_i - mean(e)                       without window i

Every statistic is a function of |mean|², <d_i, mean> and |d_i|². They add up over columns, so layers are summed to the
whole, and leaving a window out costs nothing: no matrix of windows by windows is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import RowLayout
from autotune.measure.student_t import student_t_quantile

Rows = NDArray[np.floating]
"""[windows, columns]."""
Values = NDArray[np.float64]
"""[..., 1 + windows]: of all windows first, then with each of them left out."""

NO_VARIANCE = 1e-10
"""Share of |mean|² below which a variance from window to window is rounding: rows that differ by 1e-5 in size."""
_LARGEST = 1e12  # cut there: it decides the same, and a record holds no infinity
_SMALLEST_MEAN = 0.05  # share of |mean|² that |G|² is at least, lest a mean drowned in noise makes every bias large
_NOTHING_LEFT = 1e-12  # share of the baseline's squares below which the candidate's are rounding


@dataclass(frozen=True)
class Spread:
    """Rows around their mean.

    Attributes:
        mean_square: squared size of the mean row, [..., 1 + windows].
        variance: total over the columns, unbiased, [..., 1 + windows].
    """

    mean_square: Values
    variance: Values

    @property
    def counts(self) -> Values:
        """Rows behind each value, [1 + windows]: M, then M - 1 for each one left out."""
        windows = self.variance.shape[-1] - 1
        return np.array([windows] + [windows - 1] * windows, dtype=np.float64)

    @property
    def squares(self) -> Values:
        """Sum of the rows' squared sizes."""
        return self.counts * self.mean_square + (self.counts - 1.0) * self.variance

    @property
    def true_mean_square(self) -> Values:
        """Squared size of the true mean, |mean|² - variance / M: unbiased, so noise can take it below 0."""
        return self.mean_square - self.variance / self.counts

    def sum(self) -> Self:
        """Return the spread over all layers together."""
        return type(self)(self.mean_square.sum(axis=0), self.variance.sum(axis=0))

    def take(self, chosen: NDArray[np.intp]) -> Self:
        """Return the spread of some layers."""
        return type(self)(self.mean_square[chosen], self.variance[chosen])


@dataclass(frozen=True)
class Moments:
    """Two arms over the same windows.

    Attributes:
        difference: of candidate minus baseline.
        baseline: of the baseline.
        cross: sum over the windows of <difference, baseline>, [..., 1 + windows].
    """

    difference: Spread
    baseline: Spread
    cross: Values

    def sum(self) -> Self:
        """Return the moments of all layers together."""
        return type(self)(self.difference.sum(), self.baseline.sum(), self.cross.sum(axis=0))

    def take(self, chosen: NDArray[np.intp]) -> Self:
        """Return the moments of some layers."""
        return type(self)(self.difference.take(chosen), self.baseline.take(chosen), self.cross[chosen])

    def noise(self) -> Values:
        """Return the variance of the differences over the baseline's own from window to window."""
        return _divide(self.difference.variance, self.baseline.variance)

    def squared_bias(self) -> Values:
        """Return the squared size of the true mean difference over that of the true mean: 0.01 for a bias of 10 %.

        |G|² is at least 5 % of |mean|² and of the noise in it. The estimate of no bias at all is as often negative.
        """
        baseline = self.baseline
        floor = _SMALLEST_MEAN * np.maximum(baseline.mean_square, baseline.variance / baseline.counts)
        return _divide(self.difference.true_mean_square, np.maximum(baseline.true_mean_square, floor))

    def squared_steering(self) -> Values:
        """Return the squared size of the true mean difference over the variance of one window's own row.

        It needs no mean gradient, which is next to nothing where a training has converged.
        """
        return _divide(self.difference.true_mean_square, self.baseline.variance)

    def excess_bias(self, limit: float) -> Values:
        """Return |E e|² - limit² (|mean g|² + var(g) / M), which is positive only when the bias is above a limit.

        Nothing is divided, and the mean of a few elements that is 0 by chance is not taken for the truth.
        """
        size = self.baseline.mean_square + self.baseline.variance / self.baseline.counts
        return self.difference.true_mean_square - limit**2 * size

    def factor(self) -> Values:
        """Return the factor that all the candidate's rows have too much: 0.05 when they are 1.05 x the baseline's.

        A wrong factor is a bias of the same size, and this sees it in the windows' noise too, however drowned their
        mean is. It is the smaller of <e, g> / |g|² and <e, c> / (|c| |g|), and 0 when their signs differ: noise that
        only one arm has, or that each draws for itself, leaves one of them at 0 or turns the signs.
        """
        ours, theirs = self.difference.squares, self.baseline.squares
        candidate = np.maximum(theirs + 2.0 * self.cross + ours, 0.0)
        onto_baseline = _divide(self.cross, theirs)
        onto_candidate = _divide(self.cross + ours, np.sqrt(candidate) * np.sqrt(theirs))
        onto_candidate = np.where(candidate <= _NOTHING_LEFT * theirs, onto_baseline, onto_candidate)
        smaller = np.minimum(np.abs(onto_baseline), np.abs(onto_candidate))
        return np.where(onto_baseline * onto_candidate > 0.0, np.copysign(smaller, onto_baseline), 0.0)


class Ends(NamedTuple):
    """Estimates with their intervals, arrays of one shape."""

    estimate: Values
    """Of all windows."""
    low: Values
    """Lower ends."""
    high: Values
    """Upper ends."""


def measure_spread(rows: Rows, layers: RowLayout) -> Spread:
    """Return the spread of each layer's columns, [layers, 1 + windows], of at least 3 finite rows."""
    sums = np.zeros((len(layers.names), 1 + 2 * len(rows)))
    for layer, columns, weight in layers.split():
        sums[layer] += weight * _scatter(rows[:, columns].astype(np.float64))
    return _spread(sums)


def measure_moments(candidate: Rows, baseline: Rows, layers: RowLayout) -> Moments:
    """Return the moments of each layer's columns, [layers, 1 + windows], of at least 3 finite rows in each arm.

    Row i of both arms is the same window.
    """
    windows = len(baseline)
    differences, baselines = np.zeros((2, len(layers.names), 1 + 2 * windows))
    crosses = np.zeros((len(layers.names), windows))
    for layer, columns, weight in layers.split():
        theirs = baseline[:, columns].astype(np.float64)
        difference = candidate[:, columns] - theirs
        differences[layer] += weight * _scatter(difference)
        baselines[layer] += weight * _scatter(theirs)
        crosses[layer] += weight * np.einsum("ij,ij->i", difference, theirs)
    total = crosses.sum(axis=-1, keepdims=True)
    return Moments(_spread(differences), _spread(baselines), np.concatenate((total, total - crosses), axis=-1))


def noise_ends(moments: Moments, *, confidence: float) -> Ends:
    """Return the noise with one-sided bounds, each at a confidence: jackknife on the cube root, then cubed.

    The cube root of a variance is nearly normal (Wilson & Hilferty 1931), which holds the upper bound in few windows.
    """
    roots = _jackknife(np.cbrt(moments.noise()), confidence)
    return Ends(*(np.minimum(np.maximum(root, 0.0) ** 3, _LARGEST) for root in roots))


def bias_ends(moments: Moments, *, confidence: float) -> Ends:
    """Return the bias with one-sided bounds, each at a confidence; a wrong factor counts as one.

    The jackknife is on the square, which is smooth where the bias is 0. Of the bias and the factor, the larger one's
    estimate, the larger lower bound and the larger upper bound are taken.
    """
    return _with_factor(moments.squared_bias(), moments, confidence)


def steering_ends(moments: Moments, *, confidence: float) -> Ends:
    """Return the mean difference as a share of one window's own spread, with bounds like those of the bias."""
    return _with_factor(moments.squared_steering(), moments, confidence)


def _with_factor(squares: Values, moments: Moments, confidence: float) -> Ends:
    bias = Ends(*(np.sqrt(np.maximum(value, 0.0)) for value in _jackknife(squares, confidence)))
    factor = _jackknife(moments.factor(), confidence)
    away_from_zero = np.maximum(factor.low, -factor.high)  # negative when the interval holds 0: the bias wins
    size = Ends(np.abs(factor.estimate), away_from_zero, np.maximum(-factor.low, factor.high))
    return Ends(*(np.minimum(np.maximum(bias, size), _LARGEST) + 0.0))  # no -0


def exceeds_bias(moments: Moments, limit: float, *, confidence: float) -> NDArray[np.bool_]:
    """Return where the bias, or a wrong factor, is shown to be above a limit at a one-sided confidence.

    It is for layers of few elements: their intervals divide by |G|², which by chance can be next to nothing.
    """
    factor = _jackknife(moments.factor(), confidence)
    wrong = np.maximum(factor.low, -factor.high) > limit
    return np.asarray(wrong | (_jackknife(moments.excess_bias(limit), confidence).low > 0.0))


def _scatter(rows: Values) -> Values:
    mean = rows.mean(axis=0)
    deviations = rows - mean
    return np.concatenate(([mean @ mean], deviations @ mean, np.einsum("ij,ij->i", deviations, deviations)))


def _spread(sums: Values) -> Spread:
    windows = sums.shape[-1] // 2
    mean_square, along, deviations = sums[:, :1], sums[:, 1 : 1 + windows], sums[:, 1 + windows :]
    total = deviations.sum(axis=-1, keepdims=True)
    others = windows - 1
    left_out = mean_square - 2.0 * along / others + deviations / others**2
    remaining = np.maximum(total - deviations * windows / others, 0.0)
    return Spread(
        mean_square=np.concatenate((mean_square, np.maximum(left_out, 0.0)), axis=-1),
        variance=np.concatenate((total / others, remaining / (windows - 2)), axis=-1),
    )


def _divide(numerator: Values, denominator: Values) -> Values:
    quotient = np.copysign(np.where(numerator == 0.0, 0.0, _LARGEST), numerator)
    with np.errstate(over="ignore"):
        np.divide(numerator, denominator, out=quotient, where=denominator > 0.0)
    return np.clip(quotient, -_LARGEST, _LARGEST)


def _jackknife(values: Values, confidence: float) -> Ends:
    estimate, left_out = values[..., 0], values[..., 1:]
    windows = left_out.shape[-1]
    # The variance of the jackknife: (M - 1) / M times the sum of squares (Efron & Stein 1981).
    half_width = student_t_quantile(confidence, windows - 1) * math.sqrt(windows - 1.0) * left_out.std(axis=-1)
    return Ends(estimate, estimate - half_width, estimate + half_width)
