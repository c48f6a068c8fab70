"""What was timed: raw blocks and step times first, statistics derived from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import Record

NonNegative = Annotated[float, Field(ge=0)]


class Interval(Record):
    """An estimate with its uncertainty."""

    estimate: float
    """Point estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""
    confidence_level: Annotated[float, Field(gt=0, lt=1)]
    """Two-sided confidence level, e.g. 0.98 (each end then holds one-sided at 0.99)."""
    method: str
    """How it was computed, in a few words."""


class Block(Record):
    """Consecutive whole optimizer steps timed as one; the device is synchronised at both ends."""

    optimizer_steps: Annotated[int, Field(ge=1)]
    """Steps in the block."""
    samples: Annotated[int, Field(ge=1)]
    """True samples trained on."""
    seconds: Annotated[float, Field(gt=0)]
    """Wall time, loader, copies and optimizer included."""


class PeakMemory(Record):
    """Highest memory use seen."""

    host_bytes: Annotated[int, Field(ge=0)]
    """Resident set of the training process plus the proportional set of its loader workers."""
    device_bytes: Annotated[int, Field(ge=0)] | None = None
    """Device memory reserved by PyTorch; None on a CPU."""


class Measurement(Record):
    """One config in one process, timed."""

    blocks: Annotated[tuple[Block, ...], Field(min_length=1)]
    """Raw blocks in order."""
    step_seconds: tuple[float, ...]
    """Raw time of each optimizer step inside the blocks."""
    data_wait_seconds: NonNegative
    """Time inside the blocks spent waiting for the loader."""
    steady: bool
    """Warm-up ended because step times had settled, not because its time was up."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Optimizer steps before the first block."""
    warmup_seconds: NonNegative
    """Wall time of these."""
    compile_seconds: NonNegative
    """Part of the warm-up beyond steady step time when the model is compiled; 0 otherwise."""
    peak_memory: PeakMemory
    """Over the whole trial."""

    @property
    def samples(self) -> int:
        """True samples in all blocks."""
        return sum(block.samples for block in self.blocks)

    @property
    def seconds(self) -> float:
        """Wall time of all blocks."""
        return sum(block.seconds for block in self.blocks)

    @property
    def samples_per_second(self) -> float:
        """Total work over total time: the harmonic mean of the blocks' rates."""
        return self.samples / self.seconds

    @property
    def seconds_per_step(self) -> float:
        """Mean wall time of one optimizer step."""
        return self.seconds / sum(block.optimizer_steps for block in self.blocks)

    @property
    def data_wait_fraction(self) -> float:
        """Share of the measured time spent waiting for the loader."""
        return min(1.0, self.data_wait_seconds / self.seconds)


class QualityCheck(Record):
    """One comparison of a config's learning with the baseline's."""

    test: Literal["exact-losses", "paired-losses", "metric"]
    """exact-losses: bit for bit; paired-losses and metric: paired seeds, one-sided 95 % bound against a margin."""
    metric: str
    """What was compared, e.g. `training loss` or `bits_per_byte`."""
    difference: Interval | None
    """Relative worsening against the baseline (positive is worse); None when it cannot be computed."""
    margin: NonNegative
    """Largest relative worsening allowed, fixed beforehand."""
    verdict: Literal["non-inferior", "inferior", "inconclusive"]
    """non-inferior only when the upper bound is inside the margin; a missing value is never a pass."""
    seeds: Annotated[int, Field(ge=0)]
    """Paired seeds compared."""
    samples: Annotated[int, Field(ge=0)]
    """Samples trained on per seed; nothing beyond was tested."""
    reason: str = ""
    """One sentence."""
