"""What became of a trial, from what its process left: its record, what a probe knew before, or its exit status."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.format import format_duration
from autotune.isolation.causes import Outcome, describe_hopeless, describe_wait, explain_exit
from autotune.measure.hopeless import Hopeless
from autotune.records.codec import read_record
from autotune.records.layout import PARTIAL_FILE, RECORD_FAILED, RECORD_FAILED_STATUS, RESULT_FILE
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus

REPEATED_CAUSES = ("crash-signal", "server-died")
"""What may have been the machine's bad luck, and not the settings': such a trial gets a second chance."""

_TIMED = ("measure", "reference", "final")


@dataclass(frozen=True)
class Ending:
    """How a trial's process ended.

    Attributes:
        status: its exit status, or minus the signal's number; None where nobody can tell.
        log_tail: the end of what it printed.
        oom_kills: kills for want of memory that the kernel counted meanwhile; None when that cannot be read.
        asleep_seconds: of its time that the supervisor did not run.
    """

    status: int | None
    log_tail: str
    oom_kills: int | None = None
    asleep_seconds: float = 0.0


def read_result(
    folder: Path, spec: TrialSpec, ending: Ending, verdict: Outcome | Hopeless | None = None
) -> TrialResult:
    """Return the result of a trial whose process has ended; its elapsed seconds are left to the caller.

    Args:
        folder: the trial's own.
        spec: what was asked.
        ending: of the process.
        verdict: why the supervisor ended it; None when it ended by itself.

    Raises:
        OSError: the disk had no room for the trial's own record.
    """
    if isinstance(verdict, Hopeless):
        return describe_hopeless(spec, verdict, elapsed_seconds=0.0)
    if verdict is None and (folder / RESULT_FILE).exists():
        try:
            return read_record(folder / RESULT_FILE, TrialResult)
        except AutotuneError as error:
            verdict = (TrialStatus.CRASHED, "protocol-error", error.message)
    if verdict is None and ending.status == RECORD_FAILED_STATUS and RECORD_FAILED in ending.log_tail:
        reason = ending.log_tail.rpartition(RECORD_FAILED)[2].splitlines()[0]
        raise OSError(errno.ENOSPC, f"a trial's record could not be written: {reason}", str(folder))
    end, cause, text = verdict or explain_exit(ending.status, log_tail=ending.log_tail, oom_kills=ending.oom_kills)
    if end is TrialStatus.TIMED_OUT:
        text += describe_wait(ending.log_tail)
    if end is not TrialStatus.INTERRUPTED:
        partial = _read_partial(folder / PARTIAL_FILE)
        if partial is not None:
            return _complete(partial, text)
    return TrialResult(spec=spec, status=end, cause=cause, error=text, elapsed_seconds=0.0)


def why_again(result: TrialResult, asleep_seconds: float) -> str:
    """Return why a trial is to be run once more, one sentence; empty when it need not be.

    Args:
        result: of the trial.
        asleep_seconds: of its time that the supervisor did not run.
    """
    name = f"trial {result.spec.number}"
    was_cut = result.status not in (TrialStatus.COMPLETED, TrialStatus.INTERRUPTED)
    if asleep_seconds and (was_cut or result.measurement is not None):
        return (
            f"{name} is no measurement: this process or the machine slept for {format_duration(asleep_seconds)} of it"
        )
    return f"{name} ended with {result.cause}: {result.error}" if result.cause in REPEATED_CAUSES else ""


def describe_disturbance(result: TrialResult, sentence: str) -> TrialResult:
    """Return what is left of a trial that was disturbed, and for whose repetition there is no time.

    What it timed says nothing; what it found or learned is the same at any speed.
    """
    if result.spec.purpose not in _TIMED and result.status is TrialStatus.COMPLETED:
        return result
    return TrialResult(
        spec=result.spec,
        status=TrialStatus.INTERRUPTED,
        cause="disturbed",
        error=sentence,
        elapsed_seconds=result.elapsed_seconds,
        written=result.written,
        written_elsewhere=result.written_elsewhere,
    )


def _read_partial(path: Path) -> TrialResult | None:
    """Return what a probe knew; None where it left nothing, or nothing that is whole."""
    try:
        return read_record(path, TrialResult)
    except AutotuneError:
        return None


def _complete(partial: TrialResult, error: str) -> TrialResult:
    """Return what a probe knew before its process ended, with a warning."""
    if partial.facts is None:
        return partial
    warning = f"the probe was cut short while it looked at the memory: {error}"
    return partial.replace(facts=partial.facts.replace(warnings=(*partial.facts.warnings, warning)))
