"""The command line: parse, call one stage, print, exit code. Commands import their stage when they are called."""

from __future__ import annotations

from typing import Annotated

import typer

from autotune.cli.compare import compare
from autotune.cli.emit import export, report
from autotune.cli.lists import history, presets
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
autotune search train.py:workload --max-drift 0.2%
autotune search --resume --budget 10m"""
_TRAIN = """\
autotune train --profile best.json -- python train.py --epochs 30
autotune train train.py:workload --profile best.json --epochs 30 --max-time 3h50m
autotune train train.py:workload --resume"""

app = typer.Typer(
    name="autotune",
    help="Make PyTorch training faster without changing what is learned, by measurement on this machine.",
    epilog="Start with: autotune search --budget 20m -- python train.py --epochs 1000",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
app.command(
    cls=TargetCommand, epilog=_PROBE, short_help="Where a step's time and memory go, and how much faster it could get."
)(probe)
app.command(cls=TargetCommand, epilog=_SEARCH, short_help="Find faster settings that learn the same, and prove them.")(
    search
)
app.command(cls=TargetCommand, epilog=_TRAIN, short_help="Train with them: checkpointed, resumable, guarded.")(train)
app.command(
    cls=Command,
    epilog="autotune report\nautotune report --out page.html",
    short_help="Write a search as one HTML page.",
)(report)
app.command(
    cls=Command,
    epilog="autotune export --profile best.json --to torch",
    short_help="Print the settings for another tool.",
)(export)
app.command(
    cls=Command,
    epilog="autotune compare runs/train-workload-001 runs/train-workload-002",
    short_help="Show two trainings side by side.",
)(compare)
app.command(cls=Command, epilog="autotune presets", short_help="List the shipped presets.")(presets)
app.command(
    cls=Command, epilog="autotune history\nautotune history --clear", short_help="List what earlier searches have read."
)(history)
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
