"""A recorded table: every config of a small space, launched several times on a real machine, to replay searches over.

    line 1      the header: what the probe said, the space, the machine
    line n      one launch, in the order in which they ran; every eighth is the baseline's

Kept gzipped, as JSON lines: half a recording is a table of what was recorded so far.
"""

from __future__ import annotations

import gzip
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autotune.errors import UsageError
from autotune.records.codec import Record, parse_record
from autotune.records.config import TrainConfig, changed_fields, get_knob, with_knobs
from autotune.records.measurement import Block, Measurement
from autotune.records.probe import ProbeReport
from autotune.records.table import RecordedLaunch, TableHeader
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.scores.baseline_level import BaselineLevel
from autotune.selftest.replay import CURVE, Course, shift
from autotune.space import find_code, needs_compilation

_NO_BLOCK = Block(optimizer_steps=1, samples=1, seconds=1.0)


@dataclass(frozen=True)
class Table:
    """A recorded table.

    Attributes:
        header: what was recorded, and where.
        launches: in the order in which they ran.
    """

    header: TableHeader
    launches: tuple[RecordedLaunch, ...]

    @property
    def baseline(self) -> TrainConfig:
        """The target's own settings."""
        return self.header.report.target.baseline

    @cached_property
    def by_config(self) -> Mapping[TrainConfig, Sequence[tuple[int, RecordedLaunch]]]:
        """Every launch of each config with its place in the recording."""
        found: dict[TrainConfig, list[tuple[int, RecordedLaunch]]] = {}
        for place, launch in enumerate(self.launches):
            found.setdefault(with_knobs(self.baseline, launch.changes), []).append((place, launch))
        return found

    @cached_property
    def level(self) -> BaselineLevel:
        """Log samples per second of the baseline at any place of the recording."""
        anchors = [(place, rate) for place, launch in self.by_config[self.baseline] if (rate := log_rate(launch))]
        return BaselineLevel(anchors, len(self.launches))

    @cached_property
    def truths(self) -> Mapping[TrainConfig, float]:
        """Log speed-up over the baseline by config: the mean over its launches; without those that ever failed."""
        found = {}
        for config, launches in self.by_config.items():
            rates = [(place, log_rate(launch)) for place, launch in launches]
            if all(rate is not None for _, rate in rates):
                found[config] = statistics.fmean(rate - self.level.level(place)[0] for place, rate in rates if rate)
        return {config: 0.0 if config == self.baseline else truth for config, truth in found.items()}

    def drifts(self, config: TrainConfig) -> bool:
        """Return whether a config is known to learn something else."""
        return any(f"{name}={get_knob(config, name)}" in self.header.drifting for name in self.header.choices)

    @cached_property
    def compile_seconds(self) -> Mapping[TrainConfig, Sequence[float]]:
        """What its launches took to compile, by config, the least first: most find what others have compiled."""
        timed = {
            config: sorted(launch.measurement.compile_seconds for _, launch in launches if launch.measurement)
            for config, launches in self.by_config.items()
        }
        return {config: seconds for config, seconds in timed.items() if seconds}

    @cached_property
    def usual_rate(self) -> float:
        """Log samples per second of the baseline, mean over its launches."""
        return statistics.fmean(self.level.values)

    @cached_property
    def residuals(self) -> list[list[float]]:
        """Log pace of the blocks of each timed launch, in order, without what its config and its own level explain."""
        return [
            [math.log(block.seconds / block.samples) + self.usual_rate + self.truths[config] for block in blocks]
            for config, blocks in self._timed()
        ]

    def _timed(self) -> list[tuple[TrainConfig, Sequence[Block]]]:
        configs = {place: config for config, launches in self.by_config.items() for place, _ in launches}
        return [
            (configs[place], launch.measurement.blocks)
            for place, launch in enumerate(self.launches)
            if launch.measurement is not None and configs[place] in self.truths
        ]


def log_rate(launch: RecordedLaunch) -> float | None:
    """Return the log samples per second of a launch; None when it was not timed to its end."""
    if launch.measurement is None or launch.status is not TrialStatus.COMPLETED:
        return None
    return math.log(launch.measurement.samples_per_second)


def make_launch(result: TrialResult, baseline: TrainConfig) -> RecordedLaunch:
    """Return what a table keeps of a trial's result."""
    config, measurement = result.spec.config, result.measurement
    assert config is not None
    return RecordedLaunch(
        changes={name: get_knob(config, name) for name in changed_fields(config, baseline)},
        status=result.status,
        cause=result.cause,
        elapsed_seconds=round(result.elapsed_seconds, 3),
        startup_seconds=round(result.startup_seconds, 3),
        measurement=None if measurement is None else _strip(measurement),
        curve=next(iter(result.curves), None),
    )


def _strip(measurement: Measurement) -> Measurement:
    blocks = tuple(block.replace(interference=None, seconds=round(block.seconds, 6)) for block in measurement.blocks)
    return measurement.replace(blocks=blocks, step_seconds=())


def format_line(record: Record) -> str:
    """Return a line of a table."""
    return record.model_dump_json(exclude_defaults=True) + "\n"


def parse_table(lines: Iterable[str], name: str) -> Table:
    """Return the table in some lines; a last line that was cut is left out.

    Args:
        lines: header first.
        name: what it is called in an error.

    Raises:
        UsageError: it is no table, or one of a newer version.
    """
    texts = [line for line in lines if line.endswith("\n")]
    if not texts:
        raise UsageError(f"{name} is empty: a table begins with a header", hint="record it anew")
    header = parse_record(texts[0], TableHeader, name=name, error=UsageError)
    launches = [
        parse_record(text, RecordedLaunch, name=f"{name}, line {number}", error=UsageError)
        for number, text in enumerate(texts[1:], start=2)
    ]
    return Table(header, tuple(launches))


def read_table(path: Path) -> Table:
    """Read a table, gzipped or still being recorded.

    Raises:
        UsageError: it cannot be read, or is no table.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw).decode() if path.suffix == ".gz" else raw.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", hint="give a .jsonl or .jsonl.gz written by record_table.py") from None
    return parse_table(text.splitlines(keepends=True), str(path))


class TableWorld:
    """A table to search: each config as it was recorded, with the noise of a machine.

    Args:
        table: what is searched.
        noise: starts launches: log paces around the truth; the table's own in recorded order, or simulated ones.
    """

    def __init__(self, table: Table, noise: Callable[[], Iterator[float]]) -> None:
        self.table, self._noise = table, noise
        self._seen: Counter[TrainConfig] = Counter()
        self._compiled: set[tuple[str, ...]] = set()
        self.facts = table.header.report.target.replace(metrics={})  # no launch has evaluated any
        self.knobs = tuple(table.header.choices)
        self.losses = next((one.curve for _, one in table.by_config[table.baseline] if one.curve is not None), CURVE)

    def make_report(self, measurement: Measurement) -> ProbeReport:
        """Return the report of the probe when it was recorded; how fast the baseline is, is this search's reading."""
        report = self.table.header.report
        waited = report.measurement.data_wait_fraction * measurement.seconds
        return report.replace(measurement=measurement.replace(data_wait_seconds=waited), target=self.facts)

    def launch(self, config: TrainConfig) -> Course:
        """Return how the next launch of a config goes: the first as its first was, and so on, and around again.

        Raises:
            UsageError: the table is a part of its space, and this config is not in it.
        """
        launches = [launch for _, launch in self.table.by_config.get(config, ())]
        if not launches:
            raise UsageError(
                f"{self.table.header.name} holds {self.table.header.recorded_size} of "
                f"{self.table.header.space_size} configs, and not {config.key}",
                hint="searches are replayed over tables of their whole space: record one with fewer knobs",
            )
        launch = launches[self._seen[config] % len(launches)]
        self._seen[config] += 1
        truth, measurement = self.table.truths.get(config), launch.measurement
        if truth is None or measurement is None:
            failed = next(one for one in launches if one.status is not TrialStatus.COMPLETED)
            return Course(failed.status, iter(()), _NO_BLOCK, failed.elapsed_seconds, 0.0)
        own = -(self.table.usual_rate + truth)
        compiling, seconds = self._compile_seconds(config), launch.elapsed_seconds - launch.startup_seconds
        return Course(
            status=TrialStatus.COMPLETED,
            paces=shift(self._noise, own),
            block=measurement.blocks[0].replace(recompiled=False),
            startup_seconds=launch.startup_seconds,
            warmup_seconds=compiling + max(0.0, seconds - measurement.seconds - measurement.compile_seconds),
            compile_seconds=compiling,
            peak_memory=measurement.peak_memory,
            curve=launch.curve or CURVE,
        )

    def _compile_seconds(self, config: TrainConfig) -> float:
        """Return what compiling takes: the longest of its code's launches for the first of a search, then its least."""
        if not needs_compilation(config):
            return 0.0
        code = find_code(config)
        anew, known = code not in self._compiled, self.table.compile_seconds
        self._compiled.add(code)
        return max(known[one][-1] for one in known if find_code(one) == code) if anew else known[config][0]
