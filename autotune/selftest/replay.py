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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from autotune.errors import MachineError
from autotune.isolation.causes import describe_hopeless
from autotune.lifeline import die_with_parent
from autotune.measure.hopeless import EarlySteps
from autotune.measure.throughput import Ending, TimedBlocks
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.finals import FinalsRecord
from autotune.records.measurement import Block, Measurement, PeakMemory
from autotune.records.probe import ProbeReport
from autotune.records.quality import DriftLimits
from autotune.records.search import SearchState
from autotune.records.selftest import Outcome
from autotune.records.trial import DataTrace, LossCurve, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.search.explore.study import Proposal
from autotune.search.launch.budget import Budget
from autotune.search.launch.starter import SearchContext
from autotune.search.progress import SearchReporter
from autotune.search.scores.objective import Judged
from autotune.search.session import run_session
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
_CURVE = LossCurve(seed=0, losses=(2.0, 1.5, 1.2, 1.0), samples=1024)


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
    simulation = _Simulation(case, random.Random(seed))
    state = SearchState(
        target=TARGET,
        seed=seed,
        max_drift=DriftLimits(),
        memory_limit_bytes=None,
        only=(f"user_knobs.{KNOB}",),
        measure_seconds=MEASURE_SECONDS,
    )
    budget = Budget(case.budget_seconds, 0.0, simulation.clock)
    outcome = run_session(
        simulation,
        state,
        SearchContext(budget, simulation.run, SearchReporter(), lambda: False),
        lambda _profile: None,
        number=1,
        open_study=simulation.open_study,
        suggest=_suggest_nothing,
    )
    return read_outcome(outcome.profile, truth=case.truth, noise=case.name)


@dataclass
class _Simulation:
    """A machine, its clock, a search folder that holds nothing but the probe, and the proposals: one search."""

    case: Case
    rng: random.Random
    now: float = 0.0
    database: Path = field(default_factory=Path)
    _fresh: list[TrainConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = self.case.machine(self.rng)
        self._probe = self.run(_probe_spec())

    def clock(self) -> float:
        return self.now

    def read_probe(self) -> ProbeReport:
        assert self._probe.measurement is not None
        return make_report(self.case.values, self._probe.measurement)

    def write_probe(self, report: ProbeReport) -> None:
        pass

    def read_trials(self) -> list[TrialResult]:
        return [self._probe.replace(facts=make_facts(self.case.values), curves=(_CURVE,))]

    def read_finals(self) -> FinalsRecord | None:
        return None

    def write_finals(self, record: FinalsRecord) -> None:
        pass

    def count_interrupted(self) -> int:
        return 0

    def open_study(
        self,
        path: Path,
        space: SearchSpace,
        *,
        seed: int,
        known: Sequence[tuple[Judged, float | None]],
        told: Callable[[str], None],
    ) -> _Simulation:
        name = f"user_knobs.{KNOB}"
        self._fresh = [space.complete({name: value}) for value in space.choices[name][1:]]
        random.Random(seed).shuffle(self._fresh)
        return self

    def open(self, config: TrainConfig) -> Proposal:
        return Proposal(config)

    def propose(self, tried: Sequence[TrainConfig]) -> Proposal | None:
        return Proposal(self._fresh.pop()) if self._fresh else None

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        pass

    def abandon(self, proposal: Proposal) -> None:
        pass

    def save(self) -> None:
        pass

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run a trial: real stop rules over simulated blocks."""
        began = self.now
        if spec.purpose in ("tape", "fidelity"):
            # Its data are always the same, and its gradients are left to the trainings.
            self.now += min(_LOOK_SECONDS, spec.limits.time_limit_seconds)
            return _finish(spec, self.now - began, tape=DataTrace(batches=("",), shapes=("",)))
        if spec.purpose == "quality":
            self.now += _STARTUP_SECONDS
            curves = tuple(_CURVE.replace(seed=seed) for seed in spec.seeds)
            return _finish(spec, self.now - began, curves=curves)
        percent = spec.config.user_knobs.get(KNOB, 0) if spec.config and self.case.percent else 0
        paces = self._start()
        timed = TimedBlocks(spec.limits, spec.limits.rival)
        step_seconds = (BLOCK_SAMPLES / _RATE * (1 + float(percent) / 100) * math.exp(pace) for pace in paces)
        early = _take_early(step_seconds)
        hopeless = early.find_hopeless(spec.limits.pace, spec.limits.rival)
        if hopeless is not None:
            self.now += _STARTUP_SECONDS + _WARMUP_SECONDS
            return describe_hopeless(spec, hopeless, elapsed_seconds=self.now - began)
        elapsed = 0.0
        while (ending := timed.find_ending(elapsed)) is None:
            seconds = next(step_seconds)
            timed.blocks.append(Block(optimizer_steps=1, samples=BLOCK_SAMPLES, seconds=seconds))
            elapsed += seconds
        took = _STARTUP_SECONDS + _WARMUP_SECONDS + elapsed
        self.now += min(took, spec.limits.time_limit_seconds)
        if took > spec.limits.time_limit_seconds:
            status = TrialStatus.INTERRUPTED if spec.limits.ends_with_stage else TrialStatus.TIMED_OUT
            return TrialResult(spec=spec, status=status, cause="budget", elapsed_seconds=self.now - began)
        measurement = _make_measurement(timed.blocks, early, ending)
        # Its only knob is exact: every launch has the same losses.
        return _finish(spec, self.now - began, measurement=measurement, curves=(_CURVE,))


def _take_early(step_seconds: Iterator[float]) -> EarlySteps:
    early = EarlySteps()
    while not early.take(next(step_seconds), BLOCK_SAMPLES, compiled=False):
        continue
    return early


def _make_measurement(blocks: Sequence[Block], early: EarlySteps, ending: Ending) -> Measurement:
    return Measurement(
        blocks=tuple(blocks),
        step_seconds=(),
        data_wait_seconds=0.0,
        steady=True,
        warmup_steps=10,
        warmup_seconds=_WARMUP_SECONDS,
        first_step_seconds=early.first_seconds,
        warmup_step_seconds=early.pair,
        compile_seconds=0.0,
        peak_memory=_PEAK,
        ended_by=ending,
    )


def _finish(spec: TrialSpec, seconds: float, **found: object) -> TrialResult:
    return TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=seconds, **found)  # type: ignore[arg-type]


def _probe_spec() -> TrialSpec:
    limits = TrialLimits(time_limit_seconds=60.0, measure_seconds=MEASURE_SECONDS)
    return TrialSpec(number=0, purpose="probe", target=TARGET, config=None, limits=limits)


def _suggest_nothing(*_asked: object, **_presets: object) -> None:
    """Return no plan: what is tried comes from the study alone."""
