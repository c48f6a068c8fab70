"""How much faster many machines find the best settings: recorded tables, searched by 1 to 64 workers at once.

    python benchmarks/scale.py                                      every table and two crossed ones
    python benchmarks/scale.py --tables demo,digits+gpt --workers 1 8 64 --seeds 5
    python benchmarks/scale.py --strategies model random --tables digits+gpt

`a+b` is a crossed table: every config of the one with every config of the other, whose log speed-ups add up. A recorded
table has a few dozen configs; crossed ones say what a larger space does.

A worker is a machine like the others. It launches the baseline first and at every eighth launch, and reads a config
relative to it: true log speed-up, plus the launch's noise, less the mean noise of its baseline's. As soon as it is
free it asks the study that all share, which knows what runs elsewhere. A launch takes what it took when recorded. As in
a search, the user's own knobs come first, and what looks best is launched a second time before it is the answer.

Printed are medians over seeds of the seconds from which on the answer stays within 5 % of the best config of the table,
and in brackets how many times shorter that is than with one worker. The proof that follows takes two launches for each
pair that `rounds_needed` asks for, on one machine: workers shorten nothing of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from regret import TABLES, encode, learn_usual

from autotune.search.explore.additive import Change, Effect, Prior
from autotune.search.explore.prior import make_prior
from autotune.search.explore.sampler import LogAdditiveSampler, list_values
from autotune.search.finals.finalist import LEAST_ROUNDS, MOST_ROUNDS, rounds_needed
from autotune.selftest.table import Table, read_table

Params = dict[str, Any]
Key = tuple[object, ...]
Space = dict[str, optuna.distributions.BaseDistribution]

WORKERS = (1, 2, 4, 8, 16, 32, 64)
CROSSED = ("digits+gpt", "demo+gpt", "demo+digits+gpt")
WITHIN = 0.05
_BASELINE_EVERY = 8
_FAILED = -1.0
"""Log speed-up that the study is told of a config that fails, or learns something else."""
_MOST_LAUNCHES = 96
_MOST_ASKED = 8
"""Proposals that were launched before, until one is drawn at random."""


@dataclass(frozen=True)
class World:
    """A space, and what is true of it.

    Attributes:
        name: of its tables.
        space: values by knob.
        baseline: value by knob.
        prior: what is known before.
        truths: log speed-up of what can be launched and learns the same.
        seconds: that a launch takes, of everything that was recorded.
    """

    name: str
    space: Space
    baseline: Params
    prior: Prior
    truths: Mapping[Key, float]
    seconds: Mapping[Key, float]

    @property
    def best(self) -> Key:
        """The fastest config."""
        return max(self.truths, key=self.truths.__getitem__)

    def make_key(self, params: Params) -> Key:
        """Return what a config goes by: its values, in the order of the space."""
        return tuple(params[name] for name in self.space)

    def list_own(self) -> list[Params]:
        """Return the values of the user's own knobs, each alone: what a search begins with."""
        return [
            self.baseline | {name: value}
            for name, values in self.space.items()
            if "user_knobs." in name
            for value in list_values(values)
            if value != self.baseline[name]
        ]

    def count_proof_seconds(self, noise: float) -> float:
        """Return what the proof of the fastest config takes on one machine."""
        pair_sd, gain = math.sqrt(2) * noise, self.truths[self.best]
        pairs = rounds_needed(pair_sd, gain, fewest=LEAST_ROUNDS, most=MOST_ROUNDS)
        return pairs * (self.seconds[self.make_key(self.baseline)] + self.seconds[self.best])


def make_world(table: Table, usual: Mapping[Change, Effect]) -> World:
    """Return a table as a world.

    Args:
        table: what was recorded.
        usual: what changes bring on other targets.
    """
    choices = table.header.choices
    groups = {tuple(encode(config, choices).values()): (config, group) for config, group in table.by_config.items()}
    return World(
        name=table.header.name,
        space={name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()},
        baseline=encode(table.baseline, choices),
        prior=make_prior(table.header.report, usual=usual),
        truths={
            key: table.truths[config]
            for key, (config, _) in groups.items()
            if config in table.truths and not table.drifts(config)
        },
        seconds={
            key: statistics.fmean(launch.elapsed_seconds for _, launch in group) for key, (_, group) in groups.items()
        },
    )


def cross(one: World, other: World) -> World:
    """Return every config of one world with every config of another; a launch takes as long as it does on average."""

    def rename(mark: str, change: Change) -> Change:
        return f"{mark}.{change[0]}", change[1]

    parts = (("a", one), ("b", other))
    effects = {rename(mark, change): known for mark, part in parts for change, known in part.prior.effects.items()}
    pairs = {
        (rename(mark, first), rename(mark, second)): known
        for mark, part in parts
        for (first, second), known in part.prior.pairs.items()
    }
    return World(
        name=f"{one.name}+{other.name}",
        space={f"{mark}.{name}": values for mark, part in parts for name, values in part.space.items()},
        baseline={f"{mark}.{name}": value for mark, part in parts for name, value in part.baseline.items()},
        prior=Prior(effects, pairs),
        truths={(*a, *b): one.truths[a] + other.truths[b] for a, b in itertools.product(one.truths, other.truths)},
        seconds={
            (*a, *b): (one.seconds[a] + other.seconds[b]) / 2 for a, b in itertools.product(one.seconds, other.seconds)
        },
    )


def make_model(world: World, seed: int, noise: float) -> optuna.samplers.BaseSampler:
    """Return the search's own sampler."""
    return LogAdditiveSampler(
        world.space,
        world.baseline,
        prior=dataclasses.replace(world.prior, noise_sd=noise),
        price=lambda params: world.seconds[world.make_key(params)],
        is_valid=lambda params: world.make_key(params) in world.seconds,
        seed=seed,
    )


SAMPLERS: dict[str, Callable[[World, int, float], optuna.samplers.BaseSampler]] = {
    "model": make_model,
    "tpe": lambda _world, seed, _noise: optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed),
    "random": lambda _world, seed, _noise: optuna.samplers.RandomSampler(seed=seed),
}


@dataclass
class Worker:
    """A machine of the fleet.

    Attributes:
        anchors: noise of its launches of the baseline.
        launches: that it has begun.
    """

    anchors: list[float] = field(default_factory=list)
    launches: int = 0


@dataclass(frozen=True)
class Job:
    """A launch.

    Attributes:
        key: of its config.
        trial: of the study; None for the baseline, and for what is launched once more.
    """

    key: Key
    trial: optuna.Trial | None = None


class Fleet:
    """One search of a world by several workers.

    Args:
        world: that is searched.
        strategy: one of `SAMPLERS`.
        workers: how many.
        noise: standard deviation of the log rate of one launch.
        seed: of proposals and noise.

    Attributes:
        reached: seconds from which on the answer was within 5 % of the best; infinite where it never was for good.
        launches: that had ended by then, the baseline's too.
    """

    def __init__(self, world: World, strategy: str, workers: int, noise: float, seed: int) -> None:
        self.world, self.reached, self.launches = world, math.inf, 0
        self._noise, self._rng = noise, random.Random(f"{world.name} {noise} {seed}")
        self._study = optuna.create_study(direction="maximize", sampler=SAMPLERS[strategy](world, seed, noise))
        for params in world.list_own():
            self._study.enqueue_trial(params)
        self._workers = [Worker() for _ in range(workers)]
        self._own = world.make_key(world.baseline)
        self._readings: dict[Key, list[float]] = {}
        self._running: list[Key] = []
        self._best = world.truths[world.best]

    def run(self) -> None:
        """Launch until there are enough launches."""
        order, ended, most = itertools.count(), 0, _MOST_LAUNCHES + 2 * len(self._workers)
        queue = [(0.0, next(order), worker, self._begin(worker)) for worker in self._workers]
        queue = [(self.world.seconds[job.key], number, worker, job) for _, number, worker, job in queue]
        heapq.heapify(queue)
        while queue:
            now, _, worker, job = heapq.heappop(queue)
            ended += 1
            self._finish(worker, job)
            self._note(now, ended)
            if ended + len(queue) < most:
                job = self._begin(worker)
                heapq.heappush(queue, (now + self.world.seconds[job.key], next(order), worker, job))

    def _begin(self, worker: Worker) -> Job:
        """Return what a worker launches next."""
        turn, worker.launches = worker.launches, worker.launches + 1
        if turn % _BASELINE_EVERY == 0:
            return Job(self._own)
        leader = self._list_leaders()[:1]
        again = [key for key in leader if len(self._readings[key]) == 1 and key not in self._running]
        job = Job(again[0]) if again else self._ask()
        self._running.append(job.key)
        return job

    def _ask(self) -> Job:
        """Return a config that was not launched before; one of the best five once all were."""
        for _ in range(_MOST_ASKED):
            trial = self._study.ask(self.world.space)
            key = self.world.make_key(trial.params)
            if key in self.world.seconds and key != self._own and key not in self._readings:
                self._readings[key] = []
                return Job(key, trial)
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        new = [key for key in self.world.seconds if key not in self._readings and key != self._own]
        if not new:
            return Job(min(self._list_leaders()[:5] or [self._own], key=lambda one: len(self._readings.get(one, ()))))
        key = self._rng.choice(new)
        self._readings[key] = []
        return Job(key)

    def _finish(self, worker: Worker, job: Job) -> None:
        """Count what a launch has read."""
        luck = self._rng.gauss(0.0, self._noise)
        if job.key == self._own:
            worker.anchors.append(luck)
            return
        self._running.remove(job.key)
        truth = self.world.truths.get(job.key)
        value = _FAILED if truth is None else truth + luck - statistics.fmean(worker.anchors)
        if truth is not None:
            self._readings[job.key].append(value)
        if job.trial is not None:
            self._study.tell(job.trial, value)
            return
        params = dict(zip(self.world.space, job.key, strict=True))
        self._study.add_trial(optuna.create_trial(params=params, distributions=self.world.space, value=value))

    def _list_leaders(self) -> list[Key]:
        """Return what was timed, the best mean first."""
        means = {key: statistics.fmean(read) for key, read in self._readings.items() if read}
        return sorted(means, key=means.__getitem__, reverse=True)

    def _note(self, now: float, ended: int) -> None:
        """Keep since when the answer is good; where a worse one takes its place, it is not."""
        answer = next((key for key in self._list_leaders() if len(self._readings[key]) > 1), self._own)
        if 1.0 - math.exp(self.world.truths[answer] - self._best) > WITHIN:
            self.reached = math.inf
        elif math.isinf(self.reached):
            self.reached, self.launches = now, ended


def run(world: World, strategy: str, workers: int, noise: float, seeds: int) -> tuple[float, float]:
    """Return medians over seeds: the seconds until the answer is good, and the launches that took."""
    fleets = [Fleet(world, strategy, workers, noise, seed) for seed in range(seeds)]
    for fleet in fleets:
        fleet.run()
    return statistics.median(one.reached for one in fleets), statistics.median(one.launches for one in fleets)


def make_worlds(names: Sequence[str] | None) -> list[World]:
    """Return the worlds of some names, `a+b` being crossed; all when none are given."""
    tables = {path.name[:-9]: read_table(path) for path in sorted(TABLES.glob("*.jsonl.gz"))}
    worlds = []
    for name in names or (*tables, *CROSSED):
        parts = []
        for part in name.split("+"):
            label = tables[part].header.report.target.label
            usual = learn_usual([one for one in tables.values() if one.header.report.target.label != label])
            parts.append(make_world(tables[part], usual))
        worlds.append(functools.reduce(cross, parts))
    return worlds


def format_row(world: World, strategy: str, noise: float, found: Mapping[int, tuple[float, float]]) -> str:
    """Return a line of the table."""
    alone = next(iter(found.values()))
    cells = []
    for seconds, _ in found.values():
        known = math.isfinite(seconds) and math.isfinite(alone[0])
        cells.append(f"{seconds:.0f} ({alone[0] / seconds:.1f}x)" if known else "not reached")
    launches = f"{alone[1]:.0f}" if math.isfinite(alone[0]) else "-"
    facts = (world.name, f"{len(world.seconds):,}", strategy, f"{noise:.0%}", launches)
    return " | ".join(("", *facts, *cells, f"{world.count_proof_seconds(noise):.0f}", "")).strip()


def main() -> int:
    """Read the command line and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="", help="names, with commas; all when left out")
    parser.add_argument("--strategies", nargs="*", choices=SAMPLERS, default=["model"])
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    parser.add_argument("--noise", type=float, nargs="*", default=[0.03])
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    heads = ("table", "configs", "strategy", "noise", "launches", *(f"{one}" for one in arguments.workers), "proof")
    print(f"| {' | '.join(heads)} |\n| --- | --: | --- {'| --: ' * (len(heads) - 3)}|")
    for world in make_worlds(arguments.tables.split(",") if arguments.tables else None):
        for strategy, noise in itertools.product(arguments.strategies, arguments.noise):
            found = {one: run(world, strategy, one, noise, arguments.seeds) for one in arguments.workers}
            print(format_row(world, strategy, noise, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
