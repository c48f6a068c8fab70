"""What is no fault of the settings is not blamed on them: full disks, limits, outside kills, sleep, bad luck."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from record_factory import make_result
from trial_world import IMPORT_PATH, World, make_spec, open_world

from autotune.errors import MachineError, UsageError
from autotune.isolation import runner as spawn
from autotune.isolation.runner import LEAST_SLEEP_SECONDS, SleepWatch, TrialRunner
from autotune.isolation.script_starter import check_interpreter
from autotune.probe.run import explain_failed_baseline
from autotune.records.codec import read_record
from autotune.records.trial import TrialResult, TrialStatus

CRASHED, COMPLETED, INTERRUPTED = TrialStatus.CRASHED, TrialStatus.COMPLETED, TrialStatus.INTERRUPTED


@pytest.fixture(scope="module")
def module_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("mishaps"), warm=True) as world:
        yield world


@pytest.fixture
def world(module_world: World) -> Iterator[World]:
    yield module_world
    module_world.on_poll = lambda: None
    assert module_world.find_strays() == {}


def count_kills(numbers: list[int | None]) -> Callable[[], int | None]:
    """Return a counter of the kernel's kills that reads as planted, the last value for ever."""
    left = iter(numbers)
    last = [numbers[0]]

    def read() -> int | None:
        last[0] = next(left, last[0])
        return last[0]

    return read


@pytest.mark.slow
@pytest.mark.fault("4", injected="SIGSEGV in the first of two launches", outcome="repeated once, its result counts")
def test_a_crash_that_does_not_come_again_is_forgiven(world: World) -> None:
    said: list[str] = []
    world.runner._say = said.append
    result, _ = world.run("segfaults_once")
    assert (result.status, result.cause, result.error) == (COMPLETED, "", "")
    assert len(said) == 1
    assert "crash-signal: killed by SIGSEGV" in said[0]
    assert said[0].endswith("it is run once more")


@pytest.mark.fault("4", injected="SIGSEGV in every launch", outcome="repeated once, then `crash-signal`")
def test_a_crash_that_comes_again_counts(world: World) -> None:
    said: list[str] = []
    world.runner._say = said.append
    result, log = world.run("segfaults")
    assert (result.status, result.cause) == (CRASHED, "crash-signal")
    assert len(said) == 1
    assert "in meet_fate" in log
    assert read_record(world.folder / f"{result.spec.number:04d}" / "result.json", TrialResult) == result


def test_a_crash_is_not_repeated_where_the_time_does_not_allow_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    elapsed = [2.0]
    monkeypatch.setattr(
        TrialRunner,
        "_attempt",
        lambda _self, spec, *_: (_crashed(spec, elapsed[0]), 0.0),  # any second one crashes too
    )
    said: list[str] = []
    world.runner._say = said.append
    for elapsed[0], repeats in ((2.0, 1), (70.0, 0)):  # of 120 s
        said.clear()
        assert world.runner(make_spec("segfaults", number=world.trials)).cause == "crash-signal"
        assert len(said) == repeats
    world.trials += 1


def _crashed(spec: object, elapsed: float) -> TrialResult:
    return make_result(spec, status=CRASHED, cause="crash-signal", error="killed", elapsed_seconds=elapsed)


@pytest.mark.fault("F12", injected="kill -9 of a trial by somebody else", outcome="`crash-signal`, not `oom-killed`")
@pytest.mark.fault("3", injected="SIGKILL, the kernel's counter planted", outcome="`oom-killed` if the counter moved")
@pytest.mark.parametrize(
    ("counter", "status", "cause", "words"),
    [
        ([7], CRASHED, "crash-signal", "not by the kernel for want of memory"),
        ([7, 8], TrialStatus.OUT_OF_MEMORY, "oom-killed", "killed by the kernel for want of memory"),
        ([None], TrialStatus.OUT_OF_MEMORY, "oom-killed", "most likely"),
    ],
)
def test_only_the_kernels_counter_makes_a_kill_one_for_want_of_memory(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    counter: list[int | None],
    status: TrialStatus,
    cause: str,
    words: str,
) -> None:
    monkeypatch.setattr(spawn, "read_oom_kills", count_kills(counter))
    result, _ = world.run("kills_itself")
    assert (result.status, result.cause) == (status, cause)
    assert words in result.error


@pytest.mark.fault("F12", injected="disk filled before the trial's own record", outcome="OSError: exit 5, not 4")
@pytest.mark.fault("25", injected="tmpfs of 256 KiB filled by the trial", outcome="exit 5 in a search")
def test_a_full_disk_is_not_the_settings_fault(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount of its own here")
    code = """
import errno, sys
from pathlib import Path
from trial_world import make_spec, open_world
try:
    with open_world(Path(sys.argv[1]), warm=False) as world:
        print(world.run("fills_disk")[0])
except OSError as error:
    print(errno.errorcode[error.errno], error.strerror)
"""
    command = f'mount -t tmpfs -o size=256k none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, code], env=environment, capture_output=True, text=True, check=False
    )
    printed = done.stdout.strip()
    assert printed == "ENOSPC a trial's record could not be written: No space left on device", done.stderr


@pytest.mark.slow
@pytest.mark.fault("25", injected="`autotune probe` on a temporary folder of 8 KiB", outcome="one line, exit 5")
def test_a_probe_on_a_full_disk_says_so(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount of its own here")
    command = f"mount -t tmpfs -o size=8k none {tmp_path} && exec {sys.executable} -P -m autotune probe"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        env={**os.environ, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == MachineError.exit_code, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.fault("26", injected="RLIMIT_FSIZE 0 in a trial", outcome="the record's failure, exit 5 in a search")
def test_a_limit_on_the_size_of_files_is_not_the_settings_fault(world: World) -> None:
    with pytest.raises(OSError, match="File too large") as caught:
        world.run("limits_file_size")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.fault("46", injected="RLIMIT_NOFILE 64", outcome="cause `limits` with the ulimit line")
def test_too_many_open_files_name_the_limit(world: World) -> None:
    result, _ = world.run("limits_files")
    assert (result.status, result.cause) == (CRASHED, "limits")
    assert "no more than 64 files may be open: raise it with ulimit -n" in result.error
    error = explain_failed_baseline(result)
    assert isinstance(error, MachineError)


@pytest.mark.fault("46", injected="ulimit -v 600 MB", outcome="cause `limits` with the ulimit line, exit 5")
@pytest.mark.fault("F12", injected="ulimit -v 600 MB", outcome="cause `limits` with the ulimit line, exit 5")
def test_a_limit_on_addresses_is_named(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from trial_world import open_world
with open_world(Path(sys.argv[1]), warm=True) as world:
    result = world.run("trains")[0]
    print(result.cause, result.error)
"""
    most = 600 * 10**6
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("limits "), done.stdout + done.stderr
    assert "ulimit -v unlimited" in done.stdout


@pytest.mark.fault("46", injected="RLIMIT_NPROC 0, not as root", outcome="cause `limits` with the ulimit line")
@pytest.mark.parametrize("start", ["threading.Thread(target=print)", "multiprocessing.get_context('fork').Process()"])
def test_too_few_processes_name_the_limit(start: str) -> None:
    code = f"""
import multiprocessing, multiprocessing.popen_fork, os, resource, threading
from autotune.isolation.causes import explain_exception
if os.getuid() == 0:
    os.setuid(65534)  # root has as many processes as it likes
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    {start}.start()
except Exception as error:
    print(*explain_exception(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("crashed limits "), done.stdout + done.stderr
    assert "(0 allowed): raise it with ulimit -u" in done.stdout


@pytest.mark.fault(
    "F12", injected="exception text with a name that is not UTF-8", outcome="a record with it spelled out"
)
def test_a_name_that_is_not_utf8_does_not_hide_the_failure(world: World) -> None:
    result, _ = world.run("raises_odd_name")
    assert (result.status, result.cause) == (CRASHED, "user-error")
    assert "FileNotFoundError" in result.error
    assert r"caf\udce9.jpg" in result.error


@pytest.mark.fault("F14", injected="half a partial.json", outcome="as if there were none")
def test_a_torn_partial_record_is_none(world: World) -> None:
    result, _ = world.run("tears_partial")
    assert (result.status, result.cause) == (CRASHED, "crash-exit")


@pytest.mark.fault("11", injected="a lock held at fork", outcome="`timeout`, which names forkserver")
def test_a_dataset_that_cannot_be_forked_is_told_what_helps(world: World) -> None:
    whole = world.run("trains", num_workers=1)[0].elapsed_seconds
    result, _ = world.run("holds_lock_at_fork", num_workers=1, seconds=2.0 + 2 * whole)
    assert (result.status, result.cause) == (TrialStatus.TIMED_OUT, "timeout")
    assert 'multiprocessing_context="forkserver"' in result.error


def test_other_hangs_are_not_blamed_on_a_fork(world: World) -> None:
    result, _ = world.run("hangs", seconds=3.0)
    assert result.status is TrialStatus.TIMED_OUT
    assert "forkserver" not in result.error


def test_a_sleep_is_the_gap_between_two_looks() -> None:
    clock = iter([0.0, 0.05, LEAST_SLEEP_SECONDS, 100.0, 100.1])
    watch = SleepWatch(lambda: next(clock))
    seen = []
    for _ in range(4):
        watch.look()
        seen.append(watch.seconds)
    assert seen == [0.0, 0.0, 100.0 - LEAST_SLEEP_SECONDS, 100.0 - LEAST_SLEEP_SECONDS]


class Nights:
    """A clock for watches of which the first few sleep for an hour at their second look."""

    def __init__(self, nights: int) -> None:
        self.left = nights

    def __call__(self) -> SleepWatch:
        looks, is_night = 0, self.left > 0
        self.left -= 1

        def clock() -> float:
            nonlocal looks
            looks += 1
            return 0.01 * looks + (3600.0 if is_night and looks > 2 else 0.0)

        return SleepWatch(clock)


@pytest.mark.fault("23", injected="a clock that jumps by an hour under a launch", outcome="repeated, the sleep is told")
def test_a_measurement_that_was_slept_through_is_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    world.runner._say = said.append
    monkeypatch.setattr(spawn, "SleepWatch", Nights(1))
    result, _ = world.run("trains", purpose="measure")
    assert result.status is COMPLETED
    assert len(said) == 1
    assert "slept for 1h00m of it; it is run once more" in said[0]


def test_a_measurement_that_is_slept_through_again_counts_as_interrupted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "SleepWatch", Nights(2))
    result, _ = world.run("trains", purpose="measure")
    assert (result.status, result.cause, result.measurement) == (INTERRUPTED, "disturbed", None)
    assert "slept for 1h00m" in result.error


def test_what_was_learned_in_a_trial_that_was_slept_through_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = Nights(5)
    monkeypatch.setattr(spawn, "SleepWatch", nights)
    result, _ = world.run("trains")
    assert result.status is COMPLETED
    assert result.curves
    assert nights.left == 4


@pytest.mark.slow
@pytest.mark.fault("23", injected="SIGSTOP of the supervisor for 6 s", outcome="the launch is repeated, the sleep told")
def test_a_stopped_supervisor_repeats_its_launch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from trial_world import make_spec
from autotune.isolation.runner import TrialRunner
with TrialRunner(Path(sys.argv[1]), warm=False, say=print) as runner:
    print(runner(make_spec("slow", purpose="measure", user_knobs={"later": 2.0})).status.value)
"""
    environment = {**os.environ, "TOY_FOLDER": str(tmp_path), "PYTHONPATH": IMPORT_PATH}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        process = psutil.Process(supervisor.pid)
        while not any(_is_at_work(child) for child in process.children()):
            signal.sigtimedwait([], 0.05)
        supervisor.send_signal(signal.SIGSTOP)
        signal.sigtimedwait([], LEAST_SLEEP_SECONDS + 1.0)
        supervisor.send_signal(signal.SIGCONT)
        printed, _ = supervisor.communicate(timeout=300)
    assert "slept for" in printed.splitlines()[0]
    assert printed.splitlines()[-1] == "completed"


def _is_at_work(trial: psutil.Process) -> bool:
    """Return whether a process is a trial that its supervisor has started, and watches."""
    return "autotune.isolation.entry" in " ".join(trial.cmdline()) and trial.cpu_times().user > 0.2


@pytest.mark.fault("6", injected="an interpreter that never gets to import torch", outcome="given up in its time")
def test_a_look_at_an_interpreter_ends_in_time_or_when_told_to(tmp_path: Path) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o700)
    with pytest.raises(UsageError, match="was not done in time"):
        check_interpreter(str(stuck), set(), seconds=0.2)
    with pytest.raises(UsageError, match="stopped"):
        check_interpreter(str(stuck), set(), should_stop=lambda: True)


def test_our_interpreter_by_another_name_is_not_looked_at(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    other = next(path for path in (folder / "python3", folder / "python") if str(path) != sys.executable)
    checked: set[str] = set()
    check_interpreter(str(other), checked, seconds=0.0)
    assert checked == set()


_LITTER = """
import os, tempfile
from pathlib import Path
Path(tempfile.gettempdir(), "cc01.s").touch()
Path(__file__).with_name("where").write_text(tempfile.gettempdir())
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.fault("20", injected="a trial killed with a compiler's files in TMPDIR", outcome="removed with the search")
def test_temporary_files_of_a_killed_trial_go_with_its_runner(tmp_path: Path, warm: bool) -> None:
    (tmp_path / "littering.py").write_text(_LITTER)
    spec = make_spec(f"{tmp_path / 'littering.py'}:workload")
    with TrialRunner(tmp_path / "trials", warm=warm) as runner:
        assert runner(spec).status is TrialStatus.CRASHED
        ours = Path((tmp_path / "where").read_text())
        assert (ours / "cc01.s").exists()
    assert ours.name.startswith("autotune-scratch-")
    assert not ours.exists()
