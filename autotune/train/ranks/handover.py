"""What the parent of a training and the agent of its processes hand to each other, in files and the environment.

    verdict.json    what ended the training, where none of its processes could be asked any more

No torch is imported here: the parent reads the verdict.
"""

from __future__ import annotations

from pathlib import Path

from autotune.distributed.place import Place, find_folder, read_end, take_place
from autotune.records.codec import write_record
from autotune.records.training_process import RankEnd
from autotune.train.recovery.child import RANKS_VARIABLE, find_given

_VERDICT = "verdict.json"


def find_place() -> Place | None:
    """Return this process's place; None for the only process of a training."""
    folder = find_given(RANKS_VARIABLE)
    return None if folder is None else take_place(Path(folder))


def write_verdict(folder: Path, verdict: RankEnd) -> None:
    """Leave what ended the training to the parent.

    Args:
        folder: that the processes share.
        verdict: what it was.
    """
    write_record(folder / _VERDICT, verdict)


def read_verdict(beside: Path) -> RankEnd | None:
    """Return what ended the last attempt; None where its leader has said it, or there was one process only.

    Args:
        beside: what the parent has handed on.
    """
    return read_end(find_folder(beside.parent) / _VERDICT)
