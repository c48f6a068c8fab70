"""The command line: parse, call one stage, print, exit code. Commands import their stage when they are called."""

from __future__ import annotations

from typing import Annotated

import typer

from autotune.cli.compare import compare
from autotune.cli.emit import explain, export, report, show
from autotune.cli.lists import env, history, presets, status
from autotune.cli.probe import probe
from autotune.cli.search import search
from autotune.cli.selftest import selftest
from autotune.cli.target import TargetCommand
from autotune.cli.train import train
from autotune.cli.view.help import WIDEST, Command

_PROBE = """\
autotune probe
autotune probe -- python train.py --epochs 1000
autotune probe train.py:workload"""
_SEARCH = """\
autotune search --budget 20m -- python train.py --epochs 1000
autotune search train.py:workload --max-loss-increase 0.2%
autotune search --resume --budget 10m"""
_TRAIN = """\
autotune train --profile best.json -- python train.py --epochs 30
autotune train train.py:workload --profile best.json --epochs 30 --max-time 3h50m
autotune train train.py:workload --resume"""
_EXPLAIN = """\
autotune explain
autotune explain --budget 10m
autotune explain best.json --budget 0 --json"""

app = typer.Typer(
    name="autotune",
    help="Make PyTorch training faster without changing what is learned, by measurement on this machine.",
    epilog="Start with: autotune search --budget 20m -- python train.py --epochs 1000\n\n"
    "With AUTOTUNE_DEBUG=1 in the environment an error comes with its traceback.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
for _command, _kind, _short, _examples in (
    (probe, TargetCommand, "Where a step's time and memory go, and how much faster it could get.", _PROBE),
    (search, TargetCommand, "Find faster settings that learn the same, and prove them.", _SEARCH),
    (train, TargetCommand, "Train with them: checkpointed, resumable, guarded.", _TRAIN),
    (show, Command, "Print an answer once more.", "autotune show\nautotune show best.json --json"),
    (explain, Command, "Say what each change of an answer is worth, and why.", _EXPLAIN),
    (report, Command, "Write a search as one HTML page.", "autotune report -o page.html"),
    (export, Command, "Print the settings for another tool.", "autotune export --to hf"),
    (compare, Command, "Show two trainings side by side.", "autotune compare runs/train-001 runs/train-002"),
    (status, Command, "Say what is at work in this folder.", "autotune status"),
    (presets, Command, "List the shipped presets.", "autotune presets"),
    (history, Command, "List what earlier searches have read.", "autotune history\nautotune history --clear"),
    (env, Command, "Print versions and machine, for a bug report.", "autotune env"),
):
    app.command(cls=_kind, short_help=_short, epilog=_examples)(_command)
app.command(cls=Command, hidden=True, epilog="autotune selftest --replay 100")(selftest)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import platform
    from importlib.metadata import version

    from autotune import __version__

    python = platform.python_version()
    print(f"autotune {__version__}, torch {version('torch')}, optuna {version('optuna')}, Python {python}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print versions and exit.")
    ] = False,
) -> None:
    """Make PyTorch training faster without changing what is learned, by measurement on this machine."""


__all__ = ["app"]
