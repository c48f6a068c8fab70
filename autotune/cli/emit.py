"""`autotune export` and `autotune report`: the answer in other forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.view.terminal import print_json, print_plain, printable, reported_errors, say, warn


def export(
    profile: Annotated[Path, typer.Option("--profile", help="The profile to export, e.g. best.json.")],
    to: Annotated[str, typer.Option("--to", help="One of: torch, hf, lightning, accelerate, deepspeed.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print text, mapped and unmapped knobs as JSON.")] = False,
) -> None:
    """Print a profile's settings for another tool; what it cannot express is named on stderr."""
    from autotune.emit.export import export_config
    from autotune.machine.hardware import read_hardware
    from autotune.records.profile import Profile

    with reported_errors(as_json=json_output):
        answer = Profile.load(profile)
        # By its path only what this machine has found itself: a library is code, and whose path a profile says is open.
        found = read_hardware().host_allocators
        here = {name: path for name, path in answer.hardware.host_allocators.items() if found.get(name) == path}
        exported = export_config(answer.config, to, host_allocators=here)
        own = answer.hardware.preloaded_malloc
        if own is not None and answer.config.host_allocator != "default":
            warn(f"take {printable(own)} out of your own LD_PRELOAD: it was replaced when this was measured")
        if json_output:
            print_json(exported.to_json())
            return
        print_plain(exported.text)
        for name, reason in exported.unmapped.items():
            warn(f"{name} is not in it: {reason}")


def report(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON.")] = False,
) -> None:
    """Write this folder's newest search that has an answer as one HTML page that needs no network."""
    from autotune.errors import MachineError, UsageError
    from autotune.records.codec import write_text
    from autotune.search.store.folder import list_searches, require_file

    with reported_errors(as_json=json_output):
        found = next((search for search in list_searches(Path.cwd()) if search.profile.exists()), None)
        if found is None:
            raise UsageError("no search with an answer was made in this folder", hint="run autotune search first")
        require_file(out)
        if out.exists() and not force:
            raise UsageError(f"{out} exists", hint="choose another --out, or pass --force to replace it")
        try:
            write_text(out, render_search(found.path))
        except OSError as error:
            raise MachineError(f"{out}: {error.strerror}", hint="choose a folder that can be written") from None
        if json_output:
            print_json(json.dumps({"report": str(out)}))
        else:
            say(f"{out} written")


def render_search(path: Path) -> str:
    """Return the page of a search.

    Raises:
        AutotuneError: the search's files are damaged.
        UsageError: the search has no probe report.
    """
    from autotune.emit.report import render_report
    from autotune.errors import UsageError
    from autotune.records.profile import Profile
    from autotune.search.store.folder import SearchFolder

    folder = SearchFolder(path)
    probe = folder.read_probe()
    if probe is None:
        raise UsageError(f"{path} holds no probe report", hint="run autotune search again")
    return render_report(Profile.load(folder.profile), probe, folder.read_all_trials())
