"""torch.distributed's elastic agent (what torchrun is made of) as several processes of one training are started by it.

    who starts them ── elastic agent, a thread ──▶ rank 0   leads
                                               ──▶ rank 1…  the same command: follow

The agent ends all ranks when one fails. On one machine they meet at files and listen on the loopback alone; on several
each has an agent, and they meet at the first one's store. All are in sessions of their own.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.machine.cpus import read_affinity
from autotune.records.nodes import Nodes

LOOK_SECONDS = 0.1


class ElasticAgent:
    """The agent of one training's processes on this machine, in a thread of its own.

    Args:
        folder: that these processes share.
        size: how many there are.
        words: that each is started with, after the interpreter.
        nodes: how the agents of several nodes meet, and which this is; None without others.

    Attributes:
        exits: exit statuses other than 0, minus N after signal N, by rank, in the order they were seen.
        error: why it could not run them; None where it could.
    """

    def __init__(self, folder: Path, size: int, words: Sequence[str], *, nodes: Nodes | None = None) -> None:
        self._folder, self._size, self._words, self._nodes = folder, size, tuple(words), nodes
        self.exits: dict[int, int] = {}
        self.error: Exception | None = None

    def run(self, look: Callable[[], bool]) -> None:
        """Run the processes to their end.

        Args:
            look: called ten times a second meanwhile; True returns at once, whatever still runs.
        """
        # In a thread of its own, which is where it installs no signal handlers.
        thread = threading.Thread(target=self._launch, name="autotune-agent", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            if look():
                return

    def _launch(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            nproc_per_node=self._size,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
            max_restarts=0,
            monitor_interval=LOOK_SECONDS,
            **(_meet_at_file(self._folder) if self._nodes is None else _meet_at_store(self._nodes)),
        )
        try:
            elastic_launch(config, sys.executable)(*self._words)
        except ChildFailedError as error:
            self.exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:  # a port that is taken, a host name that does not resolve, ...: torch has many types
            self.error = error


def _meet_at_file(folder: Path) -> dict[str, Any]:
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": str(folder / "rendezvous"),
        "rdzv_configs": {"store_type": "file"},
        "local_addr": "127.0.0.1",
    }


def _meet_at_store(nodes: Nodes) -> dict[str, Any]:
    # torchrun's own name for nodes that have numbers: with c10d the first rank would be on whichever comes first.
    return {
        "min_nodes": nodes.count,
        "max_nodes": nodes.count,
        "run_id": nodes.rdzv_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": nodes.endpoint,
        "rdzv_configs": {"rank": nodes.node, "timeout": max(1, int(nodes.patience_seconds))},
    }


def prepare_environment(size: int, *, nodes: Nodes | None = None) -> None:
    """Set what the processes inherit: their share of the CPUs, and whom they listen to.

    Args:
        size: how many there are here.
        nodes: how they meet those of other nodes; None without any.
    """
    os.environ.update(find_cpu_share(size))
    # Left to themselves, agent and ranks would listen where the machine's name leads to: for anybody on its network.
    if nodes is None or nodes.is_one_machine:
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    # The processes of several nodes meet at their agents' store: one port for both.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1" if nodes is None else "0"


def find_cpu_share(size: int) -> dict[str, str]:
    """Return the variable that gives each of several processes its share of the CPUs, where the user has set none.

    Args:
        size: how many there are.
    """
    if size == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(read_affinity() or ()) // size))}


def count_ranks(nproc_per_node: str, gpus: int) -> int:
    """Return how many processes are to train.

    Args:
        nproc_per_node: how many, or `gpu` for one on each GPU.
        gpus: that PyTorch sees here.

    Raises:
        UsageError: there are not so many GPUs.
    """
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
