"""Record a table: launch every config of a small space of one target several times, and keep what came of it.

    python benchmarks/record_table.py demo --name demo --vary "host_allocator;num_workers;num_threads"
    python benchmarks/record_table.py examples/gpt/workload.py:workload --name gpt \
        --vary "precision;host_allocator;num_workers=0,2" --most 150
    python benchmarks/record_table.py --name vae --vary "precision;host_allocator" -- python main.py --epochs 1000
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/record_table.py ... --imitates "no bf16 arithmetic"
    taskset -c 0 python benchmarks/record_table.py ... --imitates "one CPU"
    python benchmarks/record_table.py --name demo --again 4 launch the best of a whole table four times more
    python benchmarks/record_table.py --list                what there is, and how far it is

One launch at a time, in rounds of every config in an order of its own, the baseline before every eighth. What is
recorded is kept launch by launch (NAME.jsonl), so a recording that was cut goes on where it was; at its end it is
packed as NAME.jsonl.gz. Nothing else should run on the machine. The best of many noisy means was lucky: `--again`
launches what is close to it more often, so that a regret is not one of the recording's.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.isolation.runner import TrialRunner
from autotune.knobs import Facts
from autotune.machine.hardware import read_hardware
from autotune.probe.run import probe_target
from autotune.records import ProbeReport, TrainConfig, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.records.codec import write_bytes
from autotune.records.config import changed_fields
from autotune.records.table import TableHeader
from autotune.records.trial import Target
from autotune.selftest.table import Table, format_line, make_launch, parse_table, read_table
from autotune.space import SearchSpace, build_space, needs_compilation
from autotune.targets.resolve import resolve_target
from autotune.targets.script import read_script

TABLES = Path(__file__).parent / "tables"
LAUNCHES = 3
MEASURE_SECONDS = 1.5
_BASELINE_EVERY = 8
_PROBE_SECONDS = 300.0
_LEAST_LAUNCH_SECONDS, _PATIENCE, _COMPILE_SECONDS = 30.0, 6.0, 240.0
_MOST_FAILURES = 2
"""Launches of a config that fails: it is not launched a third time."""
_CLOSE = 0.12
"""Log speed-up between the best config and those that may be it."""


def list_configs(space: SearchSpace) -> list[TrainConfig]:
    """Return every config of a space once, the baseline first."""
    values = itertools.product(*space.choices.values())
    found = {
        config.key: config for one in values if (config := space.complete(dict(zip(space.choices, one, strict=True))))
    }
    found.pop(space.baseline.key, None)
    return [space.baseline, *found.values()]


def subsample(configs: Sequence[TrainConfig], most: int) -> list[TrainConfig]:
    """Return so many of them: all that change one knob, and of the others every n-th."""
    baseline, others = configs[0], configs[1:]
    single = [one for one in others if len(changed_fields(one, baseline)) == 1]
    rest = [one for one in others if len(changed_fields(one, baseline)) > 1]
    kept = max(0, min(len(rest), most - 1 - len(single)))
    return [baseline, *single, *(rest[index * len(rest) // kept] for index in range(kept))]


def list_best(table: Table, launches: int) -> list[TrainConfig]:
    """Return what may be the best by so many launches of each config: those of later rounds choose nothing."""
    first = [
        (place, launch)
        for config, group in table.by_config.items()
        for place, launch in (group if config == table.baseline else group[:launches])
    ]
    early = Table(table.header, tuple(launch for _, launch in sorted(first, key=lambda one: one[0])))
    truths = {config: truth for config, truth in early.truths.items() if not table.drifts(config)}
    best = max(truths.values())
    return [config for config, truth in truths.items() if config != table.baseline and truth > best - _CLOSE]


def plan_launches(
    baseline: TrainConfig, configs: Sequence[TrainConfig], launches: int, seed: int
) -> Iterator[TrainConfig]:
    """Yield every launch in order: rounds of all configs, shuffled, with the baseline before every eighth."""
    others = list(configs)
    rng, place = random.Random(seed), 0
    for _ in range(launches):
        rng.shuffle(others)
        for config in others:
            if place % _BASELINE_EVERY == 0:
                yield baseline
                place += 1
            yield config
            place += 1
    yield baseline


class Recorder:
    """Records one table into a file.

    Args:
        path: of the file that grows.
        run_trial: runs one trial to its end.
        target: what is trained.
    """

    def __init__(self, path: Path, run_trial: Callable[[TrialSpec], TrialResult], target: Target) -> None:
        self._path, self._run_trial, self._target = path, run_trial, target
        self._number = 1

    def open(
        self,
        choose: Callable[[ProbeReport], tuple[SearchSpace, int]],
        name: str,
        imitates: str,
        drifting: tuple[str, ...],
    ) -> Table:
        """Return what was recorded so far; a probe and a header for nothing.

        Args:
            choose: returns the space of a probe's report, and how many configs of it to record.
            name: of the table.
            imitates: the machine that is imitated.
            drifting: values that are known to learn something else.
        """
        if self._path.exists():
            text = self._path.read_text()
            self._path.write_text(text[: text.rfind("\n") + 1])  # a line that was cut
            return parse_table(text.splitlines(keepends=True), str(self._path))
        limits = TrialLimits(time_limit_seconds=_PROBE_SECONDS, measure_seconds=MEASURE_SECONDS)
        self._path.parent.mkdir(exist_ok=True)
        report, _ = probe_target(self._target, self._run_trial, limits=limits)
        space, most = choose(report)
        size = len(list_configs(space))
        header = TableHeader(
            name=name,
            imitates=imitates,
            recorded_on=datetime.date.today().isoformat(),
            report=report,
            choices=space.choices,
            drifting=drifting,
            space_size=size,
            recorded_size=min(size, most),
            measure_seconds=MEASURE_SECONDS,
        )
        self._path.write_text(format_line(header))
        return Table(header, ())

    def run(self, table: Table, planned: Sequence[TrainConfig], until: float) -> bool:
        """Launch what is missing of a plan, and return whether all was there before a moment of the monotonic clock."""
        seen = Counter(config.key for config, group in table.by_config.items() for _ in group)
        failed = Counter(
            config.key
            for config, group in table.by_config.items()
            for _, launch in group
            if launch.status is not TrialStatus.COMPLETED
        )
        wanted: Counter[str] = Counter()
        for place, config in enumerate(planned):
            wanted[config.key] += 1
            if seen[config.key] >= wanted[config.key] or failed[config.key] >= _MOST_FAILURES:
                continue
            result = None if time.monotonic() > until else self._launch(table, config)
            if result is None or result.status is TrialStatus.INTERRUPTED:
                return False
            seen[config.key] += 1
            failed[config.key] += result.status is not TrialStatus.COMPLETED
            launch = make_launch(result, table.baseline)
            with self._path.open("a") as file:
                file.write(format_line(launch))
            rate = f"{launch.measurement.samples_per_second:.1f}/s" if launch.measurement else launch.status.value
            changes = " ".join(f"{name}={value}" for name, value in launch.changes.items()) or "baseline"
            print(f"{place + 1:>5}/{len(planned)} {launch.elapsed_seconds:6.1f} s {rate:>14}  {changes}", flush=True)
        return True

    def _launch(self, table: Table, config: TrainConfig) -> TrialResult:
        report = table.header.report
        usual = _PATIENCE * (report.measurement.warmup_seconds + MEASURE_SECONDS)
        seconds = max(_LEAST_LAUNCH_SECONDS, usual) + (_COMPILE_SECONDS if needs_compilation(config) else 0.0)
        self._number += 1
        spec = TrialSpec(
            number=self._number,
            purpose="measure",
            target=self._target,
            config=config,
            device=report.target.device,
            random_sources=report.target.data.random_sources,
            baseline=None if self._target.script is None else report.target.baseline,
            training_loaders=report.target.training_loaders,
            limits=TrialLimits(
                time_limit_seconds=seconds,
                warmup_cap_seconds=max(2.0, 2 * MEASURE_SECONDS),
                measure_seconds=MEASURE_SECONDS,
                seconds_per_sample=report.target.data.seconds_per_sample,
            ),
        )
        return self._run_trial(spec)


def choose_space(report: ProbeReport, vary: Sequence[str], most: int) -> tuple[SearchSpace, int]:
    """Return the space to record, and how many configs of it.

    Raises:
        UsageError: a knob cannot be varied on this target.
    """
    space = build_space(Facts(target=report.target, hardware=report.hardware))
    wanted = {name: values for name, _, values in (one.partition("=") for one in vary)}
    space = space.restrict([*wanted])
    choices = {}
    for name, values in space.choices.items():
        kept = wanted.get(name, "") or wanted.get(name.removeprefix("user_knobs."), "")
        choices[name] = tuple(value for value in values if not kept or value in json.loads(f"[{kept}]"))
    return replace(space, choices=choices), most


def record(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Record one table, of a script where there is its command; return 0 when it is whole, 3 when its time was up."""
    path = TABLES / f"{arguments.name}.jsonl"
    packed = path.with_suffix(".jsonl.gz")
    if packed.exists() and arguments.again and not path.exists():
        path.write_bytes(gzip.decompress(packed.read_bytes()))
    until = time.monotonic() + 60 * arguments.minutes
    named = None if arguments.target == "demo" else arguments.target
    target = resolve_target(read_script(command) if command else named, folder=Path.cwd()).target
    with (
        tempfile.TemporaryDirectory(prefix="autotune-table-") as scratch,
        TrialRunner(
            Path(scratch) / "trials",
            host_allocators=read_hardware().host_allocators,
            environment={"TORCHINDUCTOR_CACHE_DIR": str(Path(scratch) / "compiled")},
            should_stop=lambda: time.monotonic() > until + _COMPILE_SECONDS,
        ) as runner,
    ):
        recorder = Recorder(path, runner, target)
        table = recorder.open(
            lambda report: choose_space(report, arguments.vary.split(";"), arguments.most),
            arguments.name,
            arguments.imitates,
            tuple(filter(None, arguments.drifting.split(";"))),
        )
        space = SearchSpace(table.baseline, table.header.choices, ())
        configs = subsample(list_configs(space), table.header.recorded_size)
        planned = [*plan_launches(table.baseline, configs[1:], LAUNCHES, seed=len(configs))]
        is_whole = recorder.run(table, planned, until)
        if is_whole and arguments.again:
            table = read_table(path)
            best = list_best(table, LAUNCHES)
            planned += plan_launches(table.baseline, best, arguments.again, seed=arguments.again)
            is_whole = recorder.run(table, planned, until)
        if not is_whole:
            print(f"{path}: not whole yet; the same command goes on with it")
            return 3
    write_bytes(packed, gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    describe(packed)
    return 0


def describe(path: Path) -> None:
    """Print what a table holds."""
    table = read_table(path)
    header, truths = table.header, table.truths
    best = max(truths.values(), default=0.0)
    failed = len(table.by_config) - len(truths)
    size = f"{len(table.by_config)} of {header.space_size} configs, {len(table.launches)} launches, {failed} fail"
    print(f"{path.name:<28} {size}, oracle {math.exp(best):.2f}x, {path.stat().st_size // 1000} kB {header.imitates}")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "target", nargs="?", help="file.py:attr, package.module:attr; the demo when left out; or -- COMMAND"
    )
    parser.add_argument("--name", help="of the table")
    parser.add_argument("--vary", default="", help='knobs, some with values: num_workers=0,2;precision="fp32","bf16"')
    parser.add_argument("--most", type=int, default=150, help="configs to record of a larger space")
    parser.add_argument("--minutes", type=float, default=600.0, help="then stop; the same command goes on")
    parser.add_argument("--imitates", default="", help="what machine the environment imitates")
    parser.add_argument("--drifting", default="", help="values known to learn something else: user_knobs.layers=2")
    parser.add_argument("--again", type=int, default=0, help="further launches of the best of a whole table")
    parser.add_argument("--list", action="store_true")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, command = parser.parse_args(words[:end]), words[end + 1 :]
    if arguments.list or arguments.name is None:
        for path in sorted(TABLES.glob("*.jsonl*")):
            describe(path)
        return 0
    try:
        return record(arguments, command)
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
