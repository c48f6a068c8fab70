"""What the processes of one training tell each other past torch.distributed: small files in a folder of their own.

    leader.pid      the process that signals are for
    plan.json       what is trained, once the leader has opened the run
    end-N.json      how rank N ended, if it could say so

No torch is imported here.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, MachineError
from autotune.records.codec import make_folder, read_record, write_bytes, write_record
from autotune.records.run import RunPlan
from autotune.records.training_process import RankEnd

_PID, _PLAN = "leader.pid", "plan.json"
_FOLDER = "ranks"
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Place:
    """A process among those of a training.

    Attributes:
        folder: that they share.
        rank: its number, counted from 0.
        size: how many there are.
        nodes: machines that they are on; those of another one have another folder.
    """

    folder: Path
    rank: int
    size: int
    nodes: int = 1

    @property
    def leads(self) -> bool:
        """It has the run's folder and speaks to the user."""
        return self.rank == 0

    def announce(self) -> None:
        """Say where signals are to go."""
        write_bytes(self.folder / _PID, str(os.getpid()).encode(), durable=False)

    def publish(self, plan: RunPlan) -> None:
        """Tell the others what is trained."""
        write_plan(self.folder, plan)

    def await_plan(self) -> RunPlan:
        """Return what is trained; the leader may first compare a profile, and is watched by who started it.

        Raises:
            MachineError: the folder is gone.
        """
        while (plan := find_plan(self.folder)) is None:
            if not self.folder.is_dir():
                raise MachineError(f"{self.folder} is gone", hint="leave the temporary folder alone")
            time.sleep(_LOOK_SECONDS)
        return plan

    def record_end(self, end: RankEnd) -> None:
        """Say how this process ends."""
        write_record(self.folder / f"end-{end.rank}.json", end)

    @property
    def meeting(self) -> Path | None:
        """The file that they meet at; None on several nodes: where the agent's environment says."""
        return self.folder / "meeting" if self.nodes == 1 else None

    @property
    def log(self) -> Path:
        """What a process that does not lead prints."""
        return self.folder / f"rank-{self.rank}.log"


def take_place(folder: Path) -> Place:
    """Return the place of this process, which the elastic agent has started.

    Args:
        folder: that the processes share.
    """
    rank, size, nodes = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return Place(folder, rank, size, nodes)


def find_folder(parent: Path) -> Path:
    """Return where the folder is that the processes of one attempt share.

    Args:
        parent: a folder of whoever starts them.
    """
    return parent / _FOLDER


def open_folder(parent: Path) -> Path:
    """Return an empty folder for the processes of one attempt.

    Args:
        parent: a folder of whoever starts them.
    """
    folder = find_folder(parent)
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    return folder


def write_plan(folder: Path, plan: RunPlan) -> None:
    """Tell the processes of a folder what is trained."""
    write_record(folder / _PLAN, plan)


def find_plan(folder: Path) -> RunPlan | None:
    """Return what is trained; None while the leader has not said so."""
    file = folder / _PLAN
    return read_record(file, RunPlan) if file.exists() else None


def read_leader(folder: Path) -> int | None:
    """Return the process that signals are for; None before it has said so."""
    try:
        return int((folder / _PID).read_text())
    except (OSError, ValueError):
        return None


def read_ends(folder: Path, size: int) -> dict[int, RankEnd]:
    """Return how each process ended that could say so, by rank."""
    found = {rank: read_end(folder / f"end-{rank}.json") for rank in range(size)}
    return {rank: end for rank, end in found.items() if end is not None}


def read_last_line(folder: Path, rank: int) -> str:
    """Return the last line that a process printed; empty where it printed nothing."""
    try:
        lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""


def read_end(file: Path) -> RankEnd | None:
    """Return how a process ended; None where it could not say so."""
    try:
        return read_record(file, RankEnd) if file.exists() else None
    except AutotuneError:
        return None
