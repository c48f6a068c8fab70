"""Whole searches of the real code, replayed over recorded tables: how far from the best config each budget ends.

    python benchmarks/replay.py                                       every table, four budgets, 20 seeds
    python benchmarks/replay.py --tables demo --budgets 2m 10m --seeds 50 --noise 0.10

Launches take what they took when they were recorded, with noise drawn for each. Trials of the loss check take a start
and their steps; what the table says to learn something else fails, all else passes. The regret is 1 - true rate of the
settings that are answered / that of the best config that learns the same; an answer that is not proven is the own
settings. `claimed` is the part of the best config's log gain that is claimed at least, on average. A claim is false
where the true speed-up is not above its lower end, or where it learns something else.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.gate.screen import CLOSER_WINDOWS
from autotune.drift.record.trace_file import TRACE_FILE, WEIGHTS_FILE, GradientTrace, Point, write_trace
from autotune.errors import AutotuneError, UsageError
from autotune.records import TrainConfig, TrialResult, TrialSpec
from autotune.search.explore.study import Proposal, Study
from autotune.selftest.machines import Noise
from autotune.selftest.replay import Course, Simulation, search
from autotune.selftest.table import Table, TableWorld, read_table
from autotune.units import parse_duration

TABLES = Path(__file__).parent / "tables"
BLOCK_NOISE = 0.02
"""Standard deviation of the log pace of one block of a launch."""
_DRIFT = 1.2
"""Times the losses, of what learns something else."""
_CLOSING_SECONDS = 1.0
"""Of a trial of the loss check, beside its start and its steps."""
_COLUMNS = 64
_GRADIENTS = 0.3 + np.random.default_rng(1).standard_normal((CLOSER_WINDOWS, _COLUMNS))
_ROUNDING = 1e-6
"""Of gradients of about 1: what another order of the sums does to them in float32."""
_PARTS = 3.0
"""Passes over the windows of a gradient trial: forward and backward at two points, and the references between."""


@dataclass(frozen=True)
class Ending:
    """How a replayed search ended.

    Attributes:
        verdict: of its answer.
        regret: of the settings it answers.
        claimed: of the log gain of the best config, the part that it claims at least.
        is_false: it claims more than is true.
        launches: that explored, the baseline's among them.
    """

    verdict: str
    regret: float
    claimed: float
    is_false: bool
    launches: int


class LearnsTheSame(TableWorld):
    """A table on which a config has the baseline's losses and metrics, unless it is known to learn something else.

    The recorded losses are one launch's, which say nothing of several seeds.
    """

    def __init__(self, table: Table, noise: Callable[[], Iterator[float]]) -> None:
        super().__init__(table, noise)
        self.facts = table.header.report.target

    def launch(self, config: TrainConfig) -> Course:
        """Return how the next launch of a config goes."""
        worse = _DRIFT if self.table.drifts(config) else 1.0
        losses = tuple(loss if loss is None else worse * loss for loss in self.losses.losses)
        metrics = {name: worse if way == "minimize" else 1 / worse for name, way in self.facts.metrics.items()}
        curve = self.losses.replace(losses=losses, metrics=metrics)
        return dataclasses.replace(super().launch(config), curve=curve)


class StudyOnTable(Study):
    """A study that proposes only what was recorded: of a larger space, a part was.

    Args:
        table: what was recorded.
        arguments: as of `Study`.
        options: as of `Study`.
    """

    def __init__(self, table: Table, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._table = table

    def propose(self, closed: Container[object], *others: Any, **more: Any) -> Proposal | None:
        """Return a recorded config that is not closed."""
        return super().propose(_NotRecorded(self._table, closed), *others, **more)

    def expect(self, config: TrainConfig) -> float:
        """Return what is expected of a recorded config; of another one nothing, so that it is not launched."""
        return super().expect(config) if config in self._table.by_config else -math.inf

    def list_simpler(self, config: TrainConfig) -> list[TrainConfig]:
        """Return those that were recorded."""
        return [one for one in super().list_simpler(config) if one in self._table.by_config]


@dataclass(frozen=True)
class _NotRecorded:
    """What is closed, and what was not recorded."""

    table: Table
    closed: Container[object]

    def __contains__(self, config: object) -> bool:
        return config not in self.table.by_config or config in self.closed


@dataclass
class TracingSimulation(Simulation):
    """A simulation whose trials leave gradients where these tell that a config learns the same.

    So they do of what sums in another order. Of fewer digits, and of a user's own knobs, trainings decide: few windows
    of a small net's gradients cannot.

    Attributes:
        folder: for the gradients.
    """

    folder: Path = Path()

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run a trial."""
        result = super().run(spec)
        baseline = self.world.facts.baseline
        config = spec.config or baseline
        if spec.fidelity is None or (config.precision, config.user_knobs) != (baseline.precision, baseline.user_knobs):
            return result
        rng, windows = np.random.default_rng(spec.number), spec.fidelity.windows
        rows = _GRADIENTS[:windows] + _ROUNDING * rng.standard_normal((windows, _COLUMNS))
        keys = np.arange(1, 1 + windows)
        point = Point(GradientRows(keys, rows), GradientRows(keys, -1e-3 * rows), np.full((windows, 1), 1e-3))
        layers = RowLayout(("weight",), np.array([_COLUMNS]), np.array([_COLUMNS]))
        path = self.folder / str(spec.number) / TRACE_FILE
        path.parent.mkdir()
        write_trace(path, GradientTrace(layers, (point, point) if spec.fidelity.later_steps else (point,)))
        if spec.fidelity.later_steps and spec.fidelity.weights is None:
            path.with_name(WEIGHTS_FILE).touch()
        return result.replace(captures=str(path))


def price_gate(table: Table) -> Callable[[TrialSpec], float]:
    """Return what trials of the loss check take on a table's target: a start, and steps at the baseline's pace."""
    report = table.header.report
    step = report.measurement.seconds_per_step
    starts: dict[str, list[float]] = {}
    for config, launches in table.by_config.items():
        starts.setdefault(config.host_allocator, []).extend(one.startup_seconds for _, one in launches)
    batch_seconds = report.target.data.seconds_per_sample * table.baseline.effective_batch_size

    def price(spec: TrialSpec) -> float:
        config = spec.config or table.baseline
        start = _CLOSING_SECONDS + statistics.median(starts[config.host_allocator])
        if spec.fidelity is not None:
            return start + step * (_PARTS * spec.fidelity.windows + spec.fidelity.later_steps)
        if spec.purpose == "tape":
            return start + batch_seconds * spec.quality_steps
        return start + step * spec.quality_steps * len(spec.seeds)

    return price


def replay(path: Path, noise: float, budget_seconds: float, seed: int) -> Ending:
    """Return how one search over a table ends.

    Raises:
        UsageError: the budget is too small for its target.
    """
    table = read_table(path)
    rng = random.Random(f"{path.name} {noise} {budget_seconds} {seed}")
    machine = Noise(launch=noise, block=BLOCK_NOISE)(rng)
    with TemporaryDirectory() as folder:
        simulation = TracingSimulation(
            LearnsTheSame(table, machine), gate_seconds=price_gate(table), folder=Path(folder)
        )
        outcome = search(simulation, seed, budget_seconds, open_study=partial(StudyOnTable, table))
    profile = outcome.profile
    best = max(truth for config, truth in table.truths.items() if not table.drifts(config))
    truth = 0.0 if table.drifts(profile.config) else table.truths.get(profile.config, 0.0)
    claimed = math.log(profile.speedup.low) if profile.verdict == "improved" and profile.speedup is not None else 0.0
    return Ending(
        verdict=profile.verdict,
        regret=1.0 - math.exp(truth - best),
        claimed=claimed / best if best > 0.0 else 0.0,
        is_false=profile.verdict == "improved" and truth <= claimed,
        launches=len(outcome.log.judged),
    )


def describe(endings: Sequence[Ending]) -> str:
    """Return a row's figures."""
    regrets = sorted(one.regret for one in endings)
    ninth = regrets[min(len(regrets) - 1, int(0.9 * len(regrets)))]
    verdicts = Counter(one.verdict for one in endings)
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    launches = statistics.fmean(one.launches for one in endings)
    claimed = statistics.fmean(one.claimed for one in endings)
    false = sum(one.is_false for one in endings)
    figures = f"{100 * statistics.median(regrets):5.1f} /{100 * ninth:5.1f} {100 * claimed:8.0f}"
    return f"{figures} {launches:9.1f} {false:6}  {told}"


def main() -> int:
    """Read the command line and print a table of medians and 90th percentiles, and last the means, in per cent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="", help="names, with commas; all when left out")
    parser.add_argument("--budgets", nargs="*", default=["2m", "5m", "10m", "20m"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise", type=float, nargs="*", default=[0.03, 0.10])
    arguments = parser.parse_args()
    names = arguments.tables.split(",") if arguments.tables else None
    paths = [path for path in sorted(TABLES.glob("*.jsonl.gz")) if names is None or path.name[:-9] in names]
    print(f"{'table':<20}{'noise':>6}{'budget':>8}   regret  90 %  claimed  launches  false  verdicts")
    over_all: dict[tuple[float, str], list[tuple[float, float]]] = {}
    began = time.monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for path in paths:
            for noise in arguments.noise:
                for budget in arguments.budgets:
                    one = partial(replay, path, noise, parse_duration(budget, name="--budgets"))
                    try:
                        endings = [*pool.map(one, range(arguments.seeds))]
                        over_all.setdefault((noise, budget), []).extend((end.regret, end.claimed) for end in endings)
                        row = describe(endings)
                    except UsageError as error:
                        row = f"not replayed: {error.message}"
                    print(f"{path.name[:-9]:<20}{noise:>6.0%}{budget:>8}   {row}", flush=True)
    for (noise, budget), figures in over_all.items():
        regret, claimed = (statistics.fmean(values) for values in zip(*figures, strict=True))
        print(f"{'mean of all':<20}{noise:>6.0%}{budget:>8}   {100 * regret:5.2f} {100 * claimed:14.0f}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
