"""What a probe finds out about a target in its child process."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.ceilings import Ceilings
from autotune.records.codec import Record
from autotune.records.config import (
    ActivationCheckpointing,
    KnobValue,
    OptimizerImplementation,
    Precision,
    TrainConfig,
)
from autotune.records.measurement import Fraction, NonNegative
from autotune.records.script import Numerics


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

    @property
    def seconds(self) -> float:
        """Of all phases together."""
        model = self.forward_seconds + self.backward_seconds + self.optimizer_seconds
        return self.data_wait_seconds + self.copy_seconds + model + self.other_seconds


class StepWork(Record):
    """What the time of a step's computation is spent on, by the profiler; the three shares add up to one."""

    products_fraction: Fraction
    """Matrix products, convolutions and attention that are large enough to be limited by arithmetic."""
    traffic_fraction: Fraction
    """Operations limited by memory: elementwise, norms, reductions, copies, thin products, the optimizer."""
    overhead_fraction: Fraction
    """Operations so small that calling them takes most of their time, Python between them, and a GPU's idle time."""
    operations_per_step: NonNegative
    """Calls of operations from Python and autograd; on a GPU kernels."""
    host_syncs_per_step: NonNegative
    """Times the host asks for a value and, on a GPU, waits for it: `.item()`, `.tolist()`, `nonzero` and the like."""
    host_sync_places: tuple[str, ...] = ()
    """Lines of the user's code that ask most often, as `file:line`; empty where they were not looked for."""
    bytes_per_second: NonNegative | None = None
    """Memory traffic of the operations limited by memory over their time; None when they take next to none."""
    device_busy_fraction: Fraction | None = None
    """Share of a step in which a kernel ran; None on a CPU, as the next."""
    enqueue_fraction: Fraction | None = None
    """Time to hand a step over without waiting for the device, as a share of the whole step."""


class MemoryMode(Record):
    """Peak memory of a training in one mode: `fixed_bytes + bytes_per_sample * micro batch`, calibrated."""

    precision: Precision
    """Arithmetic of the mode."""
    activation_checkpointing: ActivationCheckpointing
    """Checkpointing of the mode."""
    fixed_bytes: NonNegative
    """The process, libraries, weights, gradients, optimizer state: what a larger batch does not change."""
    bytes_per_sample: NonNegative
    """Growth of the peak with each sample of a micro batch: activations and temporaries."""
    least_bytes: NonNegative = 0.0
    """Peak while the optimizer steps, gradients and its temporaries there: needed for the smallest batch as well."""
    largest_micro_batch_size: Annotated[int, Field(ge=0)] | None = None
    """Predicted to stay inside the limit, head room left; 0 when nothing fits, None when growth cannot be seen."""

    def predict_bytes(self, micro_batch_size: int) -> float:
        """Return the predicted peak at a micro batch size."""
        return max(self.least_bytes, self.fixed_bytes + self.bytes_per_sample * micro_batch_size)


class MemoryFacts(Record):
    """What a training's memory is made of, and what other settings would need."""

    base_bytes: NonNegative
    """The process before the training was built: interpreter, libraries, the dataset; on a GPU the CUDA context."""
    weights_bytes: NonNegative
    """Parameters and buffers."""
    gradient_bytes: NonNegative
    """Gradients of all trainable parameters."""
    optimizer_bytes: NonNegative
    """State of the optimizer after its first step."""
    activation_bytes_per_sample: NonNegative | None = None
    """Growth with each sample in the baseline's mode; None when it could not be found."""
    limit_bytes: NonNegative
    """What the training may use: of the device, or of the host without one."""
    modes: tuple[MemoryMode, ...] = ()
    """By precision and checkpointing, the baseline's first; empty when nothing could be predicted."""
    calibrated_micro_batch_size: int | None = None
    """Micro batch of the real step that the prediction was held against; None without one."""
    calibration_error: float | None = None
    """Prediction from the shapes alone over what that step really used, less one; it is corrected for in the modes."""
    missing: str = ""
    """Why modes could not be predicted, in one sentence; empty when they were."""

    def find_mode(self, precision: str | None, activation_checkpointing: str | None) -> MemoryMode | None:
        """Return the mode of a config; None when it was not predicted."""
        wanted = (precision, activation_checkpointing)
        return next((m for m in self.modes if (m.precision, m.activation_checkpointing) == wanted), None)


class ModelFacts(Record):
    """What the model is made of, as far as knobs depend on it."""

    parameter_count: int
    """Elements of all trainable parameters."""
    parameter_bytes: int
    """Their size."""
    has_batch_norm: bool
    """A BatchNorm layer in training mode, or another that keeps statistics: they depend on the micro batch."""
    has_4d_convolution: bool
    """A 2-d convolution, whose weight channels_last lays out anew."""
    calls_attention: bool
    """scaled_dot_product_attention was called in a step."""
    checkpointable_blocks: int
    """Repeated blocks found for activation checkpointing; 0 when there are none."""
    calls_per_step: Annotated[int, Field(ge=0)] | None = None
    """Functions of PyTorch that a training step calls from Python on each of its micro-batches once; None when not
    counted."""
    flops_per_sample: float | None = None
    """Forward and backward, matrix products and convolutions only; None when not countable."""
    draws_random: bool = False
    """A training call was seen to draw random numbers, as of dropout; False also where nobody looked."""


class DataFacts(Record):
    """What the dataset costs and how it behaves."""

    sample_count: int | None
    """Length of the training set; None for an iterable dataset."""
    seconds_per_sample: float
    """Fetching and collating in one process."""
    cpu_fraction: Fraction | None = None
    """Share of that time in which a CPU was at work: less where samples are waited for; None when not known."""
    random_sources: tuple[str, ...]
    """What its samples draw from: the global generators `torch`, `numpy`, `random`; of a script its dataset's own."""
    iterable: bool
    """An IterableDataset."""
    workers_draw_alike: bool = False
    """A script's workers start with copies of a generator and draw the same from them: more of them, more alike."""
    fingerprint: str | None = None
    """`SAMPLES:DIGEST`, the digest over some of the samples; None where they cannot be told, as of a script."""
    hot_call: str = ""
    """Innermost function that takes at least half of a sample's time, with its file and line; empty without one."""
    hot_call_fraction: Fraction | None = None
    """Share of a sample's time that it takes, what it calls included; None without one."""
    batch_bytes: Annotated[int, Field(ge=0)] | None = None
    """Tensors of one micro batch; None when not known, as below."""
    batch_shapes: Annotated[int, Field(ge=0)] | None = None
    """Different shapes among the first sixteen micro batches, of a shorter last one too; None likewise."""
    loader_seconds_per_step: NonNegative | None = None
    """One step's batches from the loader alone, with the user's own workers and no training beside it."""
    epoch_start_seconds: NonNegative | None = None
    """From asking the loader for an epoch to its first batch: starting workers, above all."""
    slow_batch_ratio: NonNegative | None = None
    """A batch in twenty takes this many times the median or more to load; None when too few were timed."""
    worker_bytes: Annotated[int, Field(ge=0)] | None = None
    """Memory that one more loader worker takes, pages shared with others counted in part; None without workers."""
    disk_read_bytes_per_second: NonNegative | None = None
    """From the disk of the data's folder, past the page cache; None when no file there is large enough to tell."""

    @property
    def has_varying_shapes(self) -> bool:
        """Batches were seen to differ in their shapes: a loader of equal ones has two, for its last one is shorter."""
        return (self.batch_shapes or 0) > 2

    @property
    def waits(self) -> bool:
        """Most of a sample's time is waiting, for a disk or a network: CPUs do not limit how many load at once."""
        return self.cpu_fraction is not None and self.cpu_fraction < 0.5


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
    implementations: tuple[OptimizerImplementation, ...]
    """Implementations it can be switched to."""
    reason: str = ""
    """Why there are none, in one sentence."""


class Switched(Record):
    """What a setting brought that was switched on for some steps of the running training, and off again."""

    knob: str
    """Field name."""
    value: KnobValue
    """That was tried in place of the baseline's."""
    log_speedup: float
    """Natural logarithm of the steps' speed over that of the baseline's in turns with them."""
    log_sd: NonNegative
    """Standard deviation of the same, for a process of its own."""


Hazard = Literal["anomaly-detection", "deterministic-algorithms", "launch-blocking"]
"""A setting of the process that slows every training."""


class TargetFacts(Record):
    """What a child process found by building and running the target with its own settings."""

    label: str
    """The target as the user names it."""
    fingerprint: str
    """Twelve hex digits over the target's source file."""
    device: Literal["cpu", "cuda"]
    """Where it was run."""
    device_bytes: Annotated[int, Field(ge=0)] | None = None
    """Of the device's memory, what a training alone could hold there; None on a CPU, and in older files."""
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
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that train together in the search; the probe itself is one, with its share of the CPUs."""
    launched_processes: Annotated[int, Field(ge=1)] = 1
    """Processes of a script that its own launcher starts; the settings are those of each."""
    compute_seconds_per_step: float
    """One optimizer step on a batch that is already on the device: no loader, no copy."""
    computed_beside_workers: bool = False
    """That was timed while the user's own workers loaded, as a script's steps are."""
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
    switched: tuple[Switched, ...] = ()
    """Settings that were tried while the training ran."""
    aside_fraction: float = 0.0
    """Share of the time a script spends on validation and the like, which no knob of a step makes shorter."""
    supports_bf16: bool = True
    """bf16 autocast runs on the device."""
    ceilings: Ceilings = Ceilings()
    """Measured limits."""
    work: StepWork | None = None
    """What the computation of a step is spent on; None when the profiler could not tell."""
    batch_elasticity: float | None = None
    """Base-2 logarithm of the time of a pass over twice the micro batch over that of one: 1 when time grows with the
    samples, 0 when they are free; None when it could not be tried."""
    memory: MemoryFacts | None = None
    """What the memory is made of; None when it was not looked at."""
    hazards: tuple[Hazard, ...] = ()
    """Settings of the process that slow every training: seen by the probe, judged with the rest."""
    warnings: tuple[str, ...] = ()
    """Things the user should know, one sentence each."""

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps of a pass over the data, shared by the processes of a launcher; None without a length."""
        count, processes = self.data.sample_count, self.launched_processes
        return None if count is None else count / (processes * self.baseline.effective_batch_size)

    @property
    def rates(self) -> Ceilings:
        """The measured limits, with the rates of this model's kind of products: of attention's, where it has both."""
        convolves = self.model.has_4d_convolution and not self.model.calls_attention
        return self.ceilings.of_convolutions() if convolves else self.ceilings
