"""`autotune train`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from autotune.cli.target import Target, read_target
from autotune.cli.terminal import StopFlag, print_json, reported_errors, say, stop_on_signals, warn
from autotune.errors import AutotuneError
from autotune.train.child import AGAIN_STATUS, keep_tie, tie_to_parent

if TYPE_CHECKING:
    from autotune.cli.training_page import LineView
    from autotune.records.trial import Target as TargetRecord
    from autotune.train.folder import RunFolder
    from autotune.train.options import TrainingCallbacks, TrainingOptions
    from autotune.train.tensorboard import TensorBoardLog

OUT_OF_TIME_STATUS = 124
"""Exit status of a training that `--max-time` ended, as of timeout(1)."""

_RELAUNCHED = "AUTOTUNE_RELAUNCHED"


def train(
    target: Target = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="The settings to train with, e.g. best.json.", show_default="your own settings"),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A shipped preset instead, e.g. balanced.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps to take.", show_default=False)] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs to train.", show_default="1 if --steps is not given"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="a new one under runs/")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, data order, dropout.", show_default="0")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out, or this target's newest run.")] = False,
    max_time: Annotated[
        str | None, typer.Option(help="End with a checkpoint before this, e.g. 3h50m.", show_default=False)
    ] = None,
    checkpoint_every: Annotated[str, typer.Option(help="Longest time between two checkpoints.")] = "5m",
    keep: Annotated[int, typer.Option(min=2, help="Checkpoints kept, beside the best one.")] = 2,
    log: Annotated[
        Literal["tensorboard"] | None, typer.Option(help="Also write TensorBoard's files.", show_default=False)
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Use a profile from elsewhere without a second look.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of a script that goes on from its own checkpoints.")
    ] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train with a profile's settings, a preset's or your own: checkpointed, resumable, guarded."""
    with reported_errors(as_json=json_output):
        is_watched = tie_to_parent()
        from autotune.train.options import TrainingOptions
        from autotune.train.target import resolve_training_target
        from autotune.units import parse_duration

        options = TrainingOptions(
            profile=profile,
            preset=preset,
            steps=steps,
            epochs=epochs,
            out=out,
            resume=resume,
            seed=seed,
            trust=trust,
            max_time_seconds=None if max_time is None else parse_duration(max_time, name="--max-time"),
            checkpoint_seconds=parse_duration(checkpoint_every, name="--checkpoint-every"),
            checkpoints_kept=keep,
        )
        options.check()
        chosen = read_target(target)
        resolved = resolve_training_target(chosen, Path.cwd())
        if resolved.target.script is not None:
            train_script_target(resolved.target, options, max_restarts=max_restarts, as_json=json_output)
        if not is_watched and sys.argv[1:2] == ["train"]:
            train_in_process(sys.argv[2:])
        if resolved.origin != "argument":
            say(f"target: {resolved.target.spec} (from the {resolved.origin})")
        assert chosen is None or isinstance(chosen, str)
        train_workload(options, chosen, log=log, as_json=json_output)


def train_in_process(words: list[str]) -> NoReturn:
    """Train in a process of its own, which this one watches over: it is started again if it is killed.

    Args:
        words: as typed after `autotune train`.
    """
    from autotune.train.restarts import train_supervised

    end = train_supervised(words, say=warn)
    if end.message:
        say(f"error: {end.message}", style="red")
        say(f"  {end.hint}")
    raise typer.Exit(end.status)


def train_workload(options: TrainingOptions, target: str | None, *, log: str | None, as_json: bool) -> None:
    """Train a workload in this process, and exit as it ended."""
    relaunch_for_profile(options)
    from autotune.cli.training_page import training_view
    from autotune.cli.training_summary import print_summary
    from autotune.train.run import run_training
    from autotune.train.steps_down import FreshProcessNeeded

    with stop_on_signals(signal.SIGUSR1, signal.SIGUSR2) as stop:
        try:
            with training_view() as view, training_log(log, view) as sink:
                summary = run_training(options, target, callbacks=make_callbacks(stop, view, sink))
        except KeyboardInterrupt:
            say("stopped at once: what was trained since the last checkpoint is lost", style="yellow")
            raise typer.Exit(128 + signal.SIGINT) from None
        except FreshProcessNeeded as error:
            say(f"step down: {error.message}", style="yellow")
            raise typer.Exit(AGAIN_STATUS) from None
        except AutotuneError:
            stop.exit_if_set()  # what a stop has left undone is no error
            raise
        if as_json:
            print_json(summary.to_json())
        else:
            print_summary(summary)
        stop.exit_if_set()
    if not summary.finished:
        raise typer.Exit(OUT_OF_TIME_STATUS)


def train_script_target(
    target: TargetRecord, options: TrainingOptions, *, max_restarts: int, as_json: bool
) -> NoReturn:
    """Run a script to its end under its settings, and exit as it does.

    Raises:
        UsageError: an option is given that only the script's own command can set.
    """
    from autotune.cli.training_summary import print_summary
    from autotune.records.profile import Profile
    from autotune.targets.fingerprint import fingerprint_target
    from autotune.train.preset_settings import find_facts
    from autotune.train.reverify import Frame, reverify_in_processes
    from autotune.train.script import prepare_script_run, refuse_workload_options
    from autotune.train.script_parent import train_script
    from autotune.train.settings import choose_script_settings

    given = {
        "--steps": options.steps,
        "--epochs": options.epochs,
        "--max-time": options.max_time_seconds,
        "--out": options.out,
        "--resume": options.resume,
        "--seed": options.seed,
    }
    refuse_workload_options(given, target)
    with stop_on_signals() as stop:
        fingerprint = fingerprint_target(target)
        settings = choose_script_settings(
            target,
            profile=None if options.profile is None else Profile.load(options.profile),
            preset=options.preset,
            find_facts=lambda: find_facts(target, fingerprint=fingerprint, should_stop=stop, say=say),
            note=warn,
        )
        if settings.needs_reverification and not options.trust:
            verified = reverify_in_processes(settings, target, Frame(should_stop=stop, say=say))
            settings = settings if verified.trusted else settings.fall_back()
        stop.exit_if_set()
    end = train_script(prepare_script_run(settings, target), say=say, max_restarts=max_restarts, as_json=as_json)
    if as_json:
        print_json(end.summary.to_json())
    else:
        print_summary(end.summary)
    raise typer.Exit(end.status)


class TrainingLog:
    """Hands the lines of metrics.jsonl on to TensorBoard's files.

    Args:
        warn: told when they cannot be written any more.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._folder: Path | None = None
        self._files: TensorBoardLog | None = None

    def open(self, folder: Path) -> None:
        """Remember the run's folder."""
        self._folder = folder

    def begin(self, step: int) -> None:
        """Write on from a step; what was written after it is going to be trained again."""
        from autotune.train.tensorboard import TensorBoardLog

        if self._files is not None:
            self._files.rewind(step)
        elif self._folder is not None:
            self._files = TensorBoardLog(self._folder, resumed_step=step, warn=self._warn)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        if self._files is not None:
            self._files(line)

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()


@contextmanager
def training_log(kind: str | None, view: LineView) -> Iterator[TrainingLog | None]:
    """Return what lines of metrics.jsonl are handed to; None for nothing."""
    if kind is None:
        yield None
        return
    from autotune.train.tensorboard import require_tensorboard

    require_tensorboard()  # before anything is written
    log = TrainingLog(view.warn)
    try:
        yield log
    finally:
        log.close()


def make_callbacks(stop: StopFlag, view: LineView, log: TrainingLog | None) -> TrainingCallbacks:
    """Return what ties a training to the terminal, its signals and its logs."""
    from autotune.train.child import note_run_folder
    from autotune.train.options import TrainingCallbacks
    from autotune.train.report import StopNow

    def open_run(folder: RunFolder) -> None:
        note_run_folder(folder.path)
        if log is not None:
            log.open(folder.path)
        view.promise(folder.plan.promised_samples_per_second)
        view.plan(f"{folder.plan.target.label}: settings of the {folder.plan.origin}, run folder {folder.path}")

    plain = TrainingCallbacks(
        should_stop=stop,
        report=view.show,
        warn=view.warn,
        say=view.plan,
        step_down=view.step_down,
        opened=open_run,
        interruptible=partial(stop.raising, StopNow),
        relaunch=relaunch,
    )
    return plain if log is None else replace(plain, log=log.write, begins=log.begin)


def relaunch_for_profile(options: TrainingOptions) -> None:
    """Start this command anew where a profile's allocator settings need variables set before Python starts.

    Raises:
        ProfileError: the profile is not valid.
    """
    if options.profile is None:
        return
    from autotune.errors import MachineError
    from autotune.probe.machine.hardware import read_hardware
    from autotune.records.profile import Profile
    from autotune.train.settings import find_missing_environment

    config = Profile.load(options.profile).config
    try:
        relaunch(find_missing_environment(config, read_hardware()))
    except MachineError:  # a profile from elsewhere may have to fall back to your own settings, which need nothing
        return


def relaunch(missing: Mapping[str, str]) -> None:
    """Start this command anew with some variables set; return where there are none, or where it did not help."""
    if not missing or _RELAUNCHED in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "autotune", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **keep_tie(), **missing, _RELAUNCHED: "1"})
