"""The fake GPU keeps its books as a GPU does, and autotune's GPU paths run on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import find_compiler, is_supported, make_environment

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not is_supported(), reason="the fake GPU is written for a CPU build of torch 2.13"),
]


def run_pytest(*words: str, seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    ended = subprocess.run(
        command,
        cwd=HERE.parents[2],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    return ended.stdout


def test_known_programs_do_what_they_do_on_a_gpu() -> None:
    assert " passed" in run_pytest(str(HERE / "programs.py"), seconds=300.0)
