"""`autotune train`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from autotune.cli.target import Target, read_target
from autotune.cli.terminal import (
    print_json,
    reported_errors,
    result_console,
    say,
    stop_on_signals,
)

if TYPE_CHECKING:
    from autotune.records.run import TrainingSummary
    from autotune.records.trial import Target as TargetRecord

_RELAUNCHED = "AUTOTUNE_RELAUNCHED"


def train(
    profile: Annotated[Path, typer.Option("--profile", help="The settings to train with, e.g. best.json.")],
    target: Target = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps to take.", show_default=False)] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs to train.", show_default="1 if --steps is not given"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.", show_default="a new one under runs/")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, data order and dropout.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out, or this target's newest run.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train with a profile's settings: checkpointed, resumable, with the metric at each epoch's end."""
    with reported_errors(as_json=json_output):
        relaunch_with_environment(profile)
        from autotune.cli.bar import training_view
        from autotune.train.run import TrainingOptions, resolve_training_target, run_training

        chosen = read_target(target)
        resolved = resolve_training_target(chosen, Path.cwd())
        if resolved.origin != "argument":
            say(f"target: {resolved.target.spec} (from the {resolved.origin})")
        if resolved.target.script is not None:
            given = {
                "--steps": steps,
                "--epochs": epochs,
                "--out": out,
                "--resume": resume,
                "--seed": seed,
            }
            become_script(profile, resolved.target, given, as_json=json_output)
        assert chosen is None or isinstance(chosen, str)
        options = TrainingOptions(profile=profile, steps=steps, epochs=epochs, out=out, resume=resume, seed=seed)
        with stop_on_signals(signal.SIGUSR1) as stop, training_view() as view:
            summary = run_training(options, chosen, should_stop=stop, report=view.show, warn=view.warn)
        if json_output:
            print_json(summary.to_json())
        else:
            print_summary(summary)
        stop.exit_if_set()


def become_script(profile: Path, target: TargetRecord, given: Mapping[str, object], *, as_json: bool) -> NoReturn:
    """Run a script with a profile's settings in this process's place: signals and exit status are its own.

    Raises:
        UsageError: an option is given that only the script's own command can set.
    """
    from autotune.errors import UsageError
    from autotune.records.profile import Profile
    from autotune.train.script import execute, prepare_script_run

    for name, value in given.items():
        if value:
            raise UsageError(
                f"{name} is for a workload, and the target is a script", hint=f"give {target.spec} its own flag for it"
            )
    words = prepare_script_run(Profile.load(profile), target, as_json=as_json, note=lambda text: say(f"note: {text}"))
    sys.stdout.flush()
    sys.stderr.flush()
    execute(words, Path(target.folder))


def relaunch_with_environment(profile: Path) -> None:
    """Start this command anew where the profile's allocator settings need variables set before Python starts.

    Raises:
        ProfileError: the profile is not valid.
        MachineError: the settings need a library this machine does not have.
    """
    from autotune.engine.allocator import launch_environment
    from autotune.errors import MachineError
    from autotune.probe.machine.hardware import read_hardware
    from autotune.records.profile import Profile

    config = Profile.load(profile).config
    try:
        needed = launch_environment(config, read_hardware().host_allocators)
    except ValueError as error:
        raise MachineError(str(error), hint="install it, or search again on this machine") from None
    if _RELAUNCHED in os.environ or all(os.environ.get(name) == value for name, value in needed.items()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "autotune", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **needed, _RELAUNCHED: "1"})


def print_summary(summary: TrainingSummary) -> None:
    """Print a training's summary on stdout."""
    from rich.text import Text

    from autotune.units import format_duration, format_rate

    console = result_console()
    loss = "-" if summary.loss is None else f"{summary.loss:.4f}"
    console.print(Text(f"trained {summary.steps:,} steps, {summary.samples:,} samples: loss {loss}", style="bold"))
    for name, value in summary.metrics.items():
        if value is not None:
            console.print(Text(f"  {name} {value:.4f}"))
    if summary.samples_per_second is not None:
        promised = summary.promised_samples_per_second
        against = f", the search measured {format_rate(promised)}" if promised else ""
        console.print(Text(f"  {format_rate(summary.samples_per_second)}{against}"))
    console.print(Text(f"  {format_duration(summary.elapsed_seconds)}, checkpoint {summary.checkpoint}"))
