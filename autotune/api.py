"""The search as Python calls it: what the command line takes as words, taken as values."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from autotune.errors import UsageError
from autotune.targets.drift_limits import read_drift_limits
from autotune.targets.script import read_script
from autotune.units import parse_duration

if TYPE_CHECKING:
    from autotune.records.profile import Profile
    from autotune.records.script import Script
    from autotune.search.progress import SearchReporter
    from autotune.search.run import SearchOptions


def run_search(
    target: object = None,
    options: SearchOptions | None = None,
    *,
    budget: str | float | None = None,
    max_drift: str | Sequence[str] | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
    reporter: SearchReporter | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Profile:
    """Search for faster settings of a training, and return the answer, which is in best.json too.

    Args:
        target: `file.py:attr` or `package.module:attr`; a workload that a module holds by a name; a script's command as
            a list of words; None for that of [tool.autotune], else the built-in demo.
        options: everything that may be asked for; what is given below goes before.
        budget: deadline of the whole search: seconds, or as on the command line, `20m`.
        max_drift: how much worse the loss and each metric may get, as on the command line: `0.5%`, `accuracy:0.1pp`.
        progress: show on standard error how it goes.
        folder: working folder; None for the current one.
        reporter: hears what happens, instead of `progress`.
        should_stop: polled; True ends the search early, everything finished is kept.

    Raises:
        UsageError: the target or an option cannot be used as given, or the budget is too small.
        NothingFeasibleError: the user's own settings break the memory limit.
        TargetError: the training fails with its own settings.
        BusyError: another search is at work in the folder.
        FolderError: the state folder is not ours.
        MachineError: the disk is full or cannot be written.
    """
    from autotune.search import run as stage

    asked = options or stage.SearchOptions()
    if budget is not None:
        seconds = parse_duration(budget, name="budget") if isinstance(budget, str) else float(budget)
        asked = dataclasses.replace(asked, budget_seconds=seconds)
    if max_drift is not None:
        limits = [max_drift] if isinstance(max_drift, str) else list(max_drift)
        asked = dataclasses.replace(asked, max_drift=read_drift_limits(limits))
    named = name_target(target, Path(folder or Path.cwd()))
    with _show(asked.budget_seconds) if progress and reporter is None else nullcontext(reporter) as listener:
        return stage.run_search(named, asked, folder=folder, reporter=listener, should_stop=should_stop)


def _show(budget_seconds: float) -> AbstractContextManager[SearchReporter]:
    from autotune.cli.view.search import search_view

    return search_view(budget_seconds)


def name_target(target: object, folder: Path) -> str | Script | None:
    """Return a target as a search takes it.

    Args:
        target: as of `run_search`.
        folder: the working folder.

    Raises:
        UsageError: it is none of these.
    """
    from autotune.records.script import Script

    if target is None or isinstance(target, str | Script):
        return target
    if isinstance(target, list | tuple):
        return read_script(tuple(str(word) for word in target))
    for module in [*sys.modules.values()]:
        for name, value in [*vars(module).items()] if isinstance(module, ModuleType) else []:
            if value is target:
                return f"{_locate(module, folder)}:{name}"
    raise UsageError(
        f"the target is a {type(target).__name__} that no module holds by a name",
        hint="bind it at the top of a file: trials import it from there; or give file.py:attr",
    )


def _locate(module: ModuleType, folder: Path) -> str:
    """Return where a module is imported from: its name, of the one that runs its file."""
    file = getattr(module, "__file__", None)
    if module.__name__ != "__main__":
        return module.__name__
    if file is None:
        raise UsageError(
            "the target is defined in a session or a notebook, which no trial can import",
            hint="write it to a file and import it from there",
        )
    return os.path.relpath(file, folder)
