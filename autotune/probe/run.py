"""`run_probe`: what this machine can do, where a step's time goes, what is worth trying and what is not.

Record in: a target. Record out: a ProbeReport. The target is built and run in a child process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from autotune.errors import MachineError, TargetError, UsageError
from autotune.isolation.runner import TrialRunner
from autotune.knobs import Facts
from autotune.machine.hardware import read_hardware, read_software
from autotune.machine.limits.cache import find_cached_ceilings, save_ceilings
from autotune.probe.analysis.issues.find import find_issues
from autotune.probe.analysis.pipeline import COMPUTE_KNOBS, compute_knobs_gain_nothing
from autotune.probe.analysis.verdict import judge
from autotune.probe.time_shares import ProbePolicy
from autotune.records.ceilings import Ceilings
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.layout import LOG_FILE, trial_name
from autotune.records.measurement import Measurement
from autotune.records.probe import MachineReport, ProbeReport
from autotune.records.script import Script
from autotune.records.search import SearchState
from autotune.records.trial import Target, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.scratch import scratch_folder, sweep_scratch
from autotune.space import SearchSpace, build_space
from autotune.targets.resolve import resolve_target
from autotune.targets.source.fingerprint import fingerprint_target

PROBE_SECONDS = ProbePolicy.limit_seconds
"""Longest a probe may take; a healthy one needs well under a minute."""

_LARGER_BUDGET = "10m"
"""Of a search whose probe has all the time that it wants."""


def run_probe(
    target: str | Script | None = None,
    *,
    folder: str | Path | None = None,
    keep: Callable[[Target, ProbeReport, TrialResult], None] = lambda _target, _report, _trial: None,
    keep_log: Callable[[Path], Path | None] = lambda _log: None,
    keeps_log: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> ProbeReport:
    """Probe a target with its own settings.

    Args:
        target: `file.py:attr`, `package.module:attr` or a script; None takes [tool.autotune]'s, else the built-in demo.
        folder: working folder; None for the current one.
        keep: given the target, the report and the trial's result, which a search can go on from.
        keep_log: given what the process printed where the training fails; returns where it is kept.
        keeps_log: do so where it does not fail, too.
        should_stop: polled; True ends the probe with an error.

    Raises:
        UsageError: the target or the settings file cannot be used as given.
        TargetError: the training fails with its own settings.
        MachineError: a limit of this machine's (`ulimit`) stops it, or the disk is full.
    """
    began = time.monotonic()
    sweep_scratch()
    resolved = resolve_target(target, folder=Path(folder or Path.cwd()).resolve())
    policy = ProbePolicy()
    limits = TrialLimits(
        time_limit_seconds=policy.limit_seconds,
        measure_seconds=policy.measure_seconds,
        ceilings_seconds=policy.machine_seconds,
    )
    with _disk_errors(), scratch_folder() as scratch:
        hardware, software = read_hardware(), read_software()
        known, age = _find_known(hardware, software)
        if known is None:  # in a process of its own, which no training has changed
            with TrialRunner(scratch, should_stop=should_stop, warm=False) as runner:
                ceilings, age = _measure_machine(
                    runner, scratch, hardware, software, of_script=resolved.target.script is not None
                )
            known = _leave_out_ranks(ceilings)
        # Started as a search starts its trials, whose start-up it stands for.
        with TrialRunner(scratch, should_stop=should_stop, warm=resolved.target.script is None) as runner:
            find_log = partial(_find_log, keep_log, scratch)
            known_limits = (known, age)
            report, trial = probe_target(resolved.target, runner, limits=limits, known=known_limits, find_log=find_log)
        if keeps_log:
            find_log(trial.spec.number)
    report = report.replace(elapsed_seconds=time.monotonic() - began)
    keep(resolved.target, report, trial)
    return report


def _find_log(keep_log: Callable[[Path], Path | None], scratch: Path, number: int) -> Path | None:
    return keep_log(scratch / trial_name(number) / LOG_FILE)


def run_machine_probe(*, should_stop: Callable[[], bool] = lambda: False) -> MachineReport:
    """Probe the machine alone: what it is, its measured limits, what is wrong with it.

    Args:
        should_stop: polled; True ends the probe with an error.

    Raises:
        MachineError: PyTorch is not installed, or does not run here, or the disk is full.
    """
    began = time.monotonic()
    sweep_scratch()
    hardware, software = read_hardware(), read_software()
    with (
        _disk_errors(),
        scratch_folder() as scratch,
        TrialRunner(scratch, should_stop=should_stop, warm=False) as runner,
    ):
        ceilings, age = _measure_machine(runner, scratch, hardware, software)
    return MachineReport(
        hardware=hardware,
        software=software,
        ceilings=ceilings,
        ceilings_age_seconds=age,
        troubles=find_issues(hardware, ceilings=ceilings),
        elapsed_seconds=time.monotonic() - began,
    )


def _measure_machine(
    runner: TrialRunner,
    scratch: Path,
    hardware: HardwareInfo,
    software: SoftwareInfo,
    *,
    of_script: bool = False,
) -> tuple[Ceilings, float]:
    """Return the machine's limits and their age; measured in a process of their own, they are kept for later probes.

    A script chooses its device itself: beside an accelerator that is not supported it may train on the CPU.

    Raises:
        MachineError: PyTorch does not run here, or has an accelerator alone that is not supported.
    """
    known, age = _find_known(hardware, software)
    policy = ProbePolicy()
    limits = TrialLimits(time_limit_seconds=policy.limit_seconds, ceilings_seconds=policy.machine_seconds)
    target = Target(spec="", folder=str(scratch))
    spec = TrialSpec(number=1, purpose="machine", target=target, config=None, ceilings=known, limits=limits)
    result = runner(spec)
    if result.cause == "machine" and of_script:
        result = runner(spec.replace(number=2, device="cpu"))
    if result.cause == "machine":
        raise MachineError(result.error, hint=result.hint)
    if result.ceilings is None:
        raise MachineError(
            f"PyTorch does not run on this machine ({result.status}): {result.error}",
            hint="python -c 'import torch; print(torch.ones(1) + 1)' shows more",
        )
    if _leave_out_ranks(result.ceilings) == known:
        return result.ceilings, age
    _keep_ceilings(result.ceilings, hardware, software)
    return result.ceilings, 0.0


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise what the disk refuses as an error of the machine."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or tempfile.gettempdir()}: {error.strerror or error}"
        raise MachineError(text, hint="free some space or mend the permissions") from error


def probe_target(
    target: Target,
    run_trial: Callable[[TrialSpec], TrialResult],
    *,
    limits: TrialLimits,
    seed: int = 0,
    asked: SearchState | None = None,
    known: tuple[Ceilings, float] | None = None,
    find_log: Callable[[int], Path | None] = lambda _number: None,
) -> tuple[ProbeReport, TrialResult]:
    """Run the probe as trial 0 and return the report and the trial's result.

    Args:
        target: what to probe.
        run_trial: runs one trial to its end.
        limits: of the trial.
        seed: of the training.
        asked: of the search that it is for: metrics and knobs that a workload has not are refused once it is imported,
            and of several processes that are going to train together one is probed, alone.
        known: the machine's limits and their age; None for those that an earlier probe has kept, if there are any.
        find_log: returns where what a trial has printed can be read after a failure, by the trial's number.

    Raises:
        UsageError: the target cannot be found, it lacks a metric or a knob that was named, or a short budget has left
            the probe too little time.
        TargetError: the training fails with its own settings, or does not get through a few steps in time.
        MachineError: a limit of this machine's (`ulimit`) stops it.
    """
    began = time.monotonic()
    hardware, software = read_hardware(), read_software()
    ceilings, age = known or _find_known(hardware, software)
    spec = TrialSpec(
        number=0, purpose="probe", target=target, config=None, seeds=(seed,), ceilings=ceilings, limits=limits
    )
    if asked is not None:
        named = (*asked.only, *asked.exclude)
        spec = spec.replace(world_size=asked.world_size, max_drift=asked.max_drift, named_knobs=named)
    fingerprint = None if target.script is None else fingerprint_target(target)
    result = run_trial(spec)
    facts, measurement = result.facts, result.measurement
    if facts is None or measurement is None:
        raise explain_failed_baseline(result, find_log(spec.number))
    if fingerprint is not None:
        warnings = (*facts.warnings, *describe_written(result.written, result.written_elsewhere))
        facts = facts.replace(fingerprint=fingerprint, warnings=warnings)
        result = result.replace(facts=facts)
    facts = facts.replace(world_size=spec.world_size)
    was_measured = _leave_out_ranks(facts.ceilings) != ceilings
    if was_measured and target.script is None:  # a script may have changed what its process can do
        _keep_ceilings(facts.ceilings, hardware, software)
    report = judge_facts(facts, measurement, hardware, software)
    age = 0.0 if was_measured else age
    return report.replace(ceilings_age_seconds=age, elapsed_seconds=time.monotonic() - began), result


def judge_facts(
    facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo, software: SoftwareInfo
) -> ProbeReport:
    """Return the report of what was found: the verdict, what to try and what not, and the troubles."""
    verdict, advice = judge(facts, measurement, hardware)
    space = build_space(Facts(target=facts, hardware=hardware))
    space = drop_idle_knobs(space, facts, measurement, hardware)
    return ProbeReport(
        hardware=hardware,
        software=software,
        target=facts,
        measurement=measurement,
        verdict=verdict,
        advice=tuple(item for item in advice if item.knob in space.choices),
        ruled_out=space.ruled_out,
        cautions=tuple(caution for caution in space.cautions if (caution.knob, caution.value) in space.unproven),
        troubles=find_issues(hardware, facts=facts, measurement=measurement, ceilings=facts.ceilings),
    )


def drop_idle_knobs(
    space: SearchSpace, facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo
) -> SearchSpace:
    """Return a space without the knobs of the computation where the data side is the limit whatever they do."""
    reason = compute_knobs_gain_nothing(facts, measurement, hardware)
    return space.without(sorted(COMPUTE_KNOBS), reason) if reason else space


def _find_known(hardware: HardwareInfo, software: SoftwareInfo) -> tuple[Ceilings | None, float]:
    """Return the machine's limits and their age, if they were measured before."""
    on_gpu = bool(hardware.gpus) and software.cuda is not None
    device = "cuda" if on_gpu else "cpu"
    return find_cached_ceilings(hardware, software, device=device) or (None, 0.0)


def _keep_ceilings(ceilings: Ceilings, hardware: HardwareInfo, software: SoftwareInfo) -> None:
    """Keep the machine's limits for later probes, if they were measured in full."""
    if ceilings.device is not None:
        save_ceilings(_leave_out_ranks(ceilings), hardware, software, device=ceilings.device)


def _leave_out_ranks(ceilings: Ceilings) -> Ceilings:
    """Return the limits of the machine alone, without what lies between the ranks of one training."""
    return ceilings.replace(ranks=1, all_reduce_bytes_per_second=None)


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


def explain_failed_baseline(result: TrialResult, log: Path | None = None) -> UsageError | TargetError | MachineError:
    """Return the error to raise when the user's own settings do not train.

    Args:
        result: of the probe.
        log: what its process has printed; None where that is not kept.
    """
    if result.cause == "limits":
        return MachineError(result.error, hint="raise the limit in this shell, then start it again")
    if result.cause == "usage":
        return UsageError(result.error, hint=result.hint)
    if result.cause == "machine":
        return MachineError(result.error, hint=result.hint)
    place = "" if log is None else f" (log: {log})"
    if result.cause == "target":
        return TargetError(result.error, hint=f"{result.hint}{place}".strip())
    given, spec = result.spec.limits.time_limit_seconds, result.spec.target.spec
    if result.status is TrialStatus.TIMED_OUT and given < ProbePolicy.full_seconds:
        return UsageError(
            f"--budget is too small here: {spec} did not get through its first steps in the {given:.0f} s of a probe",
            hint=f"give --budget {_LARGER_BUDGET}, or make the start of the training faster{place}",
        )
    if result.status is TrialStatus.TIMED_OUT:
        return TargetError(
            f"{spec} did not get through its first steps: {result.error}",
            hint=f"make the start of the training faster{place}",
        )
    return TargetError(
        f"{spec} fails with its own settings ({result.status}): {result.error}",
        hint=f"run a few steps of it by hand first{place}",
    )
