"""`autotune presets` and `autotune history`: what there is to begin with."""

from __future__ import annotations

import json
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
