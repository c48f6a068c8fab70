"""Two finished runs side by side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.measurement import Fraction, NonNegative
from autotune.records.profile import ProfileTarget
from autotune.records.run import Best, Count, GuardSummary, StepDown

RunState = Literal["finished", "stopped", "unfinished"]
"""stopped: it can be resumed; unfinished: it is still running, or was killed."""


class RunSide(Record):
    """One of the two runs, as its files tell."""

    folder: str
    """As the user named it."""
    state: RunState
    """How far it came."""
    target: ProfileTarget
    """What was trained."""
    origin: str
    """Where the settings came from: `profile`, `preset NAME`, `baseline`."""
    seed: int
    """Of initial weights, data order and dropout."""
    config: TrainConfig
    """The settings in force at its end."""
    planned_steps: Count | None
    """Optimizer steps it was to take; None when epochs were counted."""
    planned_epochs: Count | None
    """Epochs it was to train; None when steps were counted."""
    steps: Count
    """Optimizer steps taken."""
    epochs: Count
    """Epochs finished."""
    samples: Count
    """Samples trained on."""
    loss: float | None
    """Training loss of the last step."""
    metrics: dict[str, float | None]
    """What the last evaluation returned, None where not finite; empty without one."""
    best: Best | None
    """The best evaluation; None without a metric, and while the run has no summary."""
    samples_per_second: NonNegative | None
    """In the steps of all sessions; from the log while there is no summary."""
    promised_samples_per_second: NonNegative | None
    """What the search measured for these settings; None when it did not."""
    training_seconds: NonNegative | None
    """In steps, all sessions."""
    evaluation_seconds: NonNegative | None = None
    """In evaluations; None without a summary, as all below but the steps down."""
    checkpoint_seconds: NonNegative | None = None
    """In writing checkpoints."""
    data_wait_fraction: Fraction | None = None
    """Share of the stepping time spent waiting for the loader."""
    mfu: NonNegative | None = None
    """Model FLOPs utilization."""
    peak_memory_bytes: Count | None = None
    """Highest memory: reserved on the device, or resident on the host without one."""
    skipped_steps: Count | None = None
    """Optimizer steps that the loss scaler left out."""
    allocator_retries: Count | None = None
    """Times the device's allocator had to give memory back before it could go on."""
    step_downs: tuple[StepDown, ...] = ()
    """What went wrong and what was done."""
    guard: GuardSummary | None = None
    """The drift guard; None for a script."""


class SettingPair(Record):
    """A setting in which two runs differ."""

    name: str
    """Of the knob."""
    first: KnobValue | None
    """Its value in the first run."""
    second: KnobValue | None
    """Its value in the second run."""


class LossPair(Record):
    """The training loss of two runs after the same number of samples: means over the last tenth of what both saw."""

    from_samples: Count
    """Where the tenth begins."""
    to_samples: Count
    """Where it ends: what the shorter run saw."""
    first: float
    """Mean over the first run's log lines in between."""
    second: float
    """Mean over the second run's log lines in between."""
    first_lines: Annotated[int, Field(ge=1)]
    """Log lines it is the mean of."""
    second_lines: Annotated[int, Field(ge=1)]
    """Log lines it is the mean of."""


class RunComparison(Record):
    """Record out of `autotune compare`. One pair of runs has no interval, and none is made up."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this record."""
    first: RunSide
    """The run that was named first."""
    second: RunSide
    """The other one."""
    settings: tuple[SettingPair, ...]
    """What differs between the settings in force at their ends."""
    throughput_ratio: NonNegative | None
    """Samples per second of the second over the first; None when one is not known, as the next."""
    training_time_ratio: NonNegative | None
    """Seconds in steps of the second over the first, where both saw the same number of samples; else None."""
    loss: LossPair | None
    """None when there is no log line that both came to."""
    notes: tuple[str, ...]
    """What to keep in mind, one sentence each."""
