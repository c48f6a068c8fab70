"""What a training is asked to do, and who is told about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.arguments import check_fields, shown_hints
from autotune.errors import UsageError
from autotune.records.profile import Profile
from autotune.records.reading import is_preset, is_text
from autotune.records.run import Reverification, StepDown
from autotune.train.report import Report
from autotune.train.runs.folder import RunFolder

_HINTS = {
    "profile": 'give the path of an answer: "best.json"',
    "max_time_seconds": "give seconds, as 3600",
    "checkpoint_seconds": "give seconds, as 300",
}


@dataclass(frozen=True)
class TrainingOptions:
    """What a training is asked to do.

    Attributes:
        profile: a profile, its path or a preset's; None for the baseline's settings, or for those of a resumed run.
        preset: name of a shipped preset instead, or path of one.
        use_candidate: take the profile's candidate, which passed its loss checks and is not proven faster.
        steps: optimizer steps to take; None to count epochs.
        epochs: epochs to train, 1 if neither is given.
        out: run folder; None for a new numbered one under `runs/`.
        resume: go on with the run in `out`, or with the newest of this target.
        seed: of initial weights, data order and dropout; None for 0, or for that of a resumed run.
        trust: use a profile from another machine, or of another state of the target, without a look.
        max_time_seconds: end with a checkpoint before this; None for no limit.
        checkpoint_seconds: longest time between two checkpoints; one is also written at each epoch's end and at a stop.
        checkpoints_kept: complete checkpoints kept, beside the best one.
        worker_timeout_seconds: longest wait for a loader's worker.
        rank_timeout_seconds: longest wait of one of several processes for another.
        reverification: what was found before the process started anew; None to look.
    """

    profile: str | Path | Profile | None = None
    preset: str | None = None
    use_candidate: bool = False
    steps: int | None = None
    epochs: int | None = None
    out: str | Path | None = None
    resume: bool = False
    seed: int | None = None
    trust: bool = False
    max_time_seconds: float | None = None
    checkpoint_seconds: float = 300.0
    checkpoints_kept: int = 2
    worker_timeout_seconds: float = 300.0
    rank_timeout_seconds: float = 600.0
    reverification: Reverification | None = None

    @shown_hints()
    def __post_init__(self) -> None:
        """Check what was given.

        Raises:
            UsageError: a field has another type.
        """
        check_fields(self, _HINTS)

    def check(self) -> None:
        """Make sure that the options fit together.

        Raises:
            UsageError: they do not.
        """
        if self.steps is not None and self.epochs is not None:
            raise UsageError("both --steps and --epochs are given", hint="choose one")
        if self.profile is not None and self.preset is not None:
            raise UsageError("both --profile and --preset are given", hint="choose one")
        if self.use_candidate and self.profile is None:
            raise UsageError("--use-candidate is given without a profile", hint="add --profile best.json")
        for name in (str(self.out), str(self.preset)):
            if not is_text(name):
                raise UsageError(
                    f"the name {name!r} is not UTF-8, or has a NUL in it", hint="rename what it stands for"
                )
        if self.checkpoints_kept < 2:
            raise UsageError(
                f"--keep-checkpoints is {self.checkpoints_kept}",
                hint="at least 2: one to fall back to when one is torn",
            )

    def classify_presets(self, work: Path) -> TrainingOptions:
        """Return the options in which a preset that was given as a profile is a preset.

        Args:
            work: what paths are relative to.
        """
        given = self.preset if self.profile is None else self.profile
        if given is None or isinstance(given, Profile) or not is_preset(work / given):
            return self
        return replace(self, profile=None, preset=str(given if work == Path.cwd() else work / given))


def _ignore(_told: Any) -> None:
    """Tell nobody."""


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=2)
    except Warning as raised:  # where they are errors: what was trained is not lost for one
        sys.stderr.write(f"{raised}\n")


def _ignore_both(_told: Any, _more: Any) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class TrainingCallbacks:
    """Who is told about a training, and who may stop it.

    Attributes:
        should_stop: polled at each step; True ends the training with a checkpoint.
        report: called at log lines, not more often than a few times a second.
        warn: told what the user should know, one sentence at a time; `warnings.warn` where nobody is.
        say: told what goes on, one line at a time.
        log: called with each line of metrics.jsonl: the seam for TensorBoard, Weights & Biases and the like.
        step_down: called with each safe step down.
        opened: called with the run's folder, once it is there and held.
        begins: called with the optimizer steps that a stretch of the training goes on from.
        relaunch: called with the environment variables that the settings need and the process was started without, and
            with what a re-verification found; may start it anew, or return.
        interruptible: inside it a signal, or the end of so many seconds, may raise StopNow: nothing would be lost.
    """

    should_stop: Callable[[], bool] = lambda: False
    report: Callable[[Report], None] = _ignore
    warn: Callable[[str], None] = _warn
    say: Callable[[str], None] = _ignore
    log: Callable[[Mapping[str, Any]], None] = _ignore
    step_down: Callable[[StepDown], None] = _ignore
    opened: Callable[[RunFolder], None] = _ignore
    begins: Callable[[int], None] = _ignore
    relaunch: Callable[[Mapping[str, str], Reverification | None], None] = _ignore_both
    interruptible: Callable[[float | None], AbstractContextManager[Any]] = nullcontext
