"""`Profile`: the saved answer (best.json). It is data: nothing in it is ever imported, executed or followed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from autotune.records.codec import SCHEMA_VERSION, Record, read_record, write_record
from autotune.records.config import TrainConfig
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.measurement import Interval, PeakMemory, QualityCheck

MAX_PROFILE_BYTES = 1024 * 1024

SearchVerdict = Literal["improved", "keep", "inconclusive"]
StopReason = Literal["budget", "exhausted", "interrupted", "running"]


class ProfileTarget(Record):
    """Which target a profile was measured on: a label and a fingerprint, compared but never followed."""

    label: str
    """The target as the user named it."""
    fingerprint: str
    """Twelve hex digits over the target's source file."""
    training_loaders: tuple[str, ...] = ()
    """Which of a script's loaders its loader settings are for, by description."""


class OneOffCosts(Record):
    """What is paid once."""

    compile_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Compilation of the winner beyond its first steady step."""
    startup_seconds: Annotated[float, Field(ge=0)] = 0.0
    """From the start of the process to the first step."""
    search_seconds: Annotated[float, Field(ge=0)] = 0.0
    """The search itself."""


class Evidence(Record):
    """What the answer rests on, in short; the whole of it is in the search folder."""

    pairs: Annotated[int, Field(ge=0)] = 0
    """Fresh-process pairs of baseline and winner."""
    baseline_samples_per_second: float | None = None
    """Mean over the baseline's launches."""
    samples_per_second: float | None = None
    """Mean over the winner's launches in the finals."""
    launch_noise_fraction: float | None = None
    """Standard deviation of the log ratio of one pair; None with fewer than two pairs."""
    trials: dict[str, int] = {}
    """Trials by status."""
    stop_reason: StopReason = "running"
    """Why the search ended."""
    notes: tuple[str, ...] = ()
    """What the user should know, one sentence each."""


class Profile(Record):
    """Record out of the search: the settings to train with and why they can be trusted."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    verdict: SearchVerdict
    """improved: `config` is proven faster and not worse; keep, inconclusive: `config` is the baseline."""
    config: TrainConfig
    """The settings to train with."""
    baseline_config: TrainConfig
    """The user's own settings."""
    speedup: Interval
    """Throughput ratio of the measured candidate to the baseline, from paired fresh processes."""
    quality: tuple[QualityCheck, ...] = ()
    """Drift checks of the candidate."""
    candidate_config: TrainConfig | None = None
    """The fastest candidate that was measured in the finals, also when it was not accepted."""
    memory: PeakMemory | None = None
    """Peak memory of `config`."""
    one_off: OneOffCosts = OneOffCosts()
    """What is paid once."""
    target: ProfileTarget
    """What was tuned."""
    hardware: HardwareInfo
    """Where."""
    software: SoftwareInfo
    """With which versions."""
    evidence: Evidence = Evidence()
    """What it rests on."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile as data.

        Raises:
            ProfileError: missing, too large, not JSON, a newer schema, or a field that does not fit.
        """
        return read_record(Path(path), cls, max_bytes=MAX_PROFILE_BYTES)

    def save(self, path: str | Path) -> None:
        """Write the profile atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        write_record(Path(path), self)


def baseline_interval(confidence_level: float) -> Interval:
    """Return the speed-up of the baseline over itself: exactly one, by definition."""
    return Interval(estimate=1.0, low=1.0, high=1.0, confidence_level=confidence_level, method="the baseline itself")
