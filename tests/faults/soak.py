"""Run one search of a thousand trials, or one training of 200,000 steps, and see what grows.

    python tests/faults/soak.py search|train [--count 1000] [--json soak.json]

What has to stay flat: the memory and the open files of the supervisor, or of the training; the CPU time that the
supervisor spends on each trial (a neighbour does not change it), or the training's seconds for a step; the length of
metrics.jsonl for a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from bench import Bench, open_bench

from autotune.records.trial import TrialResult
from autotune.search.progress import SearchProgress, SearchReporter
from autotune.search.run import SearchOptions, run_search

COUNTS = {"search": 1000, "train": 200_000}
BUDGET_SECONDS = 4 * 3600.0
_LOOK_SECONDS = 0.5
_LEAST_LOOKS = 50


@dataclass
class Look:
    """A process at one moment.

    Attributes:
        done: share of its work, from 0 to 1.
        memory_bytes: resident.
        handles: open files.
        seconds: of its CPU time for the last trial, or of the clock for a step now.
        kind: of that trial: its purpose, and whether its settings were launched before.
    """

    done: float
    memory_bytes: int
    handles: int
    seconds: float
    kind: str = ""


@dataclass
class Soak:
    """What was seen, in order.

    Attributes:
        kind: search or train.
        count: trials or steps.
        took_seconds: all of it.
        looks: at the process.
        bytes_per_step: of metrics.jsonl; 0 for a search.
    """

    kind: str
    count: int
    took_seconds: float = 0.0
    looks: list[Look] = field(default_factory=list)
    bytes_per_step: float = 0.0

    def first_and_last(self, name: str) -> tuple[float, float]:
        """Return the median of a figure in the second tenth of the looks, and in the last.

        The first tenth holds what is done once: imports, pools, a compiler.
        """
        tenth = len(self.looks) // 10
        return _medians(name, self.looks[tenth : 2 * tenth], self.looks[-tenth:])

    def seconds_by_kind(self) -> dict[str, tuple[float, float]]:
        """Return the median seconds of the second fifth of each kind of trial, and of the last.

        One by one: a pair of the finals is less work than a proposal. Kinds that are too few to tell are left out.
        """
        found: dict[str, tuple[float, float]] = {}
        for kind in {look.kind for look in self.looks}:
            looks = [look for look in self.looks if look.kind == kind]
            fifth = len(looks) // 5
            if len(looks) >= _LEAST_LOOKS:
                found[kind] = _medians("seconds", looks[fifth : 2 * fifth], looks[-fifth:])
        return found


def _medians(name: str, early: list[Look], late: list[Look]) -> tuple[float, float]:
    first, last = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
    return first, last


class _Looker(SearchReporter):
    """Looks at this process after each trial."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak
        self.trials = 0
        self._process = psutil.Process()
        self._ended = time.process_time()
        self._launched: set[str] = set()

    def trial_finished(self, progress: SearchProgress, result: TrialResult) -> None:
        now, self.trials = time.process_time(), self.trials + 1
        key = result.spec.config.key if result.spec.config else ""
        again = " again" if key in self._launched else ""
        self._launched.add(key)
        look = Look(
            done=self.trials / self.soak.count,
            memory_bytes=self._process.memory_info().rss,
            handles=self._process.num_fds(),
            seconds=now - self._ended,
            kind=f"{result.spec.purpose}{again}",
        )
        self.soak.looks.append(look)
        self._ended = now


def soak_search(folder: Path, trials: int) -> Soak:
    """Run so many trials in one search in this process."""
    soak, bench = Soak("search", trials), open_bench(folder)
    reporter, began = _Looker(soak), time.monotonic()
    run_search(
        "tiny.py:brief",
        SearchOptions(budget_seconds=BUDGET_SECONDS, measure_seconds=0.01, history=False),
        folder=bench.folder,
        reporter=reporter,
        should_stop=lambda: reporter.trials >= trials,
    )
    soak.took_seconds = time.monotonic() - began
    return soak


def soak_train(folder: Path, steps: int) -> Soak:
    """Train for so many steps in a process of its own."""
    soak, bench = Soak("train", steps), open_bench(folder)
    began = time.monotonic()
    words = ("train", "tiny.py:long", "--steps", str(steps), "--run-dir", "run")
    with (folder / "said.txt").open("w") as said, bench.start(*words, stdout=said, stderr=said) as command:
        _look_on(bench, command.pid, soak)
        if command.wait() != 0:
            raise RuntimeError((folder / "said.txt").read_text()[-2000:])
    soak.took_seconds = time.monotonic() - began
    soak.bytes_per_step = (bench.folder / "run" / "metrics.jsonl").stat().st_size / steps
    return soak


def _look_on(bench: Bench, command: int, soak: Soak) -> None:
    """Look at a training until it ends."""
    metrics, read = bench.folder / "run" / "metrics.jsonl", 0
    while psutil.pid_exists(command) and psutil.Process(command).status() != psutil.STATUS_ZOMBIE:
        time.sleep(_LOOK_SECONDS)
        try:
            with metrics.open() as file:
                file.seek(read)
                lines = [json.loads(line) for line in file if line.endswith("\n")]
                read = file.tell()
            children = psutil.Process(command).children()  # the training, and the keeper of both
            training = max(children, key=lambda child: child.memory_info().rss)
            memory, handles = training.memory_info().rss, training.num_fds()
        except (OSError, ValueError, psutil.Error):
            continue  # it starts, or ends
        rates = [line["samples_per_second"] for line in lines if "samples_per_second" in line]
        if rates:
            done = lines[-1]["step"] / soak.count
            soak.looks.append(Look(done, memory, handles, 1.0 / statistics.median(rates)))


def run_soak(kind: str, count: int, folder: Path) -> Soak:
    """Run one kind of soak in an empty folder."""
    return soak_train(folder, count) if kind == "train" else soak_search(folder, count)


def main() -> int:
    """Run a soak and print what it saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(COUNTS))
    parser.add_argument("--count", type=int, help="trials (1,000) or steps (200,000)")
    parser.add_argument("--json", type=Path, help="also write every look here")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        soak = run_soak(options.kind, options.count or COUNTS[options.kind], Path(folder))
    memory, handles = (soak.first_and_last(name) for name in ("memory_bytes", "handles"))
    print(f"{soak.count} in {soak.took_seconds:.0f} s; after the first tenth, and in the last:")
    print(f"  memory   {memory[0] / 2**20:.1f} MiB -> {memory[1] / 2**20:.1f} MiB")
    print(f"  handles  {handles[0]:.0f} -> {handles[1]:.0f}")
    for kind, (early, late) in sorted(soak.seconds_by_kind().items()):
        print(f"  seconds  {early:.6f} -> {late:.6f} ({late / early:.2f}x) {kind}")
    if soak.bytes_per_step:
        print(f"  metrics.jsonl: {soak.bytes_per_step:.1f} bytes a step")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(soak), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
