"""How much two launches differ one after the other, and how much in turns: pairs of each, by turns.

    python benchmarks/turns.py                                                       the demo against itself
    python benchmarks/turns.py --pairs 8 --change num_threads=1 --change num_workers=1 -- python main.py

Each round launches a pair alone and a pair in turns, in an order that alternates. Printed are each pair's log ratio,
and of either way their mean and standard deviation. Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.isolation.runner import TrialRunner
from autotune.machine.hardware import read_hardware
from autotune.probe.run import probe_target
from autotune.records import ProbeReport, TrainConfig, TrialLimits, TrialResult, TrialSpec
from autotune.records.config import with_knobs
from autotune.records.trial import Target
from autotune.targets.resolve import resolve_target
from autotune.targets.script import read_script

_SECONDS = 300.0


def make_spec(target: Target, report: ProbeReport, config: TrainConfig, number: int, seconds: float) -> TrialSpec:
    """Return a launch of the finals that measures what the user's settings train on in so many seconds."""
    samples = math.ceil(seconds * report.measurement.samples_per_second)
    return TrialSpec(
        number=number,
        purpose="final",
        target=target,
        config=config,
        device=report.target.device,
        random_sources=report.target.data.random_sources,
        baseline=None if target.script is None else report.target.baseline,
        training_loaders=report.target.training_loaders,
        limits=TrialLimits(time_limit_seconds=_SECONDS, measure_seconds=seconds, measure_samples=samples),
    )


def log_ratio(ours: TrialResult, theirs: TrialResult) -> float:
    """Return the log ratio of two throughputs; one of a launch that failed ends the run with its error."""
    for one in (ours, theirs):
        if one.measurement is None:
            raise SystemExit(f"{one.status}: {one.error}")
    assert ours.measurement is not None
    assert theirs.measurement is not None
    return math.log(ours.measurement.samples_per_second / theirs.measurement.samples_per_second)


def measure(target: Target, changes: dict[str, str], pairs: int, seconds: float) -> dict[str, list[float]]:
    """Return the log ratios of the pairs alone and in turns, and the logs of the user's settings alone."""
    found: dict[str, list[float]] = {"one after the other": [], "in turns": []}
    with (
        tempfile.TemporaryDirectory(prefix="autotune-turns-") as scratch,
        TrialRunner(Path(scratch) / "trials", host_allocators=read_hardware().host_allocators) as runner,
    ):
        report, _ = probe_target(target, runner, limits=TrialLimits(time_limit_seconds=_SECONDS))
        baseline = report.target.baseline
        changed = with_knobs(baseline, {name: _read_value(value) for name, value in changes.items()})
        for number in range(pairs):
            order = [baseline, changed][:: 1 if number % 2 else -1]
            first = 1 + 4 * number
            alone = [runner(make_spec(target, report, one, first + at, seconds)) for at, one in enumerate(order)]
            specs = [make_spec(target, report, one, first + 2 + at, seconds) for at, one in enumerate(order)]
            for way, pair in zip(found, (alone, runner.run_in_turns(*specs)), strict=True):
                base, other = pair[:: 1 if number % 2 else -1]
                found[way].append(log_ratio(other, base))
            print("  ".join(f"{way} {logs[-1]:+.3f}" for way, logs in found.items()), flush=True)
    return found


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="file.py:attr, package.module:attr; the demo when left out")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a launch measures")
    parser.add_argument("--change", action="append", default=[], help="KNOB=VALUE of one of the two; may be repeated")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, command = parser.parse_args(words[:end]), words[end + 1 :]
    changes = dict(one.split("=", 1) for one in arguments.change)
    try:
        named = read_script(command) if command else arguments.target
        target = resolve_target(named, folder=Path.cwd()).target
        found = measure(target, changes, arguments.pairs, arguments.seconds)
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for way, logs in found.items():
        print(f"{way:<20} {math.exp(statistics.fmean(logs)):.3f}x, standard deviation {statistics.stdev(logs):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
