"""The folder of one search: readable without our code, one writer at a time, `trials/` the truth.

.autotune/{lock, <target>-<date>/{{search,probe,finals,best}.json, seal, study.db, worker,
trials/0007/{spec,result}.json}}
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.errors import AutotuneError, FolderError, UsageError
from autotune.lock import find_holder, hold_lock
from autotune.records.codec import make_folder, read_record, sync_folder, write_bytes, write_record, write_text
from autotune.records.explanation import Explanation
from autotune.records.finals import FinalsRecord
from autotune.records.layout import (
    COMPILER_CACHE,
    EXPLANATION_FILE,
    EXPLANATION_FOLDER,
    FINALS_FILE,
    LOCK_FILE,
    PROBE_FILE,
    PROBE_LOG_FILE,
    RECALLED_FILE,
    RESULT_FILE,
    SCREENS_FILE,
    SPEC_FILE,
    STATE_FOLDER,
    TRIALS_FOLDER,
    WORKER_FILE,
    show_log,
    trial_name,
)
from autotune.records.probe import MachineReport, ProbeReport
from autotune.records.profile import MAX_PROFILE_BYTES, Profile
from autotune.records.quality import DriftLimits
from autotune.records.reading import describe_kind, parse_json, read_bytes
from autotune.records.search import Recalled, Screens, SearchState
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.log import SearchLog
from autotune.search.store.history import Effects, make_past, recall, remember

_TRIAL_NUMBER = re.compile(r"[0-9]{4,9}")
_WORKER_DIGITS = 16
_WORKER = re.compile(rf"[0-9a-f]{{{_WORKER_DIGITS}}}")
_NAME = re.compile(r"(?P<slug>.+)-(?P<stamp>[0-9]{8}-[0-9]{6})(?:-(?P<count>[0-9]+))?")


@dataclass(frozen=True)
class SearchFolder:
    """One search on disk.

    Attributes:
        path: its folder.
    """

    path: Path

    def is_named_after(self, spec: str) -> bool:
        """Return whether its name is that of a search of a target, as far as a name can tell."""
        match = _NAME.fullmatch(self.path.name)
        return match is not None and match["slug"] == _slug(spec)

    @property
    def began(self) -> datetime | None:
        """When it was made, by this machine's clock then; None for a name that does not tell."""
        stamp, _ = _read_stamp(self.path.name)
        try:
            return datetime.strptime(stamp, "%Y%m%d-%H%M%S")
        except ValueError:
            return None

    @property
    def trials(self) -> Path:
        """Folder of the numbered trials."""
        return self.path / TRIALS_FOLDER

    @property
    def database(self) -> Path:
        """Copy of the Optuna study, a SQLite file."""
        return self.path / "study.db"

    @property
    def compiled(self) -> Path:
        """TorchInductor's cache: code that is loaded."""
        return self.path / COMPILER_CACHE

    @property
    def profile(self) -> Path:
        """This search's own copy of its answer."""
        return self.path / "best.json"

    @property
    def state_file(self) -> Path:
        """What it was asked to do."""
        return self.path / "search.json"

    def read_state(self) -> SearchState:
        """Return what the search was asked to do.

        Raises:
            AutotuneError: the file is missing or damaged.
        """
        return read_record(self.state_file, SearchState)

    def write_state(self, state: SearchState) -> None:
        """Save what the search was asked to do."""
        write_record(self.state_file, state)

    def read_probe(self) -> ProbeReport | None:
        """Return the probe's report; None when the search did not get that far, or the file is damaged."""
        try:
            return read_record(self.path / PROBE_FILE, ProbeReport)
        except AutotuneError:
            return None

    def write_probe(self, report: ProbeReport) -> None:
        """Save the probe's report."""
        write_record(self.path / PROBE_FILE, report)

    def recall(self, report: ProbeReport) -> Recalled:
        """Return what this search begins with from earlier ones: the same each time that it is resumed.

        Args:
            report: of its probe.
        """
        try:
            return read_record(self.path / RECALLED_FILE, Recalled)
        except AutotuneError:
            recalled, state = Recalled(), self.read_state()
            if state.uses_history:
                is_usual = state.max_drift == DriftLimits()
                recalled = recall(report, self.path.parents[1], knows_refusals=is_usual)
        write_record(self.path / RECALLED_FILE, recalled)
        return recalled

    def remember(self, log: SearchLog, profile: Profile, effects: Effects) -> None:
        """Keep what was read for later searches."""
        if self.read_state().uses_history:
            remember(make_past(log, profile, effects, self.path.parents[1]))

    def read_screens(self) -> Screens:
        """Return what the loss checks have shown so far; nothing where the file is damaged: it is shown again."""
        try:
            return read_record(self.path / SCREENS_FILE, Screens)
        except AutotuneError:
            return Screens()

    def write_screens(self, screens: Screens) -> None:
        """Save what the loss checks have shown so far."""
        write_record(self.path / SCREENS_FILE, screens)

    @property
    def explanation(self) -> SearchFolder:
        """Where the launches are that were made to explain the answer: numbered on their own."""
        return SearchFolder(self.path / EXPLANATION_FOLDER)

    def read_explanation(self) -> Explanation | None:
        """Return the last explanation of the answer; None without one, or where the file is damaged."""
        try:
            return read_record(self.explanation.path / EXPLANATION_FILE, Explanation)
        except AutotuneError:
            return None

    def write_explanation(self, explanation: Explanation) -> None:
        """Save an explanation of the answer.

        Raises:
            OSError: it cannot be written.
        """
        make_folder(self.explanation.path)
        write_record(self.explanation.path / EXPLANATION_FILE, explanation)

    def read_worker(self) -> str:
        """Return by what other workers of a shared study know this search: drawn once, the same when it is resumed."""
        path = self.path / WORKER_FILE
        try:
            found = read_bytes(path, max_bytes=_WORKER_DIGITS).decode("ascii", "replace")
        except OSError:
            found = ""
        if not _WORKER.fullmatch(found):
            found = secrets.token_hex(_WORKER_DIGITS // 2)
            write_text(path, found)
        return found

    def read_finals(self) -> FinalsRecord | None:
        """Return the looks of the finals so far; None before the first one.

        Raises:
            AutotuneError: the file is damaged. What was risked is not known then, so nothing may be claimed.
        """
        path = self.path / FINALS_FILE
        return read_record(path, FinalsRecord) if path.exists() else None

    def write_finals(self, record: FinalsRecord) -> None:
        """Save the looks of the finals so far."""
        write_record(self.path / FINALS_FILE, record)

    def find_log(self, number: int) -> Path:
        """Return the file of what a trial has printed, as seen from the working folder."""
        return show_log(self.path, number)

    def adopt_probe(self, report: ProbeReport, trial: TrialResult) -> None:
        """Take a probe that was made before as this search's own, which is its trial 0."""
        folder = self.trials / trial_name(trial.spec.number)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / SPEC_FILE, trial.spec)
        write_record(folder / RESULT_FILE, trial)
        self.write_probe(report)

    def read_trials(self) -> list[TrialResult]:
        """Return every finished trial in order; damaged and interrupted ones are left out, to be run again."""
        return [result for result in self.read_all_trials() if result.status is not TrialStatus.INTERRUPTED]

    def count_interrupted(self) -> int:
        """Return how many timings were cut, by the end of the time left or by the user."""
        cut = (one for one in self.read_all_trials() if one.status is TrialStatus.INTERRUPTED)
        return sum(one.spec.purpose == "measure" for one in cut)

    def read_all_trials(self) -> list[TrialResult]:
        """Return every trial that has ended in order, the interrupted ones among them; damaged ones are left out."""
        return [result for _, result in self._read_each() if result is not None]

    def find_damaged(self) -> list[str]:
        """Return the numbers of the trials whose results cannot be read; they stay as they are."""
        return [name for name, result in self._read_each() if result is None]

    def _read_each(self) -> Iterator[tuple[str, TrialResult | None]]:
        for file in sorted(self.trials.glob(f"*/{RESULT_FILE}")):
            try:
                yield file.parent.name, read_record(file, TrialResult)
            except AutotuneError:
                yield file.parent.name, None

    def next_number(self) -> int:
        """Return a trial number that was never used."""
        numbers = [int(folder.name) for folder in self.trials.glob("[0-9]*") if _TRIAL_NUMBER.fullmatch(folder.name)]
        return max(numbers, default=-1) + 1


@contextmanager
def lock_searches(folder: Path) -> Iterator[None]:
    """Hold the lock of a working folder's searches; the kernel releases it when its holder dies.

    Raises:
        BusyError: another search is at work in the folder.
        FolderError: `.autotune` belongs to someone else or is writable by others.
        MachineError: the folder's file system has no locks.
    """
    with hold_lock(prepare_state_folder(folder) / LOCK_FILE, f"another search is at work in {folder}"):
        yield


def find_search_at_work(folder: Path) -> str | None:
    """Return in words who searches in a working folder now; None when nobody does. Nothing is written."""
    return find_holder(folder / STATE_FOLDER / LOCK_FILE)


def create_search_folder(folder: Path, spec: str) -> SearchFolder:
    """Return a new folder for a search of a target, inside the working folder's `.autotune`.

    Its name tells when it was made, and never an earlier time than the names before it, whatever the clock does.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    root = prepare_state_folder(folder)
    while True:
        newest, count = max((_read_stamp(path.name) for path in root.iterdir()), default=("", 0))
        now = time.strftime("%Y%m%d-%H%M%S")
        stamp = now if now > newest else f"{newest}-{count + 1}"
        path = root / f"{_slug(spec)}-{stamp}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another search took the name just now
            continue
        (path / "trials").mkdir()
        sync_folder(root)  # else a power cut takes the folder away, with all that was synced in it
        return SearchFolder(path)


def list_searches(folder: Path) -> list[SearchFolder]:
    """Return the searches in a working folder, the newest first, damaged ones among them; a link is none.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    root = folder / STATE_FOLDER
    if not root.exists():
        return []
    _check_root(root)
    found = [SearchFolder(file.parent) for file in root.glob("*/search.json")]
    own = [one for one in found if not any(path.is_symlink() for path in (one.path, one.state_file, one.trials))]
    return sorted(own, key=lambda one: (_read_stamp(one.path.name), one.path.name), reverse=True)


def find_search_of(profile: Profile, folder: Path) -> SearchFolder | None:
    """Return the search in a working folder whose answer a profile is; None where there is none, or not any more.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    for search in list_searches(folder):
        try:
            if Profile.load(search.profile) == profile:
                return search
        except AutotuneError:
            continue
    return None


def find_search_folder(folder: Path, spec: str | None = None) -> SearchFolder | None:
    """Return the newest search in a working folder, of one target or of any; None without one.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    for search in list_searches(folder):
        try:
            state = search.read_state()
        except AutotuneError:
            continue
        if spec is None or state.target.spec == spec:
            return search
    return None


def write_report(folder: Path, report: ProbeReport | MachineReport) -> Path:
    """Save the report of a probe that belongs to no search in a working folder's `.autotune`; return its path.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    path = prepare_state_folder(folder) / PROBE_FILE
    write_record(path, report)
    return path


def keep_log(folder: Path, log: Path) -> Path | None:
    """Keep what the process of a probe has printed in a working folder's `.autotune`; None where that cannot be done.

    Args:
        folder: the working folder.
        log: where it is until the probe ends.
    """
    try:
        path = prepare_state_folder(folder) / PROBE_LOG_FILE
        write_bytes(path, read_bytes(log), private=True)
    except (OSError, AutotuneError):
        return None
    return path.relative_to(folder)


def check_output(out: Path, spec: str, *, force: bool) -> None:
    """Make sure that the answer may be written: nothing of another target is overwritten.

    Raises:
        UsageError: the file exists and is not a profile of this target, or is no file at all, or its folder is missing.
    """
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}", hint="create it first")
    require_file(out)
    if force or not out.exists():
        return
    try:
        owner = parse_json(read_bytes(out, max_bytes=MAX_PROFILE_BYTES).decode())["target"]["label"]
    except (OSError, ValueError, KeyError, TypeError):
        owner = None
    if owner != spec:
        what = "is not a profile" if owner is None else f"belongs to {str(owner)[:80]!r}"
        raise UsageError(f"{out} exists and {what}", hint="choose another --out, or pass --force to replace it")


def require_file(out: Path) -> None:
    """Make sure that what is written to is a file or nothing yet: a device would be replaced by a file.

    Raises:
        UsageError: it is a pipe, a device, a socket or a folder.
    """
    try:
        kind = describe_kind(out.stat().st_mode)
    except OSError:
        return
    if kind:
        raise UsageError(f"--out {out} is {kind}, not a file", hint="name a file; --json prints to standard output")


def prepare_state_folder(folder: Path) -> Path:
    """Return a working folder's `.autotune`, made if it is not there.

    Raises:
        FolderError: it belongs to someone else or is writable by others.
    """
    root = folder / STATE_FOLDER
    if not root.exists():
        root.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)
    _check_root(root)
    ignore = root / ".gitignore"
    if ignore.is_symlink() or not ignore.exists():
        write_text(ignore, "*\n")  # in the place of a link, not through it
    return root


def _check_root(root: Path) -> None:
    facts = root.stat(follow_symlinks=False)
    if stat.S_ISREG(facts.st_mode):
        raise FolderError(f"{root} is a file, and it is the folder for what is found here", hint="move it away")
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        what = "is a link, belongs to someone else or is writable by others"
        raise FolderError(f"{root} {what}", hint=f"chmod 700 {root}")


def _slug(spec: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", spec).strip("-")[:60] or "target"


def _read_stamp(name: str) -> tuple[str, int]:
    """Return when a search was made, as its folder's name tells, and its number in that second; empty for others."""
    match = _NAME.fullmatch(name)
    return ("", 0) if match is None else (match["stamp"], int(match["count"] or 1))
