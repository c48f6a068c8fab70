"""`run_probe`: what this machine can do, where a step's time goes, what is worth trying and what is not.

Record in: a target. Record out: a ProbeReport. The target is built and run in a child process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from autotune.errors import TargetError, UsageError
from autotune.knobs import Facts
from autotune.probe.hardware import read_hardware, read_software
from autotune.probe.verdict import judge
from autotune.records.probe import ProbeReport
from autotune.records.script import Script
from autotune.records.trial import Target, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.space import build_space
from autotune.targets.fingerprint import fingerprint_target
from autotune.targets.resolve import resolve_target
from autotune.trial.spawn import TrialRunner

PROBE_SECONDS = 300.0
"""Longest a probe may take; a healthy one needs well under a minute."""

_MEASURE_SECONDS = 4.0


def run_probe(target: str | Script | None = None, *, folder: str | Path | None = None) -> ProbeReport:
    """Probe a target with its own settings.

    Args:
        target: `file.py:attr`, `package.module:attr` or a script; None takes [tool.autotune]'s, else the built-in demo.
        folder: working folder; None for the current one.

    Raises:
        UsageError: the target or the settings file cannot be used as given.
        TargetError: the training fails with its own settings.
    """
    resolved = resolve_target(target, folder=Path(folder or Path.cwd()).resolve())
    limits = TrialLimits(time_limit_seconds=PROBE_SECONDS, measure_seconds=_MEASURE_SECONDS)
    with tempfile.TemporaryDirectory(prefix="autotune-") as scratch, TrialRunner(Path(scratch), warm=False) as runner:
        report, _ = probe_target(resolved.target, runner, limits=limits)
    return report


def probe_target(
    target: Target,
    run_trial: Callable[[TrialSpec], TrialResult],
    *,
    limits: TrialLimits,
    seed: int = 0,
) -> tuple[ProbeReport, TrialResult]:
    """Run the probe as trial 0 and return the report and the trial's result.

    Raises:
        UsageError: the target cannot be found.
        TargetError: the training fails with its own settings, or does not get through a few steps in time.
    """
    began = time.monotonic()
    hardware, software = read_hardware(), read_software()
    spec = TrialSpec(number=0, purpose="probe", target=target, config=None, seeds=(seed,), limits=limits)
    fingerprint = None if target.script is None else fingerprint_target(target)
    result = run_trial(spec)
    facts, measurement = result.facts, result.measurement
    if facts is None or measurement is None:
        raise explain_failed_baseline(result)
    if fingerprint is not None:
        facts = facts.replace(
            fingerprint=fingerprint,
            warnings=(*facts.warnings, *describe_written(result.written, result.written_elsewhere)),
        )
        result = result.replace(facts=facts)
    verdict, advice = judge(facts, measurement, hardware)
    space = build_space(Facts(target=facts, hardware=hardware))
    report = ProbeReport(
        hardware=hardware,
        software=software,
        target=facts,
        measurement=measurement,
        verdict=verdict,
        advice=tuple(item for item in advice if item.knob in space.choices),
        ruled_out=space.ruled_out,
        elapsed_seconds=time.monotonic() - began,
    )
    return report, result


def describe_written(written: Iterable[str], elsewhere: Iterable[str]) -> list[str]:
    """Return what became of the files that a script wrote in its trials, for the user.

    Args:
        written: in its view of the working folder.
        elsewhere: outside of it.
    """
    sentences = []
    if inside := _list_some(written):
        sentences.append(f"what the script wrote in its trials was thrown away: {inside}")
    if outside := _list_some(elsewhere):
        sentences.append(f"the script writes by absolute path, and so did its trials: {outside}")
    return sentences


def _list_some(paths: Iterable[str], most: int = 5) -> str:
    found = sorted(set(paths))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def explain_failed_baseline(result: TrialResult) -> UsageError | TargetError:
    """Return the error to raise when the user's own settings do not train."""
    if result.cause == "usage":
        return UsageError(result.error)
    if result.cause == "target":
        return TargetError(result.error)
    if result.status is TrialStatus.TIMED_OUT:
        return TargetError(
            f"{result.spec.target.spec} did not get through its first steps: {result.error}",
            hint="give it more time, or make the start of the training faster",
        )
    return TargetError(
        f"{result.spec.target.spec} fails with its own settings ({result.status}): {result.error}",
        hint="run a few steps of it by hand first",
    )
