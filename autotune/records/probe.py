"""What a probe finds: the target's facts, the machine's ceilings, the verdict and the advice."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.measurement import Measurement
from autotune.records.script import Numerics

Limit = Literal["input", "launch", "bandwidth", "compute", "unknown"]


class MatmulRate(Record):
    """Measured rate of a square matrix product."""

    dtype: Literal["fp32", "tf32", "bf16", "fp16"]
    """Arithmetic."""
    flops_per_second: float
    """Floating-point operations per second, multiply and add counted apart."""


class Ceilings(Record):
    """Measured limits of the device."""

    matmul: tuple[MatmulRate, ...] = ()
    """Best rate for each arithmetic the device ran."""
    memory_bytes_per_second: float | None = None
    """Large copy, read plus write traffic; None when not measured."""
    copy_to_device_bytes_per_second: float | None = None
    """Pinned host to device; None without a device."""

    def flops_per_second(self, dtype: str) -> float | None:
        """Return the measured rate for one arithmetic; None when it was not measured."""
        return next((rate.flops_per_second for rate in self.matmul if rate.dtype == dtype), None)


class StepPhases(Record):
    """Where the time of one optimizer step goes, in seconds per step, the device synchronised between phases."""

    data_wait_seconds: float
    """Waiting for the loader."""
    copy_seconds: float
    """Moving the batch to the device."""
    forward_seconds: float
    """Forward pass and loss."""
    backward_seconds: float
    """Backward pass."""
    optimizer_seconds: float
    """Clipping, optimizer, scheduler, zeroing gradients; for a script the optimizer alone."""
    other_seconds: float = 0.0
    """Whatever else a script does in a step: the loss, clipping, copies, logging."""


class ModelFacts(Record):
    """What the model is made of, as far as knobs depend on it."""

    parameter_count: int
    """Elements of all trainable parameters."""
    parameter_bytes: int
    """Their size."""
    has_batch_norm: bool
    """A BatchNorm layer in training mode: its statistics depend on the micro batch."""
    has_4d_convolution: bool
    """A 2-d convolution, whose weight channels_last lays out anew."""
    calls_attention: bool
    """scaled_dot_product_attention was called in a step."""
    checkpointable_blocks: int
    """Repeated blocks found for activation checkpointing; 0 when there are none."""
    flops_per_sample: float | None = None
    """Forward and backward, matrix products and convolutions only; None when not countable."""


class DataFacts(Record):
    """What the dataset costs and how it behaves."""

    sample_count: int | None
    """Length of the training set; None for an iterable dataset."""
    seconds_per_sample: float
    """Fetching and collating in one process."""
    random_sources: tuple[str, ...]
    """Global generators its samples draw from: any of `torch`, `numpy`, `random`."""
    iterable: bool
    """An IterableDataset."""


class Additivity(Record):
    """Whether the gradient of a batch is that of its parts, found by computing both."""

    error: float
    """Relative L2 difference of the worst window."""
    reordering: float
    """The same between a window and itself with its samples in reverse: what rounding alone does."""
    limit: float
    """What the difference may be."""
    parts: int
    """Micro batches that a window was split into."""

    @property
    def holds(self) -> bool:
        """A batch may be split."""
        return self.error <= self.limit


class OptimizerFacts(Record):
    """What the optimizer lets be changed."""

    name: str
    """Class name."""
    implementations: tuple[str, ...]
    """Implementations it can be switched to: any of `for-loop`, `foreach`, `fused`."""
    reason: str = ""
    """Why there are none, in one sentence."""


class TargetFacts(Record):
    """What a child process found by building and running the target with its own settings."""

    label: str
    """The target as the user names it."""
    fingerprint: str
    """Twelve hex digits over the target's source file."""
    device: Literal["cpu", "cuda"]
    """Where it was run."""
    baseline: TrainConfig
    """The user's own settings, with every default resolved."""
    model: ModelFacts
    """The model."""
    data: DataFacts
    """The dataset."""
    optimizer: OptimizerFacts
    """The optimizer."""
    phases: StepPhases
    """One optimizer step at the baseline."""
    compute_seconds_per_step: float
    """One optimizer step on a batch that is already on the device: no loader, no copy."""
    knobs: dict[str, tuple[KnobValue, ...]] = {}
    """The workload's own knobs and their allowed values."""
    metrics: dict[str, Literal["minimize", "maximize"]] = {}
    """The metrics that `evaluate` returns or the script prints, each with the way it is better; empty without."""
    evaluate_seconds: float | None = None
    """One call of `evaluate`; None without one, or when it takes too long for a drift check."""
    additivity: Additivity | None = None
    """Of the loss over parts of a batch; None where it was not tested."""
    fixed: dict[str, str] = {}
    """Knobs that cannot be varied on this target, by name, each with the reason in one sentence."""
    numerics: dict[str, Numerics] = {}
    """Knobs whose class on this target is not the table's; own knobs by their `user_knobs.NAME`."""
    scales_loss: bool = True
    """The loss is scaled for fp16: by the engine for a workload, by a script only if it does so itself."""
    training_loaders: tuple[str, ...] = ()
    """Which of a script's loaders it trains from."""
    aside_fraction: float = 0.0
    """Share of the time a script spends on validation and the like, which no knob of a step makes shorter."""
    supports_bf16: bool = True
    """bf16 autocast runs on the device."""
    ceilings: Ceilings = Ceilings()
    """Measured limits."""
    warnings: tuple[str, ...] = ()
    """Things the user should know, one sentence each."""


class Verdict(Record):
    """Which limit binds a step."""

    limit: Limit
    """The binding limit."""
    sentence: str
    """The verdict for people, with its evidence in numbers."""
    speedup_ceiling: float | None = None
    """No speed-up above this is possible on this machine for this model; None when not computable."""


class Advice(Record):
    """One knob worth trying."""

    knob: str
    """Field name."""
    reason: str
    """Why, with a number where there is one."""


class RuledOut(Record):
    """One value of a knob that is not tried."""

    knob: str
    """Field name."""
    value: KnobValue | None
    """The value; None for every value but the baseline's."""
    reason: str
    """Why, in one sentence."""


class ProbeReport(Record):
    """Record out of `autotune probe`, record in of the search."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    hardware: HardwareInfo
    """The machine."""
    software: SoftwareInfo
    """The versions."""
    target: TargetFacts
    """The target."""
    measurement: Measurement
    """The baseline, measured end to end."""
    verdict: Verdict
    """Which limit binds."""
    advice: tuple[Advice, ...] = ()
    """Knobs worth trying, best first."""
    ruled_out: tuple[RuledOut, ...] = ()
    """What will not be tried, and why."""
    elapsed_seconds: float = 0.0
    """Wall time of the probe."""
