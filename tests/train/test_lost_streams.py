"""Standard streams that are closed, full or read by nobody: a command's own work and status are what they would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compared_runs import make_run_summary, plant_run

from autotune.cli.pages.training import print_summary
from autotune.cli.view.console import attempt, talk_console
from autotune.cli.view.terminal import forgiven_output, print_json, say


def run_shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    command = line.replace("autotune", f"{sys.executable} -P -m autotune", 1)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    plant_run(folder / "a")
    plant_run(folder / "b")
    return folder


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("autotune compare a b 2>&-", 0),
        ("autotune compare a b --json >&- 2>&- <&-", 0),
        ("autotune compare a nowhere 2>&-", 2),
        ("autotune compare a nowhere 2>/dev/full", 2),
    ],
)
@pytest.mark.fault(
    "48", injected="standard streams closed, /dev/full as stderr", outcome="the status is what it would be"
)
def test_a_stream_that_is_not_there_changes_no_status(runs: Path, line: str, status: int) -> None:
    done = run_shell(runs, line)
    assert (done.returncode, done.stderr) == (status, "")


def test_what_is_opened_next_does_not_become_a_closed_stream(runs: Path) -> None:
    code = (
        "import os, sys\n"
        "from autotune.__main__ import _open_missing\n"
        "_open_missing()\n"
        "opened = os.open('a/run.json', os.O_RDONLY)\n"
        "print('lost'); print('lost', file=sys.stderr)\n"
        "assert opened > 2\n"
        "assert [os.readlink(f'/proc/self/fd/{n}') for n in range(3)] == ['/dev/null'] * 3\n"
        "assert all(os.get_inheritable(n) for n in range(3))\n"
        "open('right', 'w').close()\n"
    )
    words = "import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', sys.argv[1], '-', sys.argv[2]]))"
    line = f'{sys.executable} -c "$1" <&- >&- 2>&-'
    done = subprocess.run([sys.executable, "-c", words, line, code], cwd=runs, timeout=60, check=False)
    assert done.returncode == 0
    assert (runs / "right").exists()


def test_talk_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stream)
    say("one")
    say("two")
    console = talk_console()
    attempt(console, lambda: console.print("three"))
    assert console.quiet
    with pytest.raises(BrokenPipeError):
        stream.close()  # it still holds what could not be written


def test_talk_into_a_closed_stream_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = (tmp_path / "err").open("w")
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="closed file"):
        stream.isatty()
    say("one")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.fault("48", injected="/dev/full as stdout", outcome="one line; no traceback")
def test_a_result_that_cannot_be_printed_is_one_line(as_json: bool, tmp_path: Path) -> None:
    printing = "print_json(summary.to_json())" if as_json else "print_summary(summary)"
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from test_lost_streams import *\n"
        "from autotune.__main__ import _settle_streams\n"
        "summary = make_run_summary(Path('run'))\n"
        f"with forgiven_output(): {printing}\n"
        "_settle_streams(); sys.exit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False, env=environment, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


__all__ = ["forgiven_output", "make_run_summary", "print_json", "print_summary"]
