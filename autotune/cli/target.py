"""The target on the command line: a workload's name, or a script's whole command after `--`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.terminal import say

if TYPE_CHECKING:
    from autotune.records.script import Script

DEMO = "demo"
TARGET_HELP = (
    "The training: file.py:attr or package.module:attr, or a script's command after --, as in: -- python train.py "
    "--lr 0.1. Without one: target of the tool.autotune table in pyproject.toml, else the built-in demo (name: demo)."
)

Target = Annotated[list[str] | None, typer.Argument(help=TARGET_HELP, show_default=False, metavar="[TARGET]")]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--knob", help="A script's own knob, for {NAME} in its command: lr=1e-3,2e-3:semantic.", metavar="K"),
]
MetricRegex = Annotated[
    list[str] | None,
    typer.Option(
        help="Finds a script's metric in what it prints: 'val_acc=([0-9.]+)'. May be repeated.", show_default=False
    ),
]
MetricKey = Annotated[
    list[str] | None,
    typer.Option(help="Key of a script's metric in the JSON lines it prints. May be repeated.", show_default=False),
]
Direction = Annotated[
    list[str] | None,
    typer.Option(
        help="Which way a metric is better: minimize, maximize. Once for all, or once for each, expressions first.",
        show_default=False,
    ),
]
QualitySteps = Annotated[
    int | None, typer.Option(min=1, help="Steps of a script's drift check.", show_default="what the budget allows")
]
QualityEpochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of a script's drift check, instead of steps.", show_default=False)
]


def read_target(
    words: Sequence[str] | None,
    *,
    knobs: Sequence[str] | None = None,
    metric_regexes: Sequence[str] | None = None,
    metric_keys: Sequence[str] | None = None,
    directions: Sequence[str] | None = None,
    quality_steps: int | None = None,
    quality_epochs: int | None = None,
) -> str | Script | None:
    """Return the target that was typed: a workload's name, a script, or None.

    Raises:
        UsageError: a script's command or an option for scripts cannot be used as given.
    """
    from autotune.errors import UsageError
    from autotune.targets.resolve import DEMO_TARGET
    from autotune.targets.script import read_script

    options = {
        "--knob": knobs or None,
        "--metric-regex": metric_regexes or None,
        "--metric-key": metric_keys or None,
        "--direction": directions or None,
        "--quality-steps": quality_steps,
        "--quality-epochs": quality_epochs,
    }
    if words and (len(words) > 1 or is_command(words[0])):
        return read_script(
            words,
            knobs=tuple(knobs or ()),
            metric_regexes=tuple(metric_regexes or ()),
            metric_keys=tuple(metric_keys or ()),
            directions=tuple(directions or ()),
            quality_steps=quality_steps,
            quality_epochs=quality_epochs,
        )
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{given[0]} is for a script, and none was named", hint="write its command after --: -- python train.py"
        )
    if words and words[0] == DEMO:
        return DEMO_TARGET
    return words[0] if words else None


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


def announce_target(target: str | Script | None, folder: Path) -> None:
    """Say which training is used when none was named.

    Raises:
        UsageError: the settings file is not valid.
    """
    from autotune.targets.resolve import resolve_target

    resolved = resolve_target(target, folder=folder)
    if resolved.origin == "demo":
        say("no target given: using the built-in demo, a small network that learns to name drawn figures")
    elif resolved.origin == "settings":
        say(f"target: {resolved.target.spec} (from [tool.autotune])")


def show_target(target: str | Script | None) -> str:
    """Return the words that name the target in another command; empty when none was named."""
    from autotune.records.script import Script
    from autotune.targets.resolve import DEMO_TARGET
    from autotune.targets.script import script_label

    if isinstance(target, Script):
        return f" -- {script_label(target.command)}"
    return f" {DEMO}" if target == DEMO_TARGET else f" {target}" if target else ""
