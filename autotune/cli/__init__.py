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

app = typer.Typer(
    name="autotune",
    help="Make PyTorch training faster without changing what is learned, by measurement on this machine.",
    epilog="Start with: autotune probe, then autotune search --budget 20m, then autotune train --profile best.json",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=TargetCommand)(probe)
app.command(cls=TargetCommand)(search)
app.command(cls=TargetCommand)(train)
app.command()(compare)
app.command()(export)
app.command()(report)
app.command()(presets)
app.command()(history)
app.command()(selftest)


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
