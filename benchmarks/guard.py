"""The drift guard of `autotune train` at work: its false alarms in 50 healthy trainings, its catches in 22 sick ones.

    python benchmarks/guard.py [--only NAME ...] [--repeats 1] [--first-seed 0] [--json FILE]

Real trainings of small models on one CPU thread, each as the loop of a final training runs it. A healthy one is right,
whatever its settings; a sick one has one known mistake, from its first step or from a later one. Gradients are looked
at ten times as often as in a real training, so that there is more to be wrong about; the last table is the cost at the
real pace. The bands are those of five seeds of each baseline. All of it takes about six minutes on two free CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from autotune.drift.compare.loss_band import calibrate_band
from autotune.drift.guard.check_schedule import CheckPace
from autotune.drift.guard.guard import DriftGuard
from autotune.engine.dataloader import find_random_sources
from autotune.engine.loop import Training, backend_settings
from autotune.records.config import TrainConfig
from autotune.records.quality import LossBand, Margin
from autotune.records.trial import LossCurve
from autotune.targets.workload import LoadedWorkload, check_workload

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "drift"))

from guard_controls import HEALTHY, SICK, Patient  # type: ignore[import-not-found]

CPU = torch.device("cpu")
LOG_STEPS = 10
BAND_SEEDS, FIRST_BAND_SEED = 5, 900
LIMIT = Margin(amount=0.005)


class OftenLooking(DriftGuard):
    """Looks at gradients every 50 steps, whatever it costs."""

    pace = CheckPace(first_step=20, least_steps=50, most_cost=1.0)


@dataclass
class Run:
    """One training under the guard.

    Attributes:
        name: of the patient.
        seed: of the training.
        alarm: its cause; empty for none; `non-finite` where the loop itself stops, without the guard.
        sentence: the alarm's.
        step: at which it came, or the last one.
        clean_step: the alarm's.
        checks: micro batches whose gradients were compared.
        largest_error: of one of them.
        cost_fraction: of the time.
        seconds: of the training.
    """

    name: str
    seed: int
    alarm: str
    sentence: str
    step: int
    clean_step: int | None
    checks: int
    largest_error: float | None
    cost_fraction: float
    seconds: float


@dataclass
class Row:
    """What a patient's trainings came to."""

    patient: Patient
    runs: list[Run] = field(default_factory=list)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="patients; all without any")
    parser.add_argument("--repeats", type=int, default=1, help="seeds of each sick training")
    parser.add_argument("--first-seed", type=int, default=0, help="of each row; others are other trainings")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bands = Bands()
    healthy = [Row(patient) for patient in HEALTHY if patient.name in options.only or not options.only]
    sick = [Row(patient) for patient in SICK if patient.name in options.only or not options.only]
    first = options.first_seed
    print_table("healthy", healthy, bands, lambda patient: range(first, first + patient.runs))
    print_table("sick", sick, bands, lambda _patient: range(first, first + options.repeats))
    costs = [] if options.only else print_costs(bands)
    false = sum(bool(run.alarm) for row in healthy for run in row.runs)
    caught = sum(bool(run.alarm) and run.alarm not in ("non-finite", "warning") for row in sick for run in row.runs)
    stopped = sum(run.alarm == "non-finite" for row in sick for run in row.runs)
    warned = sum(run.alarm == "warning" for row in sick for run in row.runs)
    print(f"\n{false} false alarms in {sum(len(row.runs) for row in healthy)} healthy trainings", flush=True)
    total = sum(len(row.runs) for row in sick)
    print(f"{caught} of {total} sick trainings caught, {warned} warned of, {stopped} stopped by the loop", flush=True)
    if options.json is not None:
        found = {"healthy": healthy, "sick": sick, "cost": [Row(HEALTHY[0], costs)]}
        record = {kind: [asdict(run) for row in rows for run in row.runs] for kind, rows in found.items()}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


class Bands:
    """The bands of the baselines, each trained once."""

    def __init__(self) -> None:
        self._found: dict[str, LossBand | None] = {}

    def find(self, patient: Patient) -> LossBand | None:
        """Return where the loss of a patient's baseline goes."""
        if patient.kind not in self._found:
            curves = [self._learn(patient, FIRST_BAND_SEED + number) for number in range(BAND_SEEDS)]
            self._found[patient.kind] = calibrate_band(curves)
        return self._found[patient.kind]

    def _learn(self, patient: Patient, seed: int) -> LossCurve:
        loaded = load(patient.build_healthy())
        with backend_settings(loaded.baseline):
            training = build(loaded, loaded.baseline, seed)
            outcomes = [training.step() for _ in range(patient.band_steps)]
        losses = tuple(float(outcome.loss) for outcome in outcomes)
        return LossCurve(seed=seed, losses=losses, samples=sum(outcome.samples for outcome in outcomes))


def print_table(kind: str, rows: Sequence[Row], bands: Bands, seeds: Callable[[Patient], range]) -> None:
    """Train every patient and print a row for each."""
    print(f"\n| {kind} training | settings | steps | alarms | at step (clean) | gradient checks | largest error |")
    print("| --- | --- | ---: | --- | --- | ---: | ---: |", flush=True)
    for row in rows:
        band = bands.find(row.patient)
        row.runs = [train(row.patient, band, seed) for seed in seeds(row.patient)]
        print(describe(row), flush=True)
        for run in row.runs:
            if run.alarm and kind == "healthy":
                print(f"    seed {run.seed}: {run.sentence}", flush=True)


def print_costs(bands: Bands) -> list[Run]:
    """Print what the guard costs at its real pace."""
    print("\n| cost at the real pace | steps | gradient checks | share of the time |")
    print("| --- | ---: | ---: | ---: |", flush=True)
    runs = []
    for name in ("MLP, bf16", "convolutions with BatchNorm, bf16"):
        patient = next(one for one in HEALTHY if one.name == name)
        run = train(patient, bands.find(patient), seed=0, guard_class=DriftGuard, steps=4 * patient.steps)
        print(f"| {name} | {run.step} | {run.checks} | {run.cost_fraction:.2%} |", flush=True)
        runs.append(run)
    return runs


def describe(row: Row) -> str:
    """Return a patient's row of the table."""
    patient, runs = row.patient, row.runs
    settings = ", ".join(f"{name}={value}" for name, value in patient.changes.items()) or "the baseline's"
    alarms = [run for run in runs if run.alarm]
    causes = ", ".join(sorted({run.alarm for run in alarms}))
    steps = ", ".join(f"{run.step} ({run.clean_step})" for run in alarms)
    largest = max((run.largest_error or 0.0 for run in runs), default=0.0)
    checks = sum(run.checks for run in runs)
    counted = f"{len(alarms)} of {len(runs)}{': ' if causes else ''}{causes}"
    return f"| {patient.name} | {settings} | {patient.steps} | {counted} | {steps} | {checks} | {largest:.2g} |"


def load(workload: Any) -> LoadedWorkload:
    """Return a workload as a target would be loaded."""
    return check_workload(workload, label="guard_controls.py:workload", fingerprint="0" * 12)


def build(loaded: LoadedWorkload, config: TrainConfig, seed: int) -> Training:
    """Return a training that is about to start."""
    sources = find_random_sources(loaded.workload.train_dataset())
    return Training(loaded, config, device=CPU, seed=seed, random_sources=sources)


def train(
    patient: Patient,
    band: LossBand | None,
    seed: int,
    *,
    guard_class: type[DriftGuard] = OftenLooking,
    steps: int | None = None,
) -> Run:
    """Train a patient under the guard until it alarms, or to the end."""
    workload = patient.build()
    loaded = load(workload)
    config = loaded.baseline.replace(**patient.changes)
    torch._dynamo.reset()
    began = time.perf_counter()
    with backend_settings(config):
        training = build(loaded, config, seed)
        patient.plant(training, workload)
        guard = guard_class(loaded, training, config, loaded.baseline, device=CPU, band=band, limit=LIMIT)
        alarm, step = watch(training, guard, workload, patient.steps if steps is None else steps)
    summary = guard.summarize()
    return Run(
        name=patient.name,
        seed=seed,
        alarm="" if alarm is None else alarm.cause,
        sentence="" if alarm is None else alarm.sentence,
        step=step,
        clean_step=None if alarm is None else alarm.clean_step,
        checks=summary.gradient_checks,
        largest_error=summary.largest_error,
        cost_fraction=summary.cost_fraction or 0.0,
        seconds=time.perf_counter() - began,
    )


def watch(training: Training, guard: DriftGuard, workload: Any, steps: int) -> tuple[Any, int]:
    """Take steps as the loop of a final training does, until an alarm; return it and the steps taken."""
    losses: list[float] = []
    warning: str | None = None
    samples, scale = 0, 1.0 if training.scaler is None else training.scaler.get_scale()
    for step in range(1, steps + 1):
        workload.steps_taken = step - 1
        outcome = training.step()
        samples += outcome.samples
        losses.append(float(outcome.loss))
        alarm = guard.check_step(step)
        if alarm is None and (step % LOG_STEPS == 0 or outcome.ends_epoch):
            if not any(map(math.isfinite, losses)) or (training.scaler is None and not all(map(math.isfinite, losses))):
                return Stop("non-finite", "the loop finds a loss that is not finite", step - len(losses)), step
            if training.scaler is not None:
                now = training.scaler.get_scale()
                skipped = round(math.log2(scale / now)) if 0.0 < now < scale else 0
                alarm, scale = guard.record_scale(now, step=step, skipped=skipped, steps=len(losses)), now
            rate = float(training.optimizer.param_groups[0]["lr"])
            alarm = alarm or guard.record_losses(losses, step=step, samples=samples, learning_rate=rate)
            losses = []
            warning = warning or guard.take_warning()
        if alarm is not None:
            return alarm, step
    return (None if warning is None else Stop("warning", warning, 0)), steps


@dataclass(frozen=True)
class Stop:
    """What the loop itself stops for, in the form of an alarm."""

    cause: str
    sentence: str
    clean_step: int


if __name__ == "__main__":
    main()
