"""`autotune presets`, `history`, `status` and `env`: what there is, what is known, what runs, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.view.terminal import print_json, reported_errors, say
from autotune.format import count


def presets(
    json_output: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the shipped presets: settings with a name, which nobody has measured on your machine."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.lists import print_presets
        from autotune.presets import load_presets

        if json_output:
            print_json(json.dumps([one.model_dump(mode="json") for one in load_presets()], indent=2))
        else:
            print_presets(load_presets())


def history(
    clear: Annotated[bool, typer.Option("--clear", help="Forget all of them.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the searches that later ones begin with: what was tuned on this machine, and what each change brought."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.lists import print_history
        from autotune.search.store.history import forget, list_past

        if clear:
            say(f"forgotten: {count(forget(), 'search', 'searches')}")
            return
        past = list_past()
        if json_output:
            print_json(json.dumps([one.model_dump(mode="json") for one in past], indent=2))
        else:
            print_history(past)


def status(
    json_output: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what is at work in this folder, a search or trainings, and how far it is; from another terminal."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.lists import print_status
        from autotune.train.runs.status import read_status

        found = read_status(Path.cwd())
        if json_output:
            print_json(found.to_json())
        else:
            print_status(found)


def env(
    json_output: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print versions and machine, for a bug report: no path of yours, no variable and no secret is in it."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.lists import print_environment
        from autotune.machine.hardware import read_hardware, read_software

        hardware, software = read_hardware(), read_software()
        if json_output:
            found = {"software": software.model_dump(mode="json"), "hardware": hardware.model_dump(mode="json")}
            print_json(json.dumps(found, indent=2))
        else:
            print_environment(hardware, software)
