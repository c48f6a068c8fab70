"""A target in the probe's process, as the probe looks at it: what differs between the two ways in, and nothing else.

WorkloadProbe   builds trainings and takes steps whenever it wants some
ScriptProbe     has what the hooks saw; a script takes its steps by itself, and none once it was timed
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from autotune.probe.memory.look import MemorySubject
from autotune.probe.step.work import WorkProfile
from autotune.records.config import TrainConfig
from autotune.records.facts import Switched, TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialLimits
from autotune.runs.source import Run, StepSource


class ProbeSource(Protocol):
    """A target in this process, to be timed and then to be looked at: the members stand in the order they are used.

    Attributes:
        base_bytes: in use before its training was built, of a GPU or of this process.
        enqueue_fraction: share of a step without its loader in which the host hands it over.
        files: that samples were read from, once it was described.
        folder: with its data, where these are too small to tell.
        switched: settings that were tried while it trained.
    """

    base_bytes: int
    enqueue_fraction: float
    files: list[Path]
    folder: Path
    switched: tuple[Switched, ...]

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        ...

    @property
    def steps(self) -> StepSource:
        """Its training, from its begin until other batches were tried."""
        ...

    def settings(self) -> AbstractContextManager[object]:
        """Return a context in which torch is set as the target has it; steps are taken and looked at in one."""
        ...

    def begin(self) -> tuple[TrainConfig, TrialLimits]:
        """Prepare the first step that is timed; return its settings and the limits of its timing.

        Raises:
            TargetError: a part of a workload returns something of the wrong type.
        """
        ...

    def watch_steps(self, seconds_per_step: float) -> Run[None]:
        """Try switches for some steps after the timed ones; look at some more, if they can be had at no other time.

        Args:
            seconds_per_step: of the training; slow steps are not looked at.
        """
        ...

    def describe(self, measurement: Measurement) -> TargetFacts:
        """Return the facts that cost little.

        Args:
            measurement: of its steps.
        """
        ...

    def profile(self, facts: TargetFacts) -> WorkProfile | None:
        """Return some steps under the profiler; None where there are none, or nothing is seen of them."""
        ...

    def vary_batches(self, facts: TargetFacts) -> TargetFacts:
        """Return the facts with what batches of another size do, and let go of the training."""
        ...

    def open_loader(self, facts: TargetFacts) -> DataLoader[Any] | None:
        """Return a loader as its training has one; None without."""
        ...

    def open_memory(self, measurement: Measurement) -> MemorySubject:
        """Return what its memory is looked at by.

        Args:
            measurement: of its steps.
        """
        ...
