"""Tiny workloads, one for each fate a trial can have. Their processes carry TOY_FOLDER, where they leave traces."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from autotune.machine import interference

FLOOD_BYTES = 200 * 2**20
ALLOCATED_BYTES = 900 * 2**20

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def leave_trace(name: str) -> None:
    Path(os.environ["TOY_FOLDER"], name).touch()


def hang_for_good() -> None:
    leave_trace("reached")
    while True:
        time.sleep(1000.0)


def escape(name: str) -> None:
    """Start a program without any environment, in a session of its own and as nobody's child; leave its number."""
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.execve("/bin/sleep", ["sleep", "1000"], {})
        Path(os.environ["TOY_FOLDER"], name).write_text(str(pid))
        os._exit(0)
    os.wait()


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if get_worker_info() is not None:
            self.meet_fate()
        x = torch.full((4,), float(index % 7))
        return x, x.sum()

    def meet_fate(self) -> None:
        pass


class Toy:
    """Trains; the fates below override one part."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_dataset(self) -> Dataset[Any]:
        return Points()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.meet_fate()
        x, y = batch
        return nn.functional.mse_loss(model(x).squeeze(1), y)

    def meet_fate(self) -> None:
        pass


class DrawsWithoutSeed(Toy):
    """Noise from generators that are made without a seed, as a library's transforms make theirs."""

    def train_dataset(self) -> Dataset[Any]:
        self.rng, self.other = np.random.default_rng(), random.Random()
        return super().train_dataset()

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (1.0 + self.rng.random() + self.other.random()) * super().compute_loss(model, batch)


class Hangs(Toy):
    def meet_fate(self) -> None:
        hang_for_good()


class IgnoresSigterm(Toy):
    def meet_fate(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang_for_good()


class ExitsSilently(Toy):
    def meet_fate(self) -> None:
        os._exit(0)


class ExitsWithStatus(Toy):
    def meet_fate(self) -> None:
        print("giving up now", flush=True)
        os._exit(3)


class Segfaults(Toy):
    def meet_fate(self) -> None:
        ctypes.string_at(0)


class DiesOfShapes(Toy):
    """Reads tensors by their address, which those without contents do not have."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if type(batch[0]) is not Tensor:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().compute_loss(model, batch)


class Aborts(Toy):
    def meet_fate(self) -> None:
        os.abort()


class KillsItself(Toy):
    def meet_fate(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class RunsOutOfDeviceMemory(Toy):
    def meet_fate(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class RunsOutOfMemory(Toy):
    def meet_fate(self) -> None:
        raise MemoryError


class Diverges(Toy):
    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().compute_loss(model, batch) * float("nan")


class Raises(Toy):
    def meet_fate(self) -> None:
        raise ValueError("the labels do not fit the images")


class RaisesBaseException(Toy):
    def meet_fate(self) -> None:
        raise BaseException("not an Exception")


class Exits(Toy):
    def meet_fate(self) -> None:
        sys.exit("bye")


class Floods(Toy):
    is_done = False

    def meet_fate(self) -> None:
        if not self.is_done:
            self.is_done = True
            print("the first line", flush=True)
            block = (b"y" * 127 + b"\n") * (2**20 // 128)
            for _ in range(FLOOD_BYTES // len(block)):
                view = memoryview(block)
                while view:
                    view = view[os.write(1, view) :]
            print("the last line", flush=True)


class WritesJunk(Toy):
    def meet_fate(self) -> None:
        newest = max(Path(os.environ["TOY_FOLDER"]).glob("[0-9]*"))
        (newest / "result.json").write_text('{"status": NaN, "spec": [[[[')
        os._exit(0)


class PrintsEnvironment(Toy):
    def meet_fate(self) -> None:
        print({name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "LD_"))}, flush=True)


class Allocates(Toy):
    def meet_fate(self) -> None:
        block = bytearray(ALLOCATED_BYTES)
        block[::4096] = b"x" * len(block[::4096])
        hang_for_good()


class StartsDaemon(Toy):
    """Forks twice, so that the daemon is nobody's child, in a session of its own."""

    def meet_fate(self) -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                leave_trace("daemon")
                time.sleep(1000.0)
            os._exit(0)
        os.wait()


class StartsShell(Toy):
    """Leaves a whole tree of processes in a session of its own."""

    def meet_fate(self) -> None:
        subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"], start_new_session=True)


class Escapes(Toy):
    def meet_fate(self) -> None:
        escape("escapee")


class EscapesAndHangs(Toy):
    def meet_fate(self) -> None:
        escape("escapee")
        hang_for_good()


class SegfaultsOnce(Toy):
    def meet_fate(self) -> None:
        if not Path(os.environ["TOY_FOLDER"], "segfaulted").exists():
            leave_trace("segfaulted")
            ctypes.string_at(0)


class FillsDisk(Toy):
    """Leaves no room where its trial is recorded."""

    def meet_fate(self) -> None:
        with Path(os.environ["TOY_FOLDER"], "filler").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return


class LimitsFiles(Toy):
    """May have 64 files open, and opens more."""

    def meet_fate(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
        assert not files


class LimitsFileSize(Toy):
    """May write no file at all."""

    def meet_fate(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class RaisesOddName(Toy):
    def meet_fate(self) -> None:
        Path(b"/no/such/caf\xe9.jpg".decode("utf-8", "surrogateescape")).read_bytes()


class TearsPartial(Toy):
    """Leaves half of what a probe knew, and dies."""

    def meet_fate(self) -> None:
        newest = max(Path(os.environ["TOY_FOLDER"]).glob("[0-9]*"))
        (newest / "partial.json").write_text('{"spec": {"numb')
        os._exit(3)


class ChangesProcess(Toy):
    """Does to its process what libraries do, and worse."""

    def meet_fate(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        os.umask(0o777)
        os.environ.clear()
        sys.excepthook = sys.unraisablehook = lambda *_: os._exit(7)
        torch.manual_seed(0)


class ClosesOutput(Toy):
    def meet_fate(self) -> None:
        sys.stdout = None  # type: ignore[assignment]
        sys.stderr.close()


class LeavesThread(Toy):
    """Has a thread that never ends and an exit handler that hangs."""

    is_done = False

    def meet_fate(self) -> None:
        if not self.is_done:
            self.is_done = True
            threading.Thread(target=time.sleep, args=(1000.0,)).start()
            atexit.register(time.sleep, 1000.0)


class _Dying(Points):
    def meet_fate(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _Hanging(Points):
    def meet_fate(self) -> None:
        hang_for_good()


class _Escaping(Points):
    def meet_fate(self) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang_for_good()


_LOCK = threading.Lock()


class _Locked(Points):
    """Cannot be used in a process that was forked while a thread held its lock."""

    def meet_fate(self) -> None:
        leave_trace("reached")
        with _LOCK:
            raise AssertionError("the lock of another process was free")


class HoldsLockAtFork(Toy):
    def train_dataset(self) -> Dataset[Any]:
        held = threading.Event()

        def hold() -> None:
            with _LOCK:
                held.set()
                time.sleep(1000.0)

        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        return _Locked()


class _EscapingProgram(Points):
    def meet_fate(self) -> None:
        subprocess.Popen(["sleep", "1000"])
        escape("worker-escapee")
        hang_for_good()


class Judged(Toy):
    metrics = {"weight": "maximize", "undefined": "minimize"}

    def evaluate(self, model: nn.Module, device: torch.device) -> Any:
        return {"undefined": float("nan"), "weight": model.weight.abs().sum(), "step": 1}


class _Failing(Points):
    def meet_fate(self) -> None:
        raise KeyError("no such image")


class WithDataset(Toy):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def train_dataset(self) -> Dataset[Any]:
        return self._dataset


class Slow(Toy):
    """Steps of planted seconds, on a machine that nobody else uses; `turns` puts something else where the trial's
    progress is told."""

    knobs = {"first": (0.02, 4.0, 1000.0), "later": (0.02, 0.5, 2.0, 1000.0), "turns": (False, True)}
    first = later = 0.02
    turns = False
    _steps = 0

    def build_model(self) -> nn.Module:
        interference._compare_cpu = lambda _before, _after: (0.0, 0.0)
        if self.turns:
            for page in Path(os.environ["TOY_FOLDER"]).glob("*/progress"):
                page.unlink()
                os.mkfifo(page)
        return super().build_model()

    def meet_fate(self) -> None:
        self._steps += 1
        time.sleep(self.first if self._steps == 1 else self.later)


slow = Slow()
trains = Toy()
judged = Judged()
draws_without_seed = DrawsWithoutSeed()
hangs = Hangs()
ignores_sigterm = IgnoresSigterm()
exits_silently = ExitsSilently()
exits_with_status = ExitsWithStatus()
segfaults = Segfaults()
dies_of_shapes = DiesOfShapes()
aborts = Aborts()
kills_itself = KillsItself()
runs_out_of_device_memory = RunsOutOfDeviceMemory()
runs_out_of_memory = RunsOutOfMemory()
diverges = Diverges()
raises = Raises()
raises_base_exception = RaisesBaseException()
exits = Exits()
floods = Floods()
writes_junk = WritesJunk()
prints_environment = PrintsEnvironment()
allocates = Allocates()
starts_daemon = StartsDaemon()
starts_shell = StartsShell()
escapes = Escapes()
escapes_and_hangs = EscapesAndHangs()
segfaults_once = SegfaultsOnce()
fills_disk = FillsDisk()
limits_files = LimitsFiles()
limits_file_size = LimitsFileSize()
raises_odd_name = RaisesOddName()
tears_partial = TearsPartial()
holds_lock_at_fork = HoldsLockAtFork()
worker_starts_programs = WithDataset(_EscapingProgram())
changes_process = ChangesProcess()
closes_output = ClosesOutput()
leaves_thread = LeavesThread()
worker_dies = WithDataset(_Dying())
worker_hangs = WithDataset(_Hanging())
worker_escapes = WithDataset(_Escaping())
worker_raises = WithDataset(_Failing())
