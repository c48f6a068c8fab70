"""The agent of a training by several processes: torch.distributed's elastic launcher, with our ears and our last word.

    parent ──▶ launcher ── elastic agent, a thread ──▶ rank 0   autotune train, as typed: leads
           ── signals ──▶ to rank 0 alone           ──▶ rank 1…  the same words: follow

The agent ends all ranks when one fails. They meet at files, and listen on the loopback alone; the ranks are in
sessions of their own, so a Ctrl-C reaches them through here, once, and the kernel ends them with this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.machine.cgroups import read_oom_kills
from autotune.machine.cpus import read_affinity
from autotune.train.ranks.place import open_folder, read_ends, read_last_line, read_leader, write_verdict
from autotune.train.ranks.verdict import Verdict, judge
from autotune.train.recovery.attempts import FORWARDED
from autotune.train.recovery.child import (
    AGAIN_STATUS,
    OPENED_VARIABLE,
    PARENT_VARIABLE,
    RANKS_VARIABLE,
    find_given,
    keep_tie,
    tie_to_parent,
)

_LOOK_SECONDS = 0.1


def main(nproc_per_node: str, words: list[str]) -> int:
    """Run all ranks to their end and return the training's exit status.

    Args:
        nproc_per_node: how many, or `gpu` for one on each GPU.
        words: after `autotune train`.
    """
    try:
        size = count_ranks(nproc_per_node)
    except AutotuneError as error:
        _say(error)
        return error.exit_code
    opened = find_given(OPENED_VARIABLE)
    assert opened is not None
    folder = open_folder(Path(opened))
    prepare_environment(folder, size)
    kills_before = read_oom_kills()
    agent = _Agent(folder, size, words)
    heard = agent.run()
    kills = read_oom_kills()
    counted = None if kills is None or kills_before is None else max(0, kills - kills_before)
    if agent.error is not None:
        _say(MachineError(f"the processes cannot be started: {agent.error}", hint="see docs/several-devices.md"))
        return MachineError.exit_code
    if heard and agent.exits.get(0, 0) < 0:  # it was asked to end before it could listen
        return 128 - agent.exits[0]
    ends = read_ends(folder, size)
    verdict = judge(ends, agent.exits, size, oom_kills=counted, last_line=lambda rank: read_last_line(folder, rank))
    return _conclude(folder, verdict)


def count_ranks(nproc_per_node: str) -> int:
    """Return how many processes are to train.

    Raises:
        UsageError: there are not so many GPUs.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if nproc_per_node == "gpu":
        if not gpus:
            raise UsageError("--nproc-per-node gpu: PyTorch sees no GPU here", hint="give a number: CPUs then")
        return gpus
    size = int(nproc_per_node)
    if gpus and size > gpus:
        raise UsageError(
            f"--nproc-per-node {size}: there are {gpus} GPUs for {size} processes",
            hint=f"use --nproc-per-node {gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs",
        )
    return size


class _Agent:
    """The elastic agent, in a thread.

    Attributes:
        exits: exit statuses other than 0, by rank, in the order they were seen.
        error: why it could not run them; None where it could.
    """

    def __init__(self, folder: Path, size: int, words: list[str]) -> None:
        self._folder, self._size, self._words = folder, size, words
        self._pending: list[int] = []
        self.exits: dict[int, int] = {}
        self.error: Exception | None = None

    def run(self) -> list[int]:
        """Run the ranks to their end, and hand signals on to the leader; return the signals heard."""
        heard: list[int] = []

        def hear(number: int, _frame: object) -> None:
            heard.append(number)
            self._pending.append(number)

        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, hear)
        # In a thread of its own, which is where it installs no signal handlers.
        thread = threading.Thread(target=self._launch, name="autotune-agent")
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            self._forward()
        return heard

    def _forward(self) -> None:
        leader = read_leader(self._folder) if self._pending else None
        while leader is not None and self._pending:
            with suppress(ProcessLookupError):
                os.kill(leader, self._pending.pop(0))

    def _launch(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._size,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(self._folder / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=_LOOK_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "autotune", "train", *self._words)
        except ChildFailedError as error:
            self.exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:  # a port that is taken, a host name that does not resolve, ...: torch has many types
            self.error = error


def prepare_environment(folder: Path, size: int) -> None:
    """Set what the ranks inherit.

    Args:
        folder: that they share.
        size: how many there are.
    """
    told: dict[str, Any] = {**keep_tie(), PARENT_VARIABLE: str(os.getpid()), RANKS_VARIABLE: str(folder)}
    os.environ.update(told)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(read_affinity() or ()) // size)))
    # Left to themselves, agent and ranks would listen where the machine's name leads to: for anybody on its network.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def _conclude(folder: Path, verdict: Verdict) -> int:
    """Say what ended the training, or leave it to the parent; return what to exit with."""
    if verdict.end is None:
        return verdict.status
    if verdict.is_recoverable or verdict.end.cause == "timeout":
        write_verdict(folder, verdict.end)
        return AGAIN_STATUS
    error = AutotuneError(f"process {verdict.end.rank}: {verdict.end.detail}")
    _say(error)
    return verdict.status


def _say(error: AutotuneError) -> None:
    sys.stderr.write(f"error: {error.message}\n" + (f"  {error.hint}\n" if error.hint else ""))


if __name__ == "__main__":
    tie_to_parent()
    logging.disable(logging.CRITICAL)  # the agent tells of every failed process, and so do we
    sys.exit(main(sys.argv[1], sys.argv[2:]))
