"""What a training trains: the target named, or the one that settings, the search in this folder or the demo give."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import AutotuneError
from autotune.records.script import Script
from autotune.search.folder import find_search_folder
from autotune.targets.resolve import ResolvedTarget, resolve_target


def resolve_training_target(target: str | Script | None, folder: Path) -> ResolvedTarget:
    """Return the target: the argument, [tool.autotune]'s, the one this folder's newest search had, or the demo.

    Raises:
        UsageError: the settings file is not valid.
    """
    found = find_search_folder(folder)
    remembered = None
    if found is not None:
        try:
            remembered = found.read_state().target
        except AutotuneError:
            remembered = None
    return resolve_target(target, folder=folder, remembered=remembered)
