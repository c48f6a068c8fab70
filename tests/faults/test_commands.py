"""Whole commands under signals, jumps of the clock, lost streams, other work: an answer or one line, nothing left."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from bench import COMMAND, Bench, Done, finish, hear_signals, open_bench, wait_until

from autotune.errors import BusyError
from autotune.records.profile import Profile

pytestmark = pytest.mark.slow

STOP_SECONDS = 20.0
"""The promise is a second or two; a busy machine may take longer."""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return a bench whose searches take over a probe, so that each begins to measure at once."""
    bench = open_bench(tmp_path_factory.mktemp("probed"))
    done = bench.run("probe", "tiny.py:tiny")
    assert done.status == 0, done.said
    return bench


@pytest.fixture
def bench(probed: Bench) -> Iterator[Bench]:
    yield probed
    probed.environment.clear()
    (probed.folder / "best.json").unlink(missing_ok=True)
    assert probed.await_end_of_all() == {}
    assert probed.list_scratch() == []


class Terminal:
    """A command at a terminal of its own.

    Attributes:
        pid: of the command.
        printed: so far.
    """

    def __init__(self, bench: Bench, *words: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            hear_signals()
            os.chdir(bench.folder)
            os.execve(sys.executable, [*COMMAND, *words], {**bench.make_environment(), "TERM": "dumb"})
        self.printed = ""

    def await_(self, condition: Callable[[], bool]) -> None:
        """Read what is printed until a condition comes true."""

        def look() -> bool:
            if select.select([self._terminal], [], [], 0.0)[0]:
                self.printed += os.read(self._terminal, 4096).decode(errors="replace")
            return condition()

        assert wait_until(look), self.printed

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def finish(self) -> int:
        """Return the exit status, or minus the signal's number."""
        while True:
            try:
                chunk = os.read(self._terminal, 4096)
            except OSError:  # the last process at the terminal has gone
                chunk = b""
            if not chunk:
                break
            self.printed += chunk.decode(errors="replace")
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start_search(bench: Bench, *, budget: str = "300s") -> subprocess.Popen[str]:
    """Start a search and return it once it has told of two launches; what it says goes to `said.txt`."""
    log = bench.folder.parent / "said.txt"
    with log.open("w") as said:
        process = bench.start("search", "tiny.py:tiny", "--budget", budget, "--force", stdout=said, stderr=said)
    assert wait_until(lambda: log.read_text().count("\n#") >= 2 or process.poll() is not None), log.read_text()
    assert process.poll() is None, log.read_text()
    return process


def has_answer(bench: Bench) -> Callable[[], bool]:
    """Return a function that tells whether a new search has written its first answer."""
    profile = bench.folder / "best.json"
    before = profile.stat().st_mtime_ns if profile.exists() else None
    return lambda: profile.exists() and profile.stat().st_mtime_ns != before


def said(bench: Bench) -> str:
    return (bench.folder.parent / "said.txt").read_text()


def assert_answered(bench: Bench) -> Profile:
    profile = Profile.load(bench.folder / "best.json")
    assert profile.target.label == "tiny.py:tiny"
    return profile


@pytest.mark.fault(
    "21", injected="Ctrl-C at a terminal in mid search", outcome="exit 130 in a moment, with what was found"
)
def test_one_ctrl_c_ends_a_search_with_what_it_has(bench: Bench) -> None:
    terminal = Terminal(bench, "search", "tiny.py:tiny", "--budget", "300s", "--force")
    terminal.await_(has_answer(bench))
    began = time.monotonic()
    terminal.press_ctrl_c()
    assert terminal.finish() == 128 + signal.SIGINT, terminal.printed
    assert time.monotonic() - began < STOP_SECONDS
    assert "Traceback" not in terminal.printed
    assert assert_answered(bench).evidence.stop_reason == "interrupted"


@pytest.mark.fault(
    "21", injected="Ctrl-C twice at a terminal in mid search", outcome="ended at once; files whole, nothing left"
)
def test_two_ctrl_c_end_it_at_once(bench: Bench) -> None:
    terminal = Terminal(bench, "search", "tiny.py:tiny", "--budget", "300s", "--force")
    terminal.await_(has_answer(bench))
    began = time.monotonic()
    terminal.press_ctrl_c()
    terminal.press_ctrl_c()
    status = terminal.finish()
    assert status in (128 + signal.SIGINT, -signal.SIGINT), terminal.printed
    assert time.monotonic() - began < STOP_SECONDS
    assert "Traceback" not in terminal.printed
    assert_answered(bench)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.fault(
    "22", injected="SIGTERM and SIGHUP to a search", outcome="143 and 129 in a moment, with what was found"
)
def test_a_signal_ends_a_search_with_what_it_has(bench: Bench, number: signal.Signals) -> None:
    process = start_search(bench)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert time.monotonic() - began < STOP_SECONDS
    assert "Traceback" not in said(bench)
    assert assert_answered(bench).evidence.stop_reason == "interrupted"


@pytest.mark.fault("22", injected="SIGHUP to a search under nohup", outcome="it goes on")
def test_a_search_under_nohup_goes_on(bench: Bench) -> None:
    log = bench.folder.parent / "said.txt"
    with log.open("w") as file:
        words = ("search", "tiny.py:tiny", "--budget", "300s", "--force")
        process = bench.start(*words, command=("nohup", *COMMAND), stdout=file, stderr=file)
    assert wait_until(lambda: log.read_text().count("\n#") >= 2), log.read_text()
    process.send_signal(signal.SIGHUP)
    seen = log.read_text().count("\n#")
    assert wait_until(lambda: log.read_text().count("\n#") > seen)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.fault(
    "23",
    injected="SIGSTOP to all of a search for 8 s of its 60 s, then SIGCONT",
    outcome="it ends inside its budget with an answer",
)
def test_a_search_that_was_stopped_keeps_its_budget(bench: Bench) -> None:
    began = time.monotonic()
    process = start_search(bench, budget="60s")
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        one.suspend()
    time.sleep(8.0)
    for one in reversed(family):
        one.resume()
    assert process.wait(120) in (0, 3), said(bench)
    assert time.monotonic() - began < 60.0 + STOP_SECONDS
    assert_answered(bench)


_JUMPING = """
import time
_began, _true = time.monotonic(), time.time
def _jump():
    # Forward by a day after two seconds, back by two days after four.
    passed = time.monotonic() - _began
    return _true() + (0 if passed < 2 else 86400 if passed < 4 else -86400)
time.time = _jump
time.time_ns = lambda: int(1e9 * _jump())
"""


@pytest.mark.fault(
    "24",
    injected="time.time a day ahead after 2 s, a day behind after 4 s, in every process",
    outcome="the search ends inside its budget with an answer, --resume goes on",
)
def test_a_clock_that_jumps_changes_no_deadline(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_JUMPING)
    bench.environment["PYTHONPATH"] = str(tmp_path)
    words = ("search", "tiny.py:tiny", "--budget", "60s", "--force")
    for more in ((), ("--resume",)):
        done = bench.run(*words, *more)
        assert done.status in (0, 3), done.said
        assert done.seconds < 60.0 + STOP_SECONDS
        assert_answered(bench)


@pytest.mark.fault(
    "31",
    injected="a second autotune search in the folder",
    outcome="exit 6 at once, naming the process; the first goes on",
)
def test_a_second_search_is_refused_at_once(bench: Bench) -> None:
    first = start_search(bench)
    second = bench.run("search", "tiny.py:tiny", "--budget", "60s", "--force")
    assert second.status == BusyError.exit_code
    assert f"process {first.pid}" in second.said
    assert first.poll() is None
    first.terminate()
    assert first.wait(60) == 128 + signal.SIGTERM
    assert_answered(bench)


_HOG = "import time\nuntil = time.monotonic() + 300\nwhile time.monotonic() < until: pass\n"


@pytest.mark.fault(
    "32",
    injected="a busy process for each CPU beside a probe",
    outcome="probed, with the other work named; the others are left alone",
)
def test_other_work_is_named_and_left_alone(bench: Bench) -> None:
    cpus = os.sched_getaffinity(0)
    hogs = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in cpus]
    try:
        done = bench.run("probe", "tiny.py:tiny", "--json")
        assert [hog.poll() for hog in hogs] == [None] * len(hogs)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert done.status == 0, done.said
    report = json.loads(done.printed)
    told = json.dumps([report["troubles"], report["verdict"]])
    assert "other" in told, told


@pytest.mark.fault(
    "47", injected="one CPU by affinity (taskset)", outcome="one CPU is counted; no more workers or threads are advised"
)
def test_one_usable_cpu_is_one_cpu(bench: Bench) -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os, sys; os.sched_setaffinity(0, {{{one}}}); os.execv(sys.argv[1], sys.argv[1:])"
    done = bench.run("probe", "tiny.py:tiny", "--json", command=[sys.executable, "-c", code, *COMMAND])
    assert done.status == 0, done.said
    report = json.loads(done.printed)
    assert report["hardware"]["usable_cpu_count"] == 1
    assert report["target"]["baseline"]["num_threads"] == 1


LOST_STREAMS: dict[str, tuple[str, dict[str, str]]] = {
    "everything closed": ("<&- >&- 2>&-", {}),
    "everything full": (">/dev/full 2>/dev/full", {}),
    "read by nobody": ("2>&1 | true", {}),
    "plain ASCII": (">/dev/null 2>&1", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}),
}


@pytest.mark.parametrize("name", LOST_STREAMS)
@pytest.mark.fault(
    "48",
    injected="a search without streams, with full ones, with a reader that goes, in ASCII",
    outcome="it goes on, and its files are written",
)
def test_a_search_needs_no_streams(bench: Bench, name: str) -> None:
    redirections, environment = LOST_STREAMS[name]
    bench.environment |= environment
    line = " ".join([*COMMAND, "search", "tiny.py:tiny", "--budget", "300s", "--force", redirections])
    process = bench.start(line, command=("bash", "-c"))
    trials = bench.folder / ".autotune"
    before = len(list(trials.glob("*/trials/*/result.json")))
    assert wait_until(lambda: len(list(trials.glob("*/trials/*/result.json"))) >= before + 3)
    assert_answered(bench)
    for pid, words in bench.find_processes().items():
        if " search " in words and "bash" not in words:
            os.kill(pid, signal.SIGTERM)
    assert "Traceback" not in finish(process).said


@pytest.mark.parametrize("budget", ["0s", "-5s", "nan", "1e400h", "5s", "14s", "9" * 40 + "h", ""])
@pytest.mark.fault(
    "49",
    injected="budgets of nothing, less than nothing, nan, infinity, no unit",
    outcome="exit 2 in one line with what is allowed",
)
def test_a_budget_that_is_none_is_refused_in_a_line(bench: Bench, budget: str) -> None:
    done = bench.run("search", "tiny.py:tiny", f"--budget={budget}")
    assert done.status == 2, done.said
    errors = [line for line in done.said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.said
    assert "--budget" in errors[0]


@pytest.mark.fault("49", injected="a budget of 100,000 hours", outcome="the search begins, and ends when it is told to")
def test_a_huge_budget_is_a_budget(bench: Bench) -> None:
    process = start_search(bench, budget="100000h")
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert_answered(bench)


def run_search_of(bench: Bench, toy: str, *, budget: str = "60s") -> Done:
    return bench.run("search", f"tiny.py:{toy}", "--budget", budget, "--out", f"{toy}.json")


@pytest.mark.parametrize("toy", ["few", "streaming"])
@pytest.mark.fault(
    "51", injected="a dataset of 3 samples, a stream without a length", outcome="searched, with an answer, or one line"
)
def test_a_dataset_of_any_length_is_searched(bench: Bench, toy: str) -> None:
    done = run_search_of(bench, toy)
    assert done.status in (0, 3), done.said
    assert "Traceback" not in done.said
    Profile.load(bench.folder / f"{toy}.json")


@pytest.mark.fault("51", injected="an empty dataset under a search", outcome="exit 4 in one line")
def test_an_empty_dataset_is_the_targets_fault(bench: Bench) -> None:
    done = run_search_of(bench, "empty")
    assert done.status == 4, done.said
    assert "Traceback" not in done.said
    assert "no samples" in done.said or "empty" in done.said
    assert not (bench.folder / "empty.json").exists()


@pytest.mark.fault(
    "18",
    injected="a dataset that raises in every loader worker",
    outcome="workers are given up after two launches; the rest is searched",
)
def test_what_breaks_some_settings_only_costs_those(bench: Bench) -> None:
    done = run_search_of(bench, "breaks_with_workers", budget="60s")
    assert done.status in (0, 3), done.said
    profile = Profile.load(bench.folder / "breaks_with_workers.json")
    assert profile.config.num_workers == 0
    failed = [line for line in done.said.splitlines() if "num_workers=" in line and "KeyError" in line]
    assert len(failed) <= 2, failed


@pytest.mark.fault(
    "19",
    injected="a training that works while it is probed and fails in each process after it",
    outcome="exit 3 with the cause; no settings are recommended",
)
def test_a_training_that_fails_after_its_probe_recommends_nothing(bench: Bench) -> None:
    done = run_search_of(bench, "works_once", budget="3m")
    assert done.status in (3, 4), done.said
    assert "the licence server is gone" in done.said
    assert "Traceback" not in done.said
    if (bench.folder / "works_once.json").exists():
        profile = Profile.load(bench.folder / "works_once.json")
        assert profile.config == profile.baseline_config
