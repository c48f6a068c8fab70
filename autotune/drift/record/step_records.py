"""Collects the steps of a fidelity trial, point by point, for either way in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.record.trace_file import TRACE_FILE, GradientTrace, Point, write_trace
from autotune.engine.gradients import RecordedStep, StepRecorder
from autotune.errors import TargetError


class StepRecords:
    """The steps noted at each point of one training.

    Args:
        recorder: notes them.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._points: list[list[tuple[int, RecordedStep]]] = []
        self._samples = 0

    def begin_point(self, *, restarts: bool = True) -> None:
        """From here on the weights are held.

        Args:
            restarts: the same windows come again; else the data go on, and so does the count of samples.
        """
        self._recorder.hold()
        self._points.append([])
        self._samples = 0 if restarts else self._samples

    def pass_over(self, samples: int) -> None:
        """Count a step that is not noted."""
        self._samples += samples

    def add(self, samples: int) -> None:
        """Note the step that has just ended; a loss scaler may have left it out."""
        self._samples += samples
        step = self._recorder.take()
        if step is not None:
            self._points[-1].append((self._samples, step))

    def count(self) -> int:
        """Return how many steps the last point has."""
        return len(self._points[-1])

    def assemble(self) -> GradientTrace:
        """Return what was noted; points without a step are left out."""
        names, widths, elements = zip(*self._recorder.layers, strict=True) if self._recorder.layers else ((), (), ())
        layers = RowLayout(tuple(names), np.array(widths, dtype=np.int64), np.array(elements, dtype=np.int64))
        # Where a second optimizer joined late, the first rows lack its part; where models did, they have another order.
        layout = self._recorder.layout
        noted = self._points if self._points and self._points[0] else []
        # Further on the optimizers of two arms have seen other gradients: what they do then is not compared.
        points = (
            _assemble([one for one in steps if one[1].layout == layout], width=sum(widths), has_updates=not number)
            for number, steps in enumerate(noted)
            if steps
        )
        return GradientTrace(layers, tuple(points))

    def write(self, folder: Path) -> str:
        """Write what was noted into a folder and return the file's path.

        Raises:
            TargetError: no step was noted, so there is nothing to compare.
        """
        captures = self.assemble()
        if not captures.points:
            raise TargetError("no optimizer step was seen, so no gradient can be compared")
        path = folder / TRACE_FILE
        write_trace(path, captures)
        return str(path)


def _assemble(steps: list[tuple[int, RecordedStep]], *, width: int, has_updates: bool) -> Point:
    whole = [(samples, step) for samples, step in steps if step.gradient.numel() == width]
    groups = max((len(step.learning_rates) for _, step in whole), default=0)
    keys = np.array([samples for samples, _ in whole], dtype=np.int64)
    rates = np.array([step.learning_rates for _, step in whole], dtype=np.float64).reshape(len(whole), groups)
    return Point(
        gradients=GradientRows(keys, _stack([step.gradient for _, step in whole], width)),
        updates=GradientRows(
            keys, _stack([step.update[: width * has_updates] for _, step in whole], width * has_updates)
        ),
        learning_rates=rates,
    )


def _stack(rows: list[torch.Tensor], width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
    stacked = torch.stack(rows) if rows else torch.zeros(0, width)
    array: np.ndarray[tuple[int, ...], np.dtype[np.floating]] = stacked.numpy()
    return array
