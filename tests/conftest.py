"""What every test obeys: no process and no environment variable outlives it; hypothesis is repeatable.

The measured limits of the machine are kept for the tests alone: not in the user's cache.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("ci")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin take the CPUs of other tests

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="autotune-tests-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

_GRACE_SECONDS = 2.0
_ONE_PER_INTERPRETER = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Helpers that the standard library and torch start once and end with the interpreter."""
_FORK_SERVER = "autotune.isolation.warm.forkserver"
"""Of a trial runner that tests of a module share, it begins in one of them and ends with the runner."""
_SET_BY_LIBRARIES = frozenset(
    {
        "CUDA_MODULE_LOADING",  # a CUDA build of torch, when it looks for a GPU
        "DISABLE_CUPTI_LAZY_REINIT",  # the same, when a mode of torch.compile with CUDA graphs is named
        "TRITON_PTXAS_PATH",  # torch.compile, when it has found Triton's assembler
        "KMP_DUPLICATE_LIB_OK",  # scikit-learn and torch, when imported
        "KMP_INIT_AT_FORK",  # scikit-learn, when imported
        "PYTEST_CURRENT_TEST",
        "TEARDOWN_CUPTI",  # as DISABLE_CUPTI_LAZY_REINIT
        "TORCHINDUCTOR_CACHE_DIR",  # torch.compile, at its first use
        "TRITON_CACHE_DIR",  # torch.compile, at its first use
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch.compile, when it loads what it has built
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a parametrized test that `slow_cases` names, by how their ids begin, as slow ones."""
    for item in items:
        case = getattr(item, "callspec", None)
        for named in item.iter_markers("slow_cases"):
            if case is not None and case.id.startswith(named.args):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def leaves_no_server_behind() -> Iterator[None]:
    children_before = _child_pids()
    yield
    leaked = _kill_leaked_children(children_before)
    if leaked:
        pytest.fail(f"child processes were left behind by a module: {'; '.join(leaked)}")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    children_before = _child_pids()
    environment_before = dict(os.environ)
    yield
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "autotune" / "history", ignore_errors=True)
    changed = _restore_environment(environment_before)
    leaked = _kill_leaked_children(children_before, but=_FORK_SERVER)
    if changed:
        pytest.fail(f"environment variables were left changed: {', '.join(changed)}")
    if leaked:
        pytest.fail(f"child processes were left behind: {'; '.join(leaked)}")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take ten times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _restore_environment(before: dict[str, str]) -> list[str]:
    names = (before.keys() | os.environ.keys()) - _SET_BY_LIBRARIES
    changed = sorted(name for name in names if before.get(name) != os.environ.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return changed


def _kill_leaked_children(before: set[int], *, but: str | None = None) -> list[str]:
    deadline = time.monotonic() + _GRACE_SECONDS
    while leaked := [one for one in _new_children(before) if but is None or but not in _describe(one)]:
        if time.monotonic() > deadline:
            break
        multiprocessing.active_children()  # joins those that have ended
        time.sleep(0.02)
    found = [_describe(child) for child in leaked]
    for child in leaked:
        child.kill()
    return found


def _new_children(before: set[int]) -> list[psutil.Process]:
    children = []
    for pid in _child_pids() - before:
        try:
            children.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return [child for child in children if not any(name in _describe(child) for name in _ONE_PER_INTERPRETER)]


def _child_pids() -> set[int]:
    """Return this process's children, asked of the kernel: psutil looks at every process there is, twice a test."""
    if not Path("/proc/self/task", str(os.getpid()), "children").exists():  # a kernel without them
        return {child.pid for child in psutil.Process().children()}
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            pids.update(map(int, file.read_text().split()))
        except OSError:
            continue  # the thread has ended
    return pids


def _describe(child: psutil.Process) -> str:
    try:
        return f"{child.pid} {child.status()} {' '.join(child.cmdline()) or child.name()}"
    except psutil.NoSuchProcess:
        return f"{child.pid} (ended, never waited for)"
    except psutil.AccessDenied:
        return f"{child.pid} {child.name()}"
