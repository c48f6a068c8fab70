"""`run_training`: the final training, checkpointed, resumable and guarded.

    profile, preset or baseline ── re-verified if from elsewhere ──▶ RunPlan ── Session ──▶ TrainingSummary

Nothing in a profile is executed: the target comes from the argument, the settings file, the search in this folder, or
the demo, and is compared with the profile's label.
"""

from __future__ import annotations

import errno
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.engine.data_fingerprint import build_dataset, fingerprint_data
from autotune.engine.dataloader import find_random_sources
from autotune.engine.device import choose_device
from autotune.errors import MachineError
from autotune.probe.machine.hardware import read_hardware
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.quality import DriftLimits, Margin
from autotune.records.run import RunPlan, TrainingSummary
from autotune.targets.load import load_workload
from autotune.targets.resolve import ResolvedTarget
from autotune.targets.workload import LoadedWorkload
from autotune.train.blame import blame_target
from autotune.train.child import session_began
from autotune.train.deadline import Deadline
from autotune.train.folder import RunFolder, find_run, locked_run, make_run, read_plan, require_same_plan
from autotune.train.loop import Ending
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.preset_settings import find_facts
from autotune.train.reverify import Frame, reverify_in_processes
from autotune.train.session import Session
from autotune.train.settings import Settings, check_environment, choose_settings, find_missing_environment
from autotune.train.target import resolve_training_target

__all__ = ["TrainingCallbacks", "TrainingOptions", "run_training"]


def run_training(
    options: TrainingOptions,
    target: str | None = None,
    *,
    folder: str | Path | None = None,
    callbacks: TrainingCallbacks | None = None,
) -> TrainingSummary:
    """Train a target.

    Args:
        options: settings, length and paths.
        target: `file.py:attr` or `package.module:attr`; None as in `resolve_training_target`.
        folder: working folder; None for the current one.
        callbacks: who is told, and who may stop it.

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
    warnings: list[str] = []
    callbacks = callbacks or TrainingCallbacks()
    told = callbacks.warn

    def warn(text: str) -> None:
        warnings.append(text)
        told(text)

    callbacks = replace(callbacks, warn=warn)
    try:
        resolved = resolve_training_target(target, work)
        loaded = load_workload(resolved.target.spec, folder=work)
        run = _Run(options, callbacks, work, resolved, loaded, *_look_at_data(loaded))
        session, ending = run.train(began)
        if ending == "stopped":
            command = shlex.join(["autotune", "train", loaded.label, "--resume", "--out", str(session.folder.path)])
            warn(f"stopped at step {session.progress.step}; go on with: {command}")
        summary = _summarize(session, ending, warnings, time.monotonic() - began)
        session.folder.write_summary(summary)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space, then --resume" if is_full else "check the path and its permissions"
        raise MachineError(f"{error.filename or work}: {error.strerror or error}", hint=hint) from error
    return summary


@dataclass(frozen=True)
class _Run:
    """A training as it was asked for."""

    options: TrainingOptions
    callbacks: TrainingCallbacks
    work: Path
    resolved: ResolvedTarget
    loaded: LoadedWorkload
    sources: tuple[str, ...]
    data: str | None

    def train(self, began: float) -> tuple[Session, Ending]:
        options, loaded = self.options, self.loaded
        profile = None if options.profile is None else Profile.load(self.work / options.profile)
        target = ProfileTarget(label=loaded.label, fingerprint=loaded.fingerprint, data_fingerprint=self.data)
        path = find_run(self.work, loaded.label, options.out) if options.resume else None
        notes: list[str] = []
        plan = self._make_plan(target, profile, None if path is None else read_plan(path), notes.append)
        hardware = read_hardware()
        self.callbacks.relaunch(find_missing_environment(plan.current_config, hardware))
        for text in notes:  # said once: the process may have started anew
            self.callbacks.warn(text)
        check_environment(plan.current_config, hardware, self.callbacks.warn)
        path = path or make_run(self.work, loaded.label, options.out)
        with locked_run(path):
            run_folder = RunFolder(path, plan)
            run_folder.write_plan(plan)
            self.callbacks.opened(run_folder)
            session = Session(
                loaded=loaded,
                folder=run_folder,
                options=options,
                callbacks=self.callbacks,
                device=choose_device("auto"),
                began=began,
                deadline=Deadline(None if options.max_time_seconds is None else began + options.max_time_seconds),
                random_sources=self.sources,
            )
            return session, session.run()

    def _make_plan(
        self, target: ProfileTarget, profile: Profile | None, before: RunPlan | None, note: Callable[[str], None]
    ) -> RunPlan:
        """Return the plan of a new run, or of one that goes on as it was started."""
        options = self.options
        if before is not None and profile is None and options.preset is None:
            asked = before.replace(target=target, seed=before.seed if options.seed is None else options.seed)
        else:
            asked = self._plan_anew(target, profile, note, is_new=before is None)
        if before is not None:
            path = find_run(self.work, self.loaded.label, options.out)
            require_same_plan(before, asked, path)
            asked = before
        length = {"steps": options.steps, "epochs": options.epochs}
        if options.steps is None and options.epochs is None:
            length = {"steps": before.steps, "epochs": before.epochs} if before else {"steps": None, "epochs": 1}
        return asked.replace(**length)

    def _plan_anew(
        self, target: ProfileTarget, profile: Profile | None, note: Callable[[str], None], *, is_new: bool
    ) -> RunPlan:
        options = self.options
        settings = choose_settings(
            self.loaded,
            profile=profile,
            preset=options.preset,
            data_fingerprint=target.data_fingerprint,
            find_facts=lambda: find_facts(
                self.resolved.target,
                fingerprint=self.loaded.fingerprint,
                should_stop=self.callbacks.should_stop,
                say=self.callbacks.say,
            ),
            note=note,
        )
        verified = None
        if is_new and settings.needs_reverification and not options.trust:
            frame = Frame(should_stop=self.callbacks.should_stop, say=self.callbacks.say, random_sources=self.sources)
            verified = reverify_in_processes(settings, self.resolved.target, frame)
            settings = settings if verified.trusted else settings.fall_back()
        return RunPlan(
            target=target,
            asked_config=settings.config if profile is None else profile.config,
            config=settings.config,
            baseline_config=settings.baseline_config,
            origin=settings.origin,
            promised_samples_per_second=settings.promised_samples_per_second,
            flops_utilization=_find_flops_utilization(settings),
            loss_band=None if profile is None else profile.evidence.loss_band,
            drift_limit=_find_drift_limit(profile),
            accepted=() if profile is None else tuple(one for check in profile.quality for one in check.fidelity),
            reverification=verified,
            seed=options.seed or 0,
            steps=options.steps,
            epochs=options.epochs,
        )


def _find_drift_limit(profile: Profile | None) -> Margin:
    """Return how much worse the training loss was allowed to get in the search."""
    checks = () if profile is None else profile.quality
    return next((check.margin for check in checks if check.test == "paired-losses"), DriftLimits().loss)


def _look_at_data(loaded: LoadedWorkload) -> tuple[tuple[str, ...], str | None]:
    """Return which global generators the samples draw from, and the data's fingerprint."""
    with blame_target(f"{loaded.label}: setting up"):
        dataset = build_dataset(loaded)
        sources = find_random_sources(dataset, loaded.collate)
    return sources, fingerprint_data(dataset, loaded.collate, sources)


def _find_flops_utilization(settings: Settings) -> float | None:
    evidence = None if settings.profile is None else settings.profile.evidence
    if evidence is None or settings.differences or settings.config != (settings.profile and settings.profile.config):
        return None
    flops, peak = evidence.flops_per_sample, evidence.peak_flops_per_second
    return flops / peak if flops and peak else None


def _summarize(session: Session, ending: Ending, warnings: list[str], elapsed_seconds: float) -> TrainingSummary:
    plan, meters = session.plan, session.meters
    seconds, samples = meters.training_seconds, meters.training_samples
    rate = samples / seconds if seconds > 0 and samples else None
    same = plan.current_config == plan.config
    used = plan.flops_utilization if same else None
    return TrainingSummary(
        folder=str(session.folder.path),
        checkpoint=session.last_checkpoint,
        finished=ending == "finished",
        target=plan.target,
        origin=plan.origin,
        config=plan.current_config,
        steps=session.progress.step,
        epochs=session.epoch,
        samples=session.progress.samples,
        loss=session.loss,
        metrics=session.metrics,
        best=meters.best,
        samples_per_second=rate,
        promised_samples_per_second=plan.promised_samples_per_second,
        data_wait_fraction=min(1.0, meters.data_wait_seconds / seconds) if seconds > 0 else None,
        mfu=used * rate if used and rate else None,
        peak_memory_bytes=meters.peak_memory_bytes or None,
        skipped_steps=meters.skipped_steps,
        allocator_retries=meters.allocator_retries,
        evaluation_seconds=meters.evaluation_seconds,
        checkpoint_seconds=meters.checkpoint_seconds,
        training_seconds=seconds,
        elapsed_seconds=elapsed_seconds,
        step_downs=plan.step_downs,
        guard=session.guard,
        reverification=plan.reverification,
        warnings=tuple(warnings),
    )
