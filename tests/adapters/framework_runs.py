"""Programs of a user of another trainer, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "exports.md"


def require(package: str) -> None:
    """Skip without a package; it is imported in no process but a program's."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def write_program(name: str, folder: Path) -> None:
    """Write the program that the page shows by a name."""
    (block,) = re.findall(rf"^```python\n(# {name}\n.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (folder / name).write_text(block)


def run(folder: Path, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run Python and return what it printed."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "default", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_lines(folder: Path, source: str) -> list[Any]:
    """Run a program and return the JSON of its last line."""
    (folder / "asks.py").write_text(source)
    done = run(folder, "asks.py")
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
