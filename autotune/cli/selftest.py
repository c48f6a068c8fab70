"""`autotune selftest`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.stopping import stop_on_signals
from autotune.cli.view.terminal import print_json, reported_errors, say

if TYPE_CHECKING:
    from autotune.records.selftest import SelftestReport, Tally


def selftest(
    aa: Annotated[bool, typer.Option("--aa", help="Settings that do nothing: every claim is false.")] = False,
    power: Annotated[
        bool, typer.Option("--power", help="A busy wait of 3, 5, 10 and 20 % in the baseline: what is found of it.")
    ] = False,
    runs: Annotated[int, typer.Option(min=0, help="Real searches on this machine instead of replayed ones.")] = 0,
    replay: Annotated[int, typer.Option(min=1, help="Replayed searches for each machine and gain.")] = 1000,
    budget: Annotated[str, typer.Option(help="Of each real search.")] = "40s",
    recorded: Annotated[
        Path | None, typer.Option(help="Also replay the launches that --record has kept in this file.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Keep the launches of real --aa searches in this file.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Test the tool on itself: searches in which the true speed-up is known."""
    from autotune.selftest.run import SelftestOptions, run_selftest
    from autotune.units import parse_duration

    with reported_errors(as_json=json_output), stop_on_signals() as stop:
        options = SelftestOptions(
            runs=runs,
            replays=replay,
            budget_seconds=parse_duration(budget, name="--budget"),
            recorded=recorded,
            record=record,
        )
        reports = []
        for is_power in [False] * (aa or not power) + [True] * power:
            report = run_selftest(dataclasses.replace(options, power=is_power), heard=say, should_stop=stop)
            reports.append(report)
            if not json_output:
                print_report(report)
        if json_output:
            print_json("[" + ",".join(report.to_json() for report in reports) + "]")
        stop.exit_if_set()
        refuse_false_claims(reports)


def refuse_false_claims(reports: Sequence[SelftestReport]) -> None:
    """Make sure that there were no more false claims than the tool promises.

    Raises:
        MachineError: there were.
    """
    from autotune.errors import MachineError

    for tally in (tally for report in reports for tally in report.tallies):
        if is_fooled(tally):
            raise MachineError(
                f"machine {tally.noise!r}: {tally.overclaims} of {tally.runs} searches claimed more than there is",
                hint="do not trust a claim made under such noise; please report it",
            )


def is_fooled(tally: Tally) -> bool:
    """Return whether so many false claims are no accident, at 99 %: a claim may err by its own 1 %, an A/A by 0.1 %."""
    from autotune.selftest.run import ALLOWED_FALSE_RATE
    from autotune.selftest.tally import exceeds_rate

    allowed = ALLOWED_FALSE_RATE if tally.truth == 1.0 else 10 * ALLOWED_FALSE_RATE
    return exceeds_rate(tally.overclaims, tally.runs, allowed)


def print_report(report: SelftestReport) -> None:
    """Print the counts as a table on stdout."""
    from autotune.format import format_duration

    title = "nothing is faster, every claim is false" if report.kind == "aa" else "a known gain, planted"
    print(f"{title} ({format_duration(report.elapsed_seconds)})")
    print("machine     true  searches  claims  too much  at most  covered  raced  measured")
    for tally in report.tallies:
        covered = f"{100 * tally.covered / tally.with_finals:.1f}%" if tally.with_finals else "-"
        raced = f"{100 * tally.raced / tally.launches:.2f}%" if tally.launches else "-"
        measured = "-" if tally.measured_fraction is None else f"{100 * tally.measured_fraction:.0f}%"
        print(
            f"{tally.noise:<10}{tally.truth:>5.2f}x{tally.runs:>10,}{tally.claims:>8,}{tally.overclaims:>10,}"
            f"{100 * tally.worst_false_rate:>8.2g}%{covered:>9}{raced:>7}{measured:>10}"
        )
    sys.stdout.flush()
