"""Name what went wrong in a trial: by the exception's type first, then its text, then the exit status."""

from __future__ import annotations

import resource
import signal
import traceback

from autotune.format import format_bytes
from autotune.measure.hopeless import Hopeless
from autotune.records.trial import Cause, TrialResult, TrialSpec, TrialStatus

Outcome = tuple[TrialStatus, Cause, str]
"""Status, short cause, one sentence."""

_DEVICE_OOM = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine to execute this computation",  # cuDNN: none whose workspace could be had
    "HIP out of memory",
    "HIP error: out of memory",
)
_HOST_OOM = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "not enough memory")
_SHARED_MEMORY = (
    "unable to allocate shared memory",
    "unable to open shared memory",
    "insufficient shared memory",
    "out of shared memory",
    "</torch_",  # PyTorch's own files there, named when one cannot be written or grown
)
_NO_KERNEL = (
    "No available kernel",
    "No viable backend",
    "not implemented for",
    "Unsupported",
    "does not support",
    "output of CUDAGraphs that has been overwritten",  # kept from one step to the next, by an evaluation say
)
_CRASHES: dict[Cause, tuple[str, ...]] = {
    # "Caught ... in DataLoader worker process" is the dataset's own error
    "dataloader-worker-died": ("DataLoader worker (pid",),
    "dataloader-worker-hung": ("DataLoader timed out after",),
    "inference-tensor": ("Inference tensors cannot be saved", "Inplace update to inference tensor"),
}
_LOADER_WAITS = ("in _try_get_data", "in _get_data")
"""Where PyTorch's loader waits for its workers, as a dump of stacks shows it."""

_LONG_SOCKET = "AF_UNIX path too long"
"""What the thread in a worker prints that hands batches over, and dies of."""

_LAST_LINES = 5
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch.fx.experimental")
_OF_FILES = ("Too many open files", "received 0 items of ancdata")
_OF_THREADS = (
    "can't start new thread",
    "Thread creation failed",
    "pthread_create failed",
    "pthread_create() failed",
)
_OF_ADDRESSES = (
    "MemoryError",
    "Cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "std::bad_alloc",
)
_FORKS = ("multiprocessing/popen_fork.py", "multiprocessing/util.py", "subprocess.py")
"""Where Python starts processes: EAGAIN says there that there may be no more, elsewhere that a pipe is empty."""


def explain_exception(error: BaseException) -> Outcome:
    """Return how a trial ended that raised an exception."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    modules = {kind.__module__ for kind in type(error).__mro__}
    text = _one_line(error)
    if "DivergedError" in kinds:
        return TrialStatus.DIVERGED, "non-finite", text
    if "OutOfMemoryError" in kinds or _mentions(text, _DEVICE_OOM):
        return TrialStatus.OUT_OF_MEMORY, "oom-device", text
    scarce = _explain_scarcity(error, text)
    if scarce is not None:
        return scarce
    for cause, needles in _CRASHES.items():
        if _mentions(text, needles):
            return TrialStatus.CRASHED, cause, text
    if any(module.startswith(_COMPILER_MODULES) for module in modules):
        return TrialStatus.UNSUPPORTED, "compile-error", text
    if "PicklingError" in kinds or isinstance(error, NotImplementedError) or _mentions(text, _NO_KERNEL):
        return TrialStatus.UNSUPPORTED, "not-supported", text
    if "AcceleratorError" in kinds or "CUDA error" in text:
        return TrialStatus.CRASHED, "device-error", text
    return TrialStatus.CRASHED, "user-error", text


def _explain_scarcity(error: BaseException, text: str) -> Outcome | None:
    if isinstance(error, MemoryError) or _mentions(text, _HOST_OOM):
        return TrialStatus.OUT_OF_MEMORY, "oom-host", _join(text, describe_memory_limit(text))
    limit = describe_limit(text) or describe_failed_fork(error)
    if limit is not None:
        return TrialStatus.CRASHED, "limits", _join(text, limit)
    if _mentions(text, _SHARED_MEMORY):
        return TrialStatus.CRASHED, "shm", f"{text}; enlarge /dev/shm (docker run --shm-size=2g) or use fewer workers"
    return None


def describe_hopeless(spec: TrialSpec, hopeless: Hopeless, *, elapsed_seconds: float) -> TrialResult:
    """Return the result of a trial that was ended in its first steps."""
    bound = hopeless.samples_per_second
    return TrialResult(
        spec=spec,
        status=TrialStatus.TIMED_OUT if bound is None else TrialStatus.TOO_SLOW,
        cause="compile-timeout" if bound is None else "slow-steps",
        error=hopeless.sentence,
        elapsed_seconds=elapsed_seconds,
        samples_per_second_bound=bound,
    )


def explain_exit(exit_status: int | None, *, log_tail: str | None, oom_kills: int | None = None) -> Outcome:
    """Return how a trial ended that left no result and was not killed by us.

    Args:
        exit_status: as `subprocess` gives it: the exit code, or minus the signal's number; None where nobody can tell,
            because the fork server died first.
        log_tail: the end of what it printed; None where nobody has read it.
        oom_kills: kills for want of memory that the kernel counted meanwhile; None when that cannot be read.
    """
    lines = (log_tail or "").strip().splitlines()[-_LAST_LINES:] or ["it printed nothing"]
    last = lines[-1][:200]
    ending = "" if log_tail is None else f"; last line: {last}"
    if oom_kills and (exit_status is None or exit_status > 0 or exit_status == -signal.SIGKILL):
        return TrialStatus.OUT_OF_MEMORY, "oom-killed", "killed by the kernel for want of memory"
    if exit_status is None:
        return TrialStatus.CRASHED, "server-died", "the fork server that had started it died, and took it along"
    limit = describe_limit("\n".join(lines)) if exit_status != 0 else None
    if limit is not None:
        return TrialStatus.CRASHED, "limits", _join(last, limit)
    if exit_status == -signal.SIGKILL and oom_kills is None:
        sentence = "killed by SIGKILL, most likely by the kernel for want of memory"
        return TrialStatus.OUT_OF_MEMORY, "oom-killed", sentence
    if exit_status == -signal.SIGKILL:
        sentence = "killed by SIGKILL, and not by the kernel for want of memory"
        return TrialStatus.CRASHED, "crash-signal", sentence + ending
    if exit_status == -signal.SIGBUS:
        return TrialStatus.CRASHED, "shm", "killed by SIGBUS, most likely because /dev/shm is full"
    if exit_status < 0:
        return TrialStatus.CRASHED, "crash-signal", f"killed by {_signal_name(-exit_status)}{ending}"
    if exit_status == 0:
        return TrialStatus.CRASHED, "no-result", "the process ended without a result"
    return TrialStatus.CRASHED, "crash-exit", f"exit status {exit_status}{ending}"


def describe_wait(log_tail: str) -> str:
    """Return what to add about a trial that was not done in time; empty where nothing is known.

    Args:
        log_tail: the end of what it printed, its stacks among it.
    """
    if not _mentions(log_tail, _LOADER_WAITS):
        return ""
    if _LONG_SOCKET in log_tail:
        return ": its loader workers could make no socket, as the path of TMPDIR is too long; set it to a shorter one"
    return (
        ": it waited for a loader worker; one that is forked while another thread holds a lock waits for ever, which "
        'multiprocessing_context="forkserver" prevents'
    )


def encodable(text: str) -> str:
    """Return text that can be written: what stands for the bytes of a name that is not UTF-8 is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _join(text: str, limit: str | None) -> str:
    return text if limit is None else f"{text[:200]}; {limit}"


def _mentions(text: str, needles: tuple[str, ...]) -> bool:
    return any(needle in text for needle in needles)


def _one_line(error: BaseException) -> str:
    text = encodable(str(error))
    if "Original Traceback" in text:
        return f"{_last_raised(text)[:350]} (in a loader worker)"
    words = " ".join(text.split())
    return f"{type(error).__name__}: {words}"[:400] if words else type(error).__name__


def _last_raised(text: str) -> str:
    """Return what was raised last in text that ends with a traceback, as a loader worker's has, in one line."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    begins = next((number for number, line in enumerate(after) if not line.startswith(" ")), 0)
    return " ".join(" ".join(after[begins:]).split())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_limit(text: str) -> str | None:
    """Return what limit is behind a failure and the command that raises it; None for any other failure.

    Args:
        text: the exception's, or the end of what a process printed.
    """
    if any(needle in text for needle in _OF_FILES):
        return f"no more than {_show_limit(resource.RLIMIT_NOFILE)} files may be open: raise it with ulimit -n 65536"
    if any(needle in text for needle in _OF_THREADS):
        return _describe_processes()
    return describe_memory_limit(text)


def describe_memory_limit(text: str) -> str | None:
    """Return what to do about a limit on a process's memory that is behind a failure; None where there is none."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY or not any(needle in text for needle in _OF_ADDRESSES):
        return None
    return f"a process may have {format_bytes(most)} of addresses: raise it with ulimit -v unlimited"


def describe_failed_fork(error: BaseException) -> str | None:
    """Return what to do about a process that could not be started; None where the failure is another."""
    if not isinstance(error, BlockingIOError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    return _describe_processes() if frames and frames[-1].filename.endswith(_FORKS) else None


def _describe_processes() -> str:
    most = _show_limit(resource.RLIMIT_NPROC)
    return f"no more processes and threads may be started ({most} allowed): raise it with ulimit -u, or the container's"


def _show_limit(limit: int) -> str:
    most = resource.getrlimit(limit)[0]
    return "any number" if most == resource.RLIM_INFINITY else f"{most:,}"
