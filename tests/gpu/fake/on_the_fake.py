"""`make test-gpu` on the fake GPU, and which of the lines that only a GPU runs it has run.

    python tests/gpu/fake/on_the_fake.py     runs the paths under coverage, writes lines_run.json and docs/gpu.md

What is given after it goes to pytest. A line is known by its module, function and text, so that what has changed since
counts as not run.
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

PATHS = ("tests/gpu/test_gpu_paths.py", "tests/measure/test_speed_reference.py")
_KNOB = "tests/gpu/test_gpu_paths.py::test_a_knob_trains_as_the_baseline_does"
_LOSSES = "tests/gpu/test_gpu_paths.py::test_losses_that_a_compiled_model_of_a_script_computes_are_read"
_SEARCH = "tests/gpu/test_gpu_paths.py::test_a_search_ends_in_time_with_an_answer"
NOT_HERE = {
    f"{_KNOB}[compiled]": "torch.compile writes Triton kernels for a GPU",
    f"{_KNOB}[CUDA graphs]": "the same, and graphs are captured by the driver",
    **{f"{_LOSSES}[{mode}]": "the same" for mode in ("default", "reduce-overhead", "max-autotune")},
    "tests/gpu/test_gpu_paths.py::test_a_process_on_each_gpu_takes_the_steps_of_one": "a CPU build has no NCCL",
    f"{_SEARCH}[detector]": "a search takes its time, and the demo's shows the same lines",
    f"{_SEARCH}[text price]": "the same",
}
"""Paths that a fake cannot run, or need not; nor does it tell the rates that tests/machine/limits compare."""
COMMANDS = (("probe", "--json"), ("probe", "demo", "--json"))
"""Commands that are run beside the tests: what the machine can do, and the page of a target."""

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


def list_commands(words: Sequence[str]) -> list[list[str]]:
    """Return Python's words of all that is run, pytest first."""
    left_out = [f"--deselect={name}" for name in NOT_HERE]
    tests = ["-m", "pytest", "-q", "-m", "gpu", *left_out, "-p", "no:cacheprovider", *PATHS, *words]
    return [tests, *(["-m", "autotune", *one] for one in COMMANDS)]


def measure_lines(words: Sequence[str]) -> tuple[dict[str, dict[str, list[str]]], int]:
    """Run the paths under coverage; return the texts of the lines that were run, by module and function, and a status.

    Args:
        words: for pytest.
    """
    import coverage

    with tempfile.TemporaryDirectory() as scratch:
        settings, work, status = Path(scratch) / "settings", Path(scratch) / "work", 0
        settings.write_text(_COVERAGE.format(root=ROOT, folder=scratch))
        work.mkdir()
        for place, command in zip((ROOT, work, work), list_commands(words), strict=True):
            whole = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *command]
            status = subprocess.run(whole, cwd=place, env=make_environment(), check=False).returncode or status
        merged = coverage.Coverage(data_file=str(Path(scratch) / "data"), config_file=False)
        merged.combine([scratch])
        data = merged.get_data()
        found = {
            module: _keep_run(functions, set(data.lines(str(ROOT / module)) or ()))
            for module, functions in list_lines().items()
        }
        return {module: functions for module, functions in found.items() if functions}, status


def _keep_run(functions: dict[str, dict[int, str]], run: set[int]) -> dict[str, list[str]]:
    kept = {name: [text for number, text in lines.items() if number in run] for name, lines in functions.items()}
    return {name: texts for name, texts in kept.items() if texts}


if __name__ == "__main__":
    lines, status = measure_lines(sys.argv[1:])
    LINES_RUN.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")
    (ROOT / "docs" / "gpu.md").write_text(make_page())
    sys.exit(status)
