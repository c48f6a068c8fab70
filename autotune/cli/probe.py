"""`autotune probe`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.stopping import StopFlag, stop_on_signals
from autotune.cli.target import (
    Device,
    Knobs,
    Target,
    announce_target,
    has_target,
    read_target,
    set_device,
    show_target,
    suggest_trainings,
)
from autotune.cli.view.help import OUTPUT, Quiet
from autotune.cli.view.terminal import print_json, reported_errors, say, warn
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.records.probe import MachineReport, ProbeReport
    from autotune.records.script import Script
    from autotune.records.trial import Target as TargetRecord
    from autotune.records.trial import TrialResult


def probe(
    target: Target = None,
    full: Annotated[
        bool, typer.Option("--full", rich_help_panel=OUTPUT, help="Print all that was found, not what fits a screen.")
    ] = False,
    device: Device = None,
    knob: Knobs = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="As --full, and keep what the training printed."),
    ] = False,
    quiet: Quiet = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Show where a step's time and memory go, what could be gained at most, and what to try first (under a minute).

    Without any target it is about the machine alone; `autotune probe demo` shows the built-in demo.
    """
    with reported_errors(as_json=json_output, quiet=quiet):
        chosen, folder = read_target(target, command="probe", knobs=knob), Path.cwd()
        set_device(device, chosen)
        _warn_of_search(folder)
        with stop_on_signals() as stop:
            try:
                if has_target(chosen, folder):
                    _probe_target(chosen, folder, stop, as_json=json_output, full=full, verbose=verbose)
                else:
                    _probe_machine(folder, stop, as_json=json_output)
            except AutotuneError:
                if stop.signal_number is not None:
                    say("stopped: nothing is kept of this probe")
                stop.exit_if_set()  # what a signal has cut short is no error
                raise
            stop.exit_if_set()


def _warn_of_search(folder: Path) -> None:
    from autotune.search.store.folder import find_search_at_work

    searcher = find_search_at_work(folder)
    if searcher is not None:
        warn(f"a search is at work in this folder ({searcher}): each disturbs the figures of the other")


def _probe_machine(folder: Path, stop: StopFlag, *, as_json: bool) -> None:
    from autotune.cli.pages.probe import print_machine
    from autotune.probe.run import run_machine_probe

    suggest_trainings(folder, command="probe")
    machine = run_machine_probe(should_stop=stop)
    if as_json:
        print_json(machine.to_json())
    else:
        print_machine(machine)
    _keep(machine, folder)


def _probe_target(
    chosen: str | Script | None, folder: Path, stop: StopFlag, *, as_json: bool, full: bool, verbose: bool
) -> None:
    from autotune.cli.pages.probe import print_report
    from autotune.probe.run import run_probe
    from autotune.records.layout import PROBE_LOG_FILE, STATE_FOLDER
    from autotune.search.store.folder import keep_log

    announce_target(chosen, folder, command="probe")
    report = run_probe(
        chosen,
        keep=partial(_keep_for_search, folder),
        keep_log=partial(keep_log, folder),
        keeps_log=verbose,
        should_stop=stop,
    )
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, full=full or verbose)
    _keep(report, folder)
    if verbose:
        say(f"log: {STATE_FOLDER}/{PROBE_LOG_FILE}")
    if not as_json:
        say(f"next: autotune search --budget 20m{show_target(chosen)}")


def _keep_for_search(folder: Path, target: TargetRecord, report: ProbeReport, trial: TrialResult) -> None:
    """Keep the probe for a search that follows; where that is not possible, it probes again."""
    from autotune.search.store.kept_probe import keep_probe

    with suppress(OSError, AutotuneError):
        keep_probe(folder, target, report, trial)


def _keep(report: ProbeReport | MachineReport, folder: Path) -> None:
    """Save the report; where that is not possible, what was printed has to do."""
    from autotune.search.store.folder import write_report

    try:
        path = write_report(folder, report)
    except (OSError, AutotuneError) as error:
        say(f"the report could not be saved: {error}")
    else:
        say(f"report: {path.relative_to(folder)}")
