"""What the tests of trials share: specs of toy workloads, and the processes that carry a world's mark."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import record_factory
from record_factory import make_target

from autotune.isolation.runner import TrialRunner
from autotune.records.config import TrainConfig
from autotune.records.trial import TrialLimits, TrialResult, TrialSpec

TOYS = Path(__file__).parent
MARK = "TOY_WORLD"
IMPORT_PATH = os.pathsep.join(map(str, (TOYS, TOYS.parent)))
"""PYTHONPATH of a process that imports this module."""


def make_spec(
    toy: str, *, number: int = 0, seconds: float = 120.0, purpose: str = "quality", **changes: Any
) -> TrialSpec:
    """Return the spec of a short trial of one toy; changes are knobs of its config, or fields of its limits."""
    usual = {"warmup_cap_seconds": 0.5, "measure_seconds": 0.1, "ceilings_seconds": 0.3}
    limits = {name: changes.pop(name) for name in [*changes] if name in TrialLimits.model_fields}
    return record_factory.make_spec(
        TrainConfig(micro_batch_size=8, num_threads=1, **changes),
        number=number,
        purpose=purpose,
        target=make_target(toy if ":" in toy else f"toy_workloads.py:{toy}", TOYS),
        device="cpu",
        quality_steps=3,
        time_limit_seconds=seconds,
        **(usual | limits),
    )


def find_marked(mark: str) -> dict[int, str]:
    """Return the living processes whose environment carries a mark, by pid."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process is there and not just waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_borne(mark: int) -> dict[int, str]:
    """Return the living processes that bear a keeper's mark, whatever their environment, by pid."""
    found = {}
    for process in psutil.process_iter():
        try:
            if mark in process.rlimit(psutil.RLIMIT_RTTIME) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def find_descendants() -> dict[int, str]:
    """Return the living descendants of this process, those among them that it has adopted, by pid."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> bool:
    """Return whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass
class World:
    """A trial runner, its folder, and what may be seen from outside.

    Attributes:
        folder: holds the trials' folders and the toys' traces.
        runner: the runner under test.
        mark: every process of it carries this.
        foreign_pids: children of this process that were there before.
        should_stop: asked by the runner; replace it to stop a trial.
        on_poll: called by the runner while a trial runs.
    """

    folder: Path
    mark: str
    runner: TrialRunner = field(init=False)
    foreign_pids: set[int] = field(default_factory=set)
    trials: int = 0
    should_stop: Callable[[], bool] = lambda: False
    on_poll: Callable[[], object] = lambda: None

    @property
    def server_pids(self) -> set[int]:
        """The fork servers, if there are any."""
        return set(self.runner._servers.pids)

    def run(self, toy: str, **options: Any) -> tuple[TrialResult, str]:
        """Run a toy and return its result and its log."""
        (self.folder / "reached").unlink(missing_ok=True)
        number, self.trials = self.trials, self.trials + 1
        result = self.runner(make_spec(toy, number=number, **options))
        return result, self.log(number)

    def log(self, number: int) -> str:
        """Return what a trial printed."""
        return (self.folder / f"{number:04d}" / "log.txt").read_text(errors="replace")

    def is_reached(self) -> bool:
        """Return whether the toy has come to where it hangs."""
        return (self.folder / "reached").exists()

    def find_strays(self) -> dict[int, str]:
        """Return processes that should not be there between two trials: by environment, by mark and by descent."""
        found = {**find_marked(self.mark), **find_borne(self.runner._keeper.mark), **find_descendants()}
        own = {world.runner._keeper._process.pid for world in _OPEN}.union(*(world.server_pids for world in _OPEN))
        return {pid: line for pid, line in found.items() if pid not in own | self.foreign_pids}


_OPEN: list[World] = []


@contextmanager
def open_world(folder: Path, *, warm: bool) -> Iterator[World]:
    """Yield a world; all its processes are gone at the end."""
    world = World(folder=folder, mark=uuid4().hex, foreign_pids={*find_descendants()})
    world.runner = TrialRunner(
        folder,
        environment={MARK: world.mark, "TOY_FOLDER": str(folder), "OMP_NUM_THREADS": "1"},
        should_stop=lambda: world.should_stop(),
        on_poll=lambda: world.on_poll(),
        warm=warm,
    )
    _OPEN.append(world)
    try:
        with world.runner:
            yield world
    finally:
        _OPEN.remove(world)
    assert {**find_marked(world.mark), **find_borne(world.runner._keeper.mark)} == {}
