"""Runs whole commands in a folder of their own, and finds what they leave behind: processes, scratch, torn files."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil

MARK = "AUTOTUNE_TEST_BENCH"
COMMAND = (sys.executable, "-P", "-m", "autotune")
TARGET = "tiny.py:tiny"
GONE_SECONDS = 15.0
"""The promise is 2 s; a busy machine may take longer."""


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Attributes:
        status: its exit status, or minus the signal's number.
        printed: on stdout.
        said: on stderr.
        seconds: it took.
    """

    status: int
    printed: str
    said: str
    seconds: float


@dataclass
class Bench:
    """A working folder with the tiny trainings, and a temporary folder of its own.

    Attributes:
        folder: the working folder.
        scratch: TMPDIR of every command.
        mark: in the environment of every process.
        environment: added to that of every command.
    """

    folder: Path
    scratch: Path
    mark: str = field(default_factory=lambda: uuid4().hex)
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str, command: Sequence[str] = COMMAND, **options: object) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its output is piped unless told otherwise."""
        pipes: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [*command, *words],
            cwd=self.folder,
            env=self.make_environment(),
            text=True,
            start_new_session=True,
            preexec_fn=hear_signals,
            **(pipes | options),
        )

    def run(self, *words: str, command: Sequence[str] = COMMAND, seconds: float = 300.0, **options: object) -> Done:
        """Run a command to its end."""
        began = time.monotonic()
        with self.start(*words, command=command, **options) as process:
            return finish(process, began=began, seconds=seconds)

    def make_environment(self) -> dict[str, str]:
        """Return the environment of a command."""
        own = {MARK: self.mark, "TMPDIR": str(self.scratch), "TINY_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own, **self.environment}

    def find_processes(self) -> dict[int, str]:
        """Return the living processes of all commands, by their mark."""
        return find_marked(MARK, self.mark)

    def await_end_of_all(self) -> dict[int, str]:
        """Wait until no process of any command is left; return those that stay."""
        wait_until(lambda: not self.find_processes(), seconds=GONE_SECONDS)
        return self.find_processes()

    def list_scratch(self) -> list[str]:
        """Return what lies in the temporary folder, but for a cache that torch keeps there for later processes."""
        return sorted(path.name for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_"))


def open_bench(folder: Path, **environment: str) -> Bench:
    """Return a bench in an empty folder."""
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))  # a short path: sockets are made in it
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    bench = Bench(folder / "work", scratch, environment=dict(environment))
    bench.folder.mkdir()
    shutil.copy(Path(__file__).with_name("tiny.py"), bench.folder)
    return bench


def finish(process: subprocess.Popen[str], *, began: float | None = None, seconds: float = 300.0) -> Done:
    """Wait for a command's end; one that hangs is killed with its group, and the test fails."""
    began = time.monotonic() if began is None else began
    try:
        printed, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, said = process.communicate()
        raise AssertionError(f"it hung for {seconds:.0f} s; it said: {said[-2000:]}") from None
    return Done(process.returncode, printed, said, time.monotonic() - began)


def hear_signals() -> None:
    """Hear what a test's own process may ignore: one run in the background of a shell, or under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def find_marked(name: str, value: str) -> dict[int, str]:
    """Return the living processes with a variable in their environment, by pid."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


def list_family(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it, whatever their environment."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def find_living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that still live: none that has taken over the number of one."""
    living = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            continue
    return living


def wait_until(condition: Callable[[], object], *, seconds: float = 120.0) -> bool:
    """Return whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def in_namespace(mount: str, command: Sequence[str]) -> list[str]:
    """Return a command that runs in a mount namespace of its own, after a mount.

    Args:
        mount: arguments of mount(8), e.g. `-t tmpfs -o size=8m tmpfs /dev/shm`.
        command: to run.
    """
    line = f'mount {mount} && exec "$@"'
    return [*NAMESPACE, "sh", "-c", line, "sh", *command]


def can_mount(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this user may mount a tmpfs in a mount namespace."""
    if shutil.which("unshare") is None:
        return False
    command = in_namespace("-t tmpfs -o size=1m tmpfs /dev/shm", ["true"])
    done = subprocess.run(command, capture_output=True, timeout=30, check=False, env=environment)
    return done.returncode == 0


NAMESPACE = ("unshare", "--mount") if os.getuid() == 0 else ("unshare", "--mount", "--map-root-user")
