"""What a final training leaves behind: its plan, its steps down, its checkpoints' manifests, its summary."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import TrainConfig
from autotune.records.measurement import Fraction, Interval, NonNegative
from autotune.records.profile import ProfileTarget
from autotune.records.quality import DriftLimits, GradientEquivalence, LossBand, Margin
from autotune.records.trial import Cause

Count = Annotated[int, Field(ge=0)]

StepDownAction = Literal[
    "again",
    "fewer-samples",
    "recompute",
    "no-workers",
    "eager",
    "baseline-numerics",
    "baseline",
    "gradients-kept",
    "endured",
]
"""again: the same settings once more; fewer-samples: a smaller micro batch, more accumulation; recompute: activation
checkpointing; no-workers: load in the training process; eager: no compilation; baseline-numerics: the baseline's
arithmetic; baseline: all of its settings; gradients-kept: evaluate without inference mode; endured: it is slower, not
wrong, and nothing else helps."""


class StepDown(Record):
    """One safe step down: what went wrong, what was changed, and where the training went on."""

    step: Count
    """Optimizer steps taken when it went wrong."""
    resumed_step: Count
    """Optimizer steps that were kept: those of the checkpoint it went on from."""
    cause: Cause
    """What went wrong, in a word."""
    detail: str
    """What was seen, one sentence."""
    action: StepDownAction
    """What was done."""
    sentence: str
    """All of it in one sentence for the user."""
    config: TrainConfig
    """The settings from there on."""


class Reverification(Record):
    """What a few pairs showed on a machine, or a state of the target, that the profile was not measured on."""

    differences: tuple[str, ...]
    """What is not as it was measured, one sentence each."""
    speedup: Interval | None
    """Of the profile's settings over the baseline, from these pairs; None when they could not be measured."""
    pairs: Count
    """Finished pairs."""
    trusted: bool
    """The profile's settings are used."""
    reason: str
    """Why, one sentence."""


class RunPlan(Record):
    """What a run was started with, and the steps down since; a resumed run must agree with it."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    target: ProfileTarget
    """What is trained."""
    asked_config: TrainConfig
    """The settings that were asked for: the profile's, the preset's or the baseline."""
    config: TrainConfig
    """With which settings it was started: others where a profile from elsewhere did not stand a look."""
    baseline_config: TrainConfig
    """The settings to fall back to."""
    origin: str = "baseline"
    """Where the settings came from: `profile`, `preset NAME`, `baseline`."""
    promised_samples_per_second: NonNegative | None = None
    """What the search measured for them; None when it did not."""
    promised_noise: NonNegative | None = None
    """Standard deviation of the log throughput of the search's launches; None when it is not known."""
    flops_utilization: NonNegative | None = None
    """Model FLOPs utilization of one sample a second with them; None when it is not known."""
    loss_band: LossBand | None = None
    """Where the baseline's loss went in the search; None when it was not trained there."""
    drift_limit: Margin = DriftLimits().loss
    """How much worse the training loss may get."""
    accepted: tuple[GradientEquivalence, ...] = ()
    """Comparisons of gradients on which the search accepted the settings."""
    reverification: Reverification | None = None
    """Of a profile from elsewhere."""
    seed: int
    """Of initial weights, data order and dropout."""
    steps: Annotated[int, Field(ge=1)] | None
    """Optimizer steps to take; None when epochs are counted."""
    epochs: Annotated[int, Field(ge=1)] | None
    """Epochs to train; None when steps are counted."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that train together; batches of all settings here but the asked ones are those of each."""
    machine: str = ""
    """Fingerprints of the hardware and the versions it was started with."""
    step_downs: tuple[StepDown, ...] = ()
    """In order; the last one's settings are those in force."""

    @property
    def current_config(self) -> TrainConfig:
        """The settings in force."""
        return self.step_downs[-1].config if self.step_downs else self.config


class CheckpointManifest(Record):
    """Written last: a checkpoint without one is not complete."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    step: Count
    """Optimizer steps taken."""
    epoch: Count
    """Epoch the training stands in."""
    bytes: Count
    """Size of the state file."""
    sha256: str
    """Its checksum."""
    shards: dict[str, str] = {}
    """Checksums of the other files, by name, where each process of a sharded training has written its own."""
    target_fingerprint: str
    """Twelve hex digits over the target's source file."""
    torch: str
    """PyTorch that wrote it."""


class Best(Record):
    """The best evaluation so far by the target's first metric, and the checkpoint that is kept for it."""

    metric: str
    """Its name."""
    value: float
    """Its value."""
    step: Count
    """Optimizer steps taken by then."""
    checkpoint: str
    """Folder of the checkpoint."""


class GuardSummary(Record):
    """What the drift guard looked at."""

    is_on: bool
    """There was something to guard: settings that are not the baseline's."""
    reason: str = ""
    """What it could not look at and why; empty when it looked at everything."""
    gradient_checks: Count = 0
    """Micro batches whose gradient was compared with the one under the baseline's numerics."""
    last: GradientEquivalence | None = None
    """The last comparison over several micro batches; None when no single one gave cause for it."""
    largest_error: NonNegative | None = None
    """Largest squared relative difference of one micro batch's gradient; None without a check."""
    last_clean_step: Count = 0
    """Optimizer steps up to which everything looked at was as it should be."""
    cost_fraction: Fraction | None = None
    """Share of the training's time that it took."""
    alarms: Count = 0
    """Times it rolled back."""


class TrainingSummary(Record):
    """How a run ended, and how it compares with what the profile promised."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    folder: str
    """Run folder."""
    checkpoint: str
    """Last checkpoint."""
    weights: str = ""
    """The best weights as safetensors; empty before the end, and where they could not be written so."""
    finished: bool = True
    """The plan was trained to its end; False when it was stopped and can be resumed."""
    target: ProfileTarget | None = None
    """What was trained."""
    origin: str = "profile"
    """Where the settings came from."""
    config: TrainConfig | None = None
    """The settings in force at the end."""
    steps: Count
    """Optimizer steps taken, earlier sessions of a resumed run included."""
    epochs: Count
    """Epochs finished."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that trained together; the settings are those of each."""
    samples: Count
    """Samples trained on, earlier sessions included."""
    loss: float | None
    """Training loss of the last step; None when no step was taken."""
    metrics: dict[str, float | None]
    """What `evaluate` returned at the end, None where not finite; empty without it."""
    best: Best | None = None
    """The best evaluation; None without a metric."""
    samples_per_second: NonNegative | None
    """In all sessions; set-up, the first step, which also compiles, evaluation and checkpoints are not counted. None
    when no step was taken."""
    promised_samples_per_second: NonNegative | None
    """What the search measured for these settings; None when it did not."""
    promised_noise: NonNegative | None = None
    """Standard deviation of the log throughput of the search's launches; None when it is not known."""
    data_wait_fraction: Fraction | None = None
    """Share of the stepping time spent waiting for the loader."""
    mfu: NonNegative | None = None
    """Floating-point operations of the model a second over the measured rate of this machine; None when not known."""
    peak_memory_bytes: Count | None = None
    """Highest memory: reserved on the device, or resident on the host without one."""
    skipped_steps: Count = 0
    """Optimizer steps that the loss scaler left out."""
    allocator_retries: Count = 0
    """Times the device's allocator had to give memory back before it could go on."""
    evaluation_seconds: NonNegative = 0.0
    """In evaluations."""
    checkpoint_seconds: NonNegative = 0.0
    """In writing checkpoints."""
    training_seconds: NonNegative = 0.0
    """In the steps that are timed, all sessions."""
    elapsed_seconds: float
    """Wall time of this session."""
    step_downs: tuple[StepDown, ...] = ()
    """What went wrong and what was done, over all sessions."""
    guard: GuardSummary | None = None
    """The drift guard; None for a script."""
    reverification: Reverification | None = None
    """Of a profile from another machine; None when it was measured here."""
    warnings: tuple[str, ...] = ()
    """What the user should know, one sentence each."""

    def __repr__(self) -> str:
        """Return how far it came and where it is: the whole of it would be pages."""
        how = "finished" if self.finished else "stopped"
        return f"<TrainingSummary {how} after {self.steps} steps, loss {self.loss}, in {self.folder!r}>"
