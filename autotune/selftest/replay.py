"""Replay whole searches in process: real decisions, simulated or recorded launches, a clock that launches advance.

Everything that decides is the search's own: stop rules of a trial, anchors, racing, ranking, the number of pairs,
finals, verdict. Only launches (and Optuna's proposals, among settings that are all alike) are stood in for.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import MachineError
from autotune.isolation.causes import describe_hopeless
from autotune.lifeline import die_with_parent
from autotune.measure.hopeless import EarlySteps
from autotune.measure.throughput import Ending, TimedBlocks
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.finals import FinalsRecord
from autotune.records.measurement import Block, Measurement, PeakMemory
from autotune.records.objective import Objective
from autotune.records.probe import ProbeReport
from autotune.records.quality import DriftLimits
from autotune.records.search import Recalled, Screens, SearchState
from autotune.records.selftest import Outcome
from autotune.records.trial import DataTrace, LossCurve, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.search.explore.study import Proposal
from autotune.search.launch.budget import Budget
from autotune.search.launch.starter import SearchContext
from autotune.search.progress import SearchReporter
from autotune.search.scores.objective import Judged
from autotune.search.session import SessionOutcome, run_session
from autotune.selftest.machines import Machine
from autotune.selftest.placebo import KNOB, PLACEBOS
from autotune.selftest.simulated_target import BLOCK_SAMPLES, TARGET, make_facts, make_report
from autotune.selftest.tally import read_outcome
from autotune.space import SearchSpace

BUDGET_SECONDS = 120.0
MEASURE_SECONDS = 2.0

_RATE = 1000.0
_LOOK_SECONDS = 0.2
_STARTUP_SECONDS, _WARMUP_SECONDS = 0.6, 0.6
_PEAK = PeakMemory(host_bytes=2**28)
CURVE = LossCurve(seed=0, losses=(2.0, 1.5, 1.2, 1.0), samples=1024)


@dataclass(frozen=True)
class Case:
    """What is replayed.

    Attributes:
        name: of the machine.
        machine: makes its launches.
        percent: how much slower the baseline is than the only other setting; 0 for 40 settings all alike.
        budget_seconds: of each search, on the simulated clock.
    """

    name: str
    machine: Machine
    percent: int = 0
    budget_seconds: float = BUDGET_SECONDS

    @property
    def truth(self) -> float:
        """The true speed-up."""
        return 1.0 + self.percent / 100

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """Values of the only knob, the baseline's first."""
        return (self.percent, 0) if self.percent else tuple(range(PLACEBOS))


def replay(case: Case, seeds: Sequence[int]) -> list[Outcome]:
    """Return the outcomes of searches, one per seed, on all CPUs."""
    workers = min(len(os.sched_getaffinity(0)), len(seeds))
    if workers < 2:
        return [replay_one(case, seed) for seed in seeds]
    parts = [seeds[first::workers] for first in range(workers)]
    # Forked, which imports nothing twice; nothing here has started a thread or a device.
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(workers, context, _prepare_worker, (os.getpid(),)) as pool:
            return [outcome for part in pool.map(partial(_replay_some, case), parts) for outcome in part]
    except BrokenProcessPool:
        raise MachineError(
            f"a process that replayed searches on the {case.name} machine was killed from outside, "
            "perhaps for its memory: run the self-test again with nothing else on the machine"
        ) from None


def _prepare_worker(parent: int) -> None:
    die_with_parent(parent)
    # Handlers are inherited: one that only sets a flag would keep a worker alive when the pool ends it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _replay_some(case: Case, seeds: Sequence[int]) -> list[Outcome]:
    return [replay_one(case, seed) for seed in seeds]


def replay_one(case: Case, seed: int) -> Outcome:
    """Return the outcome of one search."""
    simulation = Simulation(Placebo(case, random.Random(seed)))
    outcome = search(simulation, seed, case.budget_seconds, open_study=Shuffled)
    return read_outcome(outcome.profile, truth=case.truth, noise=case.name)


def search(
    simulation: Simulation,
    seed: int,
    budget_seconds: float,
    **stages: Any,
) -> SessionOutcome:
    """Run a search on a simulation.

    Args:
        simulation: runs its trials, and is its clock.
        seed: of its proposals.
        budget_seconds: on that clock.
        stages: of `run_session`, where they are not the real ones.
    """
    state = SearchState(
        target=TARGET,
        seed=seed,
        max_drift=DriftLimits(),
        memory_limit_bytes=None,
        objective=Objective.THROUGHPUT,
        only=simulation.world.knobs,
        measure_seconds=MEASURE_SECONDS,
    )
    budget = Budget(budget_seconds, 0.0, simulation.clock)
    context = SearchContext(budget, simulation.run, SearchReporter(), lambda: False)
    return run_session(simulation, state, context, lambda _profile: None, number=1, **stages)


class World(Protocol):
    """A target on a machine, as its launches are stood in for."""

    @property
    def knobs(self) -> tuple[str, ...]:
        """What a search varies."""
        ...

    @property
    def facts(self) -> TargetFacts:
        """Of the target."""
        ...

    @property
    def losses(self) -> LossCurve:
        """Of its baseline in the probe, which those of every launch are screened against."""
        ...

    def make_report(self, measurement: Measurement) -> ProbeReport:
        """Return what a probe says of it, its baseline measured so."""
        ...

    def launch(self, config: TrainConfig) -> Course:
        """Return how the next launch of a config goes."""
        ...


@dataclass(frozen=True)
class Course:
    """How a launch goes.

    Attributes:
        status: completed, or how it fails.
        paces: log seconds per sample of its blocks, without end; empty where it fails.
        block: samples and optimizer steps of each.
        startup_seconds: until its first step; all that it takes where it fails.
        warmup_seconds: from there to its first block, compilation included.
        compile_seconds: part of these.
        peak_memory: over all of it.
        curve: its losses.
    """

    status: TrialStatus
    paces: Iterator[float]
    block: Block
    startup_seconds: float
    warmup_seconds: float
    compile_seconds: float = 0.0
    peak_memory: PeakMemory = _PEAK
    curve: LossCurve = CURVE


def shift(start: Callable[[], Iterator[float]], by: float) -> Iterator[float]:
    """Yield the log paces of a launch that is started when the first is asked for, all of them shifted."""
    for pace in start():
        yield by + pace


class Placebo:
    """The world of a case: one knob that changes nothing but the pace, if that.

    Args:
        case: the machine, and how much slower the baseline is.
        rng: random stream of the machine.
    """

    knobs = (f"user_knobs.{KNOB}",)
    losses = CURVE

    def __init__(self, case: Case, rng: random.Random) -> None:
        self._case, self._start = case, case.machine(rng)
        self.facts = make_facts(case.values)

    def make_report(self, measurement: Measurement) -> ProbeReport:
        """Return what a probe says of it."""
        return make_report(self._case.values, measurement)

    def launch(self, config: TrainConfig) -> Course:
        """Return how a launch goes."""
        percent = config.user_knobs.get(KNOB, 0) if self._case.percent else 0
        own = math.log((1 + float(percent) / 100) / _RATE)
        return Course(
            status=TrialStatus.COMPLETED,
            paces=shift(self._start, own),
            block=Block(optimizer_steps=1, samples=BLOCK_SAMPLES, seconds=BLOCK_SAMPLES / _RATE),
            startup_seconds=_STARTUP_SECONDS,
            warmup_seconds=_WARMUP_SECONDS,
        )


@dataclass
class Simulation:
    """A search on a world: its clock, its trials, and a search folder that holds nothing but the probe.

    Attributes:
        world: what is searched.
        now: seconds on the clock.
        gate_seconds: returns what a trial of the loss check takes; None for next to nothing.
        database: of the study's copy; None for no copy.
    """

    world: World
    now: float = 0.0
    gate_seconds: Callable[[TrialSpec], float] | None = None
    database: Path | None = None

    def __post_init__(self) -> None:
        self._probe = self.run(_probe_spec())

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def read_probe(self) -> ProbeReport:
        """Return what the probe said."""
        assert self._probe.measurement is not None
        return self.world.make_report(self._probe.measurement)

    def write_probe(self, report: ProbeReport) -> None:
        """Keep nothing."""

    def read_trials(self) -> list[TrialResult]:
        """Return the probe's trial."""
        return [self._probe.replace(facts=self.world.facts, curves=(self.world.losses,))]

    def read_finals(self) -> FinalsRecord | None:
        """Return no finals."""
        return None

    def write_finals(self, record: FinalsRecord) -> None:
        """Keep nothing."""

    def count_interrupted(self) -> int:
        """Return that no launch was cut."""
        return 0

    def read_screens(self) -> Screens:
        """Return nothing: each simulation is the first."""
        return Screens()

    def write_screens(self, screens: Screens) -> None:
        """Keep nothing."""

    def recall(self, report: ProbeReport) -> Recalled:
        """Return nothing: each simulation is the first."""
        return Recalled()

    def remember(self, *_: object) -> None:
        """Keep nothing."""

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run a trial: real stop rules over stood-in blocks."""
        began = self.now
        if spec.purpose in ("tape", "fidelity"):
            # Its data are always the same, and its gradients are left to the trainings.
            seconds = _LOOK_SECONDS if self.gate_seconds is None else self.gate_seconds(spec)
            self.now += min(seconds, spec.limits.time_limit_seconds)
            return _finish(spec, self.now - began, tape=DataTrace(batches=("",), shapes=("",)))
        course = self.world.launch(spec.config or self.world.facts.baseline)
        if course.status is not TrialStatus.COMPLETED:
            self.now += min(course.startup_seconds, spec.limits.time_limit_seconds)
            return TrialResult(spec=spec, status=course.status, elapsed_seconds=self.now - began)
        if spec.purpose == "quality":
            self.now += course.startup_seconds if self.gate_seconds is None else self.gate_seconds(spec)
            return _finish(spec, self.now - began, curves=tuple(course.curve.replace(seed=one) for one in spec.seeds))
        return self._time(spec, course)

    def _time(self, spec: TrialSpec, course: Course) -> TrialResult:
        began, samples = self.now, course.block.samples
        timed = TimedBlocks(spec.limits, spec.limits.rival)
        block_seconds = (samples * math.exp(pace) for pace in course.paces)
        early = _take_early(block_seconds, course.block)
        hopeless = early.find_hopeless(spec.limits.pace, spec.limits.rival)
        if hopeless is not None:
            self.now += course.startup_seconds + course.warmup_seconds
            return describe_hopeless(spec, hopeless, elapsed_seconds=self.now - began)
        elapsed = 0.0
        while (ending := timed.find_ending(elapsed)) is None:
            seconds = next(block_seconds)
            timed.blocks.append(course.block.replace(seconds=seconds))
            elapsed += seconds
        took = course.startup_seconds + course.warmup_seconds + elapsed
        self.now += min(took, spec.limits.time_limit_seconds)
        if took > spec.limits.time_limit_seconds:
            status = TrialStatus.INTERRUPTED if spec.limits.ends_with_stage else TrialStatus.TIMED_OUT
            return TrialResult(spec=spec, status=status, cause="budget", elapsed_seconds=self.now - began)
        measurement = _make_measurement(timed.blocks, early, ending, course)
        return _finish(
            spec,
            self.now - began,
            startup_seconds=course.startup_seconds,
            measurement=measurement,
            curves=(course.curve,),
        )


class Shuffled:
    """Proposes the values of the only knob in random order: they are all alike, and Optuna has nothing to learn.

    Arguments as of `Study`.
    """

    def __init__(
        self,
        path: Path | None,
        space: SearchSpace,
        *,
        seed: int,
        **_others: object,
    ) -> None:
        ((name, values),) = space.choices.items()
        self._fresh = [space.complete({name: value}) for value in values[1:]]
        random.Random(seed).shuffle(self._fresh)

    def open(self, config: TrainConfig) -> Proposal:
        """Return a proposal for a config."""
        return Proposal(config)

    def propose(
        self, closed: Container[object], together: object = (), dear: object = (), lost: object = ()
    ) -> Proposal | None:
        """Return the next; None when none is left."""
        return Proposal(self._fresh.pop()) if self._fresh else None

    def list_simpler(self, config: TrainConfig) -> list[TrainConfig]:
        """Return nothing: a config has one change."""
        return []

    def expect(self, config: TrainConfig) -> float:
        """Return nothing: all are alike."""
        return 0.0

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Learn nothing."""

    def abandon(self, proposal: Proposal) -> None:
        """Learn nothing."""

    def list_effects(self) -> dict[tuple[str, KnobValue | None], tuple[float, float]]:
        """Return nothing: it has learnt nothing."""
        return {}

    def list_estimates(self) -> dict[str, float]:
        """Return nothing: a reading is all that is known of a config."""
        return {}

    def save(self, attributes: Mapping[str, Any]) -> None:
        """Keep nothing."""


def _take_early(block_seconds: Iterator[float], block: Block) -> EarlySteps:
    early = EarlySteps()
    while not early.take(
        next(block_seconds) / block.optimizer_steps, block.samples // block.optimizer_steps, compiled=False
    ):
        continue
    return early


def _make_measurement(blocks: Sequence[Block], early: EarlySteps, ending: Ending, course: Course) -> Measurement:
    return Measurement(
        blocks=tuple(blocks),
        step_seconds=(),
        data_wait_seconds=0.0,
        steady=True,
        warmup_steps=10,
        warmup_seconds=course.warmup_seconds,
        first_step_seconds=early.first_seconds,
        warmup_step_seconds=early.pair,
        compile_seconds=course.compile_seconds,
        peak_memory=course.peak_memory,
        ended_by=ending,
    )


def _finish(spec: TrialSpec, seconds: float, **found: object) -> TrialResult:
    return TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=seconds, **found)  # type: ignore[arg-type]


def _probe_spec() -> TrialSpec:
    limits = TrialLimits(time_limit_seconds=60.0, measure_seconds=MEASURE_SECONDS)
    return TrialSpec(number=0, purpose="probe", target=TARGET, config=None, limits=limits)
