"""TensorBoard's event files in the run's folder.

A training that goes on from an earlier step says so in a new file, and TensorBoard forgets what came after that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autotune.loggers import require_package
from autotune.loggers.point_log import PointLog, Value, is_number

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

TENSORBOARD_FOLDER = "tensorboard"

_FLUSH_SECONDS = 10


class TensorBoardLog(PointLog):
    """Numbers are scalars over the steps, everything else is text."""

    name = "the TensorBoard files"
    _writer: SummaryWriter

    def open(self, step: int) -> None:
        """Open a new file."""
        require_package("tensorboard")
        from torch.utils.tensorboard.writer import SummaryWriter

        place = self.folder / TENSORBOARD_FOLDER
        purge = step + 1 if place.exists() and not self.is_search else None
        self._writer = SummaryWriter(str(place), purge_step=purge, flush_secs=_FLUSH_SECONDS)

    def add(self, step: int, points: Mapping[str, Value]) -> None:
        """Add scalars, and one text of the rest."""
        for tag, value in points.items():
            if is_number(value):
                self._writer.add_scalar(tag, value, global_step=step)
        words = {tag: value for tag, value in points.items() if not is_number(value) and value is not None}
        if words:
            self._add_text("trial", words, step)

    def conclude(self, answer: Mapping[str, Value]) -> None:
        """Add the answer as a text."""
        self._add_text("answer", answer, 0)

    def sync(self) -> None:
        """Write the file."""
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add_text(self, tag: str, words: Mapping[str, Value], step: int) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in words.items())
        self._writer.add_text(tag, f"| | |\n| --- | --- |\n{rows}", global_step=step)


LOG = TensorBoardLog
