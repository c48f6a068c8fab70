"""Search the demo and an example on machines that this one imitates, and print a table of what came of each.

    python benchmarks/machines.py [--budget 2m] [--only NAME ...] [--targets demo example] [--json FILE]

The machines are this one as it is; with the vector instructions of older ones (oneDNN's and PyTorch's kernels alone are
held to them, matrix products of MKL are not); with one thread; with one core; and beside a process that keeps a core
busy. Each search is a process of its own, in a fresh folder and with nothing kept from another; it is killed when it
takes a minute more than its budget. Seconds are those of the whole process. Lost are the trials that were not
completed: those that failed, were hopeless, or were cut.

All fourteen searches take about half an hour with the default budget; let nothing else run beside them. With `--json`
each row is written as soon as it is there, and those that the file has, of the same machine, target and budget, are
not run again, whatever came of them: the same command goes on where it was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.machine.hardware import read_hardware
from autotune.records import Profile, TrialStatus, parse_record, read_record
from autotune.records.codec import Record, write_record
from autotune.records.layout import STATE_FOLDER
from autotune.records.measurement import Interval
from autotune.records.trial import TrialResult
from autotune.search.store.folder import SearchFolder
from autotune.sentences.settings import describe_changes
from autotune.targets.resolve import DEMO_TARGET
from autotune.units import parse_duration

from hog import busy
from recipes import describe_machine, describe_ratio

TARGETS = {
    "demo": DEMO_TARGET,
    "example": f"{Path(__file__).resolve().parents[1] / 'examples' / 'digits' / 'workload.py'}:workload",
}
GRACE_SECONDS = 60.0
"""What a search may take beyond its budget."""

KILLED, NO_ANSWER = "killed", "no answer"
"""In place of a verdict: it took too long; it failed or refused, the budget as too small for instance."""

HEADER = ("machine", "target", "verdict", "speed-up", "seconds", "unused", "launches", "lost", "seconds lost", "chosen")


@dataclass(frozen=True)
class Machine:
    """How a machine is imitated.

    Attributes:
        name: of the machine.
        environment: variables it has.
        wrapper: words before the search's command.
        neighbours: processes that keep a core busy each.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    neighbours: int = 0


MACHINES = (
    Machine("as-it-is"),
    Machine("avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    Machine("avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Machine("sse41", {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}),
    Machine("one-thread", {"OMP_NUM_THREADS": "1"}),
    Machine("one-core", wrapper=("taskset", "-c", "0")),
    Machine("busy-neighbour", neighbours=1),
)


class Row(Record):
    """What came of one search."""

    machine: str
    """Name of the imitated one."""
    where: str
    """The machine that imitated it, and its PyTorch."""
    target: str
    """demo or example."""
    budget: str
    """As it was given."""
    verdict: str
    """Of the answer; `killed` or `no answer` where there is none."""
    told: str
    """Why there is no answer; empty where there is one."""
    speedup: Interval | None
    """Of the answer; None where it is not known."""
    seconds: float
    """Of the whole process."""
    unused: float
    """Share of the budget."""
    launches: int
    """Trials that have ended, the probe among them."""
    lost: dict[str, int]
    """Of these, those that were not completed, by status."""
    lost_seconds: float
    """What these took."""
    chosen: str
    """What the answer changes."""
    candidate: str
    """What an answer that changes nothing had as its best candidate; empty without one."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells rows apart."""
        return self.where, self.machine, self.target, self.budget


class Table(Record):
    """All rows."""

    rows: tuple[Row, ...] = ()
    """In the order in which they were run."""


@dataclass(frozen=True)
class Ended:
    """How the process of a search ended.

    Attributes:
        seconds: it took.
        killed: it took too long.
        said: on stdout.
        complained: on stderr.
    """

    seconds: float
    killed: bool
    said: str
    complained: str


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="2m", help="of each search")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in MACHINES], metavar="NAME", help="machines")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS])
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows that it has are kept, new ones are added")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started ends with it
    chosen = [one for one in MACHINES if options.only is None or one.name in options.only]
    try:
        parse_duration(options.budget, name="--budget")
        run_all(chosen, options.targets, budget=options.budget, file=options.json)
    except AutotuneError as error:
        sys.exit(f"error: {error.message}\n  {error.hint}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")


def run_all(machines: Sequence[Machine], targets: Sequence[str], *, budget: str, file: Path | None) -> None:
    """Run and print what the file does not have yet, and print what it has.

    Raises:
        AutotuneError: the file holds something else.
        OSError: it cannot be written, or a machine's wrapper is not installed.
    """
    table = read_record(file, Table) if file is not None and file.exists() else Table()
    known = {row.key: row for row in table.rows}
    where = f"{describe_machine(read_hardware())}, torch {version('torch')}"
    print(f"{where}, {budget} for each search\n")
    for cells in (HEADER, ["---"] * len(HEADER)):
        print_row(cells)
    for target in targets:
        for machine in machines:
            key = (where, machine.name, target, budget)
            if key not in known:
                known[key] = run_search(machine, target, budget=budget, where=where)
                if file is not None:
                    write_record(file, Table(rows=tuple(known.values())))
            print_row(list_cells(known[key]))


def run_search(machine: Machine, target: str, *, budget: str, where: str) -> Row:
    """Return what came of one search."""
    seconds = parse_duration(budget)
    with tempfile.TemporaryDirectory(prefix="machines-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        command = [*machine.wrapper, sys.executable, "-P", "-m", "autotune", "search", TARGETS[target], "--no-history"]
        # Kept limits of the machine would be those of another one.
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **machine.environment}
        limit = seconds + GRACE_SECONDS
        with busy(machine.neighbours, limit):
            ended = run_bounded([*command, "--budget", budget, "--json"], folder, environment, seconds=limit)
        trials = read_trials(folder)
    lost = [trial for trial in trials if trial.status is not TrialStatus.COMPLETED]
    profile, told = read_answer(ended)
    improved = profile is not None and profile.verdict == "improved"
    candidate = profile.candidate_config if profile and not improved else None
    return Row(
        machine=machine.name,
        where=where,
        target=target,
        budget=budget,
        verdict=profile.verdict if profile else KILLED if ended.killed else NO_ANSWER,
        told=told,
        speedup=profile.speedup if profile else None,
        seconds=ended.seconds,
        unused=max(0.0, 1.0 - ended.seconds / seconds),
        launches=len(trials),
        lost=dict(Counter(str(trial.status) for trial in lost)),
        lost_seconds=sum(trial.elapsed_seconds for trial in lost),
        chosen=describe_changes(profile.config, profile.baseline_config) if profile else "",
        candidate=describe_changes(candidate, profile.baseline_config) if profile and candidate else "",
    )


def run_bounded(command: Sequence[str], folder: Path, environment: Mapping[str, str], *, seconds: float) -> Ended:
    """Run a command in a folder, in a process group that is killed when it takes longer than so many seconds."""
    out, complaints = folder / "out.txt", folder / "complaints.txt"
    began, killed = time.monotonic(), False
    with out.open("wb") as said, complaints.open("wb") as complained:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=complained, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            killed = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its trials die with it
                process.wait()
    took = time.monotonic() - began
    return Ended(took, killed, *(file.read_text(errors="replace") for file in (out, complaints)))


def read_trials(folder: Path) -> list[TrialResult]:
    """Return every trial that has ended of the search in a folder."""
    found = (folder / STATE_FOLDER).glob("*/trials")
    return [trial for trials in found for trial in SearchFolder(trials.parent).read_all_trials()]


def read_answer(ended: Ended) -> tuple[Profile | None, str]:
    """Return the answer that a search has printed, or why there is none."""
    if ended.killed:
        return None, f"killed after {ended.seconds:.0f} s"
    try:
        said = json.loads(ended.said)
    except json.JSONDecodeError:
        return None, ended.complained[-300:].strip() or "it said nothing"
    if "verdict" in said:
        return parse_record(ended.said, Profile, name="the search's answer"), ""
    error = said.get("error", {})
    return None, "; ".join(error[part] for part in ("message", "hint") if error.get(part)) or "it gave no answer"


def list_cells(row: Row) -> Sequence[str]:
    """Return a row's cells."""
    statuses = ", ".join(f"{count} {status}" for status, count in row.lost.items())
    found = f"{row.chosen}; candidate: {row.candidate}" if row.candidate else row.chosen
    return (
        row.machine,
        row.target,
        row.verdict,
        describe_ratio(row.speedup) if row.speedup else "not known",
        f"{row.seconds:.0f} of {row.budget}",
        f"{row.unused:.0%}",
        str(row.launches),
        f"{sum(row.lost.values())} ({statuses})" if row.lost else "0",
        f"{row.lost_seconds:.0f}",
        row.told or found,
    )


def print_row(cells: Sequence[str]) -> None:
    """Print a row of the table."""
    shown = (" ".join(cell.split()).replace("|", "/") for cell in cells)
    print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
