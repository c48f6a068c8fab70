from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from autotune.machine.limits import all_reduce
from autotune.machine.limits.all_reduce import BYTES, measure_all_reduce

ANSWERS = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'seconds').write_text(sys.argv[2])"


def plant(monkeypatch: pytest.MonkeyPatch, *programs: str) -> list[Path]:
    """Have each rank run a program of its own; return the folders they were given."""
    folders: list[Path] = []

    def build(rank: int, ranks: int, device_type: str, budget_seconds: float, folder: Path) -> list[str]:
        folders.append(folder)
        return [sys.executable, "-S", "-c", programs[rank], str(folder), "0.25"]

    monkeypatch.setattr(all_reduce, "_build_command", build)
    return folders


@pytest.mark.parametrize("ranks", [-1, 0, 1])
def test_one_rank_has_nobody_to_talk_to(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert measure_all_reduce(ranks, device_type="cpu") is None


def test_two_ranks_add_up_here() -> None:
    # OpenMP's threads are started already: a fork would hang.
    torch.ones(512, 512) @ torch.ones(512, 512)
    began = time.monotonic()
    rate = measure_all_reduce(2, device_type="cpu", budget_seconds=0.3)
    assert rate is not None
    # It was reached within the time the whole took.
    assert rate > BYTES / (time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.fault(
    "F19", injected="the user's gloo and NCCL told another interface", outcome="ranks listen on loopback"
)
def test_ranks_listen_on_the_loopback_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "no-such-interface")
    assert measure_all_reduce(2, device_type="cpu", budget_seconds=0.1) is not None


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5)])
def test_the_bus_bandwidth_is_that_of_nccl_tests(monkeypatch: pytest.MonkeyPatch, ranks: int, factor: float) -> None:
    folders = plant(monkeypatch, ANSWERS, *["pass"] * (ranks - 1))
    assert measure_all_reduce(ranks, device_type="cpu") == pytest.approx(factor * BYTES / 0.25)
    assert len(folders) == ranks
    assert not folders[0].exists()


def is_gone(pid: int, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.fault("41", injected="a rank that never joins", outcome="ended, with its children")
def test_a_rank_that_never_joins_is_ended_with_its_own_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hang = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    real = all_reduce._build_command
    plant(monkeypatch, "", hang)
    planted = all_reduce._build_command

    def build(rank: int, *arguments: Any) -> list[str]:
        return (planted if rank else real)(rank, *arguments)

    # Rank 0 is a real one, that waits for the other at the meeting.
    monkeypatch.setattr(all_reduce, "_build_command", build)
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import subprocess"], check=True, timeout=300)
    monkeypatch.setattr(
        all_reduce, "_START_SECONDS", 3.0 + 5 * (time.monotonic() - began)
    )  # the child is there by then
    began = time.monotonic()
    assert measure_all_reduce(2, device_type="cpu", budget_seconds=0.1) is None
    assert time.monotonic() - began < 600.0
    assert is_gone(int((tmp_path / "child").read_text()), seconds=5.0)


@pytest.mark.parametrize("death", ["raise SystemExit(3)", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"])
@pytest.mark.fault("41", injected="a rank that dies", outcome="the others end at once")
def test_a_rank_that_dies_ends_the_others_at_once(monkeypatch: pytest.MonkeyPatch, death: str) -> None:
    plant(monkeypatch, "import time; time.sleep(600)", death)
    monkeypatch.setattr(all_reduce, "_START_SECONDS", 300.0)
    began = time.monotonic()
    assert measure_all_reduce(2, device_type="cpu") is None
    assert time.monotonic() - began < all_reduce._START_SECONDS


@pytest.mark.parametrize("answer", ["", "nonsense", "0", "-1", "nan"])
def test_an_answer_that_is_none_counts_as_none(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    plant(monkeypatch, ANSWERS.replace("sys.argv[2]", repr(answer)), "pass")
    assert measure_all_reduce(2, device_type="cpu") is None


def test_no_answer_at_all_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "pass", "pass")
    assert measure_all_reduce(2, device_type="cpu") is None


def test_processes_that_cannot_be_started_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started = all_reduce._start

    def start_once(command: list[str]) -> subprocess.Popen[bytes]:
        monkeypatch.setattr(all_reduce, "_start", no_more)
        return started([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

    def no_more(command: list[str]) -> subprocess.Popen[bytes]:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(all_reduce, "_start", start_once)
    assert measure_all_reduce(2, device_type="cpu") is None


def test_gpus_that_are_not_there_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert measure_all_reduce(2, device_type="cuda") is None


@pytest.mark.slow
def test_ranks_die_with_the_process_that_started_them() -> None:
    program = (
        "from autotune.machine.limits import all_reduce\n"
        "start = all_reduce._start\n"
        "def note(command):\n"
        "    process = start(command)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "all_reduce._start = note\n"
        "all_reduce.measure_all_reduce(2, device_type='cpu', budget_seconds=60.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(parent.stdout.readline()) for _ in range(2)]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(is_gone(rank, seconds=20.0) for rank in ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_gpus_add_up() -> None:
    on_gpus = measure_all_reduce(torch.cuda.device_count(), device_type="cuda")
    assert on_gpus is not None
    assert on_gpus > 0
