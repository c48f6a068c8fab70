"""A `Log` that writes TensorBoard's event files into a run's folder, one point for each figure of metrics.jsonl.

A training that goes on from an earlier step says so in a new file, and TensorBoard forgets what came after that step.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from autotune.errors import MachineError

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

TENSORBOARD_FOLDER = "tensorboard"

_PACKAGE = "tensorboard"
_FLUSH_SECONDS = 10
_SPEED = ("samples_per_second", "data_wait_fraction", "mfu", "memory_bytes")
_KEYS = ("step", "samples")


def require_tensorboard() -> None:
    """Make sure that the files can be written, before anything else takes its time.

    Raises:
        MachineError: tensorboard is not installed.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MachineError(
            "tensorboard is not installed", hint="pip install tensorboard, or autotune-torch[tensorboard]"
        )


class TensorBoardLog:
    """Writes the lines of metrics.jsonl as points over the optimizer steps.

    Args:
        folder: of the run.
        resumed_step: optimizer steps that were taken before; 0 in a new run.
        least_seconds: between two points of a curve, since writing one is not free; the last one is never left out.
        warn: told when the files cannot be written any more, which does not end the training.

    Raises:
        MachineError: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_step: int = 0,
        least_seconds: float = 0.25,
        warn: Callable[[str], None] = lambda _text: None,
    ) -> None:
        require_tensorboard()
        self._folder = folder / TENSORBOARD_FOLDER
        self._warn = warn
        self._step = resumed_step
        self._least_seconds = least_seconds
        self._written = -math.inf
        self._held: Mapping[str, float | int | None] | None = None
        self._writer: SummaryWriter | None = None
        try:
            self._open(purge_step=resumed_step + 1 if resumed_step else None)
        except OSError as error:
            hint = "check the folder's permissions and its disk"
            raise MachineError(f"{self._folder}: {error.strerror or error}", hint=hint) from error

    def __call__(self, line: Mapping[str, float | int | None]) -> None:
        """Write a line's figures; those that are not known, or not finite, are left out."""
        self._attempt(lambda: self._take(line))

    def rewind(self, step: int) -> None:
        """Forget what was written after a step, which is going to be trained again."""
        self._attempt(lambda: self._reopen(step))

    def flush(self) -> None:
        """Have everything on disk."""
        self._attempt(self._flush)

    def close(self) -> None:
        """Flush and close; later lines are not written."""
        self._attempt(self._close)
        self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, line: Mapping[str, float | int | None]) -> None:
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
        self._write(line)

    def _write_held(self) -> None:
        line, self._held = self._held, None
        if line is not None:
            self._write(line)

    def _write(self, line: Mapping[str, float | int | None]) -> None:
        assert self._writer is not None
        for name, value in line.items():
            if name not in _KEYS and value is not None and math.isfinite(value):
                tag = _tag(name, is_evaluation="samples" not in line)
                self._writer.add_scalar(tag, value, global_step=int(line["step"] or 0))

    def _flush(self) -> None:
        assert self._writer is not None
        self._write_held()
        self._writer.flush()

    def _close(self) -> None:
        assert self._writer is not None
        self._write_held()
        self._writer.close()

    def _reopen(self, step: int) -> None:
        held = self._held
        if held is not None and int(held["step"] or 0) > step:
            self._held = None
        self._close()
        self._step = step
        self._open(purge_step=step + 1)

    def _open(self, *, purge_step: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=_FLUSH_SECONDS)

    def _attempt(self, act: Callable[[], None]) -> None:
        if self._writer is None:
            return
        try:
            act()
        except (OSError, ValueError, RuntimeError) as error:
            # Curves are a convenience: metrics.jsonl has all of it.
            self._writer = None
            self._warn(f"the TensorBoard files end at step {self._step}: {error}")


def _tag(name: str, *, is_evaluation: bool) -> str:
    if name == "epoch":
        return "train/epoch"
    if is_evaluation:
        return f"evaluation/{name}"
    return f"speed/{name}" if name in _SPEED else f"train/{name}"
