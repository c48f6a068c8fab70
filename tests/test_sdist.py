"""What is published as source can be tested by whoever unpacks it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
FEW = ("tests/test_format.py", "tests/test_units.py", "tests/test_architecture.py", "tests/docs", "tests/targets")
"""Tests that read the package's own source, the documentation, the examples and the benchmarks."""


def run(*words: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("sdist")
    tools = work / "tools"
    install = run(
        sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "hatchling", cwd=work, path=work
    )
    if install.returncode:
        pytest.skip("hatchling cannot be had here")
    built = run(sys.executable, "-c", BUILD, str(work), cwd=ROOT, path=tools)
    assert built.returncode == 0, built.stderr
    name = built.stdout.split()[-1]
    with tarfile.open(work / name) as archive:
        archive.extractall(work, filter="data")
    return work / name.removesuffix(".tar.gz")


@pytest.mark.slow
def test_every_test_is_in_an_sdist_and_can_be_collected(unpacked: Path) -> None:
    def list_tests(root: Path) -> set[Path]:
        return {path.relative_to(root) for path in (root / "tests").rglob("*.py")}

    assert list_tests(unpacked) == list_tests(ROOT)
    done = run(
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=unpacked, path=unpacked
    )
    assert done.returncode == 0, done.stdout[-2000:]
    collected = re.search(r"(\d+)(?:/\d+)? tests? collected", done.stdout)
    assert collected is not None, done.stdout[-2000:]
    assert int(collected[1]) > len(list_tests(ROOT))


@pytest.mark.slow
def test_some_of_them_pass_there(unpacked: Path) -> None:
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *FEW)
    done = run(*words, cwd=unpacked, path=unpacked)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_the_command_runs_from_it(unpacked: Path) -> None:
    done = run(sys.executable, "-m", "autotune", "presets", cwd=unpacked, path=unpacked)
    assert done.returncode == 0, done.stderr
    assert "balanced" in done.stdout
