from __future__ import annotations

import inspect
import pickle
import signal

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

from autotune.isolation.causes import describe_wait, explain_exception, explain_exit
from autotune.measure.timing import DivergedError
from autotune.records.trial import TrialStatus

CRASHED, OUT_OF_MEMORY, UNSUPPORTED = TrialStatus.CRASHED, TrialStatus.OUT_OF_MEMORY, TrialStatus.UNSUPPORTED

_WORKER_TEXT = """Caught {kind} in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
{kind}: {text}
"""


def _in_worker(kind: type[Exception], text: str) -> Exception:
    return kind(_WORKER_TEXT.format(kind=kind.__name__, text=text))


def _device_error(text: str) -> Exception:
    return type("AcceleratorError", (RuntimeError,), {})(text)


def _fail_to_compile(text: str) -> BackendCompilerFailed:
    known = len(inspect.signature(BackendCompilerFailed).parameters)  # torch 2.6 has no frame
    return BackendCompilerFailed(*(lambda: None, RuntimeError(text), None)[:known])


EXCEPTIONS = {
    "diverged": (DivergedError(7), TrialStatus.DIVERGED, "non-finite"),
    "device memory": (torch.OutOfMemoryError("Tried to allocate 2 GiB"), OUT_OF_MEMORY, "oom-device"),
    "device memory by text": (RuntimeError("CUDA error: out of memory"), OUT_OF_MEMORY, "oom-device"),
    "cudnn": (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OUT_OF_MEMORY, "oom-device"),
    "no workspace for cudnn": (
        RuntimeError("GET was unable to find an engine to execute this computation"),
        OUT_OF_MEMORY,
        "oom-device",
    ),
    "an output of a graph that was kept": (
        RuntimeError("Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."),
        UNSUPPORTED,
        "not-supported",
    ),
    "cublas": (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), OUT_OF_MEMORY, "oom-device"),
    "memory": (MemoryError(), OUT_OF_MEMORY, "oom-host"),
    "torch's CPU allocator": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        OUT_OF_MEMORY,
        "oom-host",
    ),
    "errno 12": (OSError(12, "Cannot allocate memory"), OUT_OF_MEMORY, "oom-host"),
    "memory in a worker": (_in_worker(MemoryError, "no room"), OUT_OF_MEMORY, "oom-host"),
    "shared memory": (
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"),
        CRASHED,
        "shm",
    ),
    "shared memory, written": (
        RuntimeError("unable to write to file </torch_1_2_0>: No space left on device (28)"),
        CRASHED,
        "shm",
    ),
    "shared memory, in a worker": (
        _in_worker(RuntimeError, "unable to allocate shared memory(shm) for file </torch_1_2_0>"),
        CRASHED,
        "shm",
    ),
    "shared memory, bus error": (
        RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit."
        ),
        CRASHED,
        "shm",
    ),
    "worker killed": (
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
        CRASHED,
        "dataloader-worker-died",
    ),
    "workers gone": (
        RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
        CRASHED,
        "dataloader-worker-died",
    ),
    "open files": (OSError(24, "Too many open files"), CRASHED, "limits"),
    "open files, by shared memory": (
        RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"),
        CRASHED,
        "limits",
    ),
    "threads": (RuntimeError("can't start new thread"), CRASHED, "limits"),
    "an empty pipe of the user's own": (BlockingIOError(11, "Resource temporarily unavailable"), CRASHED, "user-error"),
    "the dataset's own error": (_in_worker(ValueError, "bad image"), CRASHED, "user-error"),
    "compiler": (Unsupported("call_function"), UNSUPPORTED, "compile-error"),
    "compiler's backend": (
        _fail_to_compile("no C++ compiler"),
        UNSUPPORTED,
        "compile-error",
    ),
    "pickling": (pickle.PicklingError("Can't pickle <lambda>"), UNSUPPORTED, "not-supported"),
    "not implemented": (NotImplementedError("no kernel for sparse tensors"), UNSUPPORTED, "not-supported"),
    "no kernel": (RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"), UNSUPPORTED, "not-supported"),
    "no attention kernel": (RuntimeError("No available kernel. Aborting execution."), UNSUPPORTED, "not-supported"),
    "device": (_device_error("an illegal memory access was encountered"), CRASHED, "device-error"),
    "device by text": (RuntimeError("CUDA error: device-side assert triggered"), CRASHED, "device-error"),
    "user": (ValueError("shapes differ"), CRASHED, "user-error"),
    "exit": (SystemExit(3), CRASHED, "user-error"),
    "Ctrl-C": (KeyboardInterrupt(), CRASHED, "user-error"),
}


@pytest.mark.parametrize(("error", "status", "cause"), EXCEPTIONS.values(), ids=EXCEPTIONS.keys())
@pytest.mark.fault("10", injected="what torch raises when shared memory runs out", outcome="cause shm, with what to do")
@pytest.mark.fault("44", injected="torch.AcceleratorError and its texts", outcome="device-error")
@pytest.mark.fault("45", injected="BackendCompilerFailed, Unsupported", outcome="compile-error, unsupported")
def test_an_exception_has_its_cause(error: BaseException, status: TrialStatus, cause: str) -> None:
    assert explain_exception(error)[:2] == (status, cause)


def test_a_subclass_counts_as_its_kind() -> None:
    error = type("FullError", (torch.OutOfMemoryError,), {})("full")
    assert explain_exception(error)[:2] == (OUT_OF_MEMORY, "oom-device")


def test_the_sentence_is_one_bounded_line_with_the_type() -> None:
    _, _, text = explain_exception(ValueError("first\n  second\n" + "x" * 10_000))
    assert text.startswith("ValueError: first second xxx")
    assert "\n" not in text
    assert len(text) <= 400


def test_a_workers_error_is_told_by_its_reason() -> None:
    _, _, text = explain_exception(_in_worker(ValueError, "bad image"))
    assert text == "ValueError: bad image (in a loader worker)"


def test_a_workers_error_of_several_lines_begins_with_its_first() -> None:
    error = _in_worker(RuntimeError, "CUDA error: initialization error\nSearch for what that is\n\n")
    told = "RuntimeError: CUDA error: initialization error Search for what that is (in a loader worker)"
    assert explain_exception(error)[2] == told


EXITS = [
    (-signal.SIGKILL, OUT_OF_MEMORY, "oom-killed", "SIGKILL"),
    (-signal.SIGBUS, CRASHED, "shm", "/dev/shm"),
    (-signal.SIGSEGV, CRASHED, "crash-signal", "SIGSEGV; last line: the end"),
    (-signal.SIGABRT, CRASHED, "crash-signal", "SIGABRT"),
    (-signal.SIGTERM, CRASHED, "crash-signal", "SIGTERM"),
    (-(signal.SIGRTMIN + 3), CRASHED, "crash-signal", f"signal {signal.SIGRTMIN + 3}"),
    (0, CRASHED, "no-result", "without a result"),
    (1, CRASHED, "crash-exit", "exit status 1; last line: the end"),
    (255, CRASHED, "crash-exit", "exit status 255"),
]


@pytest.mark.parametrize(("exit_status", "status", "cause", "words"), EXITS)
def test_an_exit_status_has_its_cause(exit_status: int, status: TrialStatus, cause: str, words: str) -> None:
    found = explain_exit(exit_status, log_tail="first\nthe end\n\n")
    assert found[:2] == (status, cause)
    assert words in found[2]


@pytest.mark.parametrize(
    ("status", "oom_kills", "found"),
    [
        (-signal.SIGKILL, 0, (CRASHED, "crash-signal")),
        (-signal.SIGKILL, 2, (OUT_OF_MEMORY, "oom-killed")),
        (-signal.SIGSEGV, 2, (CRASHED, "crash-signal")),
        (1, 1, (OUT_OF_MEMORY, "oom-killed")),
        (1, 0, (CRASHED, "crash-exit")),
        (None, None, (CRASHED, "server-died")),
        (None, 1, (OUT_OF_MEMORY, "oom-killed")),
    ],
)
def test_the_kernels_counter_tells_a_kill_for_want_of_memory(
    status: int | None, oom_kills: int | None, found: tuple[TrialStatus, str]
) -> None:
    assert explain_exit(status, log_tail="the end", oom_kills=oom_kills)[:2] == found


@pytest.mark.parametrize(
    "printed",
    ["libgomp: Thread creation failed: Resource temporarily unavailable", "OSError: [Errno 24] Too many open files"],
)
def test_a_limit_is_read_from_what_was_printed_last(printed: str) -> None:
    assert explain_exit(1, log_tail=f"first\n{printed}\n")[1] == "limits"
    assert explain_exit(1, log_tail=printed + "\nlater" * 10)[1] == "crash-exit"


def test_a_silent_end_says_so_and_a_long_last_line_is_cut() -> None:
    assert "it printed nothing" in explain_exit(1, log_tail=" \n ")[2]
    assert len(explain_exit(1, log_tail="x" * 5000)[2]) < 300


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("in _try_get_data", "forkserver"),
        ("OSError: AF_UNIX path too long\nin _try_get_data", "the path of TMPDIR is too long; set it to a shorter one"),
        ("OSError: AF_UNIX path too long\nin forward", ""),
        ("in forward", ""),
    ],
)
def test_what_a_hang_waits_for_is_told_where_its_stacks_show_it(printed: str, words: str) -> None:
    told = describe_wait(printed)
    assert words in told
    assert bool(told) == bool(words)
