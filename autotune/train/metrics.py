"""metrics.jsonl: a line every few steps and one for each evaluation; a resumed run goes on where it was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.records.codec import write_text

METRICS_FILE = "metrics.jsonl"


def append_metrics(folder: Path, line: dict[str, Any]) -> None:
    """Add a line.

    Raises:
        OSError: the file cannot be written.
    """
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


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
