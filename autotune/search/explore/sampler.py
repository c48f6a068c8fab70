"""An Optuna sampler for spaces whose knobs multiply: it knows what each usually brings, and learns what it brings here.

Any study can use it, if its objective is a log speed-up over a baseline that is maximised:

    sampler = LogAdditiveSampler(distributions, baseline, prior=Prior({("workers", None): Effect(0.1, 0.2)}, {}))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(baseline)

Every other turn takes the largest expected improvement, the turns between the best of a draw from the model (Thompson
1933), a quarter as far from its mean, each for its price. Where the model does not fit what it sees, TPE has these.

What is maximised may be something else than a speed-up, as long as changes add up, and a trial may have to keep a
second figure above a floor: that one has a model of its own, and what promises much is worth as much of it as it is
likely to stay above.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.search.explore.additive import Features, LogAdditiveModel, Prior, Rows, Vector, sum_weights

Params = dict[str, Any]

_MOST_ROWS = 2**14
"""Configs that are enumerated; of a larger space, the knobs of least promise are varied one at a time."""

_LOOKED_AT = 24
"""Rows that are priced at once, the best first."""

_DOUBT = 2.0
"""Standard deviations that what a change brings has to be away from nothing, or it is tried without."""

_BOLDNESS = 0.25
"""Of what a draw is away from the mean: of a dozen launches, whole ones lose too many on what promises nothing (on
recorded tables, replayed searches ended a fourth further from the best config at a tenth of the exhaustive cost)."""

TAKEN_BACK = "taken_back"
"""User attribute of a trial that was told as failed, and whose params may be proposed again all the same."""

_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_MISFIT = 2.0
"""Root mean square of five standard scores: more has a chance of about 1 in 1,000."""


@dataclass(frozen=True)
class Floor:
    """A second figure of each trial, which counts as additive too and has to stay above something.

    Attributes:
        attribute: of a trial, where the user keeps it.
        least: that it may be.
        prior: what is known of changes beforehand.
    """

    attribute: str
    least: float
    prior: Prior


class _Held:
    """What is known of a floor's figure.

    Args:
        floor: that it has to stay above.
        values: by knob.
        baseline: value by knob.
        rows: configs [rows, knobs].
    """

    def __init__(
        self,
        floor: Floor,
        values: Mapping[str, Sequence[Any]],
        baseline: Mapping[str, Any],
        rows: Rows,
    ) -> None:
        self.floor, self.features = floor, Features(values, baseline, floor.prior)
        self.model = LogAdditiveModel(self.features, floor.prior.noise_sd)
        self._columns = self.features.encode(rows)

    def learn(self, trial: FrozenTrial, key: tuple[int, ...]) -> None:
        """Learn from a trial that was timed."""
        value = trial.user_attrs.get(self.floor.attribute)
        if value is not None and math.isfinite(value):
            self.model.add(key, value)

    def weigh(self, promise: Vector) -> Vector:
        """Return promises [rows], those above 0 for the chance that each stays above the floor."""
        means, sds = self.model.foretell(self._columns)
        spread = self.model.spread.own_sd
        scores = (means - self.floor.least) / np.sqrt(sds**2 + spread**2)
        chances = np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in scores])
        weighed: Vector = np.where(promise > 0, promise * chances, promise)
        return weighed

    def list_able(self) -> set[tuple[int, ...]]:
        """Return what was read and is taken to stay above the floor."""
        return {key for key, value in self.model.list_estimates() if value >= self.floor.least}


class LogAdditiveSampler(BaseSampler):
    """Proposes the config that the model takes for the largest gain for its price.

    Args:
        space: distribution by name, categorical or of integers; the same for every trial of the study.
        baseline: value by name.
        prior: what is known of changes beforehand.
        price: returns what a trial of some params costs, in any unit.
        is_valid: returns whether some params are a config at all, spelled in its one way; asked once for each.
        least_gain: log speed-up that every change has to bring: for less, the config without it is the better one.
        seed: of the draws; each proposal draws from a stream of its own, by the number of different params before it.
        floor: a second figure that has to stay above something; None for none.

    Attributes:
        is_open: returns whether some params may be proposed now, all of them unless it is set; those of trials that
            run, or have ended, are not, but for failed ones that have the user attribute `TAKEN_BACK`.
        closed_values: values that may not come together now, by param: whatever has them is closed without being asked
            about.
        lost_values: likewise, of what can be the answer no more: what was read of it is no bar for others.
        dear_values: values that cost far more than others, by param, and times which the price of what has them counts:
            the best without any of them is looked at too.
        exhausted: the last proposal was random, for nothing was open.
    """

    exhausted = False

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        baseline: Mapping[str, Any],
        *,
        prior: Prior,
        price: Callable[[Params], float] = lambda _params: 1.0,
        is_valid: Callable[[Params], bool] = lambda _params: True,
        least_gain: float = 0.01,
        seed: int = 0,
        floor: Floor | None = None,
    ) -> None:
        self._space = {name: one for name, one in sorted(space.items()) if not one.single()}
        self._values = {name: list_values(one) for name, one in self._space.items()}
        self._baseline = {name: baseline[name] for name in self._space}
        self._indices = {name: {value: place for place, value in enumerate(own)} for name, own in self._values.items()}
        self._features = features = Features(self._values, self._baseline, prior)
        self._model, self._learnt = LogAdditiveModel(features, prior.noise_sd), set[int]()
        self._rows = enumerate_rows(self._values, self._baseline, self._promise(features))
        self._columns = features.encode(self._rows)
        self._held = None if floor is None else _Held(floor, self._values, self._baseline, self._rows)
        self._asked = least_gain * features.count_changes(self._rows)
        self._least_gain = least_gain
        self._places = {tuple(row): place for place, row in enumerate(self._rows.tolist())}
        self._closed, self._checked = np.zeros((2, len(self._rows)), dtype=bool)
        self._keys: dict[int, tuple[int, ...]] = {}
        self._running: list[int] = []
        self._proposed: dict[int, tuple[int, ...]] = {}  # to trials that have yet to take them over
        self._lock = threading.RLock()
        self._price, self._is_valid, self._seed = price, is_valid, seed
        self._independent = RandomSampler(seed)
        self.is_open: Callable[[Params], bool] = lambda _params: True
        self.closed_values: Sequence[Params] = ()
        self.lost_values: Sequence[Params] = ()
        self.dear_values: Sequence[tuple[Params, float]] = ()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the space: every trial has the same."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the params to try next; none where all of the space was tried."""
        with self._lock:
            params = self._propose(study, trial)
            self.exhausted = params is None
            if params is not None:
                self._proposed[trial.number] = tuple(self._find_row(params))
            return params or {}

    def _propose(self, study: Study, trial: FrozenTrial) -> Params | None:
        trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        self._running = self._find_places(trials, TrialState.RUNNING)
        ended = [one for one in trials if one.state.is_finished() and TAKEN_BACK not in one.user_attrs]
        self._closed[self._find_places(ended, *_ENDED)] = True
        self._learn(trials)
        counted = (*ended, *(one for one in trials if one.state is TrialState.RUNNING))
        turn = len({self._key(one) for one in counted})
        model = self._model
        held = self._held  # TPE knows of no floor
        is_tpe_turn = held is None and not turn % 2 and model.misfit > _MISFIT
        params = self._ask_tpe(study, trial, turn) if is_tpe_turn else None
        if params is None:
            best = model.find_best(self._least_gain, self._list_able())
            if turn % 2:
                means, sds = model.foretell(self._columns)
                promise = expected_gain(means - self._asked - best, sds)
            else:
                drawn = model.draw(np.random.default_rng((self._seed, turn)), _BOLDNESS)
                promise = sum_weights(drawn, self._columns) - self._asked - best
            params = self._choose(promise if held is None else held.weigh(promise))
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a random value: of params outside of the space, or where nothing is left to propose."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def list_effects(self, study: Study) -> dict[tuple[str, Any], tuple[float, float]]:
        """Return what each change alone brings by the model, by param and value: its mean and its sd, best first.

        It is the floor's figure that is told of, where there is one.

        Args:
            study: whose trials say so.
        """
        with self._lock:
            self._learn(study.get_trials(deepcopy=False))
        changes = [
            (name, value) for name, values in self._values.items() for value in values if value != self._baseline[name]
        ]
        if not changes:
            return {}
        rows = [self._find_row(self._baseline | {name: value}) for name, value in changes]
        features, model = self._told_of
        means, sds = model.foretell(features.encode(np.array(rows, dtype=np.int64)))
        found = sorted(zip(means.tolist(), sds.tolist(), changes, strict=True), key=lambda one: -one[0])
        return {change: (mean, sd) for mean, sd, change in found}

    def list_estimates(self, study: Study) -> dict[int, float]:
        """Return what all trials together say that the params of each timed one have, by its number.

        It is the floor's figure that is told of, where there is one.

        Args:
            study: whose trials say so.
        """
        with self._lock:
            self._learn(study.get_trials(deepcopy=False))
        estimates = dict(self._told_of[1].list_estimates())
        return {number: estimates[key] for number in self._learnt if (key := self._keys[number]) in estimates}

    @property
    def _told_of(self) -> tuple[Features, LogAdditiveModel]:
        return (self._features, self._model) if self._held is None else (self._held.features, self._held.model)

    def list_simpler(self, study: Study, params: Params) -> list[Params]:
        """Return some params with one change taken back, for each that may be worth nothing, the least of them first.

        Args:
            study: whose trials say what changes bring.
            params: of the space.
        """
        with self._lock:
            self._learn(study.get_trials(deepcopy=False))
        parts = [params | {name: own} for name, own in self._baseline.items() if params[name] != own]
        if not parts:
            return []
        keys = [self._find_row(one) for one in (params, *parts)]
        columns = self._features.encode(np.array(keys, dtype=np.int64))
        credits = [self._model.foretell_difference(columns[0], part) for part in columns[1:]]
        doubtful = [(mean, place) for place, (mean, sd) in enumerate(credits) if mean - _DOUBT * sd < self._least_gain]
        return [parts[place] for _, place in sorted(doubtful) if self._is_valid(parts[place])]

    def _list_able(self) -> set[tuple[int, ...]] | None:
        """Return what was read and can be the answer; None for all of it."""
        able = None if self._held is None else self._held.list_able()
        if not self.lost_values:
            return able
        lost = self._find_rows(self.lost_values)
        found = ((key, self._places.get(key)) for key, _ in self._model.list_estimates())
        read = {key for key, place in found if place is None or not lost[place]}
        return read if able is None else read & able

    def _find_row(self, params: Params) -> list[int]:
        return [places[params[name]] for name, places in self._indices.items()]

    def _choose(self, promise: Vector) -> Params | None:
        """Return the open params of most promise [rows] for their price."""
        together = self._find_rows([*self.closed_values, *self.lost_values])
        sums = np.where(self._closed | together, -np.inf, promise)
        sums[self._running] = -np.inf

        factors = np.ones(len(sums))
        for values, factor in self.dear_values:
            rows = self._find_rows([values])
            factors[rows] = np.maximum(factors[rows], factor)

        def worth(row: int) -> float:
            gain, price = float(sums[row]), float(factors[row]) * self._price(self._decode(row))
            return gain / price if gain > 0 else gain * price

        looked_at = self._list_best(sums)
        if self.dear_values:
            is_dear = self._find_rows([values for values, _ in self.dear_values])
            looked_at += self._list_best(np.where(is_dear, -np.inf, sums))
        return self._decode(max(looked_at, key=worth)) if looked_at else None

    def _list_best(self, sums: Vector) -> list[int]:
        """Return open rows of the largest sums [rows]: of the first so many that have any."""
        order = np.argsort(-sums, kind="stable")[: int(np.isfinite(sums).sum())].tolist()
        for first in range(0, len(order), _LOOKED_AT):
            group = [row for row in order[first : first + _LOOKED_AT] if self._check(row)]
            found = [row for row in group if self.is_open(self._decode(row))]
            if found:
                return found
        return []

    def _find_rows(self, combinations: Sequence[Params]) -> npt.NDArray[np.bool_]:
        """Return which rows have all values of one of some combinations."""
        together: dict[tuple[str, ...], list[list[int]]] = {}
        for values in combinations:
            names = tuple(sorted(values))
            places = [self._indices[name].get(values[name], -1) for name in names]
            if -1 not in places:
                together.setdefault(names, []).append(places)
        found = np.zeros(len(self._rows), dtype=bool)
        axes = {name: axis for axis, name in enumerate(self._space)}
        for names, wanted in together.items():
            sizes = [len(self._values[name]) for name in names]
            rows = np.ravel_multi_index([self._rows[:, axes[name]] for name in names], sizes)
            found |= np.isin(rows, np.ravel_multi_index(np.array(wanted).T.tolist(), sizes))
        return found

    def _check(self, row: int) -> bool:
        """Return whether a row is a config at all; one that is none is closed for good."""
        if not self._checked[row]:
            self._checked[row] = True
            self._closed[row] = not self._is_valid(self._decode(row))
        return not self._closed[row]

    def _find_places(self, trials: Sequence[FrozenTrial], *states: TrialState) -> list[int]:
        """Return the rows of the trials that are in one of some states."""
        places = (self._places.get(self._key(one)) for one in trials if one.state in states)
        return [place for place in places if place is not None]

    def _ask_tpe(self, study: Study, trial: FrozenTrial, turn: int) -> Params | None:
        """Return what TPE proposes; None where that is not open."""
        tpe = TPESampler(n_startup_trials=1, multivariate=True, seed=(self._seed * 7919 + turn) % 2**32)
        params = tpe.sample_relative(study, trial, self._space)
        if params.keys() != self._space.keys():
            return None
        place = self._places.get(tuple(places[params[name]] for name, places in self._indices.items()))
        if place is None or place in self._running or not self._check(place) or not self.is_open(params):
            return None
        if self._find_rows([*self.closed_values, *self.lost_values])[place]:
            return None
        return params

    def _learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Learn from the trials that were timed since the last proposal."""
        for one in trials:
            if one.state is not TrialState.COMPLETE or one.number in self._learnt:
                continue
            self._learnt.add(one.number)
            key = self._key(one)
            if -1 not in key and one.value is not None and math.isfinite(one.value):
                self._model.add(key, one.value)
                if self._held is not None:
                    self._held.learn(one, key)

    def _key(self, trial: FrozenTrial) -> tuple[int, ...]:
        """Return the indices of a trial's values, -1 for one that is not in the space."""
        key = self._keys.get(trial.number)
        if key is None:
            key = tuple(places.get(trial.params.get(name), -1) for name, places in self._indices.items())
            if trial.state.is_finished():
                self._keys[trial.number] = key
                self._proposed.pop(trial.number, None)
            elif -1 in key:  # a trial runs before it has its params
                key = self._proposed.get(trial.number, key)
        return key

    def _decode(self, row: int) -> Params:
        return {name: values[self._rows[row, axis]] for axis, (name, values) in enumerate(self._values.items())}

    def _promise(self, features: Features) -> dict[str, float]:
        """Return for each knob the most that one of its values may bring: prior mean and standard deviation."""
        names = [name for name, values in self._values.items() for value in values if value != self._baseline[name]]
        promise: dict[str, float] = {}
        for name, mean, sd in zip(names, features.prior_mean, features.prior_sd, strict=False):  # the pairs come later
            promise[name] = max(promise.get(name, -math.inf), float(mean + sd))
        return promise


def expected_gain(means: Vector, sds: Vector) -> Vector:
    """Return E[max(0, x)] of normal variables: expected improvement (Jones, Schonlau & Welch 1998, eq. 15).

    Args:
        means: over the best so far [rows].
        sds: of each [rows].
    """
    scores = means / np.maximum(sds, 1e-12)
    density = np.exp(-(scores**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in scores])
    gain: Vector = means * below + sds * density
    return gain


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
