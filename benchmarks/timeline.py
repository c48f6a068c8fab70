"""Where the time of a search goes: whole searches, the real code, on simulated machines with a virtual clock.

python benchmarks/timeline.py                  budgets x launches x noise: shares of the budget, unused, verdicts
python benchmarks/timeline.py --hard           values that are hopeless, hang or compile for ever: seconds lost to them
python benchmarks/timeline.py --seeds 20       more of each (6)

Launches cost what they cost on a real machine: start-up, warm-up, compilation, blocks until the measuring is done. The
training gains 1.35x by another malloc, little by attention and a fused optimizer, 1.15x by compiling; smaller batches,
bf16, fewer threads and recomputing lose. A gain is claimed rightly where the answer is `improved`.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import optuna

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "search"), str(ROOT / "tests")]

import simulated  # type: ignore[import-not-found]  # noqa: E402

from autotune.errors import UsageError  # noqa: E402
from autotune.measure.hopeless import Beat as LastBeat  # noqa: E402
from autotune.measure.hopeless import EarlySteps, Hopeless, Phase, find_overdue  # noqa: E402
from autotune.measure.throughput import TimedBlocks  # noqa: E402
from autotune.records import (  # noqa: E402  # noqa: E402
    Block,
    DriftLimits,
    Measurement,
    PeakMemory,
    Target,
    TrainConfig,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from autotune.records.search import SearchState  # noqa: E402
from autotune.records.trial import DataTrace  # noqa: E402
from autotune.search.explore.study import StudyFile  # noqa: E402
from autotune.search.launch.budget import Budget, measure_seconds_for  # noqa: E402
from autotune.search.launch.starter import SearchContext  # noqa: E402
from autotune.search.progress import SearchReporter  # noqa: E402
from autotune.search.session import run_session  # noqa: E402
from autotune.search.store.folder import create_search_folder  # noqa: E402

MINUTES = (2, 7, 20)
LAUNCHES = ((0.3, 0.05), (4.0, 0.1), (15.0, 0.25))
"""Start-up and step of a training, in seconds."""

_BLOCK_SECONDS = 0.25
_NEVER = 1e9


def gain(config: TrainConfig) -> float:
    """Return the true speed of a config over the baseline's."""
    speed = 1.0
    speed *= {"glibc-tuned": 1.35}.get(config.host_allocator, 1.0)
    speed *= {"bf16": 0.85}.get(config.precision, 1.0)
    speed *= {"math": 1.05}.get(config.attention_backend, 1.0)
    speed *= {"fused": 1.05}.get(config.optimizer_implementation or "", 1.0)
    speed *= {"full": 0.75, "selective": 0.9}.get(config.activation_checkpointing, 1.0)
    speed *= 0.75 if config.num_threads == 1 else 1.0
    speed *= 1.15 if config.compile_mode != "off" else 1.0
    return float(speed * min(1.0, config.micro_batch_size / simulated.BASELINE.micro_batch_size) ** 0.15)


def compile_seconds(config: TrainConfig) -> float:
    """Return what compiling a config takes the first time."""
    return {"off": 0.0, "default": 40.0}.get(config.compile_mode, 90.0)


@dataclass
class Machine(simulated.Machine):  # type: ignore[misc]
    """A machine on which every kind of trial takes its time.

    Attributes:
        startup: seconds of a process until its first step.
        cold: seconds more where the environment differs, and the process is no fork.
        step: seconds of the baseline's step.
        probe_extra: seconds of a probe beside its timing.
        hangs: configs that never end.
        log: begin, seconds, purpose, config and status of each trial.
    """

    repeats_losses: bool = True
    startup: float = 0.4
    cold: float = 0.0
    step: float = 0.05
    probe_extra: float = 15.0
    hangs: Callable[[TrainConfig], bool] = lambda _config: False
    log: list[tuple[float, float, str, TrainConfig | None, TrialStatus]] = field(default_factory=list)
    _compiled: set[str] = field(default_factory=set)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        """Run a trial: advance the clock by what it takes."""
        self.specs.append(spec)
        began = self.now
        result = self._run(spec)
        self.log.append((began, self.now - began, spec.purpose, spec.config, result.status))
        return result

    def _run(self, spec: TrialSpec) -> TrialResult:
        config = spec.config or simulated.BASELINE
        if self.hangs(config):
            return self._end(spec, _NEVER)
        compiling = self._compile(spec, config)
        start = self.startup + (self.cold if config.host_allocator != "default" else 0.0) + compiling
        step = self.step / self.speed(config)
        if spec.purpose == "tape":
            tape = DataTrace(batches=(self.tape(config),), shapes=("int64[32]",), samples=10_000)
            return self._end(spec, start + 0.3, tape=tape)
        if spec.purpose == "fidelity":
            return self._trace(spec, config, start, step)
        if spec.purpose == "quality":
            curves = self.curves(config, seeds=spec.seeds, steps=spec.quality_steps)
            return self._end(spec, start + len(spec.seeds) * (0.1 + spec.quality_steps * step), curves=curves)
        return self._time(spec, config, start, step, compiling)

    def _compile(self, spec: TrialSpec, config: TrainConfig) -> float:
        if spec.purpose == "tape" or config.compile_mode == "off":
            return 0.0
        key, full = config.to_json(), self.compile_seconds(config)
        seconds = 0.07 * full if key in self._compiled else full
        if self.startup + seconds < spec.limits.time_limit_seconds:
            self._compiled.add(key)
        return float(seconds)

    def _trace(self, spec: TrialSpec, config: TrainConfig, start: float, step: float) -> TrialResult:
        plan = spec.fidelity
        assert plan is not None
        held = (2 if plan.later_steps else 1) * plan.windows
        steps = 1.6 * held + (plan.later_steps if plan.weights is None else 0)
        return self._end(spec, start + steps * step, captures=self._capture(spec, config))

    def _time(self, spec: TrialSpec, config: TrainConfig, start: float, step: float, compiling: float) -> TrialResult:
        offset = self.random.gauss(0, self.noise)
        step *= math.exp(-offset)
        hopeless = self._find_hopeless(spec, config, step)
        if hopeless is not None:
            seconds, found = hopeless
            told = {"error": found.sentence, "samples_per_second_bound": found.samples_per_second}
            return self._end(spec, start + seconds, status=TrialStatus.TOO_SLOW, **told)
        warm_steps = 1.5 + max(3 if step > 1 else 6, min(11, 0.6 / step))
        warmup = min(warm_steps * step, 2.5 * step + spec.limits.warmup_cap_seconds)
        block_steps = max(1, math.ceil(_BLOCK_SECONDS / step))
        timed, luck = TimedBlocks(spec.limits, self._rival_now(spec.limits.rival)), self._stream()
        head = start + warmup + 0.3 + (self.probe_extra if spec.purpose == "probe" else 0.0)
        elapsed = 0.0
        while (ending := timed.find_ending(elapsed)) is None and head + elapsed < spec.limits.time_limit_seconds:
            seconds = block_steps * step * math.exp(luck.gauss(0, self.block_noise))
            samples = simulated.BASELINE.effective_batch_size * block_steps
            timed.blocks.append(Block(optimizer_steps=block_steps, samples=samples, seconds=seconds))
            elapsed += seconds
        if ending is None:
            return self._end(spec, _NEVER)
        measurement = Measurement(
            blocks=tuple(timed.blocks),
            step_seconds=(step,) * 3,
            data_wait_seconds=0.0,
            steady=True,
            warmup_steps=8,
            warmup_seconds=warmup,
            first_step_seconds=1.5 * step,
            warmup_step_seconds=(step, step),
            compile_seconds=compiling,
            peak_memory=PeakMemory(host_bytes=500 * 2**20),
            ended_by=ending,
        )
        facts = {"facts": self.find_facts()} if spec.purpose == "probe" else {}
        curves = self.curves(config, seeds=spec.seeds, steps=40)
        return self._end(
            spec, head + elapsed, measurement=measurement, startup_seconds=self.startup, curves=curves, **facts
        )

    def _find_hopeless(self, spec: TrialSpec, config: TrainConfig, step: float) -> tuple[float, Hopeless] | None:
        """Return when a launch is seen to be hopeless, and why: in a step that does not end, or after two."""
        samples = config.effective_batch_size
        first = 1.5 * step
        overdue = find_overdue(spec.limits, LastBeat(Phase.STEPPING, 0.0), first)
        if overdue is not None:
            seconds = next(
                s / 10 for s in range(10**5) if find_overdue(spec.limits, LastBeat(Phase.STEPPING, 0.0), s / 10)
            )
            return seconds, overdue
        early = EarlySteps()
        for seconds in (first, step, step):
            early.take(seconds, samples, compiled=False)
        found = early.find_hopeless(spec.limits.pace, self._rival_now(spec.limits.rival))
        return None if found is None else (first + 2 * step, found)

    def _stream(self) -> random.Random:
        return random.Random(f"{self.seed} {len(self.specs)}")

    def _end(self, spec: TrialSpec, seconds: float, **found: Any) -> TrialResult:
        limit = spec.limits.time_limit_seconds
        if seconds > limit:
            self.now += limit
            status = TrialStatus.INTERRUPTED if spec.limits.ends_with_stage else TrialStatus.TIMED_OUT
            return TrialResult(spec=spec, status=status, cause="user-error", elapsed_seconds=limit)
        self.now += seconds
        usual: dict[str, Any] = {"status": TrialStatus.COMPLETED, "spec": spec, "elapsed_seconds": seconds}
        return TrialResult(**(usual | found))


@dataclass(frozen=True)
class Run:
    """One whole search.

    Attributes:
        verdict: of its answer; `refused` where the budget was.
        seconds: by kind of launch, `unused` among them.
        launches: by kind.
        told: of a budget that was refused.
    """

    verdict: str
    seconds: dict[str, float]
    launches: dict[str, int]
    told: str = ""


def run_search(machine: Machine, budget: float) -> Run:
    """Return what a whole search on a machine came to."""
    work = Path(tempfile.mkdtemp(prefix="autotune-timeline-"))
    target = Target(spec="toy.py:workload", folder=str(work))
    folder = create_search_folder(work, target.spec)
    state = SearchState(
        target=target,
        seed=machine.seed,
        max_drift=DriftLimits(),
        memory_limit_bytes=None,
        measure_seconds=measure_seconds_for(budget),
    )
    folder.write_state(state)
    machine.trials = folder.trials
    clock = Budget(budget, machine.now, machine.clock)
    context = SearchContext(clock, machine, SearchReporter(), machine.should_stop)
    verdict, told = "refused", ""
    try:
        verdict = run_session(folder, state, context, lambda _profile: None, number=0).profile.verdict
    except UsageError as error:
        told = error.hint
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _account(machine, budget, verdict, told)


def _account(machine: Machine, budget: float, verdict: str, told: str) -> Run:
    seconds: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = Counter()
    seen: set[str] = set()
    for _, took, purpose, config, status in machine.log:
        kind = {"fidelity": "check", "tape": "check", "quality": "check", "final": "finals"}.get(purpose, purpose)
        if purpose == "measure" and config is not None:
            key = config.to_json()
            known = "again" if key in seen else "new"
            kind = "baseline" if config == simulated.BASELINE else known
            kind = kind if status is TrialStatus.COMPLETED else "lost"
            seen.add(key)
        seconds[kind] += took
        launches[kind] += 1
    seconds["unused"] = max(0.0, budget - machine.now)
    return Run(verdict, seconds, launches, told)


def print_timeline(seeds: int) -> None:
    """Print the table: a row for each noise, budget and cost of a launch."""
    print("| noise | budget | start-up, step | new / again / baseline | check | finals | unused | verdicts |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for noise, block_noise in ((0.02, 0.015), (0.08, 0.08)):
        for minutes in MINUTES:
            for startup, step in LAUNCHES:
                make = functools.partial(
                    Machine,
                    noise=noise,
                    block_noise=block_noise,
                    startup=startup,
                    step=step,
                    speed=gain,
                    cold=min(2.5, startup + 1.5) if startup < 1 else 0.0,
                    compile_seconds=compile_seconds,
                )
                runs = [run_search(make(seed=seed), 60.0 * minutes) for seed in range(seeds)]
                print(
                    f"| {noise:.0%} | {minutes} m | {startup:g}, {step:g} s | {_describe(runs, 60.0 * minutes)} |",
                    flush=True,
                )


def _describe(runs: list[Run], budget: float) -> str:
    verdicts = Counter(run.verdict for run in runs)
    answer = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    if set(verdicts) == {"refused"}:
        return f" | | | | {answer}: {runs[0].told.partition(',')[0]}"

    def mean(kind: str) -> float:
        return sum(run.launches.get(kind, 0) for run in runs) / len(runs)

    def share(kind: str) -> float:
        return sum(run.seconds.get(kind, 0.0) for run in runs) / len(runs) / budget

    counts = " / ".join(f"{mean(kind):.1f}" for kind in ("new", "again", "baseline"))
    finals = f"{mean('finals'):.1f} ({share('finals'):.0%})"
    return f"{counts} | {share('check'):.0%} | {finals} | **{share('unused'):.0%}** | {answer}"


HARD: dict[str, dict[str, Any]] = {
    "bf16 100x slower, its rate not measured": {
        "step": 0.19,
        "speed": lambda config: gain(config) * (0.01 if config.precision == "bf16" else 1.0),
    },
    "workers hang": {"hangs": lambda config: config.num_workers > 0},
    "compiling never ends": {"compile_seconds": lambda config: 1e6 if config.compile_mode != "off" else 0.0},
    "compiling takes 100 s": {"compile_seconds": lambda config: 100.0 if config.compile_mode != "off" else 0.0},
}


def print_hard(seeds: int) -> None:
    """Print the table of values that fail: what they cost in each budget."""
    print("| machine | budget | launches lost | seconds lost | unused | verdicts |")
    print("| --- | --- | --- | --- | --- | --- |")
    usual: dict[str, Any] = {
        "noise": 0.04,
        "block_noise": 0.05,
        "startup": 0.3,
        "cold": 2.5,
        "step": 0.1,
        "speed": gain,
        "compile_seconds": compile_seconds,
    }
    for name, planted in HARD.items():
        for minutes in MINUTES:
            runs = [run_search(Machine(seed=seed, **(usual | planted)), 60.0 * minutes) for seed in range(seeds)]
            lost = sum(run.launches.get("lost", 0) for run in runs) / seeds
            seconds = sum(run.seconds.get("lost", 0.0) for run in runs) / seeds
            unused = sum(run.seconds["unused"] for run in runs) / seeds / (60.0 * minutes)
            answer = ", ".join(f"{n} {verdict}" for verdict, n in Counter(run.verdict for run in runs).most_common())
            share = seconds / (60.0 * minutes)
            print(
                f"| {name} | {minutes} m | {lost:.1f} | {seconds:.0f} ({share:.0%}) | {unused:.0%} | {answer} |",
                flush=True,
            )


def main() -> int:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--hard", action="store_true")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # The study's copy on disk costs real seconds, and none of the clock's.
    with mock.patch.object(StudyFile, "update"):
        if arguments.hard:
            print_hard(arguments.seeds)
        else:
            print_timeline(arguments.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
