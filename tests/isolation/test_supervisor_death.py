"""A supervisor that is killed outright takes its trial, the trial's workers and the fork server with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from trial_world import IMPORT_PATH, MARK, find_borne, find_marked, is_alive, wait_until

GONE_SECONDS = 9.0
"""The promise is 2 s; a busy machine may take longer."""

_SUPERVISOR = """
import sys
from pathlib import Path
from trial_world import make_spec
from autotune.isolation.runner import TrialRunner
with TrialRunner(Path(sys.argv[1]), warm=sys.argv[2] == "warm") as runner:
    print("up", flush=True)
    runner(make_spec(sys.argv[3], num_workers=int(sys.argv[4])))
"""


@pytest.mark.parametrize(
    ("start", "toy", "workers", "is_early"),
    [
        pytest.param("warm", "worker_hangs", 1, False, id="warm"),
        pytest.param("cold", "worker_hangs", 1, False, id="cold", marks=pytest.mark.slow),
        pytest.param("warm", "worker_escapes", 1, False, id="warm-own-session", marks=pytest.mark.slow),
        pytest.param("cold", "hangs", 0, True, id="cold-while-starting", marks=pytest.mark.slow),
        pytest.param("warm", "hangs", 0, True, id="warm-while-starting", marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault(
    "20",
    injected="SIGKILL to the supervisor: trials starting, training, in a session of their own",
    outcome="trial, workers and fork server are gone",
)
def test_nothing_outlives_a_killed_supervisor(
    tmp_path: Path, start: str, toy: str, workers: int, is_early: bool
) -> None:
    mark = uuid4().hex
    environment = {**os.environ, MARK: mark, "TOY_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _SUPERVISOR, str(tmp_path), start, toy, str(workers)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as supervisor:
        try:
            if is_early:
                # The trial's (or the server's) process exists, and is still busy importing.
                assert wait_until(lambda: len(find_marked(mark)) > 1)
            else:
                assert wait_until((tmp_path / "reached").exists)
                assert len(find_marked(mark)) >= 2 + workers
        finally:
            supervisor.kill()
    assert wait_until(lambda: not find_marked(mark), seconds=GONE_SECONDS), find_marked(mark)


@contextmanager
def killed_supervisor(folder: Path, code: str, *words: str, when: Callable[[], object]) -> Iterator[list[int]]:
    """Yield the keepers' marks that the descendants of a supervisor bore when it was killed."""
    environment = {**os.environ, "TOY_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            assert wait_until(when)
            below = psutil.Process(process.pid).children(recursive=True)
            limits = [child.rlimit(psutil.RLIMIT_RTTIME)[1] for child in below]
        finally:
            process.kill()
    yield sorted({mark for mark in limits if mark != psutil.RLIM_INFINITY})


@pytest.mark.slow_cases("worker_starts_programs")
@pytest.mark.fault(
    "F7", injected="kill -9 of the supervisor under a trial that started programs", outcome="all gone within 2 s"
)
@pytest.mark.fault("20", injected="kill -9 under a trial", outcome="no orphan within 2 s")
@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("toy", "workers", "escapee"),
    [("escapes_and_hangs", 0, "escapee"), ("worker_starts_programs", 1, "worker-escapee")],
)
def test_programs_that_a_trial_has_started_end_with_the_supervisor(
    tmp_path: Path, start: str, toy: str, workers: int, escapee: str
) -> None:
    words = (str(tmp_path), start, toy, str(workers))
    with (
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as users_own,
        killed_supervisor(tmp_path, _SUPERVISOR, *words, when=(tmp_path / "reached").exists) as marks,
    ):
        (mark,) = marks
        escaped = int((tmp_path / escapee).read_text())
        gone = wait_until(lambda: not find_borne(mark) and not is_alive(escaped), seconds=GONE_SECONDS)
        survived = users_own.poll() is None
        users_own.kill()
    assert gone, find_borne(mark)
    assert survived


_SCRIPT = """
import os, subprocess, sys, time
sys.path.insert(0, os.environ["TOY_TESTS"])
from toy_workloads import escape, leave_trace
subprocess.Popen(["sleep", "1000"])
escape("escapee")
leave_trace("reached")
time.sleep(1000)
"""

_SCRIPT_SUPERVISOR = """
import sys
from pathlib import Path
from trial_world import make_spec
from autotune.records.trial import Target
from autotune.targets.script import read_script
from autotune.isolation.runner import TrialRunner
command = [sys.argv[2], "train.py"]
target = Target(spec=" ".join(command), folder=sys.argv[1], script=read_script(command))
with TrialRunner(Path(sys.argv[1], ".autotune", "trials"), warm=False) as runner:
    runner(make_spec("trains").replace(target=target, config=None, purpose="probe"))
"""


@pytest.mark.fault(
    "F7", injected="kill -9 of the supervisor under a script with programs", outcome="all gone within 2 s"
)
def test_programs_that_a_script_has_started_end_with_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "user" / "work"  # the traces are left where no view of it hides them
    work.mkdir(parents=True)
    (work / "train.py").write_text(_SCRIPT)
    monkeypatch.setenv("TOY_TESTS", str(Path(__file__).parent))
    words = (str(work), sys.executable)
    with killed_supervisor(tmp_path, _SCRIPT_SUPERVISOR, *words, when=(tmp_path / "reached").exists) as marks:
        (mark,) = marks
        escaped = int((tmp_path / "escapee").read_text())
        assert wait_until(lambda: not find_borne(mark) and not is_alive(escaped), seconds=GONE_SECONDS), find_borne(
            mark
        )


@pytest.mark.fault("F7", injected="kill -9 while an interpreter is being looked at", outcome="that look ends too")
def test_a_look_at_an_interpreter_ends_with_the_supervisor(tmp_path: Path) -> None:
    stuck, reached = tmp_path / "python", tmp_path / "reached"
    # A look is known once it has been started; where the supervisor is killed in that moment, nobody knows of it.
    stuck.write_text(f"#!/bin/sh\nsleep 2\necho $$ > {reached}\nexec sleep 1000\n")
    stuck.chmod(0o700)
    (tmp_path / "train.py").write_text("")
    words = (str(tmp_path), str(stuck))
    with killed_supervisor(tmp_path, _SCRIPT_SUPERVISOR, *words, when=lambda: _read(reached)):
        assert wait_until(lambda: not is_alive(int(_read(reached))), seconds=GONE_SECONDS)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def test_a_process_that_comes_up_after_its_parent_ends_itself() -> None:
    code = "from autotune.lifeline import die_with_parent; die_with_parent({}); print('alive')"
    parents = {os.getpid(): b"alive\n", 2**22 + 1: b""}
    for parent, printed in parents.items():
        done = subprocess.run([sys.executable, "-c", code.format(parent)], capture_output=True, timeout=60, check=False)
        assert done.stdout == printed
        assert done.returncode == (0 if printed else 1)
