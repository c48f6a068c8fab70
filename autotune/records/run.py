"""What a final training leaves behind: its plan, its checkpoints' manifests, its summary."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import TrainConfig
from autotune.records.profile import ProfileTarget

Count = Annotated[int, Field(ge=0)]


class RunPlan(Record):
    """What a run was started with; a resumed one must agree with it."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    target: ProfileTarget
    """What is trained."""
    config: TrainConfig
    """With which settings."""
    seed: int
    """Of initial weights, data order and dropout."""
    steps: Annotated[int, Field(ge=1)] | None
    """Optimizer steps to take; None when epochs are counted."""
    epochs: Annotated[int, Field(ge=1)] | None
    """Epochs to train; None when steps are counted."""


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
    target_fingerprint: str
    """Twelve hex digits over the target's source file."""
    torch: str
    """PyTorch that wrote it."""


class TrainingSummary(Record):
    """How a run ended, and how it compares with what the profile promised."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    folder: str
    """Run folder."""
    checkpoint: str
    """Last checkpoint."""
    steps: Count
    """Optimizer steps taken, earlier sessions of a resumed run included."""
    epochs: Count
    """Epochs finished."""
    samples: Count
    """Samples trained on, earlier sessions included."""
    loss: float | None
    """Training loss of the last step; None when no step was taken."""
    metrics: dict[str, float | None]
    """What `evaluate` returned at the end, None where not finite; empty without it."""
    samples_per_second: float | None
    """In this session, set-up, evaluation and checkpoints not counted; None when no step was taken."""
    promised_samples_per_second: float | None
    """What the search measured for these settings; None when it did not."""
    elapsed_seconds: float
    """Wall time of this session."""
    warnings: tuple[str, ...] = ()
    """What the user should know, one sentence each."""
