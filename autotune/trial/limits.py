"""Tell a failure for want of files, processes or address space that a limit of this machine's causes: `ulimit`."""

from __future__ import annotations

import resource
import traceback

from autotune.units import format_bytes

_FILES = ("Too many open files", "received 0 items of ancdata")
_PROCESSES = ("can't start new thread", "Thread creation failed", "pthread_create failed", "pthread_create() failed")
_MEMORY = ("MemoryError", "Cannot allocate memory", "can't allocate memory", "failed to map segment", "std::bad_alloc")
_FORKS = ("multiprocessing/popen_fork.py", "multiprocessing/util.py", "subprocess.py")
"""Where Python starts processes: EAGAIN says there that there may be no more, elsewhere that a pipe is empty."""


def describe_limit(text: str) -> str | None:
    """Return what limit is behind a failure and the command that raises it; None for any other failure.

    Args:
        text: the exception's, or the end of what a process printed.
    """
    if any(needle in text for needle in _FILES):
        return f"no more than {_show(resource.RLIMIT_NOFILE)} files may be open: raise it with ulimit -n 65536"
    if any(needle in text for needle in _PROCESSES):
        return _describe_processes()
    return describe_memory_limit(text)


def describe_memory_limit(text: str) -> str | None:
    """Return what to do about a limit on a process's memory that is behind a failure; None where there is none."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY or not any(needle in text for needle in _MEMORY):
        return None
    return f"a process may have {format_bytes(most)} of addresses: raise it with ulimit -v unlimited"


def describe_failed_fork(error: BaseException) -> str | None:
    """Return what to do about a process that could not be started; None where the failure is another."""
    if not isinstance(error, BlockingIOError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    return _describe_processes() if frames and frames[-1].filename.endswith(_FORKS) else None


def _describe_processes() -> str:
    most = _show(resource.RLIMIT_NPROC)
    return f"no more processes and threads may be started ({most} allowed): raise it with ulimit -u, or the container's"


def _show(limit: int) -> str:
    most = resource.getrlimit(limit)[0]
    return "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
