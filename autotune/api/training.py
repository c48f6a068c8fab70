"""`autotune.run_training`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.api.targets import find_folder, name_target
from autotune.arguments import shorten, shown_hints
from autotune.errors import TargetError, UsageError
from autotune.records.profile import Profile
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.settings.target import resolve_training_target

if TYPE_CHECKING:
    from autotune.records.run import TrainingSummary
    from autotune.records.trial import Target

_FIRST_SIGNAL_STATUS = 128


@shown_hints()
def run_training(
    options: TrainingOptions | Profile | str | Path | None = None,
    target: object = None,
    *,
    folder: str | Path | None = None,
    callbacks: TrainingCallbacks | None = None,
) -> TrainingSummary:
    """Train with an answer's settings, and return how it ended.

    Args:
        options: settings, length and paths; a profile or its path stands for one epoch with its settings, None for one
            with the user's own.
        target: as of `run_search`; None also takes that of the newest search in the folder.
        folder: working folder; None for the current one.
        callbacks: who is told, and who may stop it. Of a script only `warn`, `say` and `should_stop` are called.

    A first Ctrl-C, or a notebook's stop, ends a workload's training at the next step with a checkpoint.

    Raises:
        KeyboardInterrupt: it came; what was trained is saved, unless a second one did not wait for it.
        ProfileError: the profile is not valid, was measured on another target, or a resumed run was started otherwise.
        UsageError: the target or an option cannot be used as given.
        TargetError: the training fails, and no safe step down is left.
        CheckpointError: there is nothing to resume.
        BusyError: another training is at work in the run folder.
        MachineError: the disk is full, or the machine lacks what the settings need.
    """
    work = find_folder(folder).resolve()
    asked = _read_options(options, work)
    asked.check()
    named = name_target(target, work)
    resolved = resolve_training_target(named, work).target
    if resolved.script is not None:
        return _train_script(resolved, asked, work, callbacks or TrainingCallbacks())
    from autotune.train import run as stage

    assert named is None or isinstance(named, str)
    with _heeding_interrupts(callbacks or TrainingCallbacks()) as told:
        return stage.run_training(asked, named, folder=work, callbacks=told)


@contextmanager
def _heeding_interrupts(callbacks: TrainingCallbacks) -> Iterator[TrainingCallbacks]:
    """Yield callbacks by which a first Ctrl-C stops a training too, on the main thread; it is raised when that is over.

    A program that handles it by itself, or ignores it, goes on doing so.

    Raises:
        KeyboardInterrupt: it came.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield callbacks
        return
    from autotune.cli.stopping import stop_on_signals
    from autotune.train.report import StopNow

    @contextmanager
    def interruptible(seconds: float | None) -> Iterator[None]:
        with flag.raising(StopNow), callbacks.interruptible(seconds):
            yield

    with stop_on_signals(signals=(signal.SIGINT,)) as flag:
        try:
            yield replace(callbacks, should_stop=lambda: flag() or callbacks.should_stop(), interruptible=interruptible)
        finally:
            if flag.signal_number is not None:
                raise KeyboardInterrupt


def _read_options(given: object, folder: Path) -> TrainingOptions:
    if given is None:
        return TrainingOptions()
    if isinstance(given, TrainingOptions):
        return given
    if isinstance(given, str) and ":" in given and not (folder / given).exists():
        raise UsageError(
            f"{given!r} is a target, and the settings come first",
            hint=f'run_training("best.json", "{given}"), or run_training(None, "{given}") for your own settings',
        )
    if isinstance(given, str | os.PathLike | Profile):
        return TrainingOptions(profile=given if isinstance(given, Profile) else Path(os.fspath(given)))
    raise UsageError(
        f"options is {shorten(given)}", hint='give TrainingOptions(...), a profile, or its path: "best.json"'
    )


def _train_script(
    target: Target, options: TrainingOptions, work: Path, callbacks: TrainingCallbacks
) -> TrainingSummary:
    """Run a script to its end.

    Raises:
        TargetError: it ended with an error.
    """
    from autotune.train.script.recovery import train_script
    from autotune.train.script.run import list_workload_options, prepare_script_run, refuse_workload_options
    from autotune.train.script.settings import choose_settings

    refuse_workload_options(list_workload_options(options), target)
    chosen = options.classify_presets(work)
    settings = choose_settings(
        target, chosen, work, warn=callbacks.warn, say=callbacks.say, should_stop=callbacks.should_stop
    )
    end = train_script(prepare_script_run(settings, target), say=callbacks.say)
    if 0 < end.status < _FIRST_SIGNAL_STATUS:
        raise TargetError(
            f"{target.spec} ended with exit status {end.status}", hint="what it printed says why; say= hears what helps"
        )
    return end.summary
