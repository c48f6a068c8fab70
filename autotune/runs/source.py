"""Where the optimizer steps of a run come from, and what a run is: each is written once, for both ways in.

    WorkloadSource   drives a run: it takes a step whenever the run asks for one
    ScriptSource     is driven: the script trains, and each of its steps is handed to the run

A run is a generator. Every `yield` asks for one optimizer step and gets it; what the generator returns was found out.
A source whose training takes no further step throws `TrainingEndedError` into it, and the run makes do with what it
has, or lets the exception pass where it has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from autotune.engine.gradients import StepRecorder
from autotune.measure.clock import Clock
from autotune.measure.timing import Timing
from autotune.records.measurement import Measurement
from autotune.records.trial import DataTrace, LossCurve, TrialResult, TrialSpec, TrialStatus

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        samples: trained on by all processes; 0 where a script does not show them.
        loss: scalar on the device; of several micro batches their sum or mean, as the training divides them.
    """

    samples: int
    loss: Tensor


Run = Generator[None, Step, T]


def drive(run: Run[T], take_step: Callable[[], Step]) -> T:
    """Take every optimizer step that a run asks for; return what it has found out."""
    try:
        next(run)
        while True:
            run.send(take_step())
    except StopIteration as end:
        found: T = end.value
        return found


@dataclass(frozen=True)
class Found:
    """What a run has found out: the parts of a `TrialResult` that are its own."""

    measurement: Measurement | None = None
    curves: tuple[LossCurve, ...] = ()
    tape: DataTrace | None = None
    captures: str | None = None
    draws_random: bool = False

    def complete(self, spec: TrialSpec, *, elapsed_seconds: float, startup_seconds: float) -> TrialResult:
        """Return the result of a trial that came to its end.

        Args:
            spec: of the trial.
            elapsed_seconds: since its process was started.
            startup_seconds: of these, until its first training call.
        """
        return TrialResult(
            spec=spec,
            status=TrialStatus.COMPLETED,
            elapsed_seconds=elapsed_seconds,
            startup_seconds=startup_seconds,
            measurement=self.measurement,
            curves=self.curves,
            tape=self.tape,
            captures=self.captures,
            draws_random=self.draws_random,
        )


class StepSource(Protocol):
    """One training in this process, as its runs see it.

    Attributes:
        timing: what its steps are noted in while they are timed; a run sets it.
        draws_random: steps between `begin_window` and their end have drawn random numbers.
    """

    timing: Timing | None
    draws_random: bool

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        ...

    @property
    def clock(self) -> Clock:
        """Stands still while the training does something else, such as validating."""
        ...

    @property
    def samples_per_window(self) -> int | None:
        """Of an optimizer step under the user's own settings; None where any step is a window that comes again."""
        ...

    def read_ranks(self) -> tuple[float, ...]:
        """Return what each of several processes took by itself up to the clock's last look, in seconds; or nothing."""
        ...

    def list_others(self) -> tuple[int, ...]:
        """Return other processes of the training, whose memory is counted here; none that count it themselves."""
        ...

    def name_parameters(self) -> Mapping[int, str]:
        """Return what parameters are called, by id and in the models' order; some may have no name."""
        ...

    def read_loss_scale(self) -> float | None:
        """Return the loss scale now; None without one."""
        ...

    def pin_loss_scale(self) -> bool:
        """Keep the loss scale from growing by itself; False where the steps that it leaves out cannot be counted."""
        ...

    def find_metrics(self) -> Run[dict[str, float]]:
        """Return the target's own metrics by name, of the training as it is now."""
        ...

    def read_data(self) -> Run[Found]:
        """Return what the loader hands over, looked at from now on."""
        ...

    def record(self, recorder: StepRecorder) -> None:
        """Have every optimizer step from now on recorded."""
        ...

    def rewind(self, recorder: StepRecorder) -> bool:
        """Go back to the first window, the loss scale settled; False where the data only go on."""
        ...

    def begin_window(self, number: int, *, is_last: bool) -> None:
        """Prepare a window: its random numbers depend on its number alone, where that can be had.

        Args:
            number: from 0.
            is_last: the last one at held weights: the end of the epoch, whose parts are unequal.
        """
        ...

    def save_weights(self, path: Path, *, writes: bool) -> None:
        """Write the weights, for the other arm to load; all processes of a launcher are asked, one of them writes."""
        ...

    def load_weights(self, path: Path) -> None:
        """Load the weights that the other arm has written."""
        ...
