"""Inside a trial's process: spec.json in, result.json out, moved into place when complete.

folder/spec.json ── load workload ── build training ── measure │ learn │ find facts ── folder/result.json
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from autotune.engine.device import choose_device, limit_device_memory
from autotune.engine.evaluation import evaluate
from autotune.engine.loop import Training, backend_settings
from autotune.errors import AutotuneError, TargetError, UsageError
from autotune.isolation.causes import describe_hopeless, encodable, explain_exception
from autotune.isolation.prepare import exit_at_once, own_record, prepare_process
from autotune.isolation.progress import ProgressWriter, open_progress
from autotune.machine.interference import watch_interference
from autotune.measure.hopeless import TooSlowError
from autotune.measure.throughput import finite_or_none, time_training
from autotune.records.codec import read_record, write_record
from autotune.records.config import TrainConfig
from autotune.records.layout import PARTIAL_FILE, RESULT_FILE, SPEC_FILE
from autotune.records.trial import GROWTH_STEPS, LossCurve, TrialResult, TrialSpec, TrialStatus
from autotune.runs.gradients import capture_workload, record_workload_tape
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload


def main(folder: Path, *, started: float) -> None:
    """Run the trial whose spec is in a folder and leave its result there.

    Args:
        folder: the trial's own folder.
        started: `time.monotonic()` when the process was started.
    """
    prepare_process()
    spec = read_record(folder / SPEC_FILE, TrialSpec)
    result = run_spec(spec, folder, started=started)
    with own_record():
        write_record(folder / RESULT_FILE, result)


def run_and_exit(folder: Path, *, started: float) -> NoReturn:
    """Run the trial as `main` does and end the process at once: a finished trial waits for no exit handler or thread.

    Args:
        folder: the trial's own folder.
        started: `time.monotonic()` when the process was started.
    """
    status = 1
    try:
        main(folder, started=started)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        exit_at_once(status)


def run_spec(spec: TrialSpec, folder: Path, *, started: float) -> TrialResult:
    """Return the result of a trial run in this process; every exception becomes a status.

    Args:
        spec: what is asked.
        folder: the trial's own, for what does not fit into a result.
        started: `time.monotonic()` when the process was started.
    """
    progress = open_progress(folder)  # before any of the user's code runs
    try:
        return _dispatch(spec, folder, progress, started=started)
    except TooSlowError as error:
        return describe_hopeless(spec, error.hopeless, elapsed_seconds=time.monotonic() - started)
    except AutotuneError as error:
        traceback.print_exc()
        cause = {UsageError: "usage", TargetError: "target"}.get(type(error), "target")
        failed = _failed(spec, TrialStatus.CRASHED, cause, encodable(error.message), started=started)
        return failed.replace(hint=encodable(error.hint))
    except BaseException as error:  # also SystemExit, and what derives from BaseException alone
        traceback.print_exc()
        return _failed(spec, *explain_exception(error), started=started)


def _dispatch(spec: TrialSpec, folder: Path, progress: ProgressWriter | None, *, started: float) -> TrialResult:
    device = choose_device(spec.device)
    limit_device_memory(spec.limits.device_memory_limit_bytes, device)
    if spec.purpose == "machine":
        from autotune.probe.child import probe_machine

        return probe_machine(spec, device, started=started)
    loaded = load_workload(spec.target.spec, folder=Path(spec.target.folder))
    if spec.purpose == "probe":
        from autotune.probe.facts import probe_workload

        def keep(partial: TrialResult) -> None:
            with own_record():
                write_record(folder / PARTIAL_FILE, partial)

        return probe_workload(spec, loaded, device, started=started, keep=keep)
    assert spec.config is not None
    with backend_settings(spec.config, device):
        if spec.purpose == "fidelity":
            return capture_workload(spec, spec.config, loaded, device, folder, started=started)
        if spec.purpose == "tape":
            return record_workload_tape(spec, spec.config, loaded, device, started=started)
        if spec.purpose == "quality":
            return _learn(spec, spec.config, loaded, device, started=started)
        return _measure(spec, loaded, device, progress, started=started)


def _measure(
    spec: TrialSpec, loaded: LoadedWorkload, device: torch.device, progress: ProgressWriter | None, *, started: float
) -> TrialResult:
    config = spec.config
    assert config is not None
    training = Training(loaded, config, device=device, seed=spec.seeds[0], random_sources=spec.random_sources)
    startup = time.monotonic() - started
    measurement, curve = time_training(
        training,
        config,
        spec.limits,
        device,
        seed=spec.seeds[0],
        interference=watch_interference(device),
        progress=progress,
    )
    return TrialResult(
        spec=spec,
        status=TrialStatus.COMPLETED,
        elapsed_seconds=time.monotonic() - started,
        startup_seconds=startup,
        measurement=measurement,
        curves=(curve,),
    )


def _learn(
    spec: TrialSpec, config: TrainConfig, loaded: LoadedWorkload, device: torch.device, *, started: float
) -> TrialResult:
    curves = tuple(_learn_seed(seed, spec, config, loaded, device) for seed in spec.seeds)
    elapsed = time.monotonic() - started
    return TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=elapsed, curves=curves)


def _learn_seed(
    seed: int, spec: TrialSpec, config: TrainConfig, loaded: LoadedWorkload, device: torch.device
) -> LossCurve:
    training = Training(loaded, config, device=device, seed=seed, random_sources=spec.random_sources)
    outcomes, skipped = [], 0
    if training.scaler is not None:
        training.scaler.set_growth_interval(GROWTH_STEPS)
    for step in range(spec.quality_steps):
        scale = training.scaler.get_scale() if training.scaler is not None else 0.0
        outcomes.append(training.step())
        fell = training.scaler is not None and training.scaler.get_scale() < scale
        skipped += int(fell and step >= spec.quality_steps // 2)
    losses = tuple(finite_or_none(float(outcome.loss)) for outcome in outcomes)
    found = evaluate(loaded, training, config) if spec.evaluate else {}
    metrics = {name: finite_or_none(value) for name, value in found.items()}
    samples = sum(outcome.samples for outcome in outcomes)
    return LossCurve(seed=seed, losses=losses, samples=samples, skipped=skipped, metrics=metrics)


def _failed(spec: TrialSpec, status: TrialStatus, cause: str, error: str, *, started: float) -> TrialResult:
    elapsed = time.monotonic() - started
    return TrialResult(spec=spec, status=status, cause=cause, error=error, elapsed_seconds=elapsed)
