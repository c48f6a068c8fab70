"""`autotune probe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.target import Knobs, Target, announce_target, read_target, show_target
from autotune.cli.terminal import print_json, reported_errors, result_console, say

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.records.probe import ProbeReport

_BAR_WIDTH = 40


def probe(
    target: Target = None,
    knob: Knobs = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Show what this machine can do, where a step's time and memory go, and what the ceiling is (under a minute)."""
    from autotune.probe.run import run_probe

    with reported_errors(as_json=json_output):
        chosen = read_target(target, knobs=knob)
        announce_target(chosen, Path.cwd())
        report = run_probe(chosen)
        if json_output:
            print_json(report.to_json())
        else:
            print_report(report)
            say(f"next: autotune search --budget 20m{show_target(chosen)}")


def print_report(report: ProbeReport) -> None:
    """Print a probe's report on stdout."""
    from rich.text import Text

    from autotune.units import format_bytes, format_rate

    console = result_console()
    hardware, target = report.hardware, report.target
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_total_bytes)})" for gpu in hardware.gpus)
    console.print(Text("machine", style="bold"))
    console.print(Text(f"  {hardware.cpu_name}, {hardware.usable_cpu_count} usable CPUs"))
    console.print(Text(f"  memory {format_bytes(hardware.memory_limit_bytes)}, GPU: {gpus or 'none'}"))
    console.print(Text(f"  Python {report.software.python}, torch {report.software.torch}"))
    for rate in target.ceilings.matmul:
        console.print(Text(f"  {rate.dtype} matrix products: {rate.flops_per_second / 1e9:,.0f} GFLOP/s"))
    console.print(Text(f"target {target.label} on {target.device}", style="bold"))
    rate_text = format_rate(report.measurement.samples_per_second)
    step = 1000 * report.measurement.seconds_per_step
    memory = format_bytes(report.measurement.peak_memory.device_bytes or report.measurement.peak_memory.host_bytes)
    size = f"{target.model.parameter_count:,} parameters"
    console.print(Text(f"  {size}, {rate_text}, {step:.1f} ms a step, peak memory {memory}"))
    for line in _phase_bars(report):
        console.print(Text(f"  {line}"))
    console.print(Text("verdict", style="bold"))
    console.print(Text(f"  {report.verdict.sentence}"))
    for sentence in (*target.warnings, *hardware.missing):
        console.print(Text(f"  note: {sentence}", style="yellow"))
    for title, rows in (
        ("worth trying", [(a.knob, a.reason) for a in report.advice]),
        ("ruled out", [(f"{r.knob} {'' if r.value is None else r.value}".strip(), r.reason) for r in report.ruled_out]),
    ):
        console.print(Text(title, style="bold"))
        _print_rows(console, rows)


def _print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    """Print two columns: wrapped to a terminal's width, one line a row in a pipe."""
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        for left, right in rows:
            console.print(Text(f"  {left:<38}{right}"))
        return
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    for left, right in rows:
        table.add_row(Text(left), Text(right))
    console.print(table)


def _phase_bars(report: ProbeReport) -> list[str]:
    phases = report.target.phases
    named = {
        "loader": phases.data_wait_seconds,
        "copy": phases.copy_seconds,
        "forward": phases.forward_seconds,
        "backward": phases.backward_seconds,
        "optimizer": phases.optimizer_seconds,
        "other": phases.other_seconds,
    }
    total = sum(named.values()) or 1.0
    return [
        f"{name:<10}{1000 * seconds:8.1f} ms {100 * seconds / total:4.0f} % {'#' * round(_BAR_WIDTH * seconds / total)}"
        for name, seconds in named.items()
        if name != "other" or seconds > 0
    ]
