"""`run_training`: the final training with a profile's settings, checkpointed and resumable.

Record in: a Profile. Record out: a TrainingSummary. Nothing in the profile is executed: the target comes from the
argument, the settings file, the search in this folder, or the demo, and is compared with the profile's label.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.engine.allocator import launch_environment
from autotune.engine.dataloader import find_random_sources
from autotune.engine.device import choose_device
from autotune.engine.loop import Training, backend_settings
from autotune.errors import AutotuneError, MachineError, ProfileError, UsageError
from autotune.probe.machine.hardware import read_hardware, read_software
from autotune.records.codec import read_record, write_record
from autotune.records.config import TrainConfig
from autotune.records.hardware import HardwareInfo
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.run import RunPlan, TrainingSummary
from autotune.records.script import Script
from autotune.search.folder import find_search_folder
from autotune.targets.load import load_workload
from autotune.targets.resolve import ResolvedTarget, resolve_target
from autotune.targets.workload import LoadedWorkload
from autotune.train.checkpoint import CHECKPOINTS_FOLDER, Progress, load_checkpoint
from autotune.train.loop import Report, RunLoop, blame_target

_PLAN_FILE = "run.json"
_SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class TrainingOptions:
    """What a training is asked to do.

    Attributes:
        profile: path of the profile.
        steps: optimizer steps to take; None to count epochs.
        epochs: epochs to train, 1 if neither is given.
        out: run folder; None for a new numbered one under `runs/`.
        resume: go on with the run in `out`, or with the newest of this target.
        seed: of initial weights, data order and dropout.
    """

    profile: str | Path
    steps: int | None = None
    epochs: int | None = None
    out: str | Path | None = None
    resume: bool = False
    seed: int = 0


def run_training(
    options: TrainingOptions,
    target: str | None = None,
    *,
    folder: str | Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[Report], None] = lambda _report: None,
    warn: Callable[[str], None] = lambda _text: None,
) -> TrainingSummary:
    """Train a target with the settings of a profile.

    Args:
        options: profile, length and paths.
        target: `file.py:attr` or `package.module:attr`; None as in `resolve_training_target`.
        folder: working folder; None for the current one.
        should_stop: polled at each step; True ends the training with a checkpoint.
        report: called at each log line.
        warn: told what the user should know, one sentence at a time.

    Raises:
        ProfileError: the profile is not valid, or was measured on another target.
        UsageError: the target or an option cannot be used as given.
        TargetError: the training fails.
        CheckpointError: there is nothing to resume.
        MachineError: the disk is full, or the machine lacks what the settings need.
    """
    began = time.monotonic()
    work = Path(folder or Path.cwd()).resolve()
    profile = Profile.load(work / options.profile)
    if options.steps is not None and options.epochs is not None:
        raise UsageError("both --steps and --epochs are given", hint="choose one")
    resolved = resolve_training_target(target, work)
    warnings: list[str] = []

    def note(text: str) -> None:
        warnings.append(text)
        warn(text)

    loaded = load_workload(resolved.target.spec, folder=work)
    check_profile(profile, loaded, note)
    check_environment(profile.config, read_hardware(), note)
    plan = _make_plan(options, profile, loaded)
    try:
        run_folder, plan = _open_run(work, options, plan)
        loop = _train(loaded, plan, run_folder, options=options, should_stop=should_stop, report=report, note=note)
        summary = _summarize(loop, profile, warnings, time.monotonic() - began)
        write_record(run_folder / _SUMMARY_FILE, summary)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space, then --resume" if is_full else "check the path and its permissions"
        raise MachineError(f"{error.filename or work}: {error.strerror or error}", hint=hint) from error
    return summary


def resolve_training_target(target: str | Script | None, folder: Path) -> ResolvedTarget:
    """Return the target: the argument, [tool.autotune]'s, the one this folder's newest search had, or the demo.

    Raises:
        UsageError: the settings file is not valid.
    """
    found = find_search_folder(folder)
    remembered = None
    if found is not None:
        try:
            remembered = found.read_state().target
        except AutotuneError:
            remembered = None
    return resolve_target(target, folder=folder, remembered=remembered)


def check_profile(profile: Profile, loaded: LoadedWorkload, note: Callable[[str], None]) -> None:
    """Compare a profile with the target and the machine; tell what differs.

    Raises:
        ProfileError: it was measured on another target.
    """
    if profile.target.fingerprint != loaded.fingerprint:
        if profile.target.label != loaded.label:
            raise ProfileError(
                f"the profile was measured on {_shown(profile.target.label)}, and this is {loaded.label}",
                hint="name the target it belongs to, or search again for this one",
            )
        note(f"{loaded.label} has changed since the search: the speed-up and the drift check may no longer hold")
    check_machine(profile, note)


def check_machine(profile: Profile, note: Callable[[str], None]) -> None:
    """Tell what is other about this machine than about the one a profile was measured on."""
    if profile.hardware.fingerprint != read_hardware().fingerprint:
        machine = _shown(_machine(profile.hardware))
        note(f"the profile was measured on other hardware ({machine}): search again here to be sure")
    software = read_software()
    if profile.software.fingerprint != software.fingerprint:
        note(f"the profile was measured with torch {_shown(profile.software.torch)}, this is {software.torch}")


def check_environment(config: TrainConfig, hardware: HardwareInfo, note: Callable[[str], None]) -> None:
    """Tell when the process was not started with the environment the settings need.

    Raises:
        MachineError: the settings need a library this machine does not have.
    """
    try:
        needed = launch_environment(config, hardware.host_allocators)
    except ValueError as error:
        raise MachineError(str(error), hint="install it, or search again on this machine") from None
    missing = {name: value for name, value in needed.items() if os.environ.get(name) != value}
    if missing:
        shown = " ".join(f"{name}={value}" for name, value in missing.items())
        note(f"the allocator settings have no effect unless Python is started with {shown}")


def _make_plan(options: TrainingOptions, profile: Profile, loaded: LoadedWorkload) -> RunPlan:
    epochs = options.epochs if options.steps is not None or options.epochs is not None else 1
    return RunPlan(
        target=ProfileTarget(label=loaded.label, fingerprint=loaded.fingerprint),
        config=profile.config,
        seed=options.seed,
        steps=options.steps,
        epochs=epochs,
    )


def _open_run(work: Path, options: TrainingOptions, plan: RunPlan) -> tuple[Path, RunPlan]:
    runs = work / "runs"
    slug = re.sub(r"[^A-Za-z0-9]+", "-", plan.target.label).strip("-")[:60]
    if options.resume:
        numbered = _find_numbered(runs, slug)
        path = work / options.out if options.out else numbered[max(numbered)] if numbered else None
        if path is None or not (path / _PLAN_FILE).is_file():
            raise UsageError(f"--resume: there is no run in {path or runs}", hint="leave --resume out to start one")
        before = read_record(path / _PLAN_FILE, RunPlan)
        _require_same_plan(before, plan, path)
        if options.steps is None and options.epochs is None:
            plan = before
    elif options.out:
        path = work / options.out
        if (path / _PLAN_FILE).exists() or (path / CHECKPOINTS_FOLDER).exists():
            raise UsageError(
                f"{path} holds a run already", hint="pass --resume to go on with it, or choose another --out"
            )
        path.mkdir(parents=True, exist_ok=True)
    else:
        path = _make_numbered(runs, slug)
    write_record(path / _PLAN_FILE, plan)
    return path, plan


def _require_same_plan(before: RunPlan, now: RunPlan, path: Path) -> None:
    for name, what in (("target", "target"), ("config", "profile's settings"), ("seed", "seed")):
        if getattr(before, name) != getattr(now, name):
            raise ProfileError(
                f"--resume: the {what} of {path} changed since it was started",
                hint="start a new run: leave --resume out",
            )


def _find_numbered(runs: Path, slug: str) -> dict[int, Path]:
    pattern = re.compile(re.escape(slug) + r"-([0-9]{3,9})")
    found = {path: pattern.fullmatch(path.name) for path in runs.glob(f"{slug}-*")}
    return {int(match[1]): path for path, match in found.items() if match is not None}


def _make_numbered(runs: Path, slug: str) -> Path:
    number = max(_find_numbered(runs, slug), default=0) + 1
    while True:
        path = runs / f"{slug}-{number:03d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another training took the number just now
            number += 1
            continue
        return path


def _train(
    loaded: LoadedWorkload,
    plan: RunPlan,
    run_folder: Path,
    *,
    options: TrainingOptions,
    should_stop: Callable[[], bool],
    report: Callable[[Report], None],
    note: Callable[[str], None],
) -> RunLoop:
    device = choose_device("auto")
    with backend_settings(plan.config, device):
        with blame_target(f"{loaded.label}: setting up"):
            sources = find_random_sources(loaded.workload.train_dataset(), loaded.collate)
            training = Training(loaded, plan.config, device=device, seed=plan.seed, random_sources=sources)
        progress = Progress()
        if options.resume:
            progress, problems = load_checkpoint(run_folder / CHECKPOINTS_FOLDER, training)
            for problem in problems:
                note(f"{problem}; the one before it is used")
            if training.batches_per_epoch is None:
                note("the samples of an iterable dataset need not be those an uninterrupted training would see")
        loop = RunLoop(
            loaded=loaded,
            training=training,
            plan=plan,
            folder=run_folder,
            device=device,
            progress=progress,
            should_stop=should_stop,
            report=report,
        )
        if not loop.run():
            seed = f" --seed {plan.seed}" if plan.seed else ""
            note(f"stopped at step {loop.progress.step}; go on with --resume --out {run_folder}{seed}")
    return loop


def _summarize(loop: RunLoop, profile: Profile, warnings: list[str], elapsed_seconds: float) -> TrainingSummary:
    evidence = profile.evidence
    promised = evidence.samples_per_second if profile.verdict == "improved" else evidence.baseline_samples_per_second
    return TrainingSummary(
        folder=str(loop.folder),
        checkpoint=str(loop.last_checkpoint),
        steps=loop.progress.step,
        epochs=loop.training.windows.epoch,
        samples=loop.progress.samples,
        loss=loop.loss,
        metrics=loop.metrics,
        samples_per_second=loop.stepped_samples / loop.stepping_seconds if loop.stepping_seconds > 0 else None,
        promised_samples_per_second=promised,
        elapsed_seconds=elapsed_seconds,
        warnings=tuple(warnings),
    )


def _machine(hardware: HardwareInfo) -> str:
    gpus = ", ".join(gpu.name for gpu in hardware.gpus)
    return gpus or f"{hardware.cpu_name}, {hardware.usable_cpu_count} CPUs"


def _shown(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:80]
