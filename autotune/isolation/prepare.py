"""What every trial's process does first; imports no torch."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from autotune.records.layout import RECORD_FAILED, RECORD_FAILED_STATUS

_OOM_SCORE = "700"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


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


@contextmanager
def own_record() -> Iterator[None]:
    """Write a file of this trial's own inside; a disk that takes none ends the process, and the supervisor says why.

    Raises:
        OSError: it could not be written for another reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        with suppress(OSError):
            os.write(2, f"\n{RECORD_FAILED}{error.strerror}\n".encode())  # whatever user code made of sys.stderr
        exit_at_once(RECORD_FAILED_STATUS)
