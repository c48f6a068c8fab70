"""What the processes of one training tell each other: in a file, replaced whole, or in a word of the command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import Record
from autotune.records.config import TrainConfig
from autotune.records.measurement import NonNegative
from autotune.records.run import Count
from autotune.records.trial import Cause


class Failure(Record):
    """What ended a process of a training, by its own account."""

    cause: Cause
    """In a word."""
    detail: str
    """One sentence."""
    at: float
    """`time.time()` then, to find the first of several processes."""


class TrainingProgress(Record):
    """How far a training has come, or one of its processes; counts go on over attempts and sessions."""

    rank: int = 0
    """Of the process, 0 for the only one."""
    steps: Count = 0
    """Optimizer steps taken."""
    samples: Count = 0
    """Trained on, by all processes together."""
    loss: float | None = None
    """Training loss of the last step that was looked at; None before one was."""
    training_seconds: NonNegative = 0.0
    """In timed steps; evaluations, and the first step of a session, which also compiles, are not counted."""
    training_samples: Count = 0
    """Trained on in these seconds."""
    data_wait_seconds: float = 0.0
    """Of these seconds, spent waiting for the training's loader."""
    peak_memory_bytes: Count = 0
    """Reserved on the device, or resident on the host without one; 0 while not known."""
    non_finite_step: Count | None = None
    """First optimizer step at which the loss was found not to be finite; None while it is."""
    eager_step: Count | None = None
    """Optimizer steps taken when a compilation failed and the rest went on without; None where none did."""
    eager_detail: str = ""
    """How it failed."""
    failure: Failure | None = None
    """What ended it; None while it runs, and when it ended in order or without a word."""


class RankEnd(Record):
    """How one of several processes of a training ended, by its own account or that of who started them."""

    rank: Count
    """Of the process."""
    status: int
    """To exit with."""
    cause: Cause
    """In a word."""
    detail: str
    """One sentence."""
    saw: Literal["", "gone", "silent"] = ""
    """It ended because of another one: gone, or without an answer."""


class OpenedRun(Record):
    """What a workload's training tells its parent when it has opened its run."""

    folder: str
    """Absolute path of the run's folder."""
    step_downs: Count
    """That the run's plan has from before."""


class ScriptPlan(Record):
    """What a process of a script's training is started with."""

    config: TrainConfig
    """The settings."""
    changed: tuple[str, ...]
    """Knobs that hooks set, because no flag of the script's does."""
    training_loaders: tuple[str, ...]
    """Which of its loaders they are for, by description."""
    promised_samples_per_second: NonNegative | None
    """What the search measured for the settings; None when it did not."""
    as_json: bool
    """Standard output is for the summary alone; what the script prints there goes to standard error."""
    progress_folder: str
    """Absolute path of the folder that its `TrainingProgress` is written into."""
    kind: Literal["file", "module"]
    """Whether `name` is a file or a module."""
    name: Annotated[str, Field(min_length=1)]
    """The script."""
    interpreter_options: tuple[str, ...]
    """Of the python that runs it."""
    launcher_options: tuple[str, ...] | None
    """torchrun's own; None where it does not start the script."""
    passes_local_rank: bool = False
    """Each process is given `--local_rank=K` before its other arguments."""
