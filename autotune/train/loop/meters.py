"""What a training counts about itself; kept in its checkpoints, so that a resumed one goes on counting."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotune.engine.device import on_accelerator, peak_reserved_bytes, read_device_memory, reserved_bytes
from autotune.records.run import Best

_STATM = Path("/proc/self/statm")
_KIBIBYTE = 1024


@dataclass
class Meters:
    """Times and counts of a run, over all of its sessions.

    Attributes:
        training_seconds: in steps, but for the first of a session, which also compiles and starts the workers.
        training_samples: trained on in them.
        data_wait_seconds: of the steps, spent waiting for the loader.
        evaluation_seconds: in evaluations.
        evaluations: finished.
        checkpoint_seconds: in writing checkpoints.
        checkpoints: written.
        longest_checkpoint_seconds: the slowest of them.
        skipped_steps: optimizer steps that the loss scaler left out.
        allocator_retries: times the device's allocator had to give memory back before it could go on.
        peak_memory_bytes: reserved on the device, or resident on the host without one.
        best: the best evaluation.
    """

    training_seconds: float = 0.0
    training_samples: int = 0
    data_wait_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    evaluations: int = 0
    checkpoint_seconds: float = 0.0
    checkpoints: int = 0
    longest_checkpoint_seconds: float = 0.0
    skipped_steps: int = 0
    allocator_retries: int = 0
    peak_memory_bytes: int = 0
    best: Best | None = None

    def capture(self) -> dict[str, Any]:
        """Return the figures as plain containers."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"best": None if self.best is None else self.best.model_dump()}

    def restore(self, noted: Mapping[str, Any]) -> None:
        """Go on from earlier figures; ones that are not known are left out."""
        for field in dataclasses.fields(self):
            if field.name in noted:
                setattr(self, field.name, noted[field.name])
        self.best = None if noted.get("best") is None else Best(**noted["best"])

    def find_best(self, checkpoints: Path) -> None:
        """Look the best evaluation's checkpoint up in the run's folder, which may have been moved.

        It is forgotten where it is gone, as after a roll back beyond the one that replaced it.
        """
        if self.best is not None:
            here = checkpoints / Path(self.best.checkpoint).name
            self.best = self.best.replace(checkpoint=str(here)) if here.is_dir() else None

    def record_checkpoint(self, seconds: float) -> None:
        """Count a checkpoint."""
        self.checkpoint_seconds += seconds
        self.checkpoints += 1
        self.longest_checkpoint_seconds = max(self.longest_checkpoint_seconds, seconds)

    def record_evaluation(self, seconds: float) -> None:
        """Count an evaluation."""
        self.evaluation_seconds += seconds
        self.evaluations += 1

    @property
    def mean_evaluation_seconds(self) -> float:
        """Of one evaluation; 0 before the first."""
        return self.evaluation_seconds / self.evaluations if self.evaluations else 0.0

    @property
    def mean_checkpoint_seconds(self) -> float:
        """Of one checkpoint; 0 before the first."""
        return self.checkpoint_seconds / self.checkpoints if self.checkpoints else 0.0

    def record_memory(self, device: torch.device) -> int:
        """Return the memory in use now, in bytes, and remember the highest."""
        peak = peak_reserved_bytes(device)
        if peak is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes, peak)
            return reserved_bytes(device)
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE
        self.peak_memory_bytes = max(self.peak_memory_bytes, highest)
        return read_resident_bytes()


def read_resident_bytes() -> int:
    """Return the memory that this process has in RAM; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def read_memory_limit(device: torch.device) -> int | None:
    """Return how much memory there is: of the device, or of the host without one; None where it does not tell."""
    if on_accelerator(device):
        return read_device_memory(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
