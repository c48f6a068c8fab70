"""How far from the best config searches of so many launches end, on recorded tables, by strategy.

    python benchmarks/regret.py                                   every table, every strategy, 50 seeds
    python benchmarks/regret.py --tables demo --strategies search tpe --seeds 10 --noise 0.03

The model's prior is learnt from all tables but the one that is searched, and the other machines' of the same target.

    search      the real search, replayed: its own baseline launches, repeats, early stops, refusals and finals
    again       the same, with what an earlier search of the same training has read
    sampler     its sampler alone, asked by Optuna

A launch reads a config's true log speed-up, the mean over its recorded launches, with noise drawn for it; one that
failed when it was recorded fails, and so does one that is known to learn something else. Every eighth launch is the
baseline's, for every strategy alike but the search's own. The regret is that of the config that would be returned then:
1 - its true rate / that of the best config of the table. Cost is in seconds as they were recorded; that of a space of
which a part was recorded is taken to be that part's in proportion.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from replay import BLOCK_NOISE, LearnsTheSame, StudyOnTable, price_gate

from autotune.records import TrainConfig
from autotune.records.config import KnobValue, changed_fields, get_knob
from autotune.records.search import KnownEffect
from autotune.search.explore.additive import Change, Effect
from autotune.search.explore.prior import USUAL, make_prior
from autotune.search.explore.sampler import LogAdditiveSampler
from autotune.search.explore.stage import list_own
from autotune.search.explore.study import Proposal
from autotune.search.policy import USUAL_POLICY
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import Ranking
from autotune.search.store.history import SAME_SD
from autotune.selftest.machines import Noise
from autotune.selftest.replay import Simulation, search
from autotune.selftest.table import Table, read_table
from autotune.space import SearchSpace, revert_knobs

TABLES = Path(__file__).parent / "tables"
LAUNCHES = (8, 12, 16, 24, 32)
COST_SHARES = (0.05, 0.10, 0.20)
_BASELINE_EVERY = 8
_LEAST_GAIN = 0.005
_SHIPPED_TABLES = 2
"""What is shipped counts as so many tables beside those that were recorded."""

_BUDGET_SECONDS = 7200.0
"""Of a replayed search: more than it needs for the launches that are looked at."""

_ANOTHER_DAY = 1000
"""Added to the seed of a search before."""

_FAILED = -1.0
"""Log speed-up that a sampler is told of a config that fails: it takes no None."""


class Ended(Exception):
    """The bench has no launch left."""


@dataclass
class Bench:
    """One search on one table.

    Attributes:
        table: what is launched.
        noise: standard deviation of the log rate of one launch.
        seed: of it.
        readings: by config, in the order of their first launch; empty for one that failed.
        usual: what changes bring on other targets.
        recalled: what earlier searches have read.
        answer: returns the config that would be returned now.
        list_effects: returns what each change alone is taken to bring by now: log speed-up and its sd.
        regrets: after so many launches, and at so much of the exhaustive cost (keys below 1).
    """

    table: Table
    noise: float
    seed: int
    usual: Mapping[Change, Effect] = field(default_factory=lambda: USUAL)
    recalled: Sequence[KnownEffect] = ()
    readings: dict[TrainConfig, list[float]] = field(default_factory=dict)
    answer: Callable[[], TrainConfig | None] = lambda: None
    list_effects: Callable[[], Mapping[tuple[str, KnobValue | None], tuple[float, float]]] = dict
    regrets: dict[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.table.header.name} {self.noise} {self.seed}")
        self.answer = self.best_mean
        self.space = SearchSpace(self.table.baseline, self.table.header.choices, ())
        self.truths = {one: truth for one, truth in self.table.truths.items() if not self.table.drifts(one)}
        self._oracle = max(self.truths.values())
        prices = {
            config: statistics.fmean(launch.elapsed_seconds for _, launch in group)
            for config, group in self.table.by_config.items()
        }
        self.prices: Mapping[TrainConfig, float] = prices
        whole = self.table.header.space_size / self.table.header.recorded_size
        self._exhaustive, self._spent, self._launches = whole * math.fsum(prices.values()), 0.0, 0

    @property
    def baseline(self) -> TrainConfig:
        """The own settings."""
        return self.table.baseline

    @property
    def configs(self) -> Sequence[TrainConfig]:
        """Every recorded config."""
        return [*self.table.by_config]

    def launch(self, config: TrainConfig) -> float | None:
        """Return what a launch reads; None when it fails.

        Raises:
            Ended: it is over.
        """
        if self._launches % _BASELINE_EVERY == 0:
            self.count(self.baseline)
        truth = self.truths.get(config)
        readings = self.readings.setdefault(config, [])
        reading = None if truth is None else truth + self.rng.gauss(0.0, self.noise)
        if reading is not None:
            readings.append(reading)
        self.count(config)
        return reading

    def count(self, config: TrainConfig) -> None:
        """Count a launch, and take the regret where it is asked for.

        Raises:
            Ended: it is over.
        """
        self._launches += 1
        self._spent += self.prices[config]
        if self._launches in LAUNCHES:
            self.regrets[self._launches] = self._regret()
        for share in COST_SHARES:
            if share not in self.regrets and self._spent >= share * self._exhaustive:
                self.regrets[share] = self._regret()
        if self._launches >= LAUNCHES[-1] and len(self.regrets) == len(LAUNCHES) + len(COST_SHARES):
            raise Ended

    def _regret(self) -> float:
        config = self.answer()
        return 1.0 - math.exp((0.0 if config is None else self.truths.get(config, 0.0)) - self._oracle)

    def finish(self) -> None:
        """Take what stands now for everything that is still to come: nothing new was left."""
        for key in (*LAUNCHES, *COST_SHARES):
            self.regrets.setdefault(key, self._regret())

    def best_mean(self) -> TrainConfig | None:
        """Return the config with the highest mean reading above the baseline's zero."""
        means = {config: statistics.fmean(read) for config, read in self.readings.items() if read}
        best = max(means, key=means.__getitem__, default=None)
        return best if best is not None and means[best] > 0 else None


def search_at_random(bench: Bench) -> None:
    """Try configs in random order."""
    configs = bench.rng.sample(bench.configs, len(bench.configs))
    for config in configs:
        bench.launch(config)


def ask_optuna(
    make_sampler: Callable[[Bench, int], optuna.samplers.BaseSampler], *, own_first: bool = False
) -> Callable[[Bench], None]:
    """Return the strategy that asks a sampler of Optuna's; what it has asked for already is drawn anew, eight times.

    Args:
        make_sampler: of a bench and a seed.
        own_first: begin as a search does, with the values of the user's own knobs, each alone.
    """

    def search(bench: Bench) -> None:
        distributions = make_distributions(bench)
        study = optuna.create_study(direction="maximize", sampler=make_sampler(bench, bench.rng.randrange(2**31)))
        study.enqueue_trial(encode(bench.baseline, distributions))
        for config in list_own(bench.space) if own_first else ():
            study.enqueue_trial(encode(config, distributions))
        again = 0
        while len(bench.readings) < len(bench.configs):
            trial = study.ask(distributions)
            config = bench.space.complete(trial.params)
            if config in bench.readings and again < 8:
                again += 1
                study.tell(trial, statistics.fmean(bench.readings[config] or [_FAILED]))
                continue
            if config not in bench.table.by_config or again >= 8:
                config = bench.rng.choice([one for one in bench.configs if one not in bench.readings])
            again = 0
            reading = bench.launch(config)
            study.tell(trial, _FAILED if reading is None else reading)

    return search


def climb(bench: Bench) -> None:
    """Coordinate ascent: knobs in random order, every value on top of the best so far, until nothing moves."""
    best, value, moved = bench.baseline, 0.0, True
    while moved:
        moved = False
        for name in bench.rng.sample([*bench.space.choices], len(bench.space.choices)):
            for config in neighbours(bench, best, name):
                reading = bench.launch(config)
                if reading is not None and reading > value:
                    best, value, moved = config, reading, True
    search_at_random(bench)


def neighbours(bench: Bench, start: TrainConfig, name: str) -> list[TrainConfig]:
    """Return the untried configs that differ from one in a knob."""
    values = {one: get_knob(start, one) for one in bench.space.choices}
    configs = [bench.space.complete({**values, name: value}) for value in bench.space.choices[name]]
    return [one for one in configs if one in bench.table.by_config and one not in (*bench.readings, bench.baseline)]


def combine(bench: Bench) -> None:
    """One change at a time, then those that won together, then without each of them."""
    won: dict[str, tuple[float, Any]] = {}
    for name in bench.rng.sample([*bench.space.choices], len(bench.space.choices)):
        for config in neighbours(bench, bench.baseline, name):
            reading = bench.launch(config)
            if reading is not None and reading > won.get(name, (_LEAST_GAIN, None))[0]:
                won[name] = (reading, get_knob(config, name))
    best = bench.space.complete({name: value for name, (_, value) in won.items()})
    for config in (best, *(revert_knobs(best, bench.baseline, [name]) for name in won)):
        if config in bench.table.by_config and config not in bench.readings:
            bench.launch(config)
    search_at_random(bench)


def double_batch(bench: Bench) -> None:
    """Lightning's batch finder, or DeepSpeed's fast mode on one device: larger micro batches as long as they fit."""
    for value in sorted(bench.space.choices.get("micro_batch_size", ()), key=float):
        config = bench.space.complete({"micro_batch_size": value})
        if config in bench.table.by_config and config != bench.baseline and bench.launch(config) is None:
            break


def make_sampler(bench: Bench, seed: int) -> optuna.samplers.BaseSampler:
    """Return the search's own sampler, with what the probe of the table expects."""

    def is_open(params: dict[str, Any]) -> bool:
        config = bench.space.complete(params)
        return config in bench.table.by_config and config not in bench.readings

    distributions, prior = make_distributions(bench), make_prior(bench.table.header.report, usual=bench.usual)
    sampler = LogAdditiveSampler(distributions, encode(bench.baseline, distributions), prior=prior, seed=seed)
    sampler.is_open = is_open
    return sampler


class RecordingStudy(StudyOnTable):
    """The study of a replayed search, which tells a bench of each launch and of who leads then.

    Args:
        bench: counts; what it knows beforehand is known here.
        arguments: as of `Study`.
        options: as of `Study`; the prior is the bench's.
    """

    def __init__(self, bench: Bench, *arguments: Any, **options: Any) -> None:
        options["prior"] = make_prior(bench.table.header.report, bench.recalled, usual=bench.usual)
        super().__init__(bench.table, *arguments, **options)
        self._bench = bench
        self._judged: list[Judged] = []
        bench.answer, bench.list_effects = self._find_leader, self.list_effects

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Learn from a launch, and count it."""
        super().close(proposal, judged, value)
        self._judged.append(judged)
        self._bench.readings.setdefault(judged.config, []).extend([] if value is None else [value])
        self._bench.count(judged.config)

    def _find_leader(self) -> TrainConfig | None:
        leader = Ranking(self._judged, self._bench.baseline, estimates=self.list_estimates()).leader
        return None if leader is None or leader.score <= USUAL_POLICY.least_gain else leader.config


def replay_search(bench: Bench) -> None:
    """Run the real search on the table until it has launched enough."""
    machine = Noise(launch=bench.noise, block=BLOCK_NOISE)(bench.rng)
    simulation = Simulation(LearnsTheSame(bench.table, machine), gate_seconds=price_gate(bench.table))
    search(simulation, bench.seed, _BUDGET_SECONDS, open_study=partial(RecordingStudy, bench))


def replay_again(bench: Bench) -> None:
    """Run one search until it has launched enough, then another that knows what the first has read."""
    first = Bench(bench.table, bench.noise, bench.seed + _ANOTHER_DAY, bench.usual)
    with contextlib.suppress(Ended):
        replay_search(first)
    tried = {(name, get_knob(config, name)) for config in first.readings for name in bench.space.choices}
    bench.recalled = [
        KnownEffect(knob=name, value=value, log_speedup=mean, log_sd=math.hypot(sd, SAME_SD), failed=False)
        for (name, value), (mean, sd) in first.list_effects().items()
        if (name, value) in tried
    ]
    replay_search(bench)


STRATEGIES: dict[str, Callable[[Bench], None]] = {
    "search": replay_search,
    "again": replay_again,
    "sampler": ask_optuna(make_sampler, own_first=True),
    "random": search_at_random,
    "tpe": ask_optuna(lambda _bench, seed: optuna.samplers.TPESampler(multivariate=True, seed=seed)),
    "gp": ask_optuna(lambda _bench, seed: optuna.samplers.GPSampler(seed=seed)),
    "climb": climb,
    "combine": combine,
    "batch": double_batch,
}


def make_distributions(bench: Bench) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return the space as Optuna sees it."""
    choices = bench.space.choices.items()
    return {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices}


def encode(config: TrainConfig, names: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of some knobs of a config."""
    return {name: get_knob(config, name) for name in names}


def learn_usual(tables: Sequence[Table]) -> dict[Change, Effect]:
    """Return what single changes bring over some tables, together with what is shipped, which counts as so many tables.

    Mean and standard deviation are over targets and values: of each table, the values of a knob count as one.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for table in tables:
        by_knob: dict[str, list[float]] = {}
        for config, truth in table.truths.items():
            changed = [name for name in changed_fields(config, table.baseline) if name in table.header.choices]
            if len(changed) == 1:
                by_knob.setdefault(changed[0], []).append(truth)
        for name, truths in by_knob.items():
            found.setdefault(name, []).append((statistics.fmean(truths), statistics.pvariance(truths)))
    learnt = {**USUAL}
    for name, parts in found.items():
        shipped = USUAL.get((name, None), Effect())
        weight = _SHIPPED_TABLES + len(parts)
        mean = (_SHIPPED_TABLES * shipped.mean + math.fsum(part for part, _ in parts)) / weight
        variance = _SHIPPED_TABLES * (shipped.sd**2 + (shipped.mean - mean) ** 2)
        variance += math.fsum(within + (part - mean) ** 2 for part, within in parts)
        learnt[name, None] = Effect(mean, math.sqrt(variance / weight))
    return learnt


def run(
    table: Table, strategy: str, noise: float, seeds: int, others: Sequence[Table] = ()
) -> list[dict[float, float]]:
    """Return the regrets of searches, one for each seed.

    Args:
        table: that is searched.
        strategy: by name.
        noise: standard deviation of the log rate of one launch.
        seeds: how many searches.
        others: of other targets, from which a prior may be learnt.
    """
    found, usual = [], learn_usual(others)
    for seed in range(seeds):
        bench = Bench(table, noise, seed, usual)
        with contextlib.suppress(Ended):
            STRATEGIES[strategy](bench)
        bench.finish()
        found.append(bench.regrets)
    return found


def main() -> int:
    """Read the command line and print a table of medians and 90th percentiles, and last the means over all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="", help="names, with commas; all when left out")
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=[*STRATEGIES])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--noise", type=float, nargs="*", default=[0.03, 0.10])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = arguments.tables.split(",") if arguments.tables else None
    paths = [path for path in sorted(TABLES.glob("*.jsonl.gz")) if names is None or path.name[:-9] in names]
    keys = (*LAUNCHES, *COST_SHARES)
    print(f"{'table':<16}{'noise':>6} {'strategy':<10}" + "".join(f"{_say(key):>12}" for key in keys))
    every = [read_table(path) for path in sorted(TABLES.glob("*.jsonl.gz"))]
    over_all: dict[tuple[float, str], list[dict[float, float]]] = {}
    for path in paths:
        table = read_table(path)
        label = table.header.report.target.label
        others = [one for one in every if one.header.report.target.label != label]
        for noise in arguments.noise:
            for strategy in arguments.strategies:
                began, found = time.process_time(), run(table, strategy, noise, arguments.seeds, others)
                cells = [_quantiles([regrets[key] for regrets in found]) for key in keys]
                seconds = (time.process_time() - began) / arguments.seeds
                head = f"{table.header.name:<16}{noise:>6.0%} {strategy:<10}"
                print(head + "".join(f"{cell:>12}" for cell in cells) + f"  {seconds:.2f} s", flush=True)
                over_all.setdefault((noise, strategy), []).extend(found)
    for (noise, strategy), found in over_all.items():
        means = (100 * statistics.fmean(regrets[key] for regrets in found) for key in keys)
        print(f"{'mean of all':<16}{noise:>6.0%} {strategy:<10}" + "".join(f"{mean:>12.2f}" for mean in means))
    return 0


def _say(key: float) -> str:
    return f"{key:.0%} cost" if key < 1 else f"{key:.0f}"


def _quantiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{100 * statistics.median(ordered):.1f}/{100 * ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
