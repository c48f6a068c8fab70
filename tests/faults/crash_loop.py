"""Kill a command at random moments, start it again each time, and look at what is lost, torn or left behind.

    python tests/faults/crash_loop.py search|script|train [--kills 100] [--seed 0] [--json crashes.json]

search   a search of a tiny workload, resumed after each kill; another one follows when it is done
script   the same for a plain script
train    a training, resumed after each kill; its end is compared bit for bit with that of one left alone

A kill is SIGKILL to the command's first process, to all of its process group, or in a training to its child, at a
moment drawn uniformly from the command's life. A second process reads best.json all the time. Exit status 1 if a
finished trial is lost or changed, best.json is ever unreadable, a trial stays RUNNING in study.db, a process outlives
its command, a scratch folder outlives the next command, or a training ends differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from bench import GONE_SECONDS, Bench, find_living, list_family, open_bench, wait_until

from autotune.errors import AutotuneError
from autotune.records.codec import read_record
from autotune.records.profile import Profile
from autotune.records.trial import TrialResult, TrialStatus

BUDGET_SECONDS = {"search": 30.0, "script": 60.0}
KILLS_PER_SEARCH = 12
EPOCHS = 24
TRAINING_SECONDS = 10.0
"""Longest that a training is let live; half of that is imports, and all of it takes about as long."""

_STAGES = ("probe", "search", "loss check", "finals")
_READ_PAUSE_SECONDS = 0.001

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader
from tiny import make_points

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(1000):
    for points, sums in DataLoader(make_points(1024), batch_size=16, shuffle=True):
        time.sleep(0.004)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(points), sums).backward()
        optimizer.step()
"""


@dataclass
class Tally:
    """What came of the kills.

    Attributes:
        kind: of command.
        kills: there were.
        stages: what the command was at when each came.
        commands: that were killed or ran to their end.
        finished: searches, or trainings, that came to their end.
        trials: finished ones that were kept.
        reads: of best.json by the second process.
        most_leftovers: names in the temporary folder after one kill.
        faults: everything that should not be, one sentence each.
    """

    kind: str
    kills: int = 0
    stages: dict[str, int] = field(default_factory=dict)
    commands: int = 0
    finished: int = 0
    trials: int = 0
    reads: int = 0
    most_leftovers: int = 0
    faults: list[str] = field(default_factory=list)


class Killer:
    """Starts a command, kills it at a random moment, and looks for what outlives it.

    Args:
        bench: to run it in.
        draw: of the moments.
        tally: to count in.
        find_stage: names what a command is at by what it said.
    """

    def __init__(self, bench: Bench, draw: random.Random, tally: Tally, find_stage: Callable[[str], str]) -> None:
        self._bench, self._draw, self.tally, self._find_stage = bench, draw, tally, find_stage
        self._log = bench.folder.parent / "said.txt"

    def run(self, words: Sequence[str], *, longest_seconds: float, spare_child: bool = True) -> int | None:
        """Run a command for a random time.

        Args:
            words: of the command.
            longest_seconds: until it is killed at the latest; infinity to leave it alone.
            spare_child: kill the first process or the group, never the first one's child alone.

        Returns:
            Its exit status; None if it was killed.
        """
        tally = self.tally
        tally.commands += 1
        with self._log.open("w") as said:
            process = self._bench.start(*words, stdout=said, stderr=said)
        seconds = None if longest_seconds == float("inf") else self._draw.uniform(0.0, longest_seconds)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        if process.returncode is not None:
            return process.returncode
        family = list_family(process.pid)
        tally.kills += 1
        stage = self._find_stage(self.say())
        tally.stages[stage] = tally.stages.get(stage, 0) + 1
        self._kill(process, family, spare_child=spare_child)
        self._await_end(family)
        tally.most_leftovers = max(tally.most_leftovers, len(self._bench.list_scratch()))
        return None if process.returncode < 0 else process.returncode

    def say(self) -> str:
        """Return what the last command said."""
        return self._log.read_text(errors="replace")

    def _kill(self, process: subprocess.Popen[str], family: list[psutil.Process], *, spare_child: bool) -> None:
        how = self._draw.choice(("first", "group") if spare_child else ("first", "group", "child"))
        if how == "child" and len(family) > 1:
            # The command starts another one; that is killed for good a moment later.
            os.kill(family[1].pid, signal.SIGKILL)
            try:
                process.wait(self._draw.uniform(0.0, TRAINING_SECONDS))
                return
            except subprocess.TimeoutExpired:
                family += list_family(process.pid)
        (os.killpg if how == "group" else os.kill)(process.pid, signal.SIGKILL)
        process.wait()

    def _await_end(self, family: Sequence[psutil.Process]) -> None:
        bench = self._bench
        if wait_until(lambda: not find_living(family) and not bench.find_processes(), seconds=GONE_SECONDS):
            return
        left = {*map(str, find_living(family)), *bench.find_processes().values()}
        self.tally.faults.append(f"after kill {self.tally.kills} there is still {sorted(left)}")
        for one in find_living(family):
            one.kill()
        for pid in bench.find_processes():
            os.kill(pid, signal.SIGKILL)


def loop_search(folder: Path, kind: str, kills: int, seed: int) -> Tally:
    """Kill searches so many times, and let each come to its end."""
    bench, tally, draw = open_bench(folder), Tally(kind), random.Random(seed)
    (bench.folder / "train.py").write_text(SCRIPT)
    target = ("tiny.py:tiny",) if kind == "search" else ("--", sys.executable, "train.py")
    killer = Killer(bench, draw, tally, find_search_stage)
    with watched(bench.folder / "best.json", tally):
        budget = BUDGET_SECONDS[kind]
        while tally.kills < kills or tally.finished == 0:
            is_large_enough = _search_once(bench, killer, budget, target, min(kills, tally.kills + KILLS_PER_SEARCH))
            budget = BUDGET_SECONDS[kind] if is_large_enough else 1.5 * budget  # the machine was busy for a while
            print(f"{tally.kills} kills, {len(tally.faults)} faults", file=sys.stderr, flush=True)
    tally.trials = len(list(bench.folder.glob(".autotune/*/trials/*/result.json")))
    return tally


def find_search_stage(said: str) -> str:
    """Return the stage that a search was at by what it said."""
    words = [line.partition(":")[0] for line in said.splitlines()]
    return next((word for word in reversed(words) if word in _STAGES), "start")


def _search_once(bench: Bench, killer: Killer, budget: float, target: Sequence[str], last_kill: int) -> bool:
    """Kill one search until there were so many kills, and then let it end; False if its budget was too small."""
    tally = killer.tally
    before, known, resume = set(find_searches(bench)), dict[Path, str](), ()
    while True:
        longest = 1.1 * budget if tally.kills < last_kill else float("inf")
        words = ("search", "--budget", f"{budget:.0f}s", *resume, *target)
        status = killer.run(words, longest_seconds=longest)
        found = [path for path in find_searches(bench) if path not in before]
        for path in found:
            check_trials(path, known, tally)
        if status is not None:
            break
        resume = ("--resume",) if found else ()
    if status == 2 and "too small for this target" in killer.say():
        return False  # a busy machine
    if status not in (0, 3):
        tally.faults.append(f"a search ended with status {status}: {killer.say()[-1500:]}")
    tally.finished += 1
    if found:
        check_study(max(found), tally)
    check_leftovers(bench, tally)
    return True


def find_searches(bench: Bench) -> list[Path]:
    """Return the folders of the searches that have been written down."""
    return [path.parent for path in bench.folder.glob(".autotune/*/search.json")]


def check_trials(search: Path, known: dict[Path, str], tally: Tally) -> None:
    """Make sure that every result is whole, and as it was when it was first seen after a kill."""
    for file in search.glob("trials/*/result.json"):
        try:
            read_record(file, TrialResult)
        except AutotuneError as error:
            tally.faults.append(f"a torn result: {error.message}")
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if known.setdefault(file, digest) != digest:
            tally.faults.append(f"{file} was changed after kill {tally.kills}")
    tally.faults += [f"{file} is gone after kill {tally.kills}" for file in known if not file.exists()]


def check_study(search: Path, tally: Tally) -> None:
    """Make sure that the study of a search that has ended holds each finished trial once, and none that runs."""
    results = [read_record(file, TrialResult) for file in search.glob("trials/*/result.json")]
    wanted = {
        one.spec.number
        for one in results
        if one.spec.purpose == "measure" and one.status is not TrialStatus.INTERRUPTED
    }
    if not wanted and not (search / "study.db").exists():
        return  # it ended before its first launch: on a busy machine the training may not get through its first steps
    with sqlite3.connect(f"file:{search / 'study.db'}?mode=ro", uri=True) as database:
        states = Counter(state for (state,) in database.execute("SELECT state FROM trials"))
        numbers = Counter(
            int(number)
            for (number,) in database.execute("SELECT value_json FROM trial_user_attributes WHERE key = 'number'")
        )
    if states["RUNNING"] or states["WAITING"]:
        tally.faults.append(f"study.db of {search.name} holds {dict(states)}")
    if numbers != Counter(wanted):
        tally.faults.append(f"study.db of {search.name} has trials {sorted(numbers.elements())}, not {sorted(wanted)}")


def check_leftovers(bench: Bench, tally: Tally) -> None:
    """Make sure that a command that came to its end has swept what those before it left behind."""
    left = [*bench.list_scratch(), *(path.name for path in bench.folder.rglob("*.tmp"))]
    if left:
        tally.faults.append(f"left behind: {sorted(left)}")
        for name in bench.list_scratch():
            shutil.rmtree(bench.scratch / name, ignore_errors=True)


def loop_train(folder: Path, kills: int, seed: int) -> Tally:
    """Kill trainings so many times, and compare the end of each with that of one left alone."""
    from train_world import find_differences, read_state

    bench, tally, draw = open_bench(folder), Tally("train"), random.Random(seed)
    shutil.copy(Path(__file__).parents[1] / "train" / "noisy_workload.py", bench.folder)
    killer = Killer(bench, draw, tally, lambda _said: find_training_stage(run))
    common = ("train", "noisy_workload.py:slow", "--checkpoint-every", "0.2s")
    while tally.kills < kills or tally.finished == 0:
        number = tally.finished
        run = bench.folder / f"killed-{number}"
        length = ("--epochs", str(EPOCHS), "--seed", str(number))
        if (
            status := killer.run((*common, *length, "--run-dir", f"straight-{number}"), longest_seconds=float("inf"))
        ) != 0:
            raise RuntimeError(f"exit status {status}: {killer.say()[-1500:]}")
        status = None
        while status != 0:
            is_begun = (run / "run.json").exists()
            if not is_begun:
                shutil.rmtree(run, ignore_errors=True)
            words = (*common, *(("--resume",) if is_begun else length), "--run-dir", run.name)
            longest = TRAINING_SECONDS if tally.kills < kills else float("inf")
            status = killer.run(words, longest_seconds=longest, spare_child=False)
            if status not in (None, 0, 137):
                raise RuntimeError(f"exit status {status}: {killer.say()[-1500:]}")
        straight = bench.folder / f"straight-{number}"
        differences = find_differences(read_state(straight), read_state(run))
        tally.faults += [f"seed {number}: the end differs in {where}" for where in differences[:5]]
        if read_losses(straight) != read_losses(run):
            tally.faults.append(f"seed {number}: the losses differ")
        tally.finished += 1
        check_leftovers(bench, tally)
    return tally


def find_training_stage(run: Path) -> str:
    """Return what a training was at by what is on the disk."""
    if not (run / "run.json").exists():
        return "start"
    return "training" if any(run.glob("checkpoints/step-*")) else "first epoch"


def read_losses(run: Path) -> list[tuple[object, ...]]:
    """Return what the lines of a run tell, but for what counts seconds."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "samples", "loss", "error")
    return [tuple(line.get(key) for key in keys) for line in lines]


class watched:
    """Has a second process read a profile all the time, and tells what it saw."""

    def __init__(self, path: Path, tally: Tally) -> None:
        self._path, self.tally = path, tally

    def __enter__(self) -> None:
        words = [sys.executable, __file__, "watch", str(self._path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        printed, _ = self._process.communicate(timeout=60)
        seen = json.loads(printed)
        self.tally.reads = seen["reads"]
        self.tally.faults += seen["faults"]
        if self._process.returncode != 0:
            self.tally.faults.append(f"the second process ended with status {self._process.returncode}")


def watch(path: Path) -> None:
    """Read a profile until SIGTERM, and print how often and what was wrong."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    reads, faults = 0, list[str]()
    while not told:
        if reads or path.exists():  # once it is there it stays
            reads += 1
            try:
                Profile.load(path)
            except AutotuneError as error:
                faults.append(f"best.json could not be read: {error.message}")
        time.sleep(_READ_PAUSE_SECONDS)
    print(json.dumps({"reads": reads, "faults": faults[:20]}), flush=True)


def run_loop(kind: str, kills: int, seed: int, folder: Path) -> Tally:
    """Run one kind of loop in an empty folder."""
    return loop_train(folder, kills, seed) if kind == "train" else loop_search(folder, kind, kills, seed)


def main() -> int:
    """Run a loop and print what came of it."""
    if sys.argv[1:2] == ["watch"]:
        watch(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("search", "script", "train"))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tally = run_loop(options.kind, options.kills, options.seed, Path(folder))
    stages = ", ".join(f"{count} in {stage}" for stage, count in tally.stages.items())
    print(f"{tally.kills} kills ({stages}) of {tally.commands} commands in {time.monotonic() - began:.0f} s")
    print(f"{tally.finished} came to their end, {tally.trials} trials kept, {tally.reads} reads of best.json")
    print("\n".join(tally.faults) or "nothing lost, nothing torn, nothing left behind")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(tally), indent=2) + "\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "train")]
    sys.exit(main())
