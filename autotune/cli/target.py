"""The target on the command line: a workload's name, or a script's whole command after `--`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autotune.cli.view.help import BASICS, OUTPUT, SCRIPTS, Command
from autotune.cli.view.terminal import say

if TYPE_CHECKING:
    from autotune.records.script import Script
    from autotune.targets.resolve import ResolvedTarget

DEMO = "demo"
COMMAND_FOLLOWS = "--"
_BEGINS_COMMAND = re.compile(r".*\.py|(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed)")
TARGET_HELP = (
    "A script's command after --, or a workload: file.py:attr, package.module:attr. Default: that of [tool.autotune] "
    "in pyproject.toml, else the built-in demo (demo)."
)

Target = Annotated[
    list[str] | None, typer.Argument(help=TARGET_HELP, show_default=False, metavar="[TARGET | -- COMMAND...]")
]
Knobs = Annotated[
    list[str] | None,
    typer.Option(
        "--knob",
        rich_help_panel=SCRIPTS,
        help="A knob of the script's own, for {NAME} in its command: lr=1e-3,2e-3:semantic.",
        metavar="NAME=V1,V2[:CLASS]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        rich_help_panel=BASICS,
        metavar="NAME",
        help="cpu: keep a workload on the CPU where there is a GPU.",
        show_default="auto",
    ),
]
MetricRegex = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=SCRIPTS,
        metavar="REGEX",
        help="Find a metric in what the script prints: 'val_acc=([0-9.]+)'. Repeatable.",
        show_default=False,
    ),
]
MetricKey = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=SCRIPTS,
        metavar="KEY",
        help="Key of a metric in the JSON lines it prints. Repeatable.",
        show_default=False,
    ),
]
Direction = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=SCRIPTS,
        metavar="WAY",
        help="minimize or maximize: for all metrics, or one each, regexes first.",
        show_default=False,
    ),
]
QualitySteps = Annotated[
    int | None,
    typer.Option(
        "--check-steps",
        "--quality-steps",
        rich_help_panel=SCRIPTS,
        metavar="N",
        min=1,
        help="Steps of the loss check.",
        show_default="what the budget allows",
    ),
]
QualityEpochs = Annotated[
    int | None,
    typer.Option(
        "--check-epochs",
        "--quality-epochs",
        rich_help_panel=SCRIPTS,
        metavar="N",
        min=1,
        help="Epochs of the loss check, instead of steps.",
        show_default=False,
    ),
]


Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        rich_help_panel=OUTPUT,
        metavar="TOOL",
        help="Also write for tensorboard, wandb, mlflow or csv. Repeatable.",
        show_default=False,
    ),
]


class TargetCommand(Command):
    """A command that is told where `--` stands: what comes after it is a script's command, be it one word or none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand the first `--` on as the word before a script's own."""
        if COMMAND_FOLLOWS in args:
            where = args.index(COMMAND_FOLLOWS)
            args = [*args[:where], COMMAND_FOLLOWS, *args[where:]]
        return super().parse_args(ctx, args)

    def mend(self, error: Any, ctx: Any, args: list[str]) -> None:
        """Have an error about an option that a script's command has say where such a command is written."""
        super().mend(error, ctx, args)
        option = error.option_name if hasattr(error, "possibilities") else None  # there is no such option
        typed = takewhile(lambda word: option is not None and not word.startswith(option), args)
        command = [*dropwhile(lambda word: not _BEGINS_COMMAND.fullmatch(word), typed)]
        if command and COMMAND_FOLLOWS not in args:
            words = shlex.join(["python"] * command[0].endswith(".py") + command)
            error.message += f"; a script's own go after --: {ctx.command_path} -- {words} {option} ..."
            error.possibilities = None


def read_target(
    words: Sequence[str] | None,
    *,
    command: str = "search",
    knobs: Sequence[str] | None = None,
    metric_regexes: Sequence[str] | None = None,
    metric_keys: Sequence[str] | None = None,
    directions: Sequence[str] | None = None,
    quality_steps: int | None = None,
    quality_epochs: int | None = None,
) -> str | Script | None:
    """Return the target that was typed: a workload's name, a script, or None. It is there, as far as reading tells.

    Args:
        words: as typed, `--` included.
        command: of this tool, for the hints.
        knobs: see `read_script`, as all that follow.
        metric_regexes: of a script.
        metric_keys: of a script.
        directions: of a script.
        quality_steps: of a script.
        quality_epochs: of a script.

    Raises:
        UsageError: nothing of the name is there, or an option for scripts cannot be used as given.
        TargetError: what is named is no workload, as its source shows.
    """
    from autotune.errors import UsageError
    from autotune.targets.resolve import DEMO_TARGET
    from autotune.targets.script import read_script, script_label

    options: dict[str, Any] = {
        "--knob": tuple(knobs or ()),
        "--metric-regex": tuple(metric_regexes or ()),
        "--metric-key": tuple(metric_keys or ()),
        "--direction": tuple(directions or ()),
        "--check-steps": quality_steps,
        "--check-epochs": quality_epochs,
    }
    given = [name for name, value in options.items() if value not in (None, ())]
    script_words = find_command(words, command=command, has_options=bool(given))
    if script_words is not None:
        names = ("knobs", "metric_regexes", "metric_keys", "directions", "quality_steps", "quality_epochs")
        script = read_script(script_words, **dict(zip(names, options.values(), strict=True)))
        _require_there(script_label(script.command), script, command=command)
        return script
    if given:
        raise UsageError(
            f"{given[0]} is for a script, and none was named", hint="write its command after --: -- python train.py"
        )
    if not words or words[0] == DEMO:
        return DEMO_TARGET if words else None
    _require_there(words[0], None, command=command)
    return words[0]


def _require_there(spec: str, script: Script | None, *, command: str) -> None:
    from autotune.records.trial import Target as TargetRecord
    from autotune.targets.check import check_target

    check_target(TargetRecord(spec=spec, folder=str(Path.cwd()), script=script), command=command)


def find_command(
    words: Sequence[str] | None, *, command: str = "search", has_options: bool = False
) -> tuple[str, ...] | None:
    """Return the words of a script's command; None where none was typed.

    Args:
        words: as typed.
        command: of this tool, for the hints.
        has_options: options for a script were typed: without a target they are for the one in the settings file.

    Raises:
        UsageError: there are several targets, or the settings file is not valid.
    """
    from autotune.errors import UsageError
    from autotune.targets.resolve import read_project_settings

    if not words:
        return read_project_settings(Path.cwd()).command if has_options else None
    first, *more = words
    if first == COMMAND_FOLLOWS and not more:
        raise UsageError("there is no command after --", hint=f"write autotune {command} -- python train.py ...")
    if first == COMMAND_FOLLOWS:
        return tuple(more)
    is_workload = first == DEMO or ":" in first
    if more and (is_workload or COMMAND_FOLLOWS in more[:1]):
        named = [word for word in words if word != COMMAND_FOLLOWS]
        raise UsageError(
            f"there is one target, and {len(named)} words were given: {' '.join(named)}",
            hint=f"write autotune {command} {first}, or a script's command: autotune {command} -- python train.py",
        )
    return tuple(words) if more or is_command(first) else None


def is_command(word: str) -> bool:
    """Return whether a single word is a program rather than the name of a workload."""
    import shutil

    return word != DEMO and ":" not in word and not word.endswith(".py") and shutil.which(word) is not None


def has_target(target: str | Script | None, folder: Path) -> bool:
    """Return whether a training was named, on the command line or in the settings file.

    Raises:
        UsageError: the settings file is not valid.
    """
    from autotune.targets.resolve import resolve_target

    return resolve_target(target, folder=folder).origin != "demo"


def announce_target(target: str | Script | None, folder: Path, *, command: str = "search") -> None:
    """Say which training is used when none was named.

    Raises:
        UsageError: the settings file is not valid.
    """
    from autotune.targets.resolve import resolve_target

    announce_resolved(resolve_target(target, folder=folder), folder, command=command)


def announce_resolved(resolved: ResolvedTarget, folder: Path, *, command: str) -> None:
    """Say which training is used when none was named; of the demo, which of the user's own could be instead."""
    if resolved.origin == "demo":
        say("no target given: using the built-in demo, a small network that learns to name drawn figures")
        suggest_trainings(folder, command=command)
    elif resolved.origin == "settings":
        say(f"target: {resolved.target.spec} (from [tool.autotune])")
    elif resolved.origin == "search":
        say(f"target: {resolved.target.spec} (from the search in this folder)")


def suggest_trainings(folder: Path, *, command: str) -> None:
    """Name each script of a folder that imports torch, with the command for it."""
    from autotune.targets.source.neighbours import find_trainings

    for training in find_trainings(folder):
        say(f"  {training.file} imports torch: for it write autotune {command} {training.words}")


def show_target(target: str | Script | None) -> str:
    """Return the words that name the target in another command; empty when none was named."""
    from autotune.records.script import Script
    from autotune.targets.resolve import DEMO_TARGET
    from autotune.targets.script import script_label

    if isinstance(target, Script):
        return f" -- {script_label(target.command)}"
    return f" {DEMO}" if target == DEMO_TARGET else f" {shlex.quote(target)}" if target else ""


def set_device(device: str | None, chosen: str | Script | None) -> None:
    """Tell this process, and all that it starts, which device a workload is for.

    Args:
        device: as typed; None leaves it to the environment.
        chosen: what `read_target` has returned.

    Raises:
        UsageError: it is no device to choose, or a script is the target.
    """
    from autotune.errors import UsageError
    from autotune.records.trial import DEVICE_VARIABLE

    if device is None:
        return
    if device not in ("auto", "cpu"):
        raise UsageError(f"--device {device}: no device to choose", hint="auto (the GPU where there is one) or cpu")
    if chosen is not None and not isinstance(chosen, str):
        raise UsageError("--device is for a workload", hint="a script chooses its device itself: see its own options")
    os.environ[DEVICE_VARIABLE] = device


def read_nproc_per_node(text: str) -> int | Literal["gpu"]:
    """Return how many processes are to train together.

    Raises:
        UsageError: it is neither a number nor `gpu`.
    """
    from autotune.errors import UsageError

    if text == "gpu":
        return "gpu"
    size = int(text) if re.fullmatch("[0-9]{1,4}", text) else 0
    if not size:
        raise UsageError(f"--nproc-per-node {text}: no number of processes", hint="give 2, say, or gpu")
    return size
