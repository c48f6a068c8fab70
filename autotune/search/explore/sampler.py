"""An Optuna sampler for spaces whose knobs multiply: it knows what each usually brings, and learns what it brings here.

Any study can use it, if its objective is a log speed-up over a baseline that is maximised:

    sampler = LogAdditiveSampler(distributions, baseline, prior=default_prior())
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(baseline)

Turns are greedy (the mean of the model) and Thompson (a draw from it), each for gain over price. Where the model does
not fit what it sees, every second turn is TPE's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.search.explore.additive import Features, Posterior, Prior, Rows, Vector, fit, misfit

Params = dict[str, Any]

_MOST_ROWS = 2**16
"""Configs that are enumerated; of a larger space, the knobs of least promise are varied one at a time."""

_LOOKED_AT = 200
"""Of the best rows: so many are priced."""

_RECENT = 5
_MISFIT = 2.0
"""Root mean square of standard scores of the last five readings: more has a chance of about 1 in 1,000."""


class LogAdditiveSampler(BaseSampler):
    """Proposes the config that the model takes for the best gain over its price.

    Args:
        space: distribution by name, categorical or of integers; the same for every trial of the study.
        baseline: value by name.
        prior: what is known of changes beforehand.
        price: returns what a trial of some params costs, in any unit.
        is_open: returns whether some params may be proposed; those of trials that ended or run are left out anyway.
        noise_sd: of the log throughput of one launch.
        seed: of the draws; each proposal draws from a stream of its own, by the number of trials before it.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        baseline: Mapping[str, Any],
        *,
        prior: Prior,
        price: Callable[[Params], float] = lambda _params: 1.0,
        is_open: Callable[[Params], bool] = lambda _params: True,
        noise_sd: float = 0.05,
        seed: int = 0,
    ) -> None:
        self._space = {name: one for name, one in sorted(space.items()) if not one.single()}
        self._values = {name: list_values(one) for name, one in self._space.items()}
        self._baseline = {name: baseline[name] for name in self._space}
        self._features = Features(self._values, self._baseline, prior)
        self._rows = enumerate_rows(self._values, self._baseline, self._promise())
        self._columns = self._features.encode(self._rows)
        self._price, self._is_open, self._noise_sd, self._seed = price, is_open, noise_sd, seed
        self._independent = RandomSampler(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the space: every trial has the same."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the params to try next; none where all of the space was tried."""
        trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        ended = [one for one in trials if one.state is TrialState.COMPLETE and one.value is not None]
        rows, means, launches = self._gather(ended)
        turn = len(trials)
        if turn % 2 and misfit(self._features, rows, means, launches, self._noise_sd, _RECENT) > _MISFIT:
            return self._ask_tpe(study, trial)
        posterior = fit(self._features, rows, means, launches, self._noise_sd)
        rng = np.random.default_rng((self._seed, turn))
        taken = {self._key(one.params) for one in trials if one.state is not TrialState.WAITING}
        best = float((self._features.encode(rows) @ posterior.mean).max(initial=0.0))
        chosen = self._choose(posterior if turn % 2 else None, posterior, rng, best, taken)
        return {} if chosen is None else self._decode(chosen)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value: of params outside of the space, or where nothing is left to propose."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def rank(self, weights: Vector, best: float) -> list[int]:
        """Return the most promising rows for some weights, the best for its price first.

        Args:
            weights: of the columns.
            best: log speed-up that counts as gained already.
        """
        sums = self._columns @ weights
        count = min(_LOOKED_AT, len(sums))
        top = np.argpartition(-sums, count - 1)[:count]

        def worth(row: int) -> float:
            gain, price = float(sums[row]) - best, self._price(self._decode(row))
            return gain / price if gain > 0 else gain * price

        return sorted((int(row) for row in top), key=worth, reverse=True)

    def _choose(
        self,
        thompson: Posterior | None,
        posterior: Posterior,
        rng: np.random.Generator,
        best: float,
        taken: set[tuple[int, ...]],
    ) -> int | None:
        weights = posterior.mean if thompson is None else thompson.draw(rng)
        for row in itertools.chain(self.rank(weights, best), np.argsort(-(self._columns @ weights))):
            if tuple(self._rows[row]) not in taken and self._is_open(self._decode(row)):
                return int(row)
        return None

    def _ask_tpe(self, study: Study, trial: FrozenTrial) -> Params:
        tpe = TPESampler(multivariate=True, seed=(self._seed * 7919 + trial.number) % 2**32)
        return tpe.sample_relative(study, trial, self._space)

    def _gather(self, ended: Sequence[FrozenTrial]) -> tuple[Rows, Vector, Vector]:
        """Return the configs that were timed [configs, knobs], their mean values and how often, in order of time."""
        found: dict[tuple[int, ...], list[float]] = {}
        for one in ended:
            if self._space.keys() <= one.params.keys() and one.value is not None and math.isfinite(one.value):
                found.setdefault(self._key(one.params), []).append(one.value)
        rows = np.array([*found], dtype=np.int64).reshape(len(found), len(self._space))
        means = np.array([math.fsum(values) / len(values) for values in found.values()])
        return rows, means, np.array([float(len(values)) for values in found.values()])

    def _key(self, params: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(
            values.index(params[name]) if params.get(name) in values else -1 for name, values in self._values.items()
        )

    def _decode(self, row: int) -> Params:
        return {name: values[self._rows[row, axis]] for axis, (name, values) in enumerate(self._values.items())}

    def _promise(self) -> dict[str, float]:
        """Return for each knob the most that one of its values may bring: prior mean and standard deviation."""
        names = [name for name, values in self._values.items() for value in values if value != self._baseline[name]]
        means, sds = self._features.prior_mean, np.sqrt(np.diag(self._features.prior_covariance))
        promise: dict[str, float] = {}
        for name, mean, sd in zip(names, means, sds, strict=False):
            promise[name] = max(promise.get(name, -math.inf), float(mean + sd))
        return promise


def list_values(distribution: BaseDistribution) -> list[Any]:
    """Return the values of a distribution, in order.

    Raises:
        ValueError: it is neither categorical nor of integers.
    """
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    raise ValueError(f"{distribution} cannot be enumerated: give categorical or integer distributions")


def enumerate_rows(
    values: Mapping[str, Sequence[Any]], baseline: Mapping[str, Any], promise: Mapping[str, float]
) -> Rows:
    """Return configs [rows, knobs] as indices of their values: all, or all of the most promising knobs' and singles.

    Args:
        values: by knob, in order.
        baseline: value by knob.
        promise: by knob.
    """
    own = [list(values[name]).index(baseline[name]) for name in values]
    full: list[str] = []
    size = 1
    for name in sorted(values, key=lambda name: -promise.get(name, 0.0)):
        if size * len(values[name]) > _MOST_ROWS:
            break
        full.append(name)
        size *= len(values[name])
    axes = [range(len(values[name])) if name in full else [own[axis]] for axis, name in enumerate(values)]
    grid = np.array(list(itertools.product(*axes)), dtype=np.int64).reshape(-1, len(values))
    others = [
        [index if place == axis else own[place] for place in range(len(values))]
        for axis, name in enumerate(values)
        if name not in full
        for index in range(len(values[name]))
        if index != own[axis]
    ]
    return np.concatenate([grid, np.array(others, dtype=np.int64).reshape(-1, len(values))])
