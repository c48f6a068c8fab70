"""metrics.jsonl: a line every few steps and one for each evaluation; a resumed run goes on where it was cut."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from autotune.records.codec import sync_folder, write_text
from autotune.records.layout import METRICS_FILE


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


def cut_metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines after a step, which a resumed training writes again, and return the ones kept.

    Raises:
        OSError: the file cannot be written; it is as it was.
    """
    file = folder / METRICS_FILE
    if not file.exists():
        return []
    kept = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if line["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a kill
    write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
