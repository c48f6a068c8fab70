"""A workload's trial inside its process: spec.json in, result.json out, moved into place when complete.

folder/spec.json ── load workload ── build training ── time │ learn │ record │ find facts ── folder/result.json
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from autotune.distributed.ends import explain_end
from autotune.distributed.place import Place
from autotune.distributed.world import RankLostError, World, joined_world
from autotune.engine.determinism import make_reference
from autotune.engine.device import choose_device, limit_device_memory
from autotune.engine.loop import backend_settings
from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.isolation.causes import describe_hopeless, encodable, explain_exception
from autotune.isolation.channel.progress import ProgressWriter, open_progress
from autotune.isolation.prepare import exit_at_once, own_record, prepare_process
from autotune.isolation.sandbox.seeds import DrawnSeeds
from autotune.measure.hopeless import TooSlowError
from autotune.measure.memory import release_free_memory
from autotune.records.codec import read_record, write_record
from autotune.records.config import TrainConfig, spread_config
from autotune.records.layout import PARTIAL_FILE, RESULT_FILE, SPEC_FILE
from autotune.records.trial import Cause, TrialResult, TrialSpec, TrialStatus
from autotune.runs.purpose import make_run
from autotune.runs.rank_source import RankSource
from autotune.runs.ranks import find_patience, find_rank, run_ranks
from autotune.runs.source import Found
from autotune.runs.workload_source import WorkloadSource
from autotune.space import require_knobs
from autotune.targets.drift_limits import require_metrics
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload

_ALONE = ("machine", "probe")
_TIMED = ("measure", "reference", "final")


def main(folder: Path, *, started: float) -> int:
    """Run the trial whose spec is in a folder and leave its result there; return what to exit with.

    Args:
        folder: the trial's own folder.
        started: `time.monotonic()` when the process was started.
    """
    prepare_process()
    spec = read_record(folder / SPEC_FILE, TrialSpec)
    drawn = DrawnSeeds(spec.seeds[0])
    drawn.serve_random()
    drawn.serve_numpy(np)
    if spec.world_size == 1 or spec.purpose in _ALONE:
        result: TrialResult | None = run_spec(spec, folder, started=started)
    elif (place := find_rank(folder)) is None:
        result = run_ranks(spec, folder, started=started)
    else:
        return _run_rank(spec, folder, place, started=started)
    if result is not None:
        _leave(result, folder)
    return 0


def _leave(result: TrialResult, folder: Path) -> None:
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
        status = main(folder, started=started)
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
    except BaseException as error:  # also SystemExit, and what derives from BaseException alone
        return _explain(spec, error, started=started)


def _run_rank(spec: TrialSpec, folder: Path, place: Place, *, started: float) -> int:
    """Run one process of several, and return what to exit with.

    The leader leaves the result; so does any other whose own training fails, for all of them.
    """
    progress = open_progress(folder) if place.leads else None
    try:
        result = _train_together(spec, folder, place, progress, started=started)
    except RankLostError as error:
        place.record_end(explain_end(error, place.rank))
        return error.exit_code
    except BaseException as error:
        result = _explain(spec, error, started=started)
        if not place.leads:
            result = result.replace(error=f"process {place.rank} of {place.size}: {result.error}")
    if result is not None and not (folder / RESULT_FILE).exists():
        _leave(result, folder)
    return 0 if result is None or result.status is TrialStatus.COMPLETED else 1


def _explain(spec: TrialSpec, error: BaseException, *, started: float) -> TrialResult:
    """Return the result of a trial in which something was raised."""
    if isinstance(error, TooSlowError):
        return describe_hopeless(spec, error.hopeless, elapsed_seconds=time.monotonic() - started)
    traceback.print_exception(error)
    if isinstance(error, AutotuneError):
        cause: Cause = "usage" if isinstance(error, UsageError) else "target"
        cause = "machine" if isinstance(error, MachineError) else cause
        failed = _failed(spec, TrialStatus.CRASHED, cause, encodable(error.message), started=started)
        return failed.replace(hint=encodable(error.hint))
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
    with backend_settings(spec.config):
        seeds = spec.seeds if spec.purpose == "quality" else spec.seeds[:1]
        runs: list[_SeedRun] = []
        for seed in seeds:
            if runs:  # a compiled model is held by what compiled it, until garbage is collected
                release_free_memory()
            runs.append(_run_with(seed, spec, spec.config, loaded, device, folder, progress))
    return _complete(spec, runs, started=started)


def _train_together(
    spec: TrialSpec, folder: Path, place: Place, progress: ProgressWriter | None, *, started: float
) -> TrialResult | None:
    """Return the result of a trial on its leader; None on the others."""
    assert spec.config is not None
    config = spread_config(spec.config, place.size)
    loaded = load_workload(spec.target.spec, folder=Path(spec.target.folder))
    with joined_world(place.meeting, find_patience(spec)) as world, backend_settings(config):
        limit_device_memory(spec.limits.device_memory_limit_bytes, world.device)
        seeds = spec.seeds if spec.purpose == "quality" else spec.seeds[:1]
        runs = [_run_with_others(seed, spec, config, loaded, world, folder, progress) for seed in seeds]
    return _complete(spec, runs, started=started) if place.leads else None


def _complete(spec: TrialSpec, runs: Sequence[_SeedRun], *, started: float) -> TrialResult:
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


def _run_with_others(
    seed: int,
    spec: TrialSpec,
    config: TrainConfig,
    loaded: LoadedWorkload,
    world: World,
    folder: Path,
    progress: ProgressWriter | None,
) -> _SeedRun:
    source = RankSource(
        loaded,
        config,
        world,
        seed=seed,
        random_sources=spec.random_sources,
        is_timed=spec.purpose in _TIMED,
        in_float64=spec.fidelity is not None and spec.fidelity.reference,
    )
    built = time.monotonic()
    if not world.leads and spec.purpose in _TIMED:
        source.follow()
        source.gather_peaks()
        return _SeedRun(Found(), built)
    run = make_run(source, spec, config, folder, seed=seed, leads=world.leads, progress=progress)
    return _SeedRun(source.conclude(source.drive(run)), built)


def _failed(spec: TrialSpec, status: TrialStatus, cause: Cause, error: str, *, started: float) -> TrialResult:
    elapsed = time.monotonic() - started
    return TrialResult(spec=spec, status=status, cause=cause, error=error, elapsed_seconds=elapsed)
