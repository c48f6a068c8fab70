"""The folder of one run: `runs/<target>-NNN/{lock, run.json, metrics.jsonl, checkpoints/, summary.json}`.

One writer at a time. What the run was started with is in run.json; a resumed one must agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import ProfileError, UsageError
from autotune.lock import hold_lock
from autotune.records.codec import make_folder, read_record, sync_folder, write_record
from autotune.records.layout import CHECKPOINTS_FOLDER, LOCK_FILE, PLAN_FILE, RUNS_FOLDER, SUMMARY_FILE
from autotune.records.run import RunPlan, StepDown, TrainingSummary
from autotune.targets.source.fingerprint import is_older


@dataclass
class RunFolder:
    """One run on disk.

    Attributes:
        path: its folder.
        plan: what it was started with, and the steps down since.
    """

    path: Path
    plan: RunPlan

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.path / CHECKPOINTS_FOLDER

    def write_plan(self, plan: RunPlan) -> None:
        """Save what the run is started with."""
        write_record(self.path / PLAN_FILE, plan, private=True)
        self.plan = plan

    def add_step_down(self, step_down: StepDown) -> None:
        """Write a step down into the run's record; from here on its settings are those in force."""
        self.write_plan(self.plan.replace(step_downs=(*self.plan.step_downs, step_down)))

    def write_summary(self, summary: TrainingSummary) -> None:
        """Save how the run ended."""
        write_record(self.path / SUMMARY_FILE, summary, private=True)


def read_plan(path: Path) -> RunPlan:
    """Return what a run was started with.

    Raises:
        ProfileError: the file is damaged, or of a newer version.
    """
    return read_record(path / PLAN_FILE, RunPlan)


def find_run(work: Path, label: str, out: str | Path | None) -> Path:
    """Return the folder of the run to resume: the one given, or the newest of a target.

    Raises:
        UsageError: there is none.
    """
    runs = work / RUNS_FOLDER
    numbered = _find_numbered(runs, slug(label))
    path = work / out if out else numbered[max(numbered)] if numbered else None
    if path is None or not (path / PLAN_FILE).is_file():
        raise UsageError(f"--resume: there is no run in {path or runs}", hint="leave --resume out to start one")
    return path


def make_run(work: Path, label: str, out: str | Path | None) -> Path:
    """Return the folder of a new run: the one given, or a new numbered one.

    Raises:
        UsageError: the one given holds a run already.
        OSError: it cannot be made.
    """
    if out is None:
        return _make_numbered(work / RUNS_FOLDER, slug(label))
    path = work / out
    if (path / PLAN_FILE).exists() or (path / CHECKPOINTS_FOLDER).exists():
        raise UsageError(f"{path} holds a run already", hint="pass --resume to go on with it, or choose another --out")
    make_folder(path)
    return path


@contextmanager
def locked_run(path: Path) -> Iterator[None]:
    """Hold a run; the kernel releases it when its holder dies.

    Raises:
        BusyError: another training is at work in it.
        MachineError: its file system has no locks.
    """
    with hold_lock(path / LOCK_FILE, f"another training is at work in {path}"):
        yield


def require_same_plan(before: RunPlan, now: RunPlan, path: Path) -> None:
    """Make sure that a run goes on as it was started.

    Raises:
        ProfileError: target, data, settings or seed are others, or cannot be compared.
    """
    old, new = before.target, now.target
    if is_older(old.fingerprint, new.fingerprint):
        raise ProfileError(
            f"--resume: {path} was begun by an older version, which did not look at what the target imports",
            hint="go on with that version, or start a new run: leave --resume out",
        )
    known = old.data_fingerprint is not None and new.data_fingerprint is not None
    changed = {
        "target": old.fingerprint != new.fingerprint or old.label != new.label,
        "training data": known and old.data_fingerprint != new.data_fingerprint,
        "profile's settings": before.asked_config != now.asked_config,
        "seed": before.seed != now.seed,
    }
    for what, is_other in changed.items():
        if is_other:
            raise ProfileError(
                f"--resume: the {what} of {path} changed since it was started",
                hint="start a new run: leave --resume out",
            )


def slug(label: str) -> str:
    """Return a target's label as the start of a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:60]


def _find_numbered(runs: Path, name: str) -> dict[int, Path]:
    pattern = re.compile(re.escape(name) + r"-([0-9]{3,9})")
    found = {path: pattern.fullmatch(path.name) for path in runs.glob(f"{name}-*")}
    return {int(match[1]): path for path, match in found.items() if match is not None}


def _make_numbered(runs: Path, name: str) -> Path:
    make_folder(runs)
    number = max(_find_numbered(runs, name), default=0) + 1
    while True:
        path = runs / f"{name}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:  # another training took the number just now
            number += 1
            continue
        sync_folder(runs)
        return path
