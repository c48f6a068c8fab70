"""A supervisor that is killed outright takes its trial, the trial's workers and the fork server with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from trial_world import MARK, find_marked, wait_until

GONE_SECONDS = 9.0
"""The promise is 2 s; a busy machine may take longer."""

_SUPERVISOR = """
import sys
from pathlib import Path
from trial_world import make_spec
from autotune.trial.spawn import TrialRunner
with TrialRunner(Path(sys.argv[1]), warm=sys.argv[2] == "warm") as runner:
    print("up", flush=True)
    runner(make_spec(sys.argv[3], num_workers=int(sys.argv[4])))
"""


@pytest.mark.parametrize(
    ("start", "toy", "workers", "is_early"),
    [
        pytest.param("warm", "worker_hangs", 1, False, id="warm"),
        pytest.param("cold", "worker_hangs", 1, False, id="cold"),
        pytest.param("warm", "worker_escapes", 1, False, id="warm-own-session"),
        pytest.param("cold", "hangs", 0, True, id="cold-while-starting"),
        pytest.param("warm", "hangs", 0, True, id="warm-while-starting"),
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
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
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


def test_a_process_that_comes_up_after_its_parent_ends_itself() -> None:
    code = "from autotune.lifeline import die_with_parent; die_with_parent({}); print('alive')"
    parents = {os.getpid(): b"alive\n", 2**22 + 1: b""}
    for parent, printed in parents.items():
        done = subprocess.run([sys.executable, "-c", code.format(parent)], capture_output=True, timeout=60, check=False)
        assert done.stdout == printed
        assert done.returncode == (0 if printed else 1)
