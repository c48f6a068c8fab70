"""The folder of one run, a workload's or a script's: its plan, its summary and what else is in it.

    runs/<target>-001/   lock, run.json, metrics.jsonl, checkpoints/, summary.json     a workload
                         script.json, summary.json, next.json                          a script

A workload's has one writer at a time, and a resumed run must agree with its plan. Of a script nothing can be resumed
from here, so a record of it that cannot be written ends nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import ProfileError, UsageError
from autotune.lock import HOLDER_FILE, hold_lock
from autotune.records.codec import Record, make_folder, read_record, sync_folder, write_record
from autotune.records.layout import (
    CHECKPOINTS_FOLDER,
    LOCK_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    RUNS_FOLDER,
    SCRIPT_FILE,
    SUMMARY_FILE,
)
from autotune.records.run import RunPlan, StepDown, TrainingSummary
from autotune.targets.source.fingerprint import is_older


@dataclass(frozen=True)
class RunKind:
    """What differs between the folders of the two ways in.

    Attributes:
        plan_file: name of the plan in it.
        must_record: a record that cannot be written ends the training.
    """

    plan_file: str
    must_record: bool


WORKLOAD_RUN = RunKind(PLAN_FILE, must_record=True)
SCRIPT_RUN = RunKind(SCRIPT_FILE, must_record=False)


@dataclass
class RunFolder:
    """One run on disk.

    Attributes:
        path: its folder.
        plan: what it was started with, and the steps down since.
        kind: whose run it is.
        is_kept: False where no folder could be made, and this one goes when the training does.
    """

    path: Path
    plan: RunPlan
    kind: RunKind = WORKLOAD_RUN
    is_kept: bool = True

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.path / CHECKPOINTS_FOLDER

    def write(self, name: str, record: Record) -> bool:
        """Write one of its files, and return whether that could be done.

        Raises:
            OSError: it could not, and the training must not go on without.
        """
        try:
            write_record(self.path / name, record, private=True)
        except OSError:
            if self.kind.must_record:
                raise
            return False
        return True

    def write_plan(self, plan: RunPlan) -> None:
        """Save what the run is started with; errors as of `write`."""
        self.write(self.kind.plan_file, plan)
        self.plan = plan

    def add_step_down(self, step_down: StepDown) -> None:
        """Write a step down into the run's record; from here on its settings are those in force."""
        self.write_plan(self.plan.replace(step_downs=(*self.plan.step_downs, step_down)))

    def write_summary(self, summary: TrainingSummary) -> None:
        """Save how the run ended; errors as of `write`."""
        self.write(SUMMARY_FILE, summary)

    def read_summary(self) -> TrainingSummary | None:
        """Return how the run ended; None where it has not.

        Raises:
            ProfileError: the file is damaged, or of a newer version.
        """
        file = self.path / SUMMARY_FILE
        return read_record(file, TrainingSummary) if file.exists() else None


def open_run(path: Path) -> RunFolder:
    """Return a run that is there, of either kind.

    Raises:
        UsageError: there is none.
        ProfileError: its plan is damaged, or of a newer version.
    """
    for kind in (WORKLOAD_RUN, SCRIPT_RUN):
        if os.path.isfile(path / kind.plan_file):  # of a path that cannot be one it says no, and raises nothing
            return RunFolder(path, read_record(path / kind.plan_file, RunPlan), kind)
    raise UsageError(f"{path} holds no run", hint="give a run folder, such as one under runs/")


def newest_first(checkpoints: Path) -> Iterator[Path]:
    """Yield the folders of a run's checkpoints, complete or not.

    Args:
        checkpoints: folder that they are in.
    """
    yield from sorted(checkpoints.glob("step-[0-9]*"), key=read_step, reverse=True)


def read_step(checkpoint: Path) -> int:
    """Return the optimizer step that a checkpoint's folder is named after; 0 for a name that holds none."""
    number = checkpoint.name.removeprefix("step-").removeprefix("best-")
    return int(number) if number.isdecimal() else 0


def newest_whole_step(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint that was written to its end, as its name says; 0 without one.

    Args:
        checkpoints: folder that they are in.
    """
    return next((read_step(path) for path in newest_first(checkpoints) if (path / MANIFEST_FILE).is_file()), 0)


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
        UsageError: the one given holds a run already, or something else.
        OSError: it cannot be made.
    """
    if out is None:
        return _make_numbered(work / RUNS_FOLDER, slug(label))
    path = work / out
    require_free(path)
    make_folder(path)
    return path


def require_free(path: Path) -> None:
    """Make sure that a new run may be made in a folder.

    Raises:
        UsageError: it holds a run already, or something else.
    """
    if (path / PLAN_FILE).exists() or (path / CHECKPOINTS_FOLDER).exists():
        raise UsageError(
            f"{path} holds a run already", hint="pass --resume to go on with it, or choose another --run-dir"
        )
    # What a run that was cut at its start leaves behind is its lock, and what is hidden.
    ours = (LOCK_FILE, HOLDER_FILE)
    if path.is_dir() and any(found.name not in ours and found.name[0] != "." for found in path.iterdir()):
        raise UsageError(f"{path} is not empty, and holds no run", hint="choose a new folder with --run-dir")


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
