"""`autotune compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.view.terminal import print_json, reported_errors


def compare(
    first: Annotated[Path, typer.Argument(help="A run folder, e.g. runs/train-workload-001.", metavar="RUN-A")],
    second: Annotated[Path, typer.Argument(help="The other one.", metavar="RUN-B")],
    json_output: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Show two runs side by side: settings, throughput, loss at the same samples, metrics, what went wrong."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.comparison import print_comparison
        from autotune.train.runs.compare import compare_runs

        comparison = compare_runs(first, second)
        if json_output:
            print_json(comparison.to_json())
        else:
            print_comparison(comparison)
