"""The progress files of a script's training: one for each of its processes, replaced whole.

What they say is not trusted: the script's process can write there what it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.records.codec import read_record, write_bytes
from autotune.records.training_process import Failure, TrainingProgress

_PATTERN = "progress-*.json"
_UNFINISHED = ".progress-*.tmp"
_MAX_BYTES = 64 * 1024


def write_progress(folder: Path, progress: TrainingProgress) -> None:
    """Replace what a process wrote before; a folder that cannot be written to does not stop the training."""
    try:
        # The disk is not waited for: it is of no use after a power cut, and a step would be slower by it.
        write_bytes(folder / f"progress-{progress.rank}.json", progress.to_json().encode(), durable=False)
    except OSError:
        return


def read_progress(folder: Path) -> list[TrainingProgress]:
    """Return what the processes of the last attempt wrote, in order of their ranks; what is damaged is left out."""
    found = [_read_file(path) for path in folder.glob(_PATTERN)]
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def clear_progress(folder: Path) -> None:
    """Remove what the processes wrote."""
    for path in (*folder.glob(_PATTERN), *folder.glob(_UNFINISHED)):
        path.unlink(missing_ok=True)


def find_failure(processes: Sequence[TrainingProgress]) -> Failure | None:
    """Return the first failure of all processes: the others follow from it."""
    failures = [one.failure for one in processes if one.failure is not None]
    return min(failures, key=lambda failure: failure.at, default=None)


def add_up(attempts: Sequence[TrainingProgress]) -> TrainingProgress:
    """Return what the attempts of a training come to together; the loss is the last one's.

    Args:
        attempts: what the first process of each counted, at least one.
    """
    return TrainingProgress(
        steps=sum(one.steps for one in attempts),
        samples=sum(one.samples for one in attempts),
        loss=attempts[-1].loss,
        training_seconds=sum(one.training_seconds for one in attempts),
        training_samples=sum(one.training_samples for one in attempts),
        data_wait_seconds=sum(one.data_wait_seconds for one in attempts),
        peak_memory_bytes=max(one.peak_memory_bytes for one in attempts),
    )


def _read_file(path: Path) -> TrainingProgress | None:
    try:
        return read_record(path, TrainingProgress, max_bytes=_MAX_BYTES)
    except AutotuneError:
        return None
