"""Whether a launch is hopeless in its first steps already, so that it costs seconds and not its whole time. Pure.

    starting ── loading ── first step ── loading ── second ── third ──┬── warm-up ── blocks
                           └ overdue: never done in time              └ both far slower than the rival's

The supervisor asks whether a step is overdue, for a step that does not end decides nothing itself; the launch's own
process asks about the steps it has done. The wait for data is in neither: a loader may start slowly and go on fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from autotune.format import format_duration
from autotune.measure.racing import CLEAR_LOG_RATIO
from autotune.records.trial import Pace, Rival, TrialLimits

PATIENCE_SECONDS = 3.0
"""A step may take this long however short those of the user's settings are: kernels are chosen, pools are started."""

LEAST_STEP_SECONDS = 0.25
"""Two steps shorter than this prove nothing, and cost nothing either: blocks of this length soon tell."""

_FAR_LOG_RATIO = math.log(2.5)
"""Farther than what ends a race: a launch's first steps are as good as the luck of its start, and a race follows."""

_PATIENCE = 4.0
_WATCHED_STEPS = 3


class Phase(IntEnum):
    """What a launch is at."""

    STARTING = 0
    LOADING = 1
    """It waits for a batch, or does something else than to train."""
    COMPILING = 2
    """In a first step that compiles."""
    STEPPING = 3
    """In a step of its warm-up."""
    MEASURING = 4


@dataclass(frozen=True)
class Beat:
    """How far a launch has come.

    Attributes:
        phase: what it is at.
        since: `time.monotonic()` when that began; the same clock for every process of a machine.
        steps: optimizer steps done.
        first_step_seconds: of the first of them, without the wait for data; 0.0 before it is done.
        latest_step_seconds: of the last of them.
    """

    phase: Phase
    since: float
    steps: int = 0
    first_step_seconds: float = 0.0
    latest_step_seconds: float = 0.0


@dataclass(frozen=True)
class Hopeless:
    """Why a launch is ended.

    Attributes:
        sentence: for the user.
        samples_per_second: that it reaches at most; None when it only compiles for too long.
    """

    sentence: str
    samples_per_second: float | None


class TooSlowError(Exception):
    """The first steps have shown that a launch is hopeless.

    Attributes:
        hopeless: why.
    """

    def __init__(self, hopeless: Hopeless) -> None:
        super().__init__(hopeless.sentence)
        self.hopeless = hopeless


def find_overdue(limits: TrialLimits, beat: Beat, now: float) -> Hopeless | None:
    """Return why the step that a launch is in will not do; None while it may still.

    The step may take 3 s and four times the first step of the user's settings, more where launches of one and the same
    config differ by more. One that compiles has a time of its own.

    Args:
        limits: with the pace of the user's settings and a rival; without either nothing is overdue.
        beat: the launch's last one.
        now: `time.monotonic()`.
    """
    pace, rival = limits.pace, limits.rival
    if pace is None or rival is None:
        return None
    if beat.phase not in (Phase.COMPILING, Phase.STEPPING) or beat.steps >= _WATCHED_STEPS:
        return None
    seconds = now - beat.since
    if pace.compile_seconds is not None:
        if seconds <= pace.compile_seconds:
            return None
        return Hopeless(f"compiling was not done after {format_duration(seconds)}: ended", None)
    usual = max(pace.first_step_seconds, beat.first_step_seconds)
    patience = max(_PATIENCE, math.exp(CLEAR_LOG_RATIO + rival.margin))
    if seconds <= PATIENCE_SECONDS + patience * usual:
        return None
    which = ("first", "second", "third")[beat.steps]
    told = f"its {which} step took more than {format_duration(seconds)}"
    theirs = f"the first of your settings takes {format_duration(usual)}"
    return Hopeless(f"{told}, where {theirs}: ended", pace.samples_per_second * usual / seconds)


@dataclass
class EarlySteps:
    """The first steps of a launch.

    Attributes:
        first_seconds: of the first, without the wait for data; None before it is done.
        pair: seconds of the first two after it in a row that compile nothing, the same way.
    """

    first_seconds: float | None = None
    pair: tuple[float, ...] = ()
    _samples: list[int] = field(default_factory=list)

    def take(self, seconds: float, samples: int, *, compiled: bool) -> bool:
        """Note a step; True when it completes the pair.

        Args:
            seconds: that it took, without the wait for data.
            samples: trained on.
            compiled: a graph was compiled in it.
        """
        seconds = max(0.0, seconds)
        if self.first_seconds is None:
            self.first_seconds = seconds
            return False
        if len(self.pair) == 2:
            return False
        if compiled:
            self.pair, self._samples = (), []
            return False
        self.pair = (*self.pair, seconds)
        self._samples.append(max(1, samples))
        return len(self.pair) == 2

    def find_hopeless(self, pace: Pace | None, rival: Rival | None) -> Hopeless | None:
        """Return why a launch whose pair is complete will not do; None when it may.

        Both steps are as long as a block at least, and slower than the rival's by more than 2.5 times, the margin of
        its race, and what the second and third step of the user's settings are slower than their rest.

        Args:
            pace: of the user's settings; None to let every launch warm up.
            rival: as it would be now.
        """
        if pace is None or rival is None or len(self.pair) < 2 or min(self.pair) < LEAST_STEP_SECONDS:
            return None
        paces = [seconds / samples for seconds, samples in zip(self.pair, self._samples, strict=True)]
        settled = min(paces) / pace.warmup_ratio
        if math.log(settled / rival.seconds_per_sample) <= _FAR_LOG_RATIO + rival.margin:
            return None
        theirs = rival.seconds_per_sample * self._samples[0]
        told = f"its second and third step took {format_duration(self.pair[0])} and {format_duration(self.pair[1])}"
        return Hopeless(f"{told}, where the best so far takes {format_duration(theirs)}: ended", 1.0 / settled)
