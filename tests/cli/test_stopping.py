"""A search that hangs itself is ended, past its deadline or a signal; one that ends in time is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autotune.cli.stopping import StopFlag, ended_in_time

_HANG = """
import functools, os
import autotune.search.run as run
from autotune.cli import stopping
from autotune.__main__ import main

def hang(*_asked, **_named):
    print("hanging", flush=True)
    open(os.environ["PIPE"])  # a pipe that nobody writes to: heeds no flag

run.run_search = hang
stopping.ended_in_time = functools.partial(stopping.ended_in_time, grace_seconds=0.5)
main()
"""


def start(folder: Path, budget: str) -> subprocess.Popen[str]:
    os.mkfifo(folder / "pipe")
    return subprocess.Popen(
        [sys.executable, "-c", _HANG, "search", "autotune.targets.demo:workload", "--budget", budget],
        cwd=folder,
        env={**os.environ, "PIPE": str(folder / "pipe")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.fault("F13", injected="the search itself waits for a pipe", outcome="ended past its budget, exit 1")
def test_a_search_that_hangs_itself_is_ended(tmp_path: Path) -> None:
    with start(tmp_path, "1s") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("error: the search did not end within 1 s: an internal error")


@pytest.mark.fault("F13", injected="SIGTERM while the search itself waits for a pipe", outcome="ended, exit 143")
def test_a_signal_ends_a_search_that_hangs_itself(tmp_path: Path) -> None:
    with start(tmp_path, "1m") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "did not end after signal 15" in said


def test_what_ends_in_time_is_left_alone() -> None:
    ended: list[int] = []
    with ended_in_time(0.0, StopFlag(), grace_seconds=5.0, end=ended.append):
        pass
    assert ended == []
    assert not any(thread.name == "autotune-watchdog" for thread in threading.enumerate())


def test_the_grace_is_a_hundredth_of_a_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, ended = StopFlag(), threading.Event()
    stop.signal_number = signal.SIGHUP
    with ended_in_time(50.0, stop, grace_seconds=0.0, end=lambda status: ended.set() if status == 129 else None):
        assert ended.wait(30.0)
