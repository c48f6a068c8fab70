"""The Optuna study: proposes configs, and has a SQLite copy of what was found kept for stock Optuna tools.

A trial has the knobs' own names and values: the copy is one to look at.

It is in memory and made from the trials' own files, which are the truth; the copy is read by nobody here.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.records.codec import write_bytes
from autotune.records.config import KnobValue, TrainConfig, changed_fields, get_knob
from autotune.search.explore.additive import NOTHING_KNOWN, Prior
from autotune.search.explore.sampler import TAKEN_BACK, Floor, LogAdditiveSampler
from autotune.search.scores.objective import KEYS, Judged
from autotune.space import BATCH_KNOBS, SearchSpace

_MOST_BEHIND = 0.02
"""Of the trials: so many may be missing in the copy while the search runs; to write it for each costs the square."""

_MOST_CONFIGS = 2**8
"""That are kept; the rows that are looked at for one proposal are far fewer."""

_FOLLOWING_KNOBS = BATCH_KNOBS - {"micro_batch_size"}
"""These follow from the micro batch."""

_METRIC_NAMES = "study:metric_names"
"""Where Optuna keeps what `Study.set_metric_names` was given."""

SPEED = "log_speedup"
"""Attribute of a trial of a study of the memory saved."""

STUDY_NAME = "autotune"
"""Name of the study in the file."""


@dataclass(frozen=True)
class Proposal:
    """A config to try.

    Attributes:
        config: the settings.
        trial: Optuna's side of it; None where Optuna does not propose.
    """

    config: TrainConfig
    trial: optuna.Trial | None = None


@dataclass(frozen=True)
class SpeedFloor:
    """How fast the winner of a search has to be that makes something else best.

    Attributes:
        least: log speed-up.
        prior: what changes usually bring in speed.
        read: returns the log speed-up of a launch; None where it is not known.
    """

    least: float
    prior: Prior
    read: Callable[[Judged], float | None]


class Study:
    """One study over a static space.

    Args:
        path: of its copy, a SQLite file; None for no copy.
        space: what may be varied.
        seed: of the sampler; each proposal draws from a stream of its own, so that a resumed search goes on alike.
        known: trials finished earlier, each with its value.
        told: hears, in one sentence, that the copy cannot be kept.
        prior: what changes usually bring, in value.
        price: returns the seconds that a launch of a config will take.
        floor: of the speed, where the value is the log of the memory that is saved; None where it is the speed-up's.
    """

    def __init__(
        self,
        path: Path | None,
        space: SearchSpace,
        *,
        seed: int,
        known: Sequence[tuple[Judged, float | None]] = (),
        told: Callable[[str], None] = lambda _sentence: None,
        prior: Prior = NOTHING_KNOWN,
        price: Callable[[TrainConfig], float] = lambda _config: 1.0,
        floor: SpeedFloor | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, self._floor = space, floor
        self._told: dict[int, str] = {}
        self._configs: dict[tuple[tuple[str, Any], ...], TrainConfig] = {}
        self._distributions: dict[str, BaseDistribution] = {
            name: make_distribution(values) for name, values in space.choices.items()
        }
        self._sampler = LogAdditiveSampler(
            self._distributions,
            self._encode(space.baseline),
            prior=prior,
            price=lambda params: price(self._complete(params)),
            is_valid=self._is_canonical,
            seed=seed,
            floor=None if floor is None else Floor(SPEED, floor.least, floor.prior),
        )
        self._study = optuna.create_study(study_name=STUDY_NAME, direction="maximize", sampler=self._sampler)
        metric = "log speed-up" if floor is None else "log of the memory saved"
        self._file = None if path is None else StudyFile(path, told, metric=metric)
        for judged, value in known:
            self._tell(self.open(judged.config), judged, value)
        self._copy()

    def open(self, config: TrainConfig) -> Proposal:
        """Enqueue a config of ours and return it as the next proposal."""
        self._study.enqueue_trial(self._encode(config))
        return Proposal(config, self._study.ask(self._distributions))

    def propose(
        self,
        closed: Container[object],
        together: Iterable[frozenset[str]] = (),
        dear: Mapping[str, float] = MappingProxyType({}),
        lost: Iterable[frozenset[str]] = (),
    ) -> Proposal | None:
        """Return the sampler's proposal; None when nothing is left that is not closed.

        Args:
            closed: configs that are not to be proposed.
            together: changes, as `name=value`, that are not to be proposed wherever all of them are made.
            dear: changes, likewise, that cost far more than others, each with the times that its price counts: the best
                without them is weighed against the best of all.
            lost: changes, likewise, that cannot be part of the answer: closed, and no bar for others.
        """
        if not self._distributions:
            return None
        self._sampler.closed_values = self._read_combinations(together)
        self._sampler.lost_values = self._read_combinations(lost)
        self._sampler.dear_values = [(dict([self._known[one]]), factor) for one, factor in dear.items()]
        self._sampler.is_open = lambda params: self._complete(params) not in closed
        trial = self._study.ask(self._distributions)
        if not self._sampler.exhausted:
            return Proposal(self._complete(trial.params), trial)
        self._take_back(trial)
        return None

    def _read_combinations(self, combinations: Iterable[frozenset[str]]) -> list[dict[str, Any]]:
        return [values for one in combinations if (values := self._read_changes(one))]

    @cached_property
    def _known(self) -> dict[str, tuple[str, Any]]:
        """Every value of the space by its text, `name=value`."""
        return {f"{name}={value}": (name, value) for name, values in self._space.choices.items() for value in values}

    def _read_changes(self, changes: frozenset[str]) -> dict[str, Any]:
        """Return the values of some changes by knob; empty where one does not vary here, or two are of one knob."""
        wanted = [text for text in changes if text.partition("=")[0] not in _FOLLOWING_KNOBS]
        known = [self._known[text] for text in wanted if text in self._known]
        return dict(known) if len({name for name, _ in known}) == len(wanted) else {}

    def list_simpler(self, config: TrainConfig) -> list[TrainConfig]:
        """Return a config with one change taken back, for each that may well be worth nothing."""
        found = self._sampler.list_simpler(self._study, self._encode(config)) if self._distributions else []
        return [self._complete(self._encode(config) | one) for one in found]

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Tell the study how a proposal ended.

        A trial without a timing, or beyond a constraint, is told as pruned and infeasible: no number is made up. One
        that was ended early by racing is told with the estimate it had.

        Args:
            proposal: from this study.
            judged: the trial.
            value: log speed-up over the baseline at that time, or of the memory saved; None without a timing.
        """
        self._tell(proposal, judged, value)
        self._copy()

    def abandon(self, proposal: Proposal) -> None:
        """Take back a proposal that was not finished."""
        assert proposal.trial is not None
        self._take_back(proposal.trial)
        self._copy()

    def _take_back(self, trial: optuna.Trial) -> None:
        trial.set_user_attr(TAKEN_BACK, True)
        self._study.tell(trial, state=TrialState.FAIL)

    def save(self, attributes: Mapping[str, Any]) -> None:
        """Bring the copy up to date, and set attributes of the study: those given, and the model's effects.

        Args:
            attributes: by name, as JSON holds them.
        """
        self._update_copy(most_behind=0.0)
        if self._file is not None:
            effects = {
                f"{name}={value}": [round(mean, 4), round(sd, 4)]
                for (name, value), (mean, sd) in self.list_effects().items()
            }
            self._file.describe({**attributes, "effects": effects})

    def list_effects(self) -> dict[tuple[str, KnobValue | None], tuple[float, float]]:
        """Return what each change alone brings in speed: log speed-up and its sd by knob and value, best first."""
        return self._sampler.list_effects(self._study) if self._distributions else {}

    def expect(self, config: TrainConfig) -> float:
        """Return the log speed-up that the changes of a config are taken to bring together: the sum of each alone."""
        effects, changed = self.list_effects(), changed_fields(config, self._space.baseline)
        return math.fsum(effects.get((name, get_knob(config, name)), (0.0, 0.0))[0] for name in changed)

    def list_estimates(self) -> dict[str, float]:
        """Return the log speed-up that each config launched here is taken to have by all launches, by its key."""
        if not self._distributions:
            return {}
        found = self._sampler.list_estimates(self._study)
        return {self._told[number]: value for number, value in found.items() if number in self._told}

    def _tell(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        trial, measurement = proposal.trial, judged.result.measurement
        assert trial is not None
        self._told[trial.number] = judged.key
        for name in KEYS:
            trial.set_constraint(name, judged.score.constraints[name])
        trial.set_user_attr("number", judged.result.spec.number)
        trial.set_user_attr("status", judged.score.status.value)
        trial.set_user_attr("ended_by", measurement.ended_by if measurement else None)
        if self._floor is not None:
            trial.set_user_attr(SPEED, self._floor.read(judged))
        if value is None or not judged.score.feasible:  # how fast it would be must draw nothing towards it
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def _copy(self) -> None:
        self._update_copy(most_behind=_MOST_BEHIND)

    def _update_copy(self, *, most_behind: float) -> None:
        if self._file is not None:
            self._file.update(self._study.get_trials(deepcopy=False), most_behind=most_behind)

    def _encode(self, config: TrainConfig) -> dict[str, Any]:
        return {name: get_knob(config, name) for name in self._space.choices}

    def _is_canonical(self, params: dict[str, Any]) -> bool:
        """Return whether this is the one spelling of what a config does."""
        return self._encode(self._complete(params)) == params

    def _complete(self, params: dict[str, Any]) -> TrainConfig:
        """Return the config of some params; a search asks for the same ones again after each launch."""
        key = tuple(params.items())
        config = self._configs.get(key)
        if config is None:
            if len(self._configs) >= _MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[key] = self._space.complete(params)
        return config


def make_distribution(values: Sequence[KnobValue]) -> BaseDistribution:
    """Return values as Optuna has them: integers at one distance are a range, whatever else is a choice of these."""
    if len(values) > 2 and all(type(value) is int for value in values):
        low, step = int(values[0]), int(values[1]) - int(values[0])
        if step > 0 and list(values) == list(range(low, low + step * len(values), step)):
            return IntDistribution(low, int(values[-1]), step=step)
    return CategoricalDistribution(values)


class StudyFile:
    """The copy on disk, best effort: what goes wrong is told once, and the file is left as it is from then on.

    Args:
        path: of the file; whatever is there is replaced.
        told: hears of the error, in one sentence.
        metric: name of what is maximised.
    """

    def __init__(self, path: Path, told: Callable[[str], None], *, metric: str = "log speed-up") -> None:
        self._path, self._told, self._metric = path, told, metric
        self._connection = sqlite3.connect(":memory:")
        self._copied = 0
        self._is_given_up = False

    def update(self, trials: Sequence[FrozenTrial], *, most_behind: float = 0.0) -> None:
        """Bring the file up to date, where it is behind by more than a share of the trials.

        Args:
            trials: all of the study so far, in order; those that are new here have ended.
            most_behind: the share.
        """
        if self._copied and len(trials) - self._copied <= most_behind * self._copied:
            return

        def copy(storage: RDBStorage, study: int) -> None:
            for trial in (one for one in trials[self._copied :] if TAKEN_BACK not in one.user_attrs):
                storage.create_new_trial(study, template_trial=trial)
            self._copied = len(trials)

        self._write(copy)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes of the study, which Optuna's tools show beside it.

        Args:
            attributes: by name, as JSON holds them.
        """

        def describe(storage: RDBStorage, study: int) -> None:
            for name, value in attributes.items():
                storage.set_study_user_attr(study, name, value)

        self._write(describe)

    def _write(self, change: Callable[[RDBStorage, int], None]) -> None:
        if self._is_given_up:
            return
        try:
            change(*self._copy)
            write_bytes(self._path, self._connection.serialize(), durable=False)
        except Exception as error:  # whatever SQLite, SQLAlchemy, Optuna or the disk raise: the search needs none of it
            self._is_given_up = True
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            self._told(
                f"{self._path} could not be written ({reason}): the search goes on without it, and a resumed one "
                "builds it anew"
            )

    @cached_property
    def _copy(self) -> tuple[RDBStorage, int]:
        storage = RDBStorage("sqlite://", engine_kwargs={"creator": lambda: self._connection})
        study = storage.create_new_study([StudyDirection.MAXIMIZE], STUDY_NAME)
        storage.set_study_system_attr(study, _METRIC_NAMES, [self._metric])
        return storage, study
