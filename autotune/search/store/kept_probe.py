"""The last `autotune probe` of a target, kept for a search that follows: what was just measured need not be again.

It is taken only where all that it depends on is the same: the target and its files, the machine, the versions, the
environment, the CPUs it may run on, and the seed; and where it is reliable, and less than an hour old. Else the search
probes anew.
The first launch of the baseline checks it: where they differ by much, the answer says so.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.format import format_duration
from autotune.machine.hardware import read_hardware, read_software
from autotune.records.codec import read_record, write_record
from autotune.records.layout import KEPT_PROBE_FILE
from autotune.records.probe import ProbeReport
from autotune.records.search import KeptProbe, SearchState
from autotune.records.trial import DEVICE_VARIABLE, Target, TrialResult
from autotune.search.store.folder import SearchFolder, prepare_state_folder
from autotune.targets.resolve import DEMO_TARGET
from autotune.targets.source.fingerprint import fingerprint_target

MOST_SECONDS = 3600.0
"""A probe that is older is made again: machines change."""

_NAMED = (
    *("ATEN_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_"),
    *(DEVICE_VARIABLE, "PYTHON", "PYTORCH_", "TCMALLOC_", "TORCH", "WORLD_SIZE", "LOCAL_"),
)
"""Beginnings of the variables that change how fast a training runs: told by name where they differ."""

_OF_THE_SHELL = (
    *("AUTOTUNE_", "COLORTERM", "COLUMNS", "DBUS_", "DISPLAY", "GPG_", "LINES", "LS_", "MAKE", "MFLAGS", "OLDPWD"),
    *("PS1", "PWD", "SHLVL", "SSH_", "STY", "TERM", "TMUX", "WINDOW", "XDG_"),
)
"""Beginnings of variables that differ from one terminal, or one command, to the next and mean nothing to a training."""

_AFFINITY, _OTHERS = "the CPUs it may run on", "a variable of your own"


def keep_probe(folder: Path, target: Target, report: ProbeReport, trial: TrialResult) -> None:
    """Keep a probe for the searches of a working folder.

    Args:
        folder: the working folder.
        target: that was probed.
        report: of the probe.
        trial: its result.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
        OSError: it cannot be written.
    """
    kept = KeptProbe(
        made_at=time.time(), target=target, environment=read_environment(os.environ), report=report, trial=trial
    )
    write_record(prepare_state_folder(folder) / KEPT_PROBE_FILE, kept)


def take_kept_probe(folder: Path, state: SearchState, place: SearchFolder) -> str | None:
    """Give a new search the kept probe, if it may be taken, as its trial 0; return what to tell, None without one.

    Args:
        folder: the working folder.
        state: what the search was asked to do.
        place: the search's own folder.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
        OSError: the search's folder cannot be written.
    """
    kept = read_kept_probe(folder)
    if kept is None:
        return None
    age = time.time() - kept.made_at
    reason = find_refusal(kept, state, age)
    if reason is not None:
        return f"probe: made again, and the last one is not used: {reason}"
    place.adopt_probe(kept.report, kept.trial)
    return f"probe: taken from `autotune probe`, {format_duration(age)} ago"


def read_kept_probe(folder: Path) -> KeptProbe | None:
    """Return the last probe of a working folder; None where there is none that can be read.

    Raises:
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    path = prepare_state_folder(folder) / KEPT_PROBE_FILE
    try:
        return read_record(path, KeptProbe)
    except AutotuneError:
        return None


def find_refusal(kept: KeptProbe, state: SearchState, age: float) -> str | None:
    """Return why a kept probe may not be taken; None where it may.

    Args:
        kept: the probe.
        state: what the search was asked to do.
        age: of the probe, in seconds; negative where the clock was set back.
    """
    if kept.target.model_dump() != state.target.model_dump():  # as they are written, without secrets
        return f"it was of {kept.target.spec}" if kept.target.spec != state.target.spec else "its options were others"
    if kept.trial.spec.world_size != state.world_size:
        return "it was of a process that trains alone, with all CPUs"
    if kept.trial.spec.seeds != (state.seed,):
        return "its seed was another"
    if not 0.0 <= age <= MOST_SECONDS:
        return f"it is {format_duration(age)} old" if age > 0 else "the clock was set back since"
    if kept.report.verdict.limit == "unreliable":
        return "it was not reliable"
    now = fingerprint_target(state.target)
    is_part_of_us = state.target.spec == DEMO_TARGET  # the versions tell whether it is the same
    if now != kept.report.target.fingerprint and not (now is None and is_part_of_us):
        return "the target has changed since" if now is not None else "the target's file was not found"
    here = read_environment(os.environ)
    changed = sorted(name for name in {*here, *kept.environment} if here.get(name) != kept.environment.get(name))
    if changed:  # first, for some of it makes the machine another
        return f"the environment has changed: {', '.join(changed)}"
    if kept.report.hardware.fingerprint != read_hardware().fingerprint:
        return "the machine is another"
    return None if kept.report.software == read_software() else "the versions are others"


def read_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what a training may depend on and no fingerprint covers: variables, as digests, and the CPUs to run on.

    Args:
        variables: of the environment.
    """
    named = {name: _digest(value) for name, value in variables.items() if name.startswith(_NAMED)}
    others = sorted(
        f"{name}={value}"
        for name, value in variables.items()
        if name != "_" and not name.startswith((*_NAMED, *_OF_THE_SHELL))
    )
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    return {**named, _OTHERS: _digest("\0".join(others)), _AFFINITY: cpus}


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
