"""A trial: one config in one process. `TrialSpec` goes in, `TrialResult` comes out, whatever happens."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from autotune.records.ceilings import Ceilings
from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.quality import DriftLimits
from autotune.records.script import Script

SAMPLES_PATIENCE = 4.0
"""Where the samples of a launch are fixed, it may measure this much longer than asked for."""

DEVICE_VARIABLE = "AUTOTUNE_DEVICE"
"""Environment variable: `cpu` keeps a workload on the CPU of a machine with an accelerator, as `--device cpu` does."""


class TrialStatus(StrEnum):
    """How a trial ended."""

    COMPLETED = "completed"
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    DRIFTED = "drifted"
    UNSUPPORTED = "unsupported"
    TIMED_OUT = "timed_out"
    TOO_SLOW = "too_slow"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"


Cause = Literal[
    "",  # completed
    "allocator-thrash",
    "oom-device",
    "oom-host",
    "oom-killed",
    "dataloader-worker-died",
    "dataloader-worker-hung",
    "shm",
    "compile-error",
    "compile-timeout",
    "device-error",
    "flag-ignored",
    "inference-tensor",
    "not-supported",
    "drift-gradients",
    "drift-loss",
    "non-finite",
    "skipped-steps",
    "crash-exit",
    "crash-signal",
    "limits",
    "no-result",
    "protocol-error",
    "server-died",
    "user-error",
    "no-optimizer-step",
    "target",
    "usage",
    "machine",
    "budget",
    "disturbed",
    "interrupted",
    "slow-steps",
    "timeout",
]
"""What went wrong in a trial or in a final training, in a word."""


class Target(Record):
    """What is tuned."""

    spec: str
    """`file.py:attr` or `package.module:attr` as the user typed it; for a script its command line."""
    folder: str
    """Working folder the spec is resolved in."""
    script: Script | None = None
    """The script; None for a workload."""


class Rival(Record):
    """The incumbent that a trial races: one that is clearly slower is ended early."""

    seconds_per_sample: Annotated[float, Field(gt=0)]
    """What the incumbent would take now."""
    block_sd: Annotated[float, Field(ge=0)]
    """Standard deviation of the log time of its blocks."""
    margin: Annotated[float, Field(ge=0)]
    """Log ratio that launches of one and the same config may differ by."""
    canary_seconds: Annotated[float, Field(gt=0)] | None = None
    """What the canary took when `seconds_per_sample` was found; None when it is not known."""


class Pace(Record):
    """How the user's own settings start: a launch whose first steps are hopelessly slower is ended in them."""

    first_step_seconds: Annotated[float, Field(gt=0)]
    """Their longest first step, without the wait for its batch, for as many samples as a step of this launch has."""
    samples_per_second: Annotated[float, Field(gt=0)]
    """What they reach once they have settled."""
    warmup_ratio: Annotated[float, Field(ge=1)] = 1.0
    """How many times as long as later ones their second and third step take."""
    compile_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a step that compiles may take; None where nothing is compiled."""


class TrialLimits(Record):
    """How long a trial may take and how much it may use."""

    time_limit_seconds: Annotated[float, Field(gt=0)]
    """From the start of the process to its kill."""
    wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """What waiting for a fork server may take before; only what takes longer is off the time limit."""
    warmup_cap_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Longest warm-up, compilation not counted."""
    measure_seconds: Annotated[float, Field(gt=0)] = 12.0
    """Longest wall time of the measured blocks together."""
    least_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Warm up over so many steps though all has settled before: then two that are compared time the same batches."""
    measure_samples: Annotated[int, Field(gt=0)] | None = None
    """Measure this many samples, however precise; None to stop when precise enough."""
    rival: Rival | None = None
    """What it races against; None to measure it to the end."""
    pace: Pace | None = None
    """How the user's settings start; with a rival, its first steps may end it. None to let it warm up in any time."""
    seconds_per_sample: Annotated[float, Field(ge=0)] | None = None
    """What the dataset takes for a sample in one process; None when it is not known."""
    ends_with_stage: bool = False
    """The time limit is what was left, not what the config deserves: running into it says nothing about it."""
    host_memory_limit_bytes: Annotated[int, Field(gt=0)] | None = None
    """Kill the trial above this; None for no limit."""
    device_memory_limit_bytes: Annotated[int, Field(gt=0)] | None = None
    """Allocator limit on the device; None for no limit."""
    ceilings_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Time to measure the machine's limits in, where a probe is not told them."""


class GradientPlan(Record):
    """What a fidelity trial writes down: what the optimizer gets and does in the same windows at the same weights."""

    windows: Annotated[int, Field(ge=1)] = 16
    """Effective batches at each point."""
    first_windows: Annotated[int, Field(ge=1)] | None = None
    """At the initial weights, where they are fewer; None for as many."""
    later_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of the baseline from the initial weights to the later point; 0 for the initial weights alone."""
    weights: str | None = None
    """File with the baseline's weights at the later point; None to train there and write it."""
    dropout: bool = True
    """False: every dropout lets everything pass, for settings that draw random numbers in another order."""
    reference: bool = False
    """Compute the model in float64."""
    keeps_state: bool = False
    """Let the optimizer's state go on from window to window: momentum shows in the second step only."""


class DataTrace(Record):
    """What a loader handed to the training."""

    batches: tuple[str, ...]
    """Digest of the contents of each of the first effective batches, in order."""
    shapes: tuple[str, ...]
    """Their types and shapes, e.g. `int64[32, 64]`, joined by `+`."""
    ends: tuple[str, ...] = ()
    """Digests of the last effective batches of the first epoch and of the first one of the second."""
    end_shapes: tuple[str, ...] = ()
    """Their types and shapes."""
    order: str = ""
    """Digest of every sample's index in the first epoch; empty where the loader does not tell."""
    samples: Annotated[int, Field(ge=0)] | None = None
    """Samples in an epoch."""
    repeated: Annotated[int, Field(ge=0)] = 0
    """Of these, how many came more than once."""


class TrialSpec(Record):
    """One trial to run."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    number: Annotated[int, Field(ge=0)]
    """Position in the search; also the folder's name."""
    purpose: Literal["machine", "probe", "measure", "reference", "final", "quality", "fidelity", "tape"]
    """machine: measure its limits, without a target; probe: find the target's facts; measure, final: time it;
    reference: time the user's settings in turns with another one; quality: train for its losses; fidelity: write down
    its gradients; tape: write down its data."""
    target: Target
    """What is tuned."""
    config: TrainConfig | None
    """The settings; None for a probe, which finds them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that train together, which share out the config's effective batch; a probe is one of so many, alone."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """Seeds of initial weights, data order and dropout; all but quality use the first only."""
    quality_steps: Annotated[int, Field(ge=1)] = 40
    """Optimizer steps per seed of a quality trial."""
    evaluate: bool = False
    """Let a quality trial also call the target's `evaluate`."""
    fidelity: GradientPlan | None = None
    """Of a fidelity trial."""
    random_sources: tuple[str, ...] = ()
    """Generators the dataset draws from, as the probe found them: seeded for each sample of a workload."""
    baseline: TrainConfig | None = None
    """What a script does by itself, as the probe found it: only what differs is applied; None for a workload."""
    training_loaders: tuple[str, ...] = ()
    """Which of a script's loaders it trains from, as the probe found them."""
    ceilings: Ceilings | None = None
    """The machine's limits where a probe need not measure them again."""
    max_drift: DriftLimits | None = None
    """Of the search that a probe is for: a limit of a metric that the workload has not ends it at once."""
    named_knobs: tuple[str, ...] = ()
    """And knobs that the search was told of: one that the workload has not ends it too."""
    limits: TrialLimits
    """Time and memory."""


GROWTH_STEPS = 50
"""Steps after which a loss scale grows in a quality trial: PyTorch's 2000 would never be seen there."""


class LossCurve(Record):
    """What one seed of a training learned."""

    seed: int
    """Seed of initial weights, data order and dropout."""
    losses: tuple[float | None, ...]
    """Training loss of each optimizer step, None where it was not finite."""
    samples: int
    """Samples trained on."""
    skipped: int | None = None
    """Optimizer steps of the last half that a loss scaler left out; None where they are not counted."""
    metrics: dict[str, float | None] = {}
    """The target's metrics after the last step, None where not finite; empty without, or when not evaluated."""


class TrialResult(Record):
    """How one trial ended."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    spec: TrialSpec
    """What was asked."""
    status: TrialStatus
    """How it ended."""
    cause: Cause = ""
    """What went wrong; empty when completed."""
    error: str = ""
    """One sentence for the user; empty when completed."""
    hint: str = ""
    """What the user can do about it, where the error says so."""
    elapsed_seconds: Annotated[float, Field(ge=0)]
    """From the start of the process to its end, as the parent saw it."""
    startup_seconds: Annotated[float, Field(ge=0)] = 0.0
    """From the start of the process to the first training step."""
    measurement: Measurement | None = None
    """The timing; None when the trial did not get that far, or was not a timing."""
    reference: Measurement | None = None
    """The timing of the user's settings in turns with it; None where it was timed alone."""
    samples_per_second_bound: Annotated[float, Field(gt=0)] | None = None
    """Of a trial that was too slow: its settings reach this at most; None for any other."""
    curves: tuple[LossCurve, ...] = ()
    """Losses: one curve per seed; of a fidelity trial those between its two points."""
    captures: str | None = None
    """File with what a fidelity trial wrote down."""
    draws_random: bool = False
    """A fidelity trial's training drew random numbers: there is dropout or the like."""
    tape: DataTrace | None = None
    """What the loader handed to the training of a tape or fidelity trial."""
    facts: TargetFacts | None = None
    """What a probe found."""
    ceilings: Ceilings | None = None
    """What a machine trial measured."""
    written: tuple[str, ...] = ()
    """Files a script made, changed or deleted in its disposable view, relative to the working folder."""
    written_elsewhere: tuple[str, ...] = ()
    """Files outside of it that the script opened for writing by an absolute path: these are real."""

    @property
    def starting_seconds(self) -> float:
        """What it took beside its steps: until the first one, and what a script did beside training in its warm-up."""
        return self.startup_seconds + (self.measurement.warmup_aside_seconds if self.measurement is not None else 0.0)

    def with_reference(self, reference: TrialResult) -> TrialResult:
        """Return it with the timing of the user's settings that was made in turns with it, and the time of both.

        Args:
            reference: of a trial that was started with this one, and ended about when it did.
        """
        seconds = max(self.elapsed_seconds, reference.elapsed_seconds)
        return self.replace(reference=reference.measurement, elapsed_seconds=seconds)
