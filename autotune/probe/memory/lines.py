"""Peak memory as a line over the micro batch, by mode: found from two sizes, corrected by one real step.

`outside` is what the process holds beside tensors: interpreter, libraries, the dataset. The real step tells what
operations allocate inside of themselves and what the allocator wastes: the excess. The part of it that goes with the
samples is added to each mode's growth as so many bytes each: most of it are freed blocks that cannot be used again, as
large as the tensors that were in them. Their size goes with the precision, not with how many tensors checkpointing
keeps.

This form was chosen, out of some fifteen, on 78 fresh trainings of five models (`benchmarks/memory.py`; 2, 4, 8 times
the baseline's micro batch), so its error there flatters it: predicted by this code 7 % on average and 25 % at worst,
mostly too little. Two models that had no part in the choice: 3 % and 11 % over 36 trainings, whose peaks are smaller,
so that the process itself is more of them. The excess as a factor on all tensors: 9 % and 28 %, no real step at all:
21 % and 57 % (both computed afterwards from the 78 peaks).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autotune.probe.memory.shapes import StepBytes
from autotune.records.config import ActivationCheckpointing, Precision, TrainConfig
from autotune.records.facts import MemoryFacts, MemoryMode

HEAD_ROOM = 0.05
"""Share of the limit that a predicted micro batch leaves free."""

Trace = Callable[[TrainConfig, int, bool], StepBytes]
"""Returns what a step takes: config, micro batch size, whether the optimizer has to step."""

_CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("off", "full", "selective")
_TOLD_CHARACTERS = 160

Found = TypeVar("Found")


@dataclass(frozen=True)
class Line:
    """Peak of a step's tensors by micro batch size, in bytes.

    Attributes:
        fixed: of forward and backward passes, without samples.
        growth: of those with each sample.
        update: while the optimizer steps.
        optimizer: its state, in all of them.
    """

    fixed: float
    growth: float
    update: int
    optimizer: int

    def predict(self, size: int) -> float:
        """Return the peak at a micro batch size."""
        return max(self.update, self.fixed + self.growth * size)


@dataclass(frozen=True)
class Calibration:
    """A real step.

    Attributes:
        size: its micro batch.
        outside: in use beside its tensors, in bytes.
        peak: in use at most; None where the system does not tell.
    """

    size: int
    outside: int
    peak: int | None

    def split_excess(self, line: Line) -> tuple[float, float]:
        """Return what the peak has beyond the tensors: bytes that stay, and bytes per sample, in the tensors' ratio."""
        if self.peak is None:
            return 0.0, 0.0
        tensors = max(1.0, line.predict(self.size))
        excess, growing = self.peak - self.outside - tensors, min(1.0, max(0.0, line.growth * self.size / tensors))
        if excess < 0:  # too much was taken to be outside: of the tensors nothing can be missing
            return excess, 0.0
        return excess * (1.0 - growing), excess * growing / self.size


def list_modes(baseline: TrainConfig, supported: Sequence[Precision], *, checkpoints: bool) -> tuple[TrainConfig, ...]:
    """Return the modes' configs, the baseline's first, then those that checkpoint as it does; none compiles."""
    plain, own = baseline.replace(compile_mode="off"), baseline.activation_checkpointing
    others = [
        plain.replace(precision=precision, activation_checkpointing=checkpointing)
        for checkpointing in (own, *(other for other in _CHECKPOINTING if checkpoints and other != own))
        for precision in supported
    ]
    return (plain, *(mode for mode in others if mode != plain))


def find_line(trace: Trace, baseline: TrainConfig, sizes: tuple[int, int]) -> Line:
    """Return the line of the baseline's mode.

    Raises:
        Exception: whatever the target's code raises when it is traced.
    """
    small, large = trace(baseline, sizes[0], True), trace(baseline, sizes[1], False)
    return _join(sizes, small.passes, large.passes + small.optimizer - large.optimizer, small)


def find_lines(
    trace: Trace, modes: Sequence[TrainConfig], sizes: tuple[int, int], first: Line, *, deadline: float
) -> list[tuple[TrainConfig, Line]]:
    """Return the line of each mode there is time for, the first given; modes that do not run are left out.

    Args:
        trace: follows a step.
        modes: the baseline's first.
        sizes: micro batches to follow.
        first: line of the baseline's mode.
        deadline: no mode is begun after it, by `time.monotonic()`.
    """
    lines = [(modes[0], first)]
    for mode in modes[1:]:
        # The tensors of both half precisions are equally large.
        twin = next((line for known, line in lines if _halved(known) == _halved(mode)), None)
        if twin is None and time.monotonic() < deadline:
            found = attempt(lambda: _follow(trace, mode, sizes, first))  # noqa: B023 - called at once
            twin = None if isinstance(found, str) else found
        if twin is not None:
            lines.append((mode, twin))
    return lines


def conclude(
    facts: MemoryFacts, lines: Sequence[tuple[TrainConfig, Line]], calibration: Calibration, *, look_ahead: float
) -> MemoryFacts:
    """Return the facts with each mode's line, corrected by the real step.

    Args:
        facts: the rest of them.
        lines: of the modes, the baseline's first.
        calibration: a real step in the baseline's mode.
        look_ahead: bytes per sample of the batch that is loaded while another one is trained on.
    """
    baseline, first = lines[0]
    staying, excess = calibration.split_excess(first)
    alike = {c.precision: line for c, line in lines if c.activation_checkpointing == baseline.activation_checkpointing}
    # The process may have held less when it began than what it needs to train at all.
    outside = max(calibration.outside, facts.base_bytes) + staying
    modes = tuple(
        _make_mode(config, line, outside, excess * _ratio(alike.get(config.precision), first) + look_ahead, facts)
        for config, line in lines
    )
    facts = facts.replace(modes=modes, activation_bytes_per_sample=modes[0].bytes_per_sample)
    if calibration.peak is None:
        return facts
    error = (facts.base_bytes + first.predict(calibration.size)) / calibration.peak - 1.0
    return facts.replace(calibrated_micro_batch_size=calibration.size, calibration_error=error)


def attempt(run: Callable[[], Found]) -> Found | str:
    """Return what a call returned, or its error in one line: a target's code may do anything."""
    try:
        return run()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:_TOLD_CHARACTERS]


def _halved(mode: TrainConfig) -> tuple[bool, str]:
    return mode.precision != "fp32", mode.activation_checkpointing


def _follow(trace: Trace, mode: TrainConfig, sizes: tuple[int, int], first: Line) -> Line:
    small, large = (trace(mode, size, False) for size in sizes)
    # The optimizer's state was seen once; it is the same in every mode.
    missing = [first.optimizer - found.optimizer for found in (small, large)]
    line = _join(sizes, small.passes + missing[0], large.passes + missing[1], small)
    return Line(line.fixed, line.growth, first.update, first.optimizer)


def _join(sizes: tuple[int, int], small: int, large: int, seen: StepBytes) -> Line:
    growth = (large - small) / (sizes[1] - sizes[0])
    return Line(small - growth * sizes[0], growth, seen.update, seen.optimizer)


def _ratio(line: Line | None, first: Line) -> float:
    return 1.0 if line is None or first.growth <= 0 else line.growth / first.growth


def lower_mode(mode: MemoryMode, by: float, limit_bytes: float) -> MemoryMode:
    """Return a mode whose every peak is lower by some bytes."""
    lowered = mode.replace(fixed_bytes=max(0.0, mode.fixed_bytes - by), least_bytes=max(0.0, mode.least_bytes - by))
    return lowered.replace(largest_micro_batch_size=_find_largest(lowered, limit_bytes))


def _make_mode(config: TrainConfig, line: Line, outside: float, extra: float, facts: MemoryFacts) -> MemoryMode:
    mode = MemoryMode(
        precision=config.precision,
        activation_checkpointing=config.activation_checkpointing,
        fixed_bytes=outside + max(0.0, line.fixed),
        bytes_per_sample=max(0.0, line.growth + extra),
        least_bytes=outside + line.update,
    )
    return mode.replace(largest_micro_batch_size=_find_largest(mode, facts.limit_bytes))


def _find_largest(mode: MemoryMode, limit_bytes: float) -> int | None:
    """Return the largest micro batch that leaves the head room free; None when the peak does not grow."""
    usable = (1.0 - HEAD_ROOM) * limit_bytes
    if mode.bytes_per_sample <= 0:
        return None
    if mode.least_bytes > usable:
        return 0
    return max(0, math.floor((usable - mode.fixed_bytes) / mode.bytes_per_sample))
