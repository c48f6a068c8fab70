"""What every trial's process does first; imports no torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

_OOM_SCORE = "700"


def prepare_process() -> None:
    """Make the process one that may be killed, dumped and starved of memory without harm to anything else."""
    os.umask(0o077)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("WANDB_MODE", "disabled")  # a trial is no run of the user's
    try:
        # If memory runs out the kernel should take the trial, not the search.
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    except OSError:
        pass


def exit_at_once(status: int) -> NoReturn:
    """End the process without exit handlers or waiting threads, everything printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # the user's code closed or replaced it
    os._exit(status)
