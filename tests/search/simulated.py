"""A simulated machine for searches: true speeds and losses, launch noise, and a clock that trials advance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.records import (
    Block,
    Ceilings,
    DataFacts,
    LossCurve,
    MatmulRate,
    Measurement,
    ModelFacts,
    OptimizerFacts,
    PeakMemory,
    Profile,
    StepPhases,
    Target,
    TargetFacts,
    TrainConfig,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from autotune.records.config import KnobValue
from autotune.records.script import Script
from autotune.records.search import SearchState
from autotune.search.budget import Budget
from autotune.search.folder import SearchFolder, create_search_folder
from autotune.search.launcher import Launcher
from autotune.search.progress import SearchReporter
from autotune.search.session import Session

BASELINE = TrainConfig(micro_batch_size=32, num_threads=2, optimizer_implementation="for-loop")
BASE_RATE = 1000.0
LAUNCH_SECONDS = 3.0


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
        fate: status of a config's trials.
        noise: standard deviation of a launch's log throughput.
        seconds: how long a launch takes.
        learns: its losses fall.
        facts: what the probe finds beside the usual.
        written: files that each trial makes.
    """

    speed: Callable[[TrainConfig], float] = bf16_wins
    loss: Callable[[TrainConfig], float] = lambda _config: 1.0
    fate: Callable[[TrainConfig], TrialStatus] = lambda _config: TrialStatus.COMPLETED
    noise: float = 0.01
    seed: int = 0
    seconds: float = LAUNCH_SECONDS
    now: float = 0.0
    specs: list[TrialSpec] = field(default_factory=list)
    stop_after: int | None = None
    knobs: dict[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    learns: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.specs) >= self.stop_after

    def __call__(self, spec: TrialSpec) -> TrialResult:
        self.specs.append(spec)
        config = spec.config or BASELINE
        took = min(self.seconds, spec.limits.time_limit_seconds)
        self.now += took
        if took < self.seconds:
            cut = spec.limits.ends_with_stage
            status = TrialStatus.INTERRUPTED if cut else TrialStatus.TIMED_OUT
            return TrialResult(spec=spec, status=status, cause="planted", elapsed_seconds=took)
        if self.should_stop():
            return TrialResult(spec=spec, status=TrialStatus.INTERRUPTED, elapsed_seconds=took)
        status = self.fate(config)
        if status is not TrialStatus.COMPLETED:
            return TrialResult(spec=spec, status=status, cause="planted", error="planted", elapsed_seconds=took)
        result = TrialResult(spec=spec, status=status, elapsed_seconds=took, curves=self._curves(spec, config))
        result = result.replace(written=self.written)
        if spec.purpose != "quality":
            result = result.replace(measurement=self._measure(config))
        return result.replace(facts=self._facts()) if spec.purpose == "probe" else result

    def _measure(self, config: TrainConfig) -> Measurement:
        rate = BASE_RATE * self.speed(config) * 2.718281828 ** self.random.gauss(0, self.noise)
        blocks = tuple(Block(optimizer_steps=10, samples=320, seconds=320 / rate) for _ in range(4))
        return Measurement(
            blocks=blocks,
            step_seconds=(0.032,) * 40,
            data_wait_seconds=0.0,
            steady=True,
            warmup_steps=5,
            warmup_seconds=0.5,
            compile_seconds=0.0,
            peak_memory=PeakMemory(host_bytes=500 * 2**20),
        )

    def _curves(self, spec: TrialSpec, config: TrainConfig) -> tuple[LossCurve, ...]:
        steps = spec.quality_steps if spec.purpose == "quality" else 40
        curves = []
        for seed in spec.seeds:
            # Rounding moves a loss a little, the same in every run of the same config and seed.
            jitter = random.Random(f"{config.to_json()}{seed}")
            plain = [2.0 / (1 + 0.1 * step * self.learns) for step in range(steps)]
            same = config.replace(user_knobs={}) == BASELINE
            losses = tuple(x * self.loss(config) * (1.0 if same else 1 + jitter.gauss(0, 1e-5)) for x in plain)
            curves.append(LossCurve(seed=seed, losses=losses, samples=32 * steps))
        return tuple(curves)

    def _facts(self) -> TargetFacts:
        return self._usual_facts().replace(**self.facts)

    def _usual_facts(self) -> TargetFacts:
        return TargetFacts(
            label="toy.py:workload",
            fingerprint="0123456789ab",
            device="cpu",
            baseline=BASELINE.replace(user_knobs={name: values[0] for name, values in self.knobs.items()}),
            knobs=self.knobs,
            model=ModelFacts(
                parameter_count=1000,
                parameter_bytes=4000,
                has_batch_norm=False,
                has_4d_convolution=False,
                calls_attention=True,
                checkpointable_blocks=2,
                flops_per_sample=1e6,
            ),
            data=DataFacts(sample_count=10_000, seconds_per_sample=1e-5, random_sources=(), iterable=False),
            optimizer=OptimizerFacts(name="AdamW", implementations=("for-loop", "foreach", "fused")),
            phases=StepPhases(
                data_wait_seconds=0.001,
                copy_seconds=0.0,
                forward_seconds=0.01,
                backward_seconds=0.015,
                optimizer_seconds=0.006,
            ),
            compute_seconds_per_step=0.031,
            ceilings=Ceilings(
                matmul=(
                    MatmulRate(dtype="fp32", flops_per_second=2e11),
                    MatmulRate(dtype="bf16", flops_per_second=1e12),
                )
            ),
        )


@dataclass
class Run:
    """A finished simulated search.

    Attributes:
        profile: the answer returned.
        saved: every answer written on the way.
        machine: with the trials it ran and the clock.
        folder: of the search.
    """

    profile: Profile
    saved: list[Profile]
    machine: Machine
    folder: SearchFolder


def run_simulated(
    machine: Machine,
    work: Path,
    *,
    budget: float = 240.0,
    folder: SearchFolder | None = None,
    memory_limit: int | None = None,
    script: Script | None = None,
) -> Run:
    """Run a whole search on a simulated machine, in a new folder or going on in an old one."""
    target = Target(spec="toy.py:workload", folder=str(work), script=script)
    if folder is None:
        folder = create_search_folder(work, target.spec)
        folder.write_state(
            SearchState(
                target=target,
                seed=machine.seed,
                max_drift=0.005,
                memory_limit_bytes=memory_limit,
                measure_seconds=2.0,
            )
        )
    saved: list[Profile] = []

    def run_and_keep(spec: TrialSpec) -> TrialResult:
        result = machine(spec)
        place = folder.trials / f"{spec.number:04d}"
        place.mkdir(exist_ok=True)
        (place / "result.json").write_text(result.to_json())
        return result

    launcher = Launcher(
        folder.read_state(),
        Budget(budget, machine.now, machine.clock),
        run_and_keep,
        SearchReporter(),
        machine.should_stop,
        number=folder.next_number(),
    )
    return Run(Session(folder, launcher, saved.append).run(), saved, machine, folder)
