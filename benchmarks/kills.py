"""Kill a final training at random moments, resume it each time, and compare its end with one that was never killed.

    python benchmarks/kills.py [--kills 50] [--seed 0] [--json kills.json]

The training is the digits example: a network with BatchNorm, augmented samples, a schedule, loader workers. A kill is
SIGKILL to all of its processes, or to the first of them alone, at a moment drawn uniformly from its start, imports and
set-up included, to a while after it has begun to train. When a run is done before all kills are used up, another one
with another seed follows. Each run's last checkpoint is compared tensor by tensor, bit for bit, with that of a run
with the same seed that was left alone; exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TARGET = f"{Path(__file__).parent.parent / 'examples' / 'digits' / 'workload.py'}:workload"
EPOCHS = 16
LONGEST_SECONDS = 9.0
TIMED_PARTS = ("notes",)
"""Of a checkpoint's state: they count seconds."""


@dataclass
class Tally:
    """What came of the kills of one run.

    Attributes:
        seed: of the training.
        kills: how many there were.
        steps: at which the newest checkpoint was when each came.
        differences: tensors and figures in which the end differs from that of a run left alone.
    """

    seed: int
    kills: int
    steps: list[int]
    differences: list[str]


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a training in a process group of its own."""
    command = [sys.executable, "-P", "-m", "autotune", "train", TARGET, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=said, stdout=said, start_new_session=True)


def finish(folder: Path, *arguments: str) -> None:
    """Train to the end.

    Raises:
        RuntimeError: the training failed.
    """
    status = start(folder, *arguments).wait()
    if status != 0:
        said = (folder / "said.txt").read_text(errors="replace")
        raise RuntimeError(f"exit status {status}\n{said[-2000:]}")


def kill_one_run(folder: Path, seed: int, kills: int, draw: random.Random) -> Tally:
    """Train with a seed under at most so many kills, and compare its end."""
    length = ("--epochs", str(EPOCHS), "--seed", str(seed), "--checkpoint-every", "0.2s")
    finish(folder, *length, "--run-dir", "straight")
    steps: list[int] = []
    while len(steps) < kills:
        resume = ("--resume",) if (folder / "killed" / "checkpoints").exists() and newest_step(folder) else ()
        if not resume and (folder / "killed").exists():
            subprocess.run(["rm", "-rf", str(folder / "killed")], check=True)
        process = start(folder, *length, "--run-dir", "killed", *resume)
        try:
            process.wait(draw.uniform(0.0, LONGEST_SECONDS))
            break  # it was done before the moment came
        except subprocess.TimeoutExpired:
            steps.append(newest_step(folder))
        (os.killpg if draw.random() < 0.5 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        wait_for_end_of_group(process.pid)
    finish(folder, *length, "--run-dir", "killed", *(("--resume",) if newest_step(folder) else ()))
    straight, killed = (read_end(folder / name) for name in ("straight", "killed"))
    return Tally(seed, len(steps), steps, find_differences(straight, killed))


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint of the killed run; 0 without one."""
    names = [path.parent.name for path in (folder / "killed" / "checkpoints").glob("step-*/manifest.json")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def wait_for_end_of_group(group: int) -> None:
    """Wait until no process of a group is left: what is left behind holds the run for a moment."""
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def read_end(run: Path) -> dict[str, Any]:
    """Return the state of a run's last checkpoint, but for what counts seconds."""
    newest = max((run / "checkpoints").glob("step-*"))
    state: dict[str, Any] = torch.load(newest / "state.pt", weights_only=True)
    return {name: part for name, part in state.items() if name not in TIMED_PARTS}


def find_differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Return where two states are not the same, bit for bit."""
    if isinstance(first, torch.Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [where]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [where]
        return [found for key in first for found in find_differences(first[key], second[key], f"{where}.{key}")]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [where]
        return [
            found
            for index, pair in enumerate(zip(first, second, strict=True))
            for found in find_differences(*pair, f"{where}[{index}]")
        ]
    return [] if first == second else [where]


def main() -> int:
    """Kill, resume, compare; print a line for each run and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    draw, left, seed = random.Random(options.seed), options.kills, options.seed
    tallies: list[Tally] = []
    while left > 0:
        with tempfile.TemporaryDirectory() as folder:
            tally = kill_one_run(Path(folder), seed, left, draw)
        tallies.append(tally)
        left, seed = left - tally.kills, seed + 1
        end = "identical" if not tally.differences else f"differs in {', '.join(tally.differences[:5])}"
        print(f"seed {tally.seed}: {tally.kills} kills, with checkpoints at steps {tally.steps}: {end}", flush=True)
    kills, wrong = sum(one.kills for one in tallies), [one for one in tallies if one.differences]
    same = len(tallies) - len(wrong)
    print(f"{kills} kills in {len(tallies)} trainings: {same} ended identical, {len(wrong)} did not")
    if options.json is not None:
        options.json.write_text(json.dumps([vars(one) for one in tallies], indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
