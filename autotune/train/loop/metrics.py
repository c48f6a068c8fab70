"""metrics.jsonl: a line every few steps and one for each evaluation; a resumed run goes on where it was cut."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from autotune.records.codec import sync_folder, write_text
from autotune.records.layout import METRICS_FILE

_LONGEST_LINE = 1024 * 1024
_TAIL_BYTES = 64 * 1024


class MetricsFile:
    """The file of one run, open for adding lines; they reach the disk when it is flushed, or when enough has gathered.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._file: TextIO | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
            sync_folder(self._path.parent)
        numbers = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }
        self._file.write(json.dumps(numbers, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Bring what was added to the disk: a checkpoint that follows must not outlive the lines before it.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; a later line opens it again.

        Raises:
            OSError: the file cannot be written.
        """
        file, self._file = self._file, None
        if file is not None:
            file.close()


def read_lines(folder: Path, *, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run that are JSON objects; the last one of a killed run may be torn.

    Args:
        folder: of the run; one without a file has no lines.
        tail_bytes: of the file's end to read; None for all of it.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        file = (folder / METRICS_FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        if tail_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
        while text := file.readline(_LONGEST_LINE):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line


def read_last_step(folder: Path) -> int:
    """Return the optimizer step of the last line, 0 without one."""
    try:
        steps = [line.get("step") for line in read_lines(folder, tail_bytes=_TAIL_BYTES)]
    except OSError:
        return 0
    return next((step for step in reversed(steps) if type(step) is int), 0)


def cut_metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines after a step, which a resumed training writes again, and return the ones kept.

    Raises:
        OSError: the file cannot be written; it is as it was.
    """
    file = folder / METRICS_FILE
    if not file.exists():
        return []
    kept = []
    for line in read_lines(folder):
        try:
            if line["step"] <= step:
                kept.append(line)
        except (KeyError, TypeError):
            continue
    write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
