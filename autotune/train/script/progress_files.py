"""What a script's training tells its parent: one small file for each of its processes, replaced whole.

Only the standard library is imported: the script's process writes it before the script has imported anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from autotune.records.trial import Cause

_PATTERN = "progress-*.json"
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """What went wrong in a script.

    Attributes:
        cause: in a word.
        detail: one sentence.
        at: `time.time()` then, to find the first of several processes.
    """

    cause: Cause
    detail: str
    at: float


@dataclass
class ScriptProgress:
    """How far one process of a script's training has come.

    Attributes:
        rank: of the process, 0 for the only one.
        steps: optimizer steps taken.
        samples: trained on, by all processes together.
        timed_samples: the same without the first step, which also compiles and starts workers.
        seconds: that these took, evaluations not counted.
        data_wait_seconds: of these, spent waiting for the training's loader.
        peak_memory_bytes: reserved on the device, or resident on the host; 0 while not known.
        loss: of the last step that was looked at; None before one was.
        non_finite_step: first step at which the loss was found not to be finite.
        eager_step: step at which a compilation failed and the rest went on without.
        eager_detail: how it failed.
        failure: what ended it.
    """

    rank: int = 0
    steps: int = 0
    samples: int = 0
    timed_samples: int = 0
    seconds: float = 0.0
    data_wait_seconds: float = 0.0
    peak_memory_bytes: int = 0
    loss: float | None = None
    non_finite_step: int | None = None
    eager_step: int | None = None
    eager_detail: str = ""
    failure: Failure | None = None

    def write(self, folder: Path) -> None:
        """Replace what was written before; a folder that cannot be written to does not stop the training."""
        temporary = folder / f".progress-{self.rank}.{os.getpid()}.tmp"
        try:
            temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
            temporary.replace(folder / f"progress-{self.rank}.json")
        except OSError:
            return


def read_progress(folder: Path) -> list[ScriptProgress]:
    """Return what the processes of the last attempt wrote, in order of their ranks."""
    found = [_read_file(path) for path in folder.glob(_PATTERN)]
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def clear_progress(folder: Path) -> None:
    """Remove what the processes wrote."""
    for path in (*folder.glob(_PATTERN), *folder.glob(f".{_PATTERN.replace('.json', '.tmp')}")):
        path.unlink(missing_ok=True)


def find_failure(notes: Sequence[ScriptProgress]) -> Failure | None:
    """Return the first failure of all processes: the others follow from it."""
    failures = [one.failure for one in notes if one.failure is not None]
    return min(failures, key=lambda failure: failure.at, default=None)


def _read_file(path: Path) -> ScriptProgress | None:
    try:
        with path.open("rb") as file:
            plain: dict[str, Any] = json.loads(file.read(_MAX_BYTES))
        failure = plain.pop("failure", None)
        progress = ScriptProgress(**plain, failure=None if failure is None else Failure(**failure))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return progress if _is_whole(progress) else None


def _is_whole(progress: ScriptProgress) -> bool:
    """Return whether everything has its type: the script's process can write what it likes."""
    found = dataclasses.asdict(progress)
    failure = found.pop("failure") or {"at": 0.0}
    texts = [found.pop("eager_detail"), *(failure[name] for name in ("cause", "detail") if len(failure) > 1)]
    maybe = ("loss", "non_finite_step", "eager_step")
    numbers = [value for name, value in found.items() if value is not None or name not in maybe]
    if "cause" in failure and failure["cause"] not in get_args(Cause):
        return False
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in (*numbers, failure["at"])
    )
