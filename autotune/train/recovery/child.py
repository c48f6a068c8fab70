"""What a training's process does first when a parent watches over it: ties its life to it, and reports its signals.

No torch is imported: a script may set its environment ahead of its own `import torch`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.lifeline import die_with_parent
from autotune.records.codec import read_record, write_bytes
from autotune.records.layout import PLAN_FILE
from autotune.records.run import RunPlan
from autotune.records.training_process import OpenedRun

PARENT_VARIABLE = "AUTOTUNE_PARENT"
"""Process that watches, and the pipe that hears of signals: `4711:5`, or `4711` without one."""

OPENED_VARIABLE = "AUTOTUNE_TRAIN_CHILD"
"""File into which a workload's training writes an `OpenedRun`."""

BEGAN_VARIABLE = "AUTOTUNE_TRAIN_BEGAN"
"""`time.monotonic()` when the first process of the session was started: a limit on its time counts from there."""

RANKS_VARIABLE = "AUTOTUNE_TRAIN_RANKS"
"""Folder that the processes of one training share; with one process there is none."""

_VARIABLES = (PARENT_VARIABLE, OPENED_VARIABLE, BEGAN_VARIABLE, RANKS_VARIABLE)

AGAIN_STATUS = 75
"""Exit status of a process that cannot go on, but has written down what a fresh one is to do (EX_TEMPFAIL)."""


_given: dict[str, str] = {}


def tie_to_parent() -> bool:
    """End with the parent, and tell it of every signal heard here; return whether there is a parent.

    What it said is taken out of the environment: a process that the user's code starts is not its child.
    """
    _given.update({name: os.environ.pop(name) for name in _VARIABLES if name in os.environ})
    if PARENT_VARIABLE not in _given:
        return False
    parent, _, descriptor = _given[PARENT_VARIABLE].partition(":")
    die_with_parent(int(parent))
    if descriptor:
        _report_signals(int(descriptor))
    return True


def find_given(variable: str) -> str | None:
    """Return what the parent has said in a variable; None where it said nothing."""
    return _given.get(variable)


def keep_tie() -> dict[str, str]:
    """Return what the environment needs when this process becomes another program that is to be tied as well."""
    _, _, descriptor = _given.get(PARENT_VARIABLE, "").partition(":")
    if descriptor:
        os.set_inheritable(int(descriptor), True)
    return dict(_given)


def tell_opened_run(folder: Path) -> None:
    """Tell the parent where the run is and how many steps down it has had, if there is a parent.

    Raises:
        OSError: the parent's file cannot be written.
    """
    if OPENED_VARIABLE not in _given:
        return
    opened = OpenedRun(folder=str(folder.resolve()), step_downs=_count_step_downs(folder))
    write_bytes(Path(_given[OPENED_VARIABLE]), opened.to_json().encode(), durable=False)


def read_opened_run(file: Path) -> OpenedRun | None:
    """Return what a training has told of its run; None where it came to none."""
    try:
        return read_record(file, OpenedRun)
    except AutotuneError:
        return None


def report_signal(number: int) -> None:
    """Tell the parent of a signal that was heard here, where Python does not: user code took its wakeup descriptor.

    To be called in a signal's handler. asyncio is such user code: while it runs, the parent hears of nothing, and
    would send on what the terminal has sent already.
    """
    _, _, text = _given.get(PARENT_VARIABLE, "").partition(":")
    if not text or threading.current_thread() is not threading.main_thread():
        return
    descriptor = int(text)
    try:
        now = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if now == descriptor:
            return  # Python has reported it itself
        if now != -1:
            signal.set_wakeup_fd(now)
        os.write(descriptor, bytes((number,)))
    except (OSError, ValueError):
        return


def session_began() -> float:
    """Return `time.monotonic()` when the session began, restarted processes included; now without a parent."""
    return float(_given.get(BEGAN_VARIABLE) or time.monotonic())


def _count_step_downs(folder: Path) -> int:
    try:
        return len(read_record(folder / PLAN_FILE, RunPlan).step_downs)
    except AutotuneError:
        return 0


def _report_signals(descriptor: int) -> None:
    # Python writes the number of each signal that has a handler, from C: also while an operation runs for minutes.
    if threading.current_thread() is not threading.main_thread():
        return
    try:
        os.set_inheritable(descriptor, False)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return
    process = os.getpid()

    def stop_in_fork() -> None:
        # A loader's worker hears signals of its own, which say nothing about the training's process.
        if os.getpid() != process and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=stop_in_fork)
