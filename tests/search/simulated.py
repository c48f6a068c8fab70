"""A simulated machine for searches: true speeds and losses, noise and drift, and a clock that trials advance."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import record_factory
from record_factory import (
    GIB,
    make_block,
    make_ceilings,
    make_data,
    make_facts,
    make_hardware,
    make_measurement,
    make_model,
    make_phases,
    make_result,
    make_software,
    make_spec,
    make_state,
)

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.record.trace_file import TRACE_FILE, WEIGHTS_FILE, GradientTrace, Point, write_trace
from autotune.measure.racing import is_clearly_slower
from autotune.records import (
    Block,
    LossCurve,
    Measurement,
    PeakMemory,
    ProbeReport,
    Profile,
    Target,
    TargetFacts,
    TrainConfig,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Verdict,
)
from autotune.records.config import KnobValue
from autotune.records.measurement import SpeedReference
from autotune.records.objective import usual_objective
from autotune.records.script import Script
from autotune.records.search import SearchState
from autotune.records.trial import DataTrace, Rival
from autotune.search.explore.stage import Explorer, OpenStudy
from autotune.search.explore.study import Proposal, Study
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.rounds import Terms, run_finals
from autotune.search.launch.budget import Budget
from autotune.search.launch.starter import RunInTurns, SearchContext, TrialStarter
from autotune.search.log import SearchLog
from autotune.search.problem import SearchProblem
from autotune.search.progress import SearchReporter
from autotune.search.scores.objective import KEYS, Judged, Score
from autotune.search.session import run_session
from autotune.search.share.alone import ALONE, Alone
from autotune.search.store.folder import SearchFolder, create_search_folder
from autotune.space import SearchSpace, numerics_of

BASELINE = TrainConfig(micro_batch_size=32, num_threads=2, optimizer_implementation="for-loop")
BASE_RATE = 1000.0
LAUNCH_SECONDS = 3.0
BLOCK_SAMPLES = 320
PEAK_MEMORY = PeakMemory(host_bytes=500 * 2**20)
FINALS_SHARE = 0.33
"""Of the budget: kept back for finals where a test has no reserve of its own."""


def bf16_wins(config: TrainConfig) -> float:
    return 1.5 if config.precision == "bf16" else 1.0


def all_equal(_config: TrainConfig) -> float:
    return 1.0


@dataclass
class Machine:
    """Runs trials in no time and says how long they would have taken.

    Attributes:
        speed: true throughput of a config over the baseline's.
        loss: factor on a config's losses; 1.0 learns the same.
        metrics: what a config's evaluation returns.
        fate: status of a config's trials.
        noise: standard deviation of a launch's log throughput, the same for all of its blocks.
        wander: standard deviation of the log of the machine's own speed at each launch; two in turns have the same.
        takes_turns: a whole search on it may run trials in turns.
        block_noise: standard deviation of the log throughput of a block within a launch.
        drift: factor on everything's speed at a time of the clock.
        canary: what the canary takes at a time of the clock; None where there is none.
        compile_seconds: what compiling a config adds to each of its launches.
        blocks: of a launch that is neither cut nor given its number of samples.
        seconds: how long a launch with all of its blocks takes, half of it for these.
        memory: true peak of a config over the baseline's.
        memory_noise: standard deviation of a launch's log peak.
        learns: its losses fall.
        facts: what the probe finds beside the usual.
        written: files that each trial makes.
        gradient_error: relative error of a config's gradients, the same in every window; 0.0 rounds differently.
        gradient_noise: of a config's gradients, as a share of their variance.
        tape: what a config's loader hands over, in a word.
        trials: where fidelity trials write; None for nowhere.
        repeats_losses: exact settings have the baseline's losses bit for bit; else the machine never repeats itself.
    """

    speed: Callable[[TrainConfig], float] = bf16_wins
    loss: Callable[[TrainConfig], float] = lambda _config: 1.0
    metrics: Callable[[TrainConfig], dict[str, float | None]] = lambda _config: {}
    fate: Callable[[TrainConfig], TrialStatus] = lambda _config: TrialStatus.COMPLETED
    noise: float = 0.01
    wander: float = 0.0
    takes_turns: bool = False
    block_noise: float = 0.0
    drift: Callable[[float], float] = lambda _now: 1.0
    canary: Callable[[float], float] | None = None
    compile_seconds: Callable[[TrainConfig], float] = lambda _config: 0.0
    blocks: int = 4
    seed: int = 0
    seconds: float = LAUNCH_SECONDS
    now: float = 0.0
    specs: list[TrialSpec] = field(default_factory=list)
    stop_after: int | None = None
    knobs: dict[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    memory: Callable[[TrainConfig], float] = lambda _config: 1.0
    memory_noise: float = 0.0
    learns: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    gradient_error: Callable[[TrainConfig], float] = lambda _config: 0.0
    gradient_noise: Callable[[TrainConfig], float] = lambda _config: 0.0
    tape: Callable[[TrainConfig], str] = lambda _config: "samples"
    trials: Path | None = None
    repeats_losses: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._shift = self._draw_shift()

    def clock(self) -> float:
        return self.now

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.specs) >= self.stop_after

    def run_in_turns(self, first: TrialSpec, second: TrialSpec) -> tuple[TrialResult, TrialResult]:
        shift, began = self._draw_shift(), self.now
        ours, theirs = self._run(first, shift), self._run(second, shift)
        ours = ours.replace(elapsed_seconds=self.now - began)
        return ours, theirs.with_reference(ours) if first.purpose == "reference" else theirs

    def _draw_shift(self) -> float:
        return self.random.gauss(0, self.wander) if self.wander else 0.0

    def __call__(self, spec: TrialSpec) -> TrialResult:
        return self._run(spec, self._draw_shift())

    def _run(self, spec: TrialSpec, shift: float) -> TrialResult:
        self._shift = shift
        self.specs.append(spec)
        config = spec.config or BASELINE
        timed = spec.purpose in ("probe", "measure", "reference", "final")
        measurement = self._measure(spec, config) if timed else None
        full = self.seconds + self.compile_seconds(config)
        if measurement is not None:
            full -= 0.5 * self.seconds * max(0.0, 1 - len(measurement.blocks) / self.blocks)
        took = min(full, spec.limits.time_limit_seconds)
        self.now += took
        if took < full:
            cut = spec.limits.ends_with_stage
            status = TrialStatus.INTERRUPTED if cut else TrialStatus.TIMED_OUT
            return make_result(spec, status=status, cause="user-error", elapsed_seconds=took)
        if self.should_stop():
            return make_result(spec, status=TrialStatus.INTERRUPTED, elapsed_seconds=took)
        status = self.fate(config)
        if status is not TrialStatus.COMPLETED:
            return make_result(spec, status=status, cause="user-error", error="planted", elapsed_seconds=took)
        result = make_result(spec, status=status, elapsed_seconds=took, measurement=measurement)
        if spec.purpose == "tape":
            return result.replace(tape=DataTrace(batches=(self.tape(config),), shapes=("int64[32]",), samples=10_000))
        if spec.purpose == "fidelity":
            return result.replace(captures=self._capture(spec, config))
        result = result.replace(
            written=self.written,
            curves=self.curves(config, seeds=spec.seeds, steps=spec.quality_steps if spec.purpose == "quality" else 40),
        )
        return result.replace(facts=self.find_facts()) if spec.purpose == "probe" else result

    def _capture(self, spec: TrialSpec, config: TrainConfig) -> str | None:
        if self.trials is None or spec.fidelity is None:
            return None
        windows, columns = spec.fidelity.windows, 64
        truth, luck = np.random.default_rng(1), np.random.default_rng(zlib.crc32(config.to_json().encode()))
        rows = 0.3 + truth.standard_normal((windows, columns))
        digits = 1e-6 if config.precision == "fp32" else 1e-4
        rounded = (
            0.0 if numerics_of(config, BASELINE) == "exact" else max(digits, math.sqrt(self.gradient_noise(config)))
        )
        rows = rows * (1 + self.gradient_error(config)) + rounded * luck.standard_normal(rows.shape)
        keys = 32 * np.arange(1, 1 + windows)

        def take(count: int) -> Point:
            held = keys[:count], rows[:count]
            return Point(GradientRows(*held), GradientRows(held[0], -1e-3 * held[1]), np.full((count, 1), 1e-3))

        points = [take(spec.fidelity.first_windows or windows), *([take(windows)] if spec.fidelity.later_steps else [])]
        layers = RowLayout(("weight",), np.array([columns]), np.array([columns]))
        path = self.trials / f"{spec.number:04d}" / TRACE_FILE
        path.parent.mkdir(exist_ok=True)
        write_trace(path, GradientTrace(layers, tuple(points)))
        if spec.fidelity.later_steps and spec.fidelity.weights is None:
            path.with_name(WEIGHTS_FILE).touch()
        return str(path)

    def _measure(self, spec: TrialSpec, config: TrainConfig) -> Measurement:
        speed = self.speed(config) * self.drift(self.now)
        rate = BASE_RATE * speed * math.exp(self.random.gauss(0, self.noise) + self._shift)
        blocks, ended_by = self._time_blocks(spec, rate)
        return make_measurement(
            blocks,
            step_seconds=(0.032,) * 10 * len(blocks),
            compile_seconds=self.compile_seconds(config),
            peak_memory=self._find_peak(config),
            canary=self._time_canary(),
            ended_by=ended_by,
        )

    def _find_peak(self, config: TrainConfig) -> PeakMemory:
        # A stream of its own, so that it changes no launch's speed.
        luck = random.Random(f"memory {self.seed} {len(self.specs)}").gauss(0, self.memory_noise)
        return PeakMemory(host_bytes=round(PEAK_MEMORY.host_bytes * self.memory(config) * math.exp(luck)))

    def _time_blocks(self, spec: TrialSpec, rate: float) -> tuple[tuple[Block, ...], Any]:
        rival, asked = self._rival_now(spec.limits.rival), spec.limits.measure_samples
        count = self.blocks if asked is None else math.ceil(asked / BLOCK_SAMPLES)
        # A stream of its own, so that how many blocks one launch takes changes no other launch.
        luck = random.Random(f"{self.seed} {len(self.specs)}")
        blocks: list[Block] = []
        ratios: list[float] = []
        while len(blocks) < count:
            seconds = BLOCK_SAMPLES / (rate * math.exp(luck.gauss(0, self.block_noise)))
            blocks.append(make_block(BLOCK_SAMPLES, seconds))
            if rival is None or asked is not None:
                continue
            ratios.append(math.log(seconds / BLOCK_SAMPLES / rival.seconds_per_sample))
            if is_clearly_slower(ratios, block_sd=rival.block_sd, margin=rival.margin):
                return tuple(blocks), "racing"
        return tuple(blocks), "time" if asked is None else "samples"

    def _rival_now(self, rival: Rival | None) -> Rival | None:
        if rival is None or rival.canary_seconds is None or self.canary is None:
            return rival
        slowdown = max(1.0, self.canary(self.now) / rival.canary_seconds)
        return rival.replace(seconds_per_sample=slowdown * rival.seconds_per_sample)

    def _time_canary(self) -> SpeedReference | None:
        if self.canary is None:
            return None
        seconds = self.canary(self.now)
        return SpeedReference(before_seconds=seconds, after_seconds=seconds)

    def curves(self, config: TrainConfig, *, seeds: Sequence[int], steps: int) -> tuple[LossCurve, ...]:
        curves = []
        metrics = self.metrics(config)
        for seed in seeds:
            # Rounding moves a loss a little, the same in every run of the same config and seed.
            jitter = random.Random(f"{config.to_json()}{seed}")
            plain = [2.0 / (1 + 0.1 * step * self.learns) for step in range(steps)]
            own = config.replace(user_knobs={})
            same = own == BASELINE or (self.repeats_losses and numerics_of(own, BASELINE) == "exact")
            losses = tuple(x * self.loss(config) * (1.0 if same else 1 + jitter.gauss(0, 1e-5)) for x in plain)
            curves.append(LossCurve(seed=seed, losses=losses, samples=32 * steps, skipped=0, metrics=metrics))
        return tuple(curves)

    def find_facts(self) -> TargetFacts:
        return self._usual_facts().replace(**self.facts)

    def _usual_facts(self) -> TargetFacts:
        return make_facts(
            label="toy.py:workload",
            baseline=BASELINE.replace(user_knobs={name: values[0] for name, values in self.knobs.items()}),
            knobs=self.knobs,
            model=make_model(calls_attention=True, checkpointable_blocks=2, flops_per_sample=1e6),
            data=make_data(seconds_per_sample=1e-5, batch_shapes=1),
            phases=make_phases(0.001, 0.0, 0.01, 0.015, 0.006),
            compute_seconds_per_step=0.031,
            ceilings=make_ceilings({"fp32": 2e11, "bf16": 1e12}),
        )


def make_report(machine: Machine) -> ProbeReport:
    """Return what the probe says of a machine; its measurement is exact."""
    rate = BASE_RATE * machine.drift(0.0)
    return record_factory.make_report(
        hardware=make_hardware(
            cpu_name="simulated",
            usable_cpu_count=2,
            cpu_features=(),
            memory_total_bytes=8 * GIB,
            memory_limit_bytes=8 * GIB,
            memory_available_bytes=8 * GIB,
            has_cpp_compiler=False,
        ),
        software=make_software(torch="2", platform="simulated"),
        target=machine.find_facts(),
        measurement=make_measurement(
            [make_block(BLOCK_SAMPLES, BLOCK_SAMPLES / rate)], step_seconds=(0.032,) * 10, peak_memory=PEAK_MEMORY
        ),
        verdict=Verdict(limit="compute", sentence="nothing binds"),
    )


def make_problem(machine: Machine, **changes: Any) -> SearchProblem:
    """Return the problem of a search without knobs; what is changed are its fields, or those of its state."""
    asked = {name: changes.pop(name) for name in [*changes] if name in SearchState.model_fields}
    asked.setdefault("objective", usual_objective(is_length_known=changes.get("planned_samples") is not None))
    report = changes.pop("report", None) or make_report(machine)
    usual: dict[str, Any] = {
        "space": SearchSpace(baseline=report.target.baseline, choices={}, ruled_out=()),
        "startup_seconds": 1.0,
        "baseline_losses": make_curve(),
    }
    return SearchProblem(make_state(**({"seed": machine.seed} | asked)), report, **(usual | changes))


@dataclass(frozen=True)
class Search:
    """A search past its probe: no disk, no database.

    Attributes:
        log: still without a launch.
        starter: of its trials.
    """

    log: SearchLog
    starter: TrialStarter

    @property
    def budget(self) -> Budget:
        return self.starter.budget


def open_search(
    machine: Machine,
    *,
    budget: float = 600.0,
    run_trial: Callable[[TrialSpec], TrialResult] | None = None,
    run_in_turns: RunInTurns | None = None,
    **changes: Any,
) -> Search:
    """Return a search on a machine; what is changed are fields of its problem or its state."""
    log = SearchLog(make_problem(machine, **changes))
    clock = Budget(budget, machine.now, machine.clock)
    context = SearchContext(
        clock, run_trial or machine, SearchReporter(), machine.should_stop, run_in_turns=run_in_turns
    )
    return Search(log, TrialStarter(log, context, number=1))


class Placebos:
    """Proposes a list of configs, the first untried one first; remembers what it was told."""

    def __init__(self, configs: Sequence[TrainConfig]) -> None:
        self.configs = list(configs)
        self.expected = 0.0
        self.told: list[tuple[TrainConfig, float | None]] = []

    def open(self, config: TrainConfig) -> Proposal:
        return Proposal(config)

    def propose(
        self, tried: Container[object], together: object = (), dear: object = (), lost: object = ()
    ) -> Proposal | None:
        left = (config for config in self.configs if config not in tried)
        return next((Proposal(config) for config in left), None)

    def list_simpler(self, config: TrainConfig) -> list[TrainConfig]:
        return []

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        self.told.append((proposal.config, value))

    def abandon(self, proposal: Proposal) -> None:
        pass

    def expect(self, config: TrainConfig) -> float:
        """Return what the test says."""
        return self.expected

    def list_estimates(self) -> dict[str, float]:
        """Return nothing: a reading is all that is known of a config."""
        return {}

    def save(self, attributes: Mapping[str, Any]) -> None:
        pass


class NothingToCheck:
    """A loss check that nobody asks."""

    def find_early_part(self, config: TrainConfig) -> TrainConfig | None:
        raise AssertionError

    def look_at(self, config: TrainConfig, *, seconds: float, most_seconds: float | None = None) -> None:
        raise AssertionError

    def choose(self, candidates: Sequence[TrainConfig], **_limits: object) -> list[TrainConfig]:
        raise AssertionError


class UnsavedStudy(Study):
    """Without its copy on disk, which takes longer than all else: for whole searches that are not about it."""

    def __init__(self, _path: Path | None, space: SearchSpace, **options: Any) -> None:
        super().__init__(None, space, **options)


def make_placebos(count: int) -> list[TrainConfig]:
    """Return configs that differ in a knob that does nothing, unless a machine's speed says so."""
    return [BASELINE.replace(user_knobs={"placebo": number}) for number in range(1, 1 + count)]


def make_judged(
    config: TrainConfig,
    value: float | None,
    *,
    feasible: bool = True,
    compile_seconds: float = 0.0,
    elapsed: float = LAUNCH_SECONDS,
    canary: float | None = None,
    block_ratios: Sequence[float] = (0.0,),
) -> Judged:
    """Return a launch with a given log speed-up over `BASE_RATE`; None for one that was not timed."""
    rate = BASE_RATE * math.exp(value or 0.0)
    measurement = make_measurement(
        [make_block(BLOCK_SAMPLES, BLOCK_SAMPLES / rate * math.exp(ratio)) for ratio in block_ratios],
        step_seconds=(0.032,) * 10,
        compile_seconds=compile_seconds,
        peak_memory=PEAK_MEMORY,
        canary=None if canary is None else SpeedReference(before_seconds=canary, after_seconds=canary),
    )
    status = TrialStatus.CRASHED if value is None else TrialStatus.COMPLETED
    result = make_result(
        make_spec(config), status=status, elapsed_seconds=elapsed, measurement=None if value is None else measurement
    )
    constraints = {**dict.fromkeys(KEYS, 0.0), "memory": 0.0 if feasible else 0.1}
    log_rate = None if value is None else math.log(BASE_RATE) + value
    return Judged(result, Score(value=log_rate, constraints=constraints, status=status))


def make_curve() -> LossCurve:
    """Return the losses of the baseline in a launch."""
    return Machine().curves(BASELINE, seeds=(0,), steps=40)[0]


def number_of(config: TrainConfig) -> int:
    """Return which placebo a config is; 0 for the baseline."""
    return int(config.user_knobs.get("placebo", 0))


def explore(search: Search, *, count: int = 100, **asked: Any) -> str:
    """Run the exploring stage over placebos and return why it ended."""
    return Explorer(search.log, search.starter, Placebos(make_placebos(count)), **asked).run()


def explore_placebos(machine: Machine, *, budget: float = 600.0, count: int = 1000) -> Search:
    """Return a search whose exploring stage went over placebos."""
    search = open_search(machine, budget=budget)
    explore(search, count=count, kept_seconds=lambda: FINALS_SHARE * budget)
    return search


@dataclass
class Run:
    """A finished simulated search.

    Attributes:
        profile: the answer returned.
        saved: every answer written on the way.
        machine: with the trials it ran and the clock.
        folder: of the search.
        log: with the launches of its exploring stage.
    """

    profile: Profile
    saved: list[Profile]
    machine: Machine
    folder: SearchFolder
    log: SearchLog


def run_simulated(
    machine: Machine,
    work: Path,
    *,
    budget: float = 240.0,
    folder: SearchFolder | None = None,
    script: Script | None = None,
    open_study: OpenStudy = UnsavedStudy,
    fleet: Alone = ALONE,
    reporter: SearchReporter | None = None,
    **asked: Any,
) -> Run:
    """Run a whole search on a simulated machine, in a new folder or going on in an old one.

    What is asked are fields of `SearchState` that are not the usual ones.
    """
    target = Target(spec="toy.py:workload", folder=str(work), script=script)
    if folder is None:
        folder = create_search_folder(work, target.spec)
        folder.write_state(make_state(**({"target": target, "seed": machine.seed} | asked)))
    saved: list[Profile] = []
    machine.trials = folder.trials

    def keep(result: TrialResult) -> TrialResult:
        place = folder.trials / f"{result.spec.number:04d}"
        place.mkdir(exist_ok=True)
        (place / "result.json").write_text(result.to_json())
        return result

    def run_pair(first: TrialSpec, second: TrialSpec) -> tuple[TrialResult, TrialResult]:
        ours, theirs = machine.run_in_turns(first, second)
        return keep(ours), keep(theirs)

    outcome = run_session(
        folder,
        folder.read_state(),
        SearchContext(
            Budget(budget, machine.now, machine.clock),
            lambda spec: keep(machine(spec)),
            reporter or SearchReporter(),
            machine.should_stop,
            run_in_turns=run_pair if machine.takes_turns else None,
        ),
        saved.append,
        number=folder.next_number(),
        open_study=open_study,
        fleet=fleet,
    )
    return Run(outcome.profile, saved, machine, folder, outcome.log)


def play_finals(
    log_ratios: Sequence[float],
    *others: Sequence[float],
    rounds: int | None = None,
    terms: Terms | None = None,
    cost: float = 0.0,
) -> FinalsOutcome:
    """Run finals in which the baseline is always the same and each candidate has the log ratios given."""
    placebos = make_placebos(1 + len(others))
    left = {number: iter(values) for number, values in enumerate((log_ratios, *others), start=1)}

    def launch(config: TrainConfig) -> TrialResult:
        return make_judged(config, next(left[number_of(config)]) if number_of(config) else 0.0).result

    return run_finals(
        placebos,
        BASELINE,
        launch,
        rounds=rounds or len(log_ratios),
        seed=0,
        terms=terms,
        cost=lambda config, _results: cost if number_of(config) else 0.0,
    )
