"""What all loggers share: lines of metrics.jsonl become points over the optimizer steps, thinned and never twice.

    line ── thinned ── points ──▶ TensorBoard's files │ a run of W&B │ a run of MLflow │ a CSV file

Such figures are a convenience: metrics.jsonl and the search's folder have all of them. So what goes wrong with a logger
once it is open is said, ends its figures, and ends nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from autotune.errors import MachineError

Value = float | int | str | bool | None
Line = Mapping[str, float | int | None]

_SPEED = ("samples_per_second", "data_wait_fraction", "mfu", "memory_bytes")
_KEYS = ("step", "samples")


class PointLog:
    """A logger of one run; a subclass knows where points go.

    Args:
        folder: of the run or the search; what is written to disk is in it.
        resumed_step: optimizer steps that were taken before; 0 in a new run.
        least_seconds: between two points of a curve, since writing one is not free; the last one is never left out.
        warn: told when nothing can be written any more.
        config: what the run was started with.
        is_search: its steps are the trials of a search.

    Attributes:
        name: what users call what is written.
        folder: see above.
        config: see above.
        is_search: see above.

    Raises:
        MachineError: the logger cannot be opened.
    """

    name: ClassVar[str] = ""

    def __init__(
        self,
        folder: Path,
        *,
        resumed_step: int = 0,
        least_seconds: float = 0.25,
        warn: Callable[[str], None] = lambda _text: None,
        config: Mapping[str, Value] | None = None,
        is_search: bool = False,
    ) -> None:
        self.folder, self.config, self.is_search = folder, dict(config or {}), is_search
        self._warn = warn
        self._step = resumed_step
        self._least_seconds = least_seconds
        self._written = -math.inf
        self._held: Line | None = None
        self._is_open = True
        try:
            self.open(resumed_step)
        except MachineError:
            raise
        except OSError as error:
            hint = "check the folder's permissions and its disk"
            raise MachineError(f"{error.filename or self.name}: {error.strerror or error}", hint=hint) from error

    # What a subclass does; whatever it raises ends its figures.

    def open(self, step: int) -> None:
        """Begin, or go on after a step: what was written after it is going to be written again."""
        raise NotImplementedError

    def add(self, step: int, points: Mapping[str, Value]) -> None:
        """Write what is known at a step."""
        raise NotImplementedError

    def conclude(self, answer: Mapping[str, Value]) -> None:
        """Write how it ended."""
        raise NotImplementedError

    def sync(self) -> None:
        """Have everything on disk, or sent."""

    def end(self) -> None:
        """Close what `open` opens each time."""

    def release(self) -> None:
        """Close for good, also after a failure."""

    # What a training and a search call.

    def __call__(self, line: Line) -> None:
        """Write a line's figures; those that are not known, or not finite, are left out."""
        self._attempt(lambda: self._take(line))

    def write(self, step: int, points: Mapping[str, Value]) -> None:
        """Write what is known at a step, at once and as it is named."""
        self._step = step
        self._attempt(lambda: self.add(step, points))

    def finish(self, answer: Mapping[str, Value]) -> None:
        """Write how it ended."""
        self._attempt(lambda: self.conclude(answer))

    def rewind(self, step: int) -> None:
        """Forget what was written after a step, which is going to be trained again."""
        self._attempt(lambda: self._reopen(step))

    def flush(self) -> None:
        """Have everything on disk."""
        self._attempt(self._flush)

    def close(self) -> None:
        """Flush and close; later lines are not written."""
        self._attempt(self._close)
        self._is_open = False
        with suppress(Exception):
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, line: Line) -> None:
        step = int(line["step"] or 0)
        if step < self._step:  # of a training that went back without a word
            self._reopen(step - 1)
        self._step = step
        now = time.monotonic()
        if "samples" in line and now - self._written < self._least_seconds:
            self._held = line
            return
        if "samples" in line:
            self._held, self._written = None, now
        else:
            self._write_held()
        self.add(step, list_points(line))

    def _write_held(self) -> None:
        line, self._held = self._held, None
        if line is not None:
            self.add(int(line["step"] or 0), list_points(line))

    def _flush(self) -> None:
        self._write_held()
        self.sync()

    def _close(self) -> None:
        self._write_held()
        self.end()

    def _reopen(self, step: int) -> None:
        held = self._held
        if held is not None and int(held["step"] or 0) > step:
            self._held = None
        self._close()
        self._step = step
        self.open(step)

    def _attempt(self, act: Callable[[], None]) -> None:
        if not self._is_open:
            return
        try:
            act()
        except Exception as error:  # of somebody else's package, which has its own kinds
            self._is_open = False
            self._warn(f"{self.name} end at step {self._step}: {' '.join(str(error).split())[:300]}")


def list_points(line: Line) -> dict[str, Value]:
    """Return a line's figures by the names they are shown under; those that are not known, or not finite, are left out.

    Args:
        line: of metrics.jsonl.
    """
    is_evaluation = "samples" not in line
    return {
        _tag(name, is_evaluation=is_evaluation): value
        for name, value in line.items()
        if name not in _KEYS and value is not None and math.isfinite(value)
    }


def _tag(name: str, *, is_evaluation: bool) -> str:
    if name == "epoch":
        return "train/epoch"
    if is_evaluation:
        return f"evaluation/{name}"
    return f"speed/{name}" if name in _SPEED else f"train/{name}"


def is_number(value: Value) -> bool:
    """Return whether a value is a number to draw: no text, and no switch."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
