"""Simulated searches that share a study: whole searches, a real database, launches that take no time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulated import BASELINE, Machine, Run, run_simulated

from autotune.records import Profile, TrainConfig, TrialResult, TrialSpec
from autotune.search.progress import SearchReporter
from autotune.search.share.address import read_address
from autotune.search.share.fleet import Fleet
from autotune.search.store.folder import SearchFolder

PLACEBOS = tuple(range(9))
"""Values of a knob of the user's own that does nothing; a search has these alone, unless it is asked for more."""
FACTS = {"numerics": {"user_knobs.planted": "exact"}}


def gain(config: TrainConfig) -> float:
    """Return the true speed of a config: one value of the knob is a third faster."""
    return 1.33 if config.user_knobs.get("planted") == 7 else 1.0


class Heard(SearchReporter):
    """What a worker told its user."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def told(self, sentence: str) -> None:
        self.sentences.append(sentence)


@dataclass
class Worker:
    """A search on a machine of its own.

    Attributes:
        work: its working folder.
        url: of the database.
        seed: of its machine and its proposals.
        before: called with each trial before it runs.
        pace: how much faster its machine is than others.
        values: of the knob.
        heard: what it told.
        run: what it came to; None while it is at work.
        fleet: what it knows of the others.
    """

    work: Path
    url: str
    seed: int = 0
    before: Callable[[TrialSpec], object] = lambda _spec: None
    pace: float = 1.0
    values: tuple[int, ...] = PLACEBOS
    heard: Heard = field(default_factory=Heard)
    run: Run | None = None
    fleet: Fleet = field(init=False)

    def search(self, *, folder: SearchFolder | None = None, fleet: dict[str, float] | None = None, **asked: Any) -> Run:
        """Search to the end, and return the answer."""
        self.work.mkdir(exist_ok=True)
        machine = _Machine(speed=gain, noise=0.01, seed=self.seed, knobs={"planted": self.values}, facts=FACTS)
        machine.drift = lambda _now: self.pace
        machine.before = self.before
        usual: dict[str, Any] = {"only": ("user_knobs.planted",), "budget": 100.0}
        others = Fleet(read_address(self.url), **({"beat_seconds": 0.05, "grace_seconds": 30.0} | (fleet or {})))
        self.fleet = others
        others.settle(_Folder(self.work), self.work / "best.json")
        try:
            self.run = run_simulated(
                machine, self.work, folder=folder, fleet=others, reporter=self.heard, **(usual | asked)
            )
        finally:
            others.leave(None)
        return self.run

    @property
    def profile(self) -> Profile:
        """Its answer."""
        assert self.run is not None
        return self.run.profile

    @property
    def specs(self) -> list[TrialSpec]:
        """Every trial that it ran."""
        assert self.run is not None
        return self.run.machine.specs

    @property
    def launched(self) -> list[TrainConfig]:
        """What it launched to explore, the baseline left out."""
        assert self.run is not None
        return [one.config for one in self.run.log.judged if one.config != BASELINE.replace(user_knobs={"planted": 0})]


class _Machine(Machine):
    before: Callable[[TrialSpec], object]

    def __call__(self, spec: TrialSpec) -> TrialResult:
        self.before(spec)
        return super().__call__(spec)


@dataclass(frozen=True)
class _Folder:
    work: Path

    def read_worker(self) -> str:
        return self.work.name


def search_together(workers: list[Worker], **asked: Any) -> None:
    """Have workers search at once, each in a thread, their launches by turns."""
    turns = Turns(len(workers))
    for worker in workers:
        worker.before = turns.take

    def search(worker: Worker) -> None:
        try:
            worker.search(**asked)
        finally:
            turns.leave()

    threads = [threading.Thread(target=search, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Turns:
    """Lets each of several threads do one thing, then the next round begins."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._count, self._lock = count, threading.Lock()

    def take(self, _spec: object = None) -> None:
        """Wait for the others."""
        try:
            self._barrier.wait(timeout=60.0)
        except threading.BrokenBarrierError:
            pass  # somebody is through: the rest need not keep step any more

    def leave(self) -> None:
        """Keep no step any more, nor the others."""
        self._barrier.abort()


def count_launches(workers: list[Worker]) -> Counter[str]:
    """Return on how many workers each config was launched to explore."""
    return Counter(key for worker in workers for key in {one.key for one in worker.launched})


def wait_until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that other processes do."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
