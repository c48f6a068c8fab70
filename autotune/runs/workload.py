"""A workload's trial inside its process: spec.json in, result.json out, moved into place when complete.

folder/spec.json ── load workload ── build training ── time │ learn │ record │ find facts ── folder/result.json
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from autotune.engine.determinism import make_reference
from autotune.engine.device import choose_device, limit_device_memory
from autotune.engine.loop import backend_settings
from autotune.errors import AutotuneError, UsageError
from autotune.isolation.causes import describe_hopeless, encodable, explain_exception
from autotune.isolation.prepare import exit_at_once, own_record, prepare_process
from autotune.isolation.progress import ProgressWriter, open_progress
from autotune.measure.hopeless import TooSlowError
from autotune.records.codec import read_record, write_record
from autotune.records.config import TrainConfig
from autotune.records.layout import PARTIAL_FILE, RESULT_FILE, SPEC_FILE
from autotune.records.trial import Cause, TrialResult, TrialSpec, TrialStatus
from autotune.runs.purpose import make_run
from autotune.runs.source import Found
from autotune.runs.workload_source import WorkloadSource
from autotune.space import require_knobs
from autotune.targets.drift_limits import require_metrics
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
        cause: Cause = "usage" if isinstance(error, UsageError) else "target"
        failed = _failed(spec, TrialStatus.CRASHED, cause, encodable(error.message), started=started)
        return failed.replace(hint=encodable(error.hint))
    except BaseException as error:  # also SystemExit, and what derives from BaseException alone
        traceback.print_exc()
        return _failed(spec, *explain_exception(error), started=started)


def _dispatch(spec: TrialSpec, folder: Path, progress: ProgressWriter | None, *, started: float) -> TrialResult:
    device = choose_device(spec.device)
    limit_device_memory(spec.limits.device_memory_limit_bytes, device)
    if spec.purpose == "machine":
        from autotune.probe.machine import probe_machine

        return probe_machine(spec, device, started=started)
    loaded = load_workload(spec.target.spec, folder=Path(spec.target.folder))
    if spec.max_drift is not None:
        require_metrics(spec.max_drift, [metric.name for metric in loaded.metrics])
    require_knobs(spec.named_knobs, loaded.knobs)
    if spec.purpose == "probe":
        from autotune.probe.sources.workload import probe_workload

        def keep(partial: TrialResult) -> None:
            with own_record():
                write_record(folder / PARTIAL_FILE, partial)

        return probe_workload(spec, loaded, device, started=started, keep=keep)
    assert spec.config is not None
    with backend_settings(spec.config, device):
        seeds = spec.seeds if spec.purpose == "quality" else spec.seeds[:1]
        runs = [_run_with(seed, spec, spec.config, loaded, device, folder, progress) for seed in seeds]
    found = replace(runs[0].found, curves=tuple(curve for run in runs for curve in run.found.curves))
    elapsed = time.monotonic() - started
    return found.complete(spec, elapsed_seconds=elapsed, startup_seconds=runs[0].built - started)


class _SeedRun(NamedTuple):
    """What was found with one seed.

    Attributes:
        built: `time.monotonic()` when its training was built.
    """

    found: Found
    built: float


def _run_with(
    seed: int,
    spec: TrialSpec,
    config: TrainConfig,
    loaded: LoadedWorkload,
    device: torch.device,
    folder: Path,
    progress: ProgressWriter | None,
) -> _SeedRun:
    source = WorkloadSource(loaded, config, device, seed=seed, random_sources=spec.random_sources)
    built = time.monotonic()
    if spec.fidelity is not None and spec.fidelity.reference:
        make_reference(source.training.model)
    run = make_run(source, spec, config, folder, seed=seed, progress=progress)
    return _SeedRun(source.drive(run), built)


def _failed(spec: TrialSpec, status: TrialStatus, cause: Cause, error: str, *, started: float) -> TrialResult:
    elapsed = time.monotonic() - started
    return TrialResult(spec=spec, status=status, cause=cause, error=error, elapsed_seconds=elapsed)
