"""A script runs as python runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses
import sys

@dataclasses.dataclass
class Arguments:
    rate: float = 0.1

def train(steps: int) -> float: ...

print([field.type for field in dataclasses.fields(Arguments)], train.__annotations__, __name__, sys.argv)
"""

RUN = """
from autotune.runs.run_script import run_script
from autotune.targets.launch.command import Launch
run_script(Launch("python", (), "file", "train.py", ("--fast",)), on_torch=lambda: None)
"""


def test_annotations_are_what_the_script_has_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone, hooked = (
        subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        for words in (["train.py", "--fast"], ["-c", RUN])
    )
    assert "<class 'float'>" in alone.stdout
    assert hooked.stdout == alone.stdout
