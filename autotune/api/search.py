"""`autotune.run_search`."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.api.profile import Profile
from autotune.api.targets import find_folder, name_target
from autotune.arguments import shorten, shown_hints
from autotune.errors import AutotuneError, UsageError
from autotune.records.objective import read_objective
from autotune.records.quality import DriftLimits
from autotune.targets.drift_limits import GivenLimits, join_limits
from autotune.units import parse_duration

if TYPE_CHECKING:
    from autotune.search.progress import SearchReporter
    from autotune.search.run import SearchOptions

Stop = Callable[[], bool]


@shown_hints()
def run_search(
    target: object = None,
    options: SearchOptions | None = None,
    *,
    budget: str | float | None = None,
    max_drift: str | Sequence[str] | Mapping[str, str] | DriftLimits | None = None,
    objective: str | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
    reporter: SearchReporter | None = None,
    should_stop: Stop = lambda: False,
) -> Profile:
    """Search for faster settings of a training, and return the answer, which is in best.json too.

    Args:
        target: `file.py:attr` or `package.module:attr`; a workload that a module holds by a name; a script's command as
            a text or a list of words; None for that of [tool.autotune], else the built-in demo.
        options: everything that may be asked for; what is given below goes before.
        budget: deadline of the whole search: seconds, or as on the command line, `20m`.
        max_drift: how much worse the loss and each metric may get: `0.5%`, or each by its name,
            `{"loss": "0.5%", "accuracy": "0.1pp"}`.
        objective: what is made best: `throughput`, `time-to-finish` of the planned run in `options`, or `memory`.
        progress: show how it goes, in a notebook below the cell, else on standard error; the first Ctrl-C, or the
            notebook's stop, then ends the search with what is known.
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

    asked = _read_options(options, budget, max_drift, objective)
    work = find_folder(folder)
    named = name_target(target, work)
    if not progress or reporter is not None:
        return Profile.of(stage.run_search(named, asked, folder=work, reporter=reporter, should_stop=should_stop))
    with _shown(asked.budget_seconds, should_stop) as (view, stop):
        return Profile.of(stage.run_search(named, asked, folder=work, reporter=view, should_stop=stop))


def _read_options(options: object, budget: object, max_drift: object, objective: object) -> SearchOptions:
    from autotune.search.run import SearchOptions

    asked = SearchOptions() if options is None else options
    if not isinstance(asked, SearchOptions):
        raise UsageError(f"options is {shorten(options)}", hint='give SearchOptions(...), or budget="20m" by its name')
    if isinstance(budget, str):
        budget = parse_duration(budget, name="budget")
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise UsageError(f"budget is {shorten(budget)}", hint='give seconds, or "20m"')
        asked = dataclasses.replace(asked, budget_seconds=float(budget))
    if objective is not None:
        asked = dataclasses.replace(asked, objective=read_objective(objective, name="objective"))
    return asked if max_drift is None else dataclasses.replace(asked, max_drift=_read_limits(max_drift))


def _read_limits(given: object) -> DriftLimits:
    if isinstance(given, DriftLimits):
        return given
    texts = [given] if isinstance(given, str) else given
    if isinstance(given, Mapping):
        texts = [f"{name}:{limit}" if isinstance(limit, str) else limit for name, limit in given.items()]
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        hint = 'write "0.5%", or {"loss": "0.5%", "accuracy": "0.1pp"}'
        raise UsageError(f"max_drift is {shorten(given)}", hint=hint)
    return join_limits(GivenLimits(older=texts, name=lambda field: field).read())


@contextmanager
def _shown(budget_seconds: float, should_stop: Stop) -> Iterator[tuple[SearchReporter, Stop]]:
    """Yield what shows a search, and what stops it: on the main thread a first Ctrl-C does too, and a second ends it.

    Raises:
        KeyboardInterrupt: the first one came before there was anything to return.
    """
    from autotune.cli.stopping import stop_on_signals
    from autotune.cli.view.search import search_view

    if threading.current_thread() is not threading.main_thread():
        with search_view(budget_seconds) as view:
            yield view, should_stop
        return
    with stop_on_signals(signals=(signal.SIGINT,)) as flag, search_view(budget_seconds) as view:
        try:
            yield view, lambda: flag() or should_stop()
        except AutotuneError as error:
            if flag.signal_number is not None:
                raise KeyboardInterrupt from error
            raise
