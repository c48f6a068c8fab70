"""How fast the processes of a training add up their gradients. A number of ranks in, bytes per second out.

    parent ──starts──▶ rank 0, rank 1, ...     fresh interpreters that meet at a file and time an all-reduce together
           ◀──file──── rank 0                  the rank that takes longest counts; the fastest repetition counts

The parent may have started threads or a device already: no rank is forked from it. Whatever becomes of the ranks, they
are gone when the parent has its answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autotune.engine.device import synchronize
from autotune.lifeline import die_with_parent
from autotune.scratch import scratch_folder

BYTES = 64 * 2**20
"""Of the tensor that is added up."""

# Importing torch and building a communicator: seconds each, and many ranks may share few cores.
_START_SECONDS = 20.0
_POLL_SECONDS = 0.02
_REAP_SECONDS = 5.0
_LEAST_REPETITIONS, _MOST_REPETITIONS = 2, 50
_MEETING_FILE, _ANSWER_FILE = "meeting", "seconds"
# Left to themselves, the ranks would listen where the machine's name leads to: for anybody on its network.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def measure_all_reduce(ranks: int, *, device_type: str, budget_seconds: float = 5.0) -> float | None:
    """Return the bus bandwidth of an all-reduce of 64 MiB between local processes, in bytes per second.

    2 * (n - 1) / n * bytes / seconds for n ranks: what each link has to carry, whatever their number.
    Source: NCCL tests, `doc/PERFORMANCE.md`.

    Args:
        ranks: processes; on GPUs one for each of the first visible ones.
        device_type: `cpu` (gloo) or `cuda` (NCCL).
        budget_seconds: wall time of the all-reduces, about. Starting the processes takes some seconds more; 20 s after
            the budget has run out they are ended, ready or not.

    Returns:
        None with less than two ranks or GPUs, and when a rank fails or there is no answer in time.
    """
    if ranks < 2 or (device_type == "cuda" and torch.cuda.device_count() < ranks):
        return None
    deadline = time.monotonic() + _START_SECONDS + budget_seconds
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with scratch_folder() as folder:
            try:
                for rank in range(ranks):
                    command = _build_command(rank, ranks, device_type, budget_seconds, folder)
                    processes.append(_start(command))
                if not _await_all(processes, deadline):
                    return None
                seconds = float((folder / _ANSWER_FILE).read_text())
            finally:
                _end(processes)
    except (OSError, ValueError):
        return None
    return 2.0 * (ranks - 1) / ranks * BYTES / seconds if seconds > 0 else None


def _build_command(rank: int, ranks: int, device_type: str, budget_seconds: float, folder: Path) -> list[str]:
    arguments = [str(rank), str(ranks), device_type, str(budget_seconds), str(folder), str(os.getpid())]
    return [sys.executable, "-P", "-m", "autotune.machine.limits.all_reduce", *arguments]


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
        env={**os.environ, **_LOOPBACK},
    )


def _await_all(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Return whether all have ended well; the first that does not decides, as the others would wait for it."""
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return False
        if None not in statuses:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        try:
            process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # it hangs in the kernel, e.g. in a driver
            continue


def run_rank(rank: int, ranks: int, device_type: str, *, budget_seconds: float, folder: Path) -> None:
    """Run one rank of the measurement; rank 0 writes the seconds of the fastest all-reduce into the folder.

    Args:
        rank: of this process.
        ranks: of them all.
        device_type: as for `measure_all_reduce`.
        budget_seconds: likewise.
        folder: empty, and the same for all ranks.

    Raises:
        RuntimeError: there is no such device or backend, or another rank is gone.
    """
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / _MEETING_FILE}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_START_SECONDS + budget_seconds),
    )
    # Zeros stay zeros however often they are added up.
    numbers = torch.zeros(BYTES // 4, dtype=torch.float32, device=device)

    def all_reduce() -> float:
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(numbers)
        synchronize(device)
        return time.perf_counter() - began

    def slowest(seconds: list[float]) -> list[float]:
        together = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return [float(value) for value in together.tolist()]

    all_reduce()  # the first one connects the ranks
    # Agreed on by all ranks, as each has to make the same number.
    longest = max(slowest([all_reduce()])[0], 1e-9)
    repetitions = min(_MOST_REPETITIONS, max(_LEAST_REPETITIONS, int(budget_seconds / longest) - 2))
    best = min(slowest([all_reduce() for _ in range(repetitions)]))
    if rank == 0:
        (folder / _ANSWER_FILE).write_text(repr(best))
    dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[6]))
    run_rank(
        int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], budget_seconds=float(sys.argv[4]), folder=Path(sys.argv[5])
    )
