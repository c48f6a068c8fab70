"""A workload's trial by several processes: the agent that starts them, and its word where none of them left a result.

    trial's process ── elastic agent ──▶ rank 0   the trial's entry once more: leads, and writes the result
                                     ──▶ rank 1…  the same: follow

A rank whose own training fails leaves that as the result of all of them. What becomes of one that dies or does not
answer is told from here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from autotune.distributed.agent import ElasticAgent, count_ranks, prepare_environment
from autotune.distributed.place import Place, find_folder, open_folder, read_ends, take_place
from autotune.distributed.verdict import judge
from autotune.errors import UsageError
from autotune.isolation.causes import encodable
from autotune.isolation.prepare import exit_at_once
from autotune.machine.cgroups import count_between, read_oom_kills
from autotune.measure.memory import list_children
from autotune.records.layout import RECORD_FAILED_STATUS, RESULT_FILE
from autotune.records.training_process import RankEnd
from autotune.records.trial import Cause, TrialResult, TrialSpec, TrialStatus

RANKS_VARIABLE = "AUTOTUNE_TRIAL_RANKS"
"""Set for the processes of a trial, to that of the agent that has started them."""

_LEAST_PATIENCE_SECONDS = 5.0
_PATIENCE_SHARE = 0.5
_ECHO_SECONDS = 1.0
"""Ranks that wait for the same one find out within about this time of each other."""

_MEMORY: tuple[Cause, ...] = ("oom-device", "oom-host", "oom-killed")


def find_rank(folder: Path) -> Place | None:
    """Return this process's place in a trial; None for the process that is to start them all.

    Args:
        folder: the trial's own.
    """
    if os.environ.pop(RANKS_VARIABLE, None) is None:
        return None
    return take_place(find_folder(folder))


def find_patience(spec: TrialSpec) -> float:
    """Return how long one rank of a trial waits for another, in seconds: a trial that one hangs in is to be told so."""
    return max(_LEAST_PATIENCE_SECONDS, _PATIENCE_SHARE * spec.limits.time_limit_seconds)


def run_ranks(spec: TrialSpec, folder: Path, *, started: float) -> TrialResult | None:
    """Run all ranks of a trial to their end; return its result where none of them has left it.

    Args:
        spec: what is asked.
        folder: the trial's own.
        started: `time.monotonic()` when the trial was started.
    """
    logging.disable(logging.CRITICAL)  # the agent tells of every failed process, and so do we
    _hand_on_dumps()
    try:
        _require_devices(spec)
    except UsageError as error:
        return _fail(spec, TrialStatus.CRASHED, "usage", error.message, started).replace(hint=error.hint)
    shared = open_folder(folder)
    prepare_environment(spec.world_size)
    os.environ[RANKS_VARIABLE] = str(os.getpid())
    kills_before = read_oom_kills()
    words = ("-P", "-m", "autotune.isolation.entry", str(folder), str(started), str(os.getpid()))
    agent = ElasticAgent(shared, spec.world_size, words)
    agent.run(_Look(folder, shared, spec.world_size))
    if (folder / RESULT_FILE).exists():
        shutil.rmtree(shared, ignore_errors=True)  # where they met is of no use any more
        return None
    if RECORD_FAILED_STATUS in agent.exits.values():
        exit_at_once(RECORD_FAILED_STATUS)
    if agent.error is not None:
        told = f"the processes cannot be started: {agent.error}"
        return _fail(spec, TrialStatus.CRASHED, "crash-exit", told, started)
    kills = count_between(kills_before, read_oom_kills())
    verdict = judge(read_ends(shared, spec.world_size), agent.exits, spec.world_size, oom_kills=kills)
    return _explain(spec, verdict.end, started)


class _Look:
    """Tells when a trial is over, whatever still runs: whoever started this process ends it all.

    Args:
        folder: the trial's own.
        shared: of its ranks.
        size: how many there are.
    """

    def __init__(self, folder: Path, shared: Path, size: int) -> None:
        self._folder, self._shared, self._size = folder, shared, size
        self._silent_since: float | None = None

    def __call__(self) -> bool:
        if (self._folder / RESULT_FILE).exists():
            return True
        if not any(end.saw == "silent" for end in read_ends(self._shared, self._size).values()):
            return False
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        return now - self._silent_since >= _ECHO_SECONDS


def _require_devices(spec: TrialSpec) -> None:
    from autotune.engine.device import count_accelerators

    count_ranks(str(spec.world_size), count_accelerators())


def _hand_on_dumps() -> None:
    """Have the ranks write down their stacks when this process is asked to."""

    def hand_on(number: int, _frame: object) -> None:
        for child in list_children():
            with suppress(ProcessLookupError):
                os.kill(child, number)

    faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, hand_on)


def _explain(spec: TrialSpec, end: RankEnd | None, started: float) -> TrialResult:
    if end is None:
        return _fail(spec, TrialStatus.CRASHED, "no-result", "the processes ended without a result", started)
    status = TrialStatus.CRASHED
    if end.cause in _MEMORY:
        status = TrialStatus.OUT_OF_MEMORY
    elif end.cause == "timeout":
        status = TrialStatus.TIMED_OUT
    return _fail(spec, status, end.cause, end.detail, started)


def _fail(spec: TrialSpec, status: TrialStatus, cause: Cause, error: str, started: float) -> TrialResult:
    elapsed = time.monotonic() - started
    return TrialResult(spec=spec, status=status, cause=cause, error=encodable(error), elapsed_seconds=elapsed)
