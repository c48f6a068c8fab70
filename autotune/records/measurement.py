"""What was timed: raw blocks and step times first, statistics derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median
from typing import Annotated, Literal, Self

from pydantic import Field

from autotune.records.codec import Record

NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

MUCH_STEAL = 0.05
"""Share of CPU time taken by the hypervisor above which a block is marked as disturbed."""
DISTURBED_SHARE = 0.15
"""Of the CPUs, used by others or stolen: with more a launch of the baseline is no anchor where another is (in turns
with so much more than the launch beside it), and two slow first steps end no launch."""


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


class GpuState(Record):
    """What the driver says of a GPU at one moment."""

    sm_clock_mhz: Annotated[int, Field(ge=0)] | None = None
    """Clock of the multiprocessors."""
    power_watts: NonNegative | None = None
    """Power drawn."""
    temperature_celsius: int | None = None
    """Of the chip."""
    slowdowns: tuple[str, ...] = ()
    """Why the clock is held down, e.g. `power-cap`, `thermal`, `hardware`; empty when it is not."""


class Interference(Record):
    """What else went on while something was timed; None for what this machine does not tell."""

    foreign_cpu_fraction: Fraction | None = None
    """Share of all CPU time that other processes used."""
    steal_fraction: Fraction | None = None
    """Share of all CPU time that the hypervisor gave to somebody else."""
    throttled_fraction: Fraction | None = None
    """Share of the wall time for which the control group was held by its CPU quota."""
    cpu_pressure_fraction: Fraction | None = None
    """Share of the wall time in which some task of the machine waited for a CPU."""
    io_pressure_fraction: Fraction | None = None
    """The same for the disk."""
    memory_pressure_fraction: Fraction | None = None
    """The same for memory."""
    major_faults: Annotated[int, Field(ge=0)] | None = None
    """Pages of this process that had to come from the disk."""
    gpu: GpuState | None = None
    """At its end; None without a GPU."""

    @property
    def taken_fraction(self) -> float:
        """Share of all CPU time that others had, processes or the hypervisor's; 0 where that is not known."""
        return (self.foreign_cpu_fraction or 0.0) + (self.steal_fraction or 0.0)


class Block(Record):
    """Consecutive whole optimizer steps timed as one; the device is synchronised at both ends."""

    optimizer_steps: Annotated[int, Field(ge=1)]
    """Steps in the block."""
    samples: Annotated[int, Field(ge=1)]
    """True samples trained on."""
    seconds: Annotated[float, Field(gt=0)]
    """Wall time, loader, copies and optimizer included."""
    interference: Interference | None = None
    """What else went on; None when it was not watched."""
    recompiled: bool = False
    """A graph was compiled inside the block, so it is no measure of the steady state."""
    rank_seconds: tuple[NonNegative, ...] = ()
    """Of these, what each of several processes took by itself, for its data and forward passes, before gradients met;
    the rest it worked with the others or waited for them. Empty with one process."""

    @property
    def disturbed(self) -> bool:
        """Its time says more about the machine than about the config; marked, and counted all the same."""
        seen = self.interference
        if self.recompiled or seen is None:
            return self.recompiled
        gpu_held = seen.gpu is not None and bool({"thermal", "hardware"} & set(seen.gpu.slowdowns))
        return gpu_held or (seen.steal_fraction or 0.0) > MUCH_STEAL or (seen.throttled_fraction or 0.0) > MUCH_STEAL


class SpeedReference(Record):
    """The same small piece of work, timed before and after a training: how fast the machine itself was."""

    before_seconds: Annotated[float, Field(gt=0)]
    """Before the warm-up."""
    after_seconds: Annotated[float, Field(gt=0)]
    """After the last block."""


class PeakMemory(Record):
    """Highest memory use seen."""

    host_bytes: Annotated[int, Field(ge=0)]
    """Resident set of the training process plus the proportional set of its loader workers."""
    device_bytes: Annotated[int, Field(ge=0)] | None = None
    """Device memory reserved by PyTorch; None on a CPU."""

    @property
    def used_bytes(self) -> int:
        """Of the device, or of the host without one."""
        return self.host_bytes if self.device_bytes is None else self.device_bytes

    @classmethod
    def largest(cls, peaks: Iterable[PeakMemory]) -> Self | None:
        """Return the largest peaks of the launches of some settings; None without a launch."""
        seen = list(peaks)
        if not seen:
            return None
        devices = [one.device_bytes for one in seen if one.device_bytes is not None]
        return cls(host_bytes=max(one.host_bytes for one in seen), device_bytes=max(devices) if devices else None)


class Measurement(Record):
    """One config in one process, timed."""

    blocks: Annotated[tuple[Block, ...], Field(min_length=1)]
    """Raw blocks in order."""
    step_seconds: tuple[float, ...]
    """Raw time of each optimizer step inside the blocks."""
    data_wait_seconds: NonNegative
    """Time inside the blocks spent waiting for the loader."""
    steady: bool
    """Warm-up ended because everything had settled, not because its time was up."""
    unsettled: str = ""
    """What had not settled when the warm-up's time was up; empty when steady."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Optimizer steps before the first block."""
    warmup_seconds: NonNegative
    """Wall time of these."""
    warmup_aside_seconds: NonNegative = 0.0
    """What a script did in between beside training, on top: a validation, or samples of what it has learned so far."""
    first_step_seconds: NonNegative | None = None
    """The very first step, without the wait for its batch; None when it was not noted."""
    warmup_step_seconds: tuple[NonNegative, ...] = ()
    """The first two steps after it that compile nothing, the same way."""
    compile_seconds: NonNegative
    """Part of the warm-up beyond steady step time when the model is compiled; 0 otherwise."""
    peak_memory: PeakMemory
    """Over the whole trial."""
    canary: SpeedReference | None = None
    """Speed of the machine around it; None when it was not measured."""
    ended_by: Literal["precision", "time", "samples", "racing", "training"] = "time"
    """Why no further block was timed: precise enough, time or samples used up, clearly slower, the training ended."""

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
    def rank_skew(self) -> float | None:
        """What the slowest of several processes took by itself over the median of all; None with one process."""
        by_rank = [*zip(*(block.rank_seconds for block in self.blocks if block.rank_seconds), strict=True)]
        totals = [sum(seconds) for seconds in by_rank]
        middle = median(totals) if totals else 0.0
        return max(totals) / middle if middle > 0 else None

    @property
    def taken_fraction(self) -> float:
        """Share of the CPUs that others used or that was stolen while it was timed; 0 where nobody watched.

        A block counts for its seconds: one that stalls is the longest.
        """
        seen = [(block.interference.taken_fraction, block.seconds) for block in self.blocks if block.interference]
        shares, seconds = zip(*seen, strict=True) if seen else ((0.0,), (1.0,))
        return fmean(shares, seconds)

    @property
    def data_wait_fraction(self) -> float:
        """Share of the measured time spent waiting for the loader."""
        return min(1.0, self.data_wait_seconds / self.seconds)
