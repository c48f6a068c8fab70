"""`run_training`: the final training, checkpointed, resumable and guarded.

    profile, preset or baseline ── re-verified if from elsewhere ──▶ RunPlan ── Session ──▶ TrainingSummary

Nothing in a profile is executed: the target comes from the argument, the settings file, the search in this folder, or
the demo, and is compared with the profile's label.
"""

from __future__ import annotations

import errno
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.distributed.place import Place
from autotune.distributed.world import Command, World, joined_world
from autotune.engine.data_fingerprint import build_dataset, mark_data
from autotune.engine.dataloader import find_random_sources
from autotune.engine.device import choose_device
from autotune.errors import MachineError
from autotune.format import count
from autotune.machine.hardware import read_hardware
from autotune.records.run import RunPlan, TrainingSummary
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.deadline import Deadline
from autotune.train.loop.session import Session
from autotune.train.loop.training_loop import Ending
from autotune.train.loop.user_code import blame_target
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.plan import RunRequest, make_plan, resume_plan
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.child import session_began
from autotune.train.recovery.steps_down import count_alarms
from autotune.train.report import summarize
from autotune.train.runs.folder import RunFolder, find_run, locked_run, make_run, read_plan
from autotune.train.runs.weights import write_weights
from autotune.train.settings.candidate import load_profile
from autotune.train.settings.choice import check_environment, find_missing_environment
from autotune.train.settings.target import resolve_training_target

__all__ = ["TrainingCallbacks", "TrainingOptions", "run_training"]


_OWN_GENERATOR = (
    "a sample fetched twice is another one, as of a data set that draws from a generator of its own: a resumed "
    "training trains on others than an uninterrupted one; draw from the global generators instead"
)


@dataclass(frozen=True)
class _End:
    """How a run ended.

    Attributes:
        session: that trained.
        ending: of it.
        weights: file of the best ones; None without one.
    """

    session: Session
    ending: Ending
    weights: Path | None


def run_training(
    options: TrainingOptions,
    target: str | None = None,
    *,
    folder: str | Path | None = None,
    callbacks: TrainingCallbacks | None = None,
    policy: TrainPolicy = TRAIN_POLICY,
    place: Place | None = None,
) -> TrainingSummary:
    """Train a target.

    Args:
        options: settings, length and paths.
        target: `file.py:attr` or `package.module:attr`; None as in `resolve_training_target`.
        folder: working folder; None for the current one.
        callbacks: who is told, and who may stop it.
        policy: the training's thresholds.
        place: this process among several that train together, which it leads; None to train alone.

    Raises:
        ProfileError: the profile is not valid, was measured on another target, or a resumed run was started otherwise.
        UsageError: the target or an option cannot be used as given.
        TargetError: the training fails, and no safe step down is left.
        CheckpointError: there is nothing to resume.
        BusyError: another training is at work in the run folder.
        MachineError: the disk is full, or the machine lacks what the settings need.
    """
    began = session_began()
    options.check()
    work = Path(folder or Path.cwd()).resolve()
    options = options.classify_presets(work)
    warnings: list[str] = []
    given = callbacks or TrainingCallbacks()

    def warn(text: str) -> None:
        warnings.append(text)
        given.warn(text)

    until = None if options.max_time_seconds is None else began + options.max_time_seconds
    try:
        chosen = resolve_training_target(target, work).target
        loaded = load_workload(chosen.spec, folder=work)
        sources, data, notes = _look_at_data(loaded)
        deadline, told = Deadline(until, policy), replace(given, warn=warn)
        request = RunRequest(work, loaded, chosen, options, told, sources, data, deadline, policy, place, notes)
        end = _train(request, began)
        session = end.session
        if end.ending == "stopped":
            command = shlex.join(["autotune", "train", loaded.label, "--resume", "--run-dir", str(session.folder.path)])
            warn(f"stopped at step {session.progress.step}; go on with: {command}")
        summary = _summarize(end, warnings, time.monotonic() - began)
        session.folder.write_summary(summary)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space, then --resume" if is_full else "check the path and its permissions"
        raise MachineError(f"{error.filename or work}: {error.strerror or error}", hint=hint) from error
    return summary


def _train(request: RunRequest, began: float) -> _End:
    options, label = request.options, request.loaded.label
    if options.resume:
        path = find_run(request.work, label, options.out)
        with locked_run(path):  # before anything is read: whoever holds it may write a step down
            return _start(request, path, resume_plan(request, read_plan(path), path), began)
    plan = make_plan(request, load_profile(options, request.work, request.note))
    request.callbacks.relaunch(find_missing_environment(plan.config, read_hardware()), plan.reverification)
    if request.place is None:
        choose_device("auto")  # a machine that cannot be used is refused before there is a run
    path = make_run(request.work, label, options.out)
    with locked_run(path):
        return _start(request, path, plan, began)


def _start(request: RunRequest, path: Path, plan: RunPlan, began: float) -> _End:
    hardware, callbacks = read_hardware(), request.callbacks
    callbacks.relaunch(find_missing_environment(plan.current_config, hardware), plan.reverification)
    for text in request.notes:  # only now: the process may have started anew
        callbacks.warn(text)
    check_environment(plan.current_config, hardware, callbacks.warn)
    folder = RunFolder(path, plan)
    folder.write_plan(plan)
    callbacks.opened(folder)
    with _joined(request, plan) as world:
        session = Session(
            loaded=request.loaded,
            folder=folder,
            options=request.options,
            callbacks=callbacks,
            device=choose_device("auto") if world is None else world.device,
            began=began,
            deadline=request.deadline,
            random_sources=request.sources,
            policy=request.policy,
            world=world,
        )
        ending = session.run()
    weights = None
    if ending == "finished":
        best = session.meters.best
        source = Path(best.checkpoint if best else session.last_checkpoint)
        prefix = getattr(request.loaded.workload, "weights_prefix", "")
        weights = write_weights(source, path, callbacks.warn, prefix=prefix)
    return _End(session, ending, weights)


@contextmanager
def _joined(request: RunRequest, plan: RunPlan) -> Iterator[World | None]:
    """Lead the other processes of the training, if there are any, until it is over."""
    place = request.place
    if place is None:
        yield None
        return
    config = plan.current_config
    each = f"micro batch {config.micro_batch_size}, accumulation {config.gradient_accumulation_steps}"
    effective = config.effective_batch_size * place.size
    who = count(place.size, "process", "processes") + ("" if place.nodes == 1 else f" on {place.nodes} nodes")
    request.callbacks.say(f"{who}, each with {each}: effective batch {effective}")
    place.publish(plan)
    with joined_world(place.meeting, request.options.rank_timeout_seconds) as world:
        yield world
        world.tell(Command.END)


def _look_at_data(loaded: LoadedWorkload) -> tuple[tuple[str, ...], str | None, list[str]]:
    """Return which global generators the samples draw from, the data's fingerprint, and what is to be told of it."""
    with blame_target(f"{loaded.label}: setting up"):
        dataset = build_dataset(loaded)
        sources = find_random_sources(dataset, loaded.collate)
    found = mark_data(dataset, loaded.collate, sources)
    return sources, found.fingerprint, [_OWN_GENERATOR] if found.repeats is False else []


def _summarize(end: _End, warnings: list[str], elapsed_seconds: float) -> TrainingSummary:
    session, plan, meters = end.session, end.session.plan, end.session.meters
    summary = summarize(
        plan, session.measure_progress(), finished=end.ending == "finished", elapsed_seconds=elapsed_seconds
    )
    used = plan.flops_utilization if plan.current_config == plan.config else None
    rate = summary.samples_per_second
    return summary.replace(
        folder=str(session.folder.path),
        checkpoint=session.last_checkpoint,
        weights=str(end.weights or ""),
        epochs=session.epoch,
        metrics=session.metrics,
        best=meters.best,
        mfu=used * rate if used and rate else None,
        skipped_steps=meters.skipped_steps,
        allocator_retries=meters.allocator_retries,
        evaluation_seconds=meters.evaluation_seconds,
        checkpoint_seconds=meters.checkpoint_seconds,
        guard=None if session.guard is None else session.guard.replace(alarms=count_alarms(plan)),
        reverification=plan.reverification,
        warnings=tuple(warnings),
    )
