"""What a training trains: the target named, or the one that settings, the search in this folder or the demo give."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import AutotuneError, UsageError
from autotune.records.script import Script
from autotune.records.secrets import is_masked
from autotune.search.folder import find_search_folder
from autotune.targets.resolve import ResolvedTarget, resolve_target


def resolve_training_target(target: str | Script | None, folder: Path) -> ResolvedTarget:
    """Return the target: the argument, [tool.autotune]'s, the one this folder's newest search had, or the demo.

    Raises:
        UsageError: the settings file is not valid, or the search's command had a secret in it, which no file holds.
    """
    found = find_search_folder(folder)
    remembered = None
    if found is not None:
        try:
            remembered = found.read_state().target
        except AutotuneError:
            remembered = None
    resolved = resolve_target(target, folder=folder, remembered=remembered)
    script = resolved.target.script
    if resolved.origin == "search" and script is not None and is_masked(script.command):
        raise UsageError(
            f"the search in this folder has no secrets in its records: {resolved.target.spec}",
            hint="name the command again, with your own words for ***: autotune train ... -- python train.py ...",
        )
    return resolved
