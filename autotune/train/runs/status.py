"""What is at work in a folder, read from its files: nothing is asked of the processes, and nothing is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean

from autotune.errors import AutotuneError
from autotune.lock import find_holder
from autotune.records.layout import LOCK_FILE, RUNS_FOLDER
from autotune.records.profile import Profile
from autotune.records.status import SearchStatus, Status, TrainingStatus
from autotune.search.store.folder import SearchFolder, find_search_at_work, find_search_folder
from autotune.train.loop.metrics import read_lines
from autotune.train.runs.folder import open_run

_LAST_BYTES = 64 * 1024


def read_status(folder: Path) -> Status:
    """Return what is at work in a working folder.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    search = find_search_folder(folder)
    runs = sorted((folder / RUNS_FOLDER).glob("*"))
    trainings = [read_training(path, folder, holder) for path in runs if (holder := find_holder(path / LOCK_FILE))]
    return Status(
        search=None if search is None else read_search(search, find_search_at_work(folder)), trainings=tuple(trainings)
    )


def read_search(search: SearchFolder, holder: str | None) -> SearchStatus:
    """Return how far a search is.

    Args:
        search: its folder.
        holder: who holds the lock of the folder's searches, in words; None when nobody does.
    """
    results = search.read_all_trials()
    trials = Counter[str](one.spec.purpose for one in results)
    try:
        profile = Profile.load(search.profile)
    except AutotuneError:
        profile = None  # the baseline is not measured yet
    own = None if profile is None else profile.baseline_config
    rates = [one.measurement.samples_per_second for one in results if one.measurement and own == one.spec.config]
    return SearchStatus(
        label=search.read_state().target.spec,
        holder=holder,
        trials=dict(trials),
        profile=profile,
        own_rate=fmean(rates) if rates else None,
    )


def read_training(path: Path, folder: Path, holder: str) -> TrainingStatus:
    """Return how far a training is.

    Args:
        path: of its run folder.
        folder: the working folder.
        holder: who is at work in it, in words.
    """
    try:
        lines = [one for one in read_lines(path, tail_bytes=_LAST_BYTES) if "loss" in one]
    except OSError:
        lines = []
    last = lines[-1] if lines else {}
    try:
        planned = open_run(path).plan.steps
    except AutotuneError:
        planned = None
    return TrainingStatus(
        folder=str(path.relative_to(folder)),
        holder=holder,
        step=last.get("step"),
        planned_steps=planned,
        loss=last.get("loss"),
        samples_per_second=last.get("samples_per_second"),
    )
