"""The Optuna study: proposes configs and keeps a stock SQLite copy of what was found.

The trials' own files are the truth; the database is rebuilt from them when it is missing, torn or out of step.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from autotune.records.config import KnobValue, TrainConfig, get_knob
from autotune.search.objective import KEYS, Judged
from autotune.space import SearchSpace

_STUDY_NAME = "autotune"
_MOST_REPEATS = 12
_RANDOM_DRAWS = 500
_STARTUP_TRIALS = 8
_LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Proposal:
    """A config to try.

    Attributes:
        config: the settings.
        trial: Optuna's side of it; None where Optuna does not propose.
    """

    config: TrainConfig
    trial: optuna.Trial | None = None


class Study:
    """One study over a static space.

    Args:
        path: of the SQLite database; rebuilt when it does not hold exactly `known`.
        space: what may be varied.
        seed: of the sampler; each proposal draws from a stream of its own, so that a resumed search goes on alike.
        known: trials finished earlier, each with its log speed-up.
    """

    def __init__(
        self, path: Path, space: SearchSpace, *, seed: int, known: Sequence[tuple[Judged, float | None]] = ()
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._seed = seed
        self._parameters = {name: _Parameter(name, values) for name, values in space.choices.items()}
        self._study, is_complete = _open_study(path, expected=len(known))
        if not is_complete:
            for judged, value in known:
                self.close(self.open(judged.config), judged, value)

    def open(self, config: TrainConfig) -> Proposal:
        """Enqueue a config of ours and return it as the next proposal."""
        params = {p.key: p.encode(get_knob(config, name)) for name, p in self._parameters.items()}
        self._study.enqueue_trial(params)
        return Proposal(config, self._study.ask(self._distributions()))

    def propose(self, tried: Sequence[TrainConfig]) -> Proposal | None:
        """Return TPE's proposal, or a random one where TPE only repeats itself; None when nothing new is left."""
        if not self._parameters:
            return None
        for repeat in range(_MOST_REPEATS):
            seed = (self._seed * 7919 + len(tried) * 31 + repeat) % 2**32
            self._study.sampler = TPESampler(n_startup_trials=_STARTUP_TRIALS, multivariate=True, seed=seed)
            trial = self._study.ask(self._distributions())
            config = self._space.complete({name: p.decode(trial.params[p.key]) for name, p in self._parameters.items()})
            if config not in tried:
                return Proposal(config, trial)
            self._study.tell(trial, state=TrialState.FAIL)
        config_or_none = self._draw_untried(tried)
        return None if config_or_none is None else self.open(config_or_none)

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Tell the study how a proposal ended.

        A trial without a timing is told as pruned and infeasible: TPE learns from it and no number is made up. One
        that was ended early by racing is told with the estimate it had.

        Args:
            proposal: from this study.
            judged: the trial.
            value: log speed-up over the baseline at that time; None without a timing.
        """
        trial, measurement = proposal.trial, judged.result.measurement
        assert trial is not None
        for name in KEYS:
            trial.set_constraint(name, judged.score.constraints[name])
        trial.set_user_attr("number", judged.result.spec.number)
        trial.set_user_attr("status", judged.score.status.value)
        trial.set_user_attr("ended_by", measurement.ended_by if measurement else None)
        if value is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def abandon(self, proposal: Proposal) -> None:
        """Take back a proposal that was not finished."""
        assert proposal.trial is not None
        self._study.tell(proposal.trial, state=TrialState.FAIL)

    def _draw_untried(self, tried: Sequence[TrainConfig]) -> TrainConfig | None:
        rng = random.Random(self._seed * 7919 + len(tried))
        for _ in range(_RANDOM_DRAWS):
            config = self._space.complete({name: rng.choice(p.values) for name, p in self._parameters.items()})
            if config not in tried:
                return config
        return None

    def _distributions(self) -> dict[str, BaseDistribution]:
        return {parameter.key: parameter.distribution for parameter in self._parameters.values()}


class _Parameter:
    """One knob as Optuna sees it: numbers by their rank, so that order is kept; the rest by value."""

    def __init__(self, name: str, values: tuple[KnobValue, ...]) -> None:
        self.ordered = len(values) > 2 and all(type(value) in (int, float) for value in values)
        self.values: tuple[Any, ...] = tuple(sorted(values)) if self.ordered else values
        self.key = f"{name}_rank" if self.ordered else name
        self.distribution: BaseDistribution = (
            IntDistribution(0, len(values) - 1) if self.ordered else CategoricalDistribution(self.values)
        )

    def encode(self, value: Any) -> Any:
        return self.values.index(value) if self.ordered else value

    def decode(self, value: Any) -> Any:
        return self.values[value] if self.ordered else value


def _open_study(path: Path, *, expected: int) -> tuple[optuna.Study, bool]:
    """Return the study in a database and True, or an empty one and False when it does not hold what it should."""
    try:
        study = _create_study(path)
        trials = study.get_trials(deepcopy=False)
        finished = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        if len(finished) == expected and not any(
            trial.state in (TrialState.RUNNING, TrialState.WAITING) for trial in trials
        ):
            return study, True
    except Exception:  # whatever SQLite, SQLAlchemy or Optuna make of a damaged file, the answer is to rebuild it
        pass
    path.unlink(missing_ok=True)
    return _create_study(path), False


def _create_study(path: Path) -> optuna.Study:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=_LOCK_SECONDS)
        # The database can be rebuilt, so it need not wait for the disk at each of Optuna's many commits.
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"creator": connect})
    return optuna.create_study(study_name=_STUDY_NAME, storage=storage, direction="maximize", load_if_exists=True)
