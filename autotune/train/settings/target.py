"""What a training trains: the target named, or the one that settings, the search in this folder or the demo give."""

from __future__ import annotations

import shlex
from pathlib import Path

from autotune.errors import AutotuneError, UsageError
from autotune.records.script import Script
from autotune.records.secrets import is_masked
from autotune.records.trial import Target
from autotune.search.store.folder import SearchFolder, list_searches
from autotune.search.store.seal import is_sealed
from autotune.targets.resolve import ResolvedTarget, resolve_target


def resolve_training_target(target: str | Script | None, folder: Path) -> ResolvedTarget:
    """Return the target of a training; as `resolve_remembered`."""
    return resolve_remembered(target, folder, command="train --profile best.json")


def resolve_remembered(target: str | Script | None, folder: Path, *, command: str) -> ResolvedTarget:
    """Return the target: the argument, [tool.autotune]'s, the one this folder's newest search had, or the demo.

    A target is started, so what a search remembers is taken only where this user has made that search.

    Args:
        target: as typed; None when it was left out.
        folder: the working folder.
        command: of this tool, for the hints.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
        UsageError: the settings file is not valid, the search may be somebody else's, or its command had a secret in
            it, which no file holds.
    """
    named = resolve_target(target, folder=folder)
    found = None if named.origin != "demo" else _find_search(folder)
    if found is None:
        return named
    search, remembered = found
    if not is_sealed(search):
        raise UsageError(
            f"no target was given, and {search.path} may be somebody else's: nothing in your cache folder tells that "
            "autotune made it for you, here",
            hint=f"name the target: autotune {command} {_show_words(remembered)}",
        )
    if remembered.script is not None and is_masked(remembered.script.command):
        raise UsageError(
            f"the search in this folder has no secrets in its records: {remembered.spec}",
            hint=f"name the command again, with your own words for ***: autotune {command} -- python train.py ...",
        )
    return resolve_target(None, folder=folder, remembered=remembered)


def _find_search(folder: Path) -> tuple[SearchFolder, Target] | None:
    """Return the newest search and its target: of those that got to measure something, where there are any."""
    found: list[tuple[SearchFolder, Target]] = []
    for search in list_searches(folder):
        try:
            found.append((search, search.read_state().target))
        except AutotuneError:
            continue
        if search.read_probe() is not None:
            return found[-1]
    return found[0] if found else None


def _show_words(target: Target) -> str:
    words = [target.spec] if target.script is None else ["--", *target.script.command]
    return shlex.join(words)
