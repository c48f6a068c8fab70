"""The same search twice: with the machine to itself, and beside a process that keeps CPUs busy.

    python benchmarks/hog.py [--budget 10m] [--processes 1] [TARGET]

Prints what each of the two claimed, how noisy it found the machine, and how much of the budget it measured. The hog
is bounded: it ends with the search, or by itself after twice the budget.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune import Profile
from autotune.sentences.answer import describe_speedup, list_evidence
from autotune.targets.resolve import DEMO_TARGET
from autotune.units import parse_duration

_HOG = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: sum(range(10000))"


@contextmanager
def busy(processes: int, seconds: float) -> Iterator[None]:
    """Keep so many processes computing, for at most some seconds."""
    hogs = [subprocess.Popen([sys.executable, "-c", _HOG, str(seconds)]) for _ in range(processes)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def search(target: str, budget: str, folder: Path) -> Profile | None:
    """Return a search's answer; None when it could not give one, whose reason it has printed."""
    words = [sys.executable, "-m", "autotune", "search", target, "--budget", budget, "--no-history"]
    subprocess.run(words, cwd=folder, check=False, stdout=subprocess.DEVNULL)
    return Profile.load(folder / "best.json") if (folder / "best.json").exists() else None


def main() -> None:
    """Run both searches and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target", nargs="?", default=DEMO_TARGET)
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    target = str(Path(given.target).resolve()) if given.target.startswith((".", "examples")) else given.target
    for processes in (0, given.processes):
        print(f"beside {processes} busy processes:" if processes else "alone:", flush=True)
        with tempfile.TemporaryDirectory() as folder, busy(processes, 2 * parse_duration(given.budget)):
            profile = search(target, given.budget, Path(folder))
        if profile is None:
            print("  no answer")
            continue
        print(f"  {describe_speedup(profile)}")
        for line in list_evidence(profile):
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
