"""`make test-gpu` on the fake GPU, and which of the lines that only a GPU runs it has run.

    python tests/gpu/fake/on_the_fake.py     runs the paths under coverage, writes lines_run.json and docs/gpu.md

A line is known by its module, function and text, so that what has changed since counts as not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fake_gpu import make_environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_lines import LINES_RUN, ROOT, list_lines, make_page

PATHS = ("tests/gpu/test_gpu_paths.py", "tests/measure/test_speed_reference.py", "tests/machine/limits")
NOT_HERE = {
    "compiled": "torch.compile writes Triton kernels for a GPU",
    "CUDA graphs": "the same, and graphs are captured by the driver",
    "test_a_process_on_each_gpu_takes_the_steps_of_one": "a CPU build of torch has no NCCL",
    "detector": "a search takes its time, and the demo's shows the same lines",
    "text price": "the same",
}
"""Paths that a fake cannot run, or need not, by a part of their name."""

_COVERAGE = """[run]
parallel = true
source = {root}/autotune
data_file = {folder}/data
patch =
    subprocess
    fork
    _exit
    execv
"""


def make_command(*words: str) -> list[str]:
    """Return pytest's words for the paths that run on the fake."""
    left_out = " and ".join(f"not ({' and '.join(name.split())})" for name in NOT_HERE)
    return ["-m", "pytest", "-q", "-m", "gpu", "-k", left_out, "-p", "no:cacheprovider", *PATHS, *words]


def run_paths(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the paths on the fake."""
    command = [sys.executable, *make_command(*words)]
    return subprocess.run(command, cwd=ROOT, env=make_environment(), capture_output=True, text=True, check=False)


def measure_lines(words: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Run the paths under coverage; return the texts of the lines that were run, by module and function."""
    import coverage

    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch) / "settings"
        settings.write_text(_COVERAGE.format(root=ROOT, folder=scratch))
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *make_command(*words)]
        subprocess.run(command, cwd=ROOT, env=make_environment(), check=True)
        merged = coverage.Coverage(data_file=str(Path(scratch) / "merged"), config_file=False)
        merged.combine([scratch], keep=True)
        data = merged.get_data()
        return {
            module: found
            for module, functions in list_lines().items()
            if (found := _keep_run(functions, set(data.lines(str(ROOT / module)) or ())))
        }


def _keep_run(functions: dict[str, dict[int, str]], run: set[int]) -> dict[str, list[str]]:
    kept = {name: [text for number, text in lines.items() if number in run] for name, lines in functions.items()}
    return {name: texts for name, texts in kept.items() if texts}


if __name__ == "__main__":
    LINES_RUN.write_text(json.dumps(measure_lines(sys.argv[1:]), indent=1, sort_keys=True) + "\n")
    (ROOT / "docs" / "gpu.md").write_text(make_page())
