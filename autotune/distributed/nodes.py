"""Where the nodes of one training meet: a store of torch.distributed at the endpoint, which node 0 holds.

    facts/K     node K's versions and devices       compared by all, before anything is started
    plan        what is trained, and in which folder  from node 0
    signal      asked to stop                         from any node to node 0
    end/K       how the processes of node K ended     judged by all

The agents of the nodes, and then their processes, meet at the same store. Whoever reaches the endpoint can write to it.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from autotune.errors import MachineError, UsageError
from autotune.format import format_duration
from autotune.machine.hardware import read_hardware, read_software
from autotune.records.codec import Record, parse_record
from autotune.records.nodes import NodeFacts, NodePlan, NodeReport, Nodes, read_endpoint

R = TypeVar("R", bound=Record)

LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 30.0
"""Longest wait for an answer of the store: more than a network that is busy takes, and less than a person waits."""

_CONNECT_SECONDS = 2.0
_BACKLOG = 1024


class StoppedWaitingError(Exception):
    """Somebody asked for an end while the nodes were waited for."""


class NodeStore:
    """What the nodes tell each other; each call takes an answer over the network.

    Args:
        store: at the endpoint.
        node: number of this node; None to be given the next one.
        nodes: how they meet.

    Attributes:
        node: number of this node.
        count: how many there are.
    """

    def __init__(self, store: Store, node: int | None, nodes: Nodes) -> None:
        self._store = PrefixStore("nodes", store)
        self._endpoint, self._patience = nodes.endpoint, nodes.patience_seconds
        self.count = nodes.count
        with self._reaching():
            self.node = self._store.add("joined", 1) if node is None else node
        if self.node >= self.count:
            raise UsageError(
                f"a node more than --nnodes {self.count} has come to {self._endpoint}",
                hint="start as many as --nnodes says, and end those of an earlier training",
            )

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise MachineError(
                f"node 0 at {self._endpoint} does not answer any more", hint="go on with --resume on every node"
            ) from error

    def has(self, key: str) -> bool:
        """Return whether somebody has told something."""
        with self._reaching():
            return self._store.check([key])

    def post(self, key: str, record: Record) -> None:
        """Tell all nodes something."""
        with self._reaching():
            self._store.set(key, record.model_dump_json())

    def find(self, key: str, kind: type[R]) -> R | None:
        """Return what was told; None where nothing was."""
        if not self.has(key):
            return None
        with self._reaching():
            data = self._store.get(key)
        return parse_record(data.decode(), kind, name=f"what {self._endpoint} has told")

    def agree(self, facts: NodeFacts, *, should_stop: Callable[[], bool]) -> tuple[NodeFacts, ...]:
        """Return the facts of all nodes, which are the same where they have to be.

        Args:
            facts: of this one.
            should_stop: polled while the others are waited for.

        Raises:
            UsageError: the nodes are not alike, or two have the same number.
            MachineError: a node has not come in time.
            StoppedWaitingError: somebody asked for an end.
        """
        mine, key = facts.model_dump_json(), f"facts/{self.node}"
        with self._reaching():
            kept = self._store.compare_set(key, "", mine).decode()
        if kept != mine:
            raise UsageError(
                f"--node-rank {self.node} is that of another node too", hint="number the nodes 0, 1, ... one each"
            )
        deadline = time.monotonic() + self._patience
        while missing := [node for node in range(self.count) if not self.has(f"facts/{node}")]:
            _wait(should_stop, deadline, self._explain_absence(missing))
        found = [self.find(f"facts/{node}", NodeFacts) for node in range(self.count)]
        everybody = tuple(one for one in found if one is not None)
        require_alike(everybody)
        return everybody

    def _explain_absence(self, missing: Sequence[int]) -> str:
        nodes, within = ", ".join(map(str, missing)), format_duration(self._patience)
        return f"node {nodes} of {self.count} did not come to {self._endpoint} within {within}"

    def exchange(self, report: NodeReport, *, seconds: float) -> tuple[NodeReport, ...]:
        """Tell how this node's processes ended; return the same of all nodes that have told it in time.

        Args:
            report: of this node.
            seconds: longest wait for the others.
        """
        self.post(f"end/{self.node}", report)
        # The leader may still be writing, for as long as it takes, when its followers have nothing left to do.
        begins_with_leader = report.is_clean and self.node != 0
        deadline = math.inf if begins_with_leader else time.monotonic() + seconds
        while time.monotonic() < deadline and not all(self.has(f"end/{node}") for node in range(self.count)):
            if deadline == math.inf and self.has("end/0"):
                deadline = time.monotonic() + seconds
            time.sleep(LOOK_SECONDS)
        found = [self.find(f"end/{node}", NodeReport) for node in range(self.count)]
        with self._reaching():
            self._store.add("parting", 1)
        return tuple(one for one in found if one is not None)

    def await_parting(self, parting: int, *, seconds: float) -> None:
        """Hold the store until as many nodes have read how it ended.

        Args:
            parting: how many have told it.
            seconds: longest wait.
        """
        deadline = time.monotonic() + seconds
        with self._reaching():
            while self._store.add("parting", 0) < parting and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)

    def publish(self, plan: NodePlan) -> None:
        """Tell the other nodes what is trained."""
        self.post("plan", plan)

    def find_plan(self) -> NodePlan | None:
        """Return what is trained; None while node 0 has not said so."""
        return self.find("plan", NodePlan)

    def ask_to_stop(self, number: int) -> None:
        """Tell node 0 of a signal that this node was sent."""
        with self._reaching():
            self._store.set("signal", str(number))

    def find_signal(self) -> int | None:
        """Return the signal that another node was sent; None for none."""
        if not self.has("signal"):
            return None
        with self._reaching():
            return int(self._store.get("signal"))

    def list_failed(self) -> list[int]:
        """Return the other nodes whose processes did not end well."""
        others = [node for node in range(self.count) if node != self.node]
        reports = [self.find(f"end/{node}", NodeReport) for node in others]
        return [one.node for one in reports if one is not None and not one.is_clean]


def meet_nodes(nodes: Nodes, *, should_stop: Callable[[], bool]) -> NodeStore:
    """Go to the endpoint: hold the store there as node 0, or find it.

    Without a number of its own node 0 is the one whose address the endpoint is; the others are numbered as they come.

    Args:
        nodes: how they meet.
        should_stop: polled while node 0 is waited for.

    Raises:
        UsageError: the endpoint cannot be used.
        MachineError: node 0 is not there in time.
        StoppedWaitingError: somebody asked for an end.
    """
    host, port = read_endpoint(nodes.endpoint)
    answer = timedelta(seconds=_ANSWER_SECONDS)
    listener = _listen(host, port, is_first=nodes.node == 0) if nodes.node in (None, 0) else None
    try:
        if listener is not None:
            # As many stores of one process at one port share their server: the agent's is going to be this one.
            return NodeStore(
                TCPStore(
                    host,
                    port,
                    is_master=True,
                    timeout=answer,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=listener.detach(),
                ),
                0,
                nodes,
            )
        _await_listener(host, port, nodes, should_stop)
        store = TCPStore(host, port, is_master=False, timeout=answer, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--rdzv-endpoint {nodes.endpoint}: what answers there is no rendezvous of torch.distributed",
            hint="give a port that nothing else listens at",
        ) from error
    return NodeStore(store, nodes.node, nodes)


def _listen(host: str, port: int, *, is_first: bool) -> socket.socket | None:
    """Return a socket that listens at the endpoint's address alone; None where that is another node's.

    Args:
        host: of the endpoint.
        port: of the endpoint.
        is_first: this is node 0 for sure; an address that leads here by detours is listened at on all of them then.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        if not is_first:
            return None
        raise _unresolved(host, port, error) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if not is_first or error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if not is_first and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise UsageError(
            f"--rdzv-endpoint {host}:{port}: node 0 cannot listen there: {error.strerror}", hint="give a free port"
        ) from error
    return listener


def _await_listener(host: str, port: int, nodes: Nodes, should_stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + nodes.patience_seconds
    absent = f"node 0 did not answer at {nodes.endpoint} within {format_duration(nodes.patience_seconds)}"
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            # A name may come to be known after the machine it is of, as in Kubernetes.
            _wait(should_stop, deadline, f"{absent}: {error.strerror or error}")
        else:
            return


def _wait(should_stop: Callable[[], bool], deadline: float, absent: str) -> None:
    if should_stop():
        raise StoppedWaitingError
    if time.monotonic() >= deadline:
        raise MachineError(absent, hint="start autotune train on every node, and see that they reach the endpoint")
    time.sleep(LOOK_SECONDS)


def _unresolved(host: str, port: int, error: OSError) -> UsageError:
    return UsageError(
        f"--rdzv-endpoint {host}:{port}: {error.strerror or error}", hint="give the first node's name or address"
    )


def collect_facts(node: int, *, processes: int, nodes: Nodes) -> NodeFacts:
    """Return what has to be the same on all nodes of a training, of this one.

    Args:
        node: its number.
        processes: that train on it.
        nodes: how they meet.
    """
    hardware, software = read_hardware(), read_software()
    gpus = ", ".join(f"{gpu.name} {round(gpu.memory_total_bytes / 2**30)} GiB" for gpu in hardware.gpus)
    facts = {
        "--rdzv-id": nodes.rdzv_id,
        "--nnodes": str(nodes.count),
        "--nproc-per-node": str(processes),
        "autotune": software.autotune,
        "torch": software.torch,
        "CUDA": software.cuda or "none",
        "CPU": hardware.cpu_name,
        "GPUs": gpus or "none",
    }
    return NodeFacts(node=node, host=socket.gethostname(), process=os.getpid(), facts=tuple(facts.items()))


def require_alike(nodes: Sequence[NodeFacts]) -> None:
    """Make sure that nothing differs which has to be the same.

    Raises:
        UsageError: something does; says what, and where.
    """
    first, *others = nodes
    for other in others:
        for (name, there), (_, here) in zip(other.facts, first.facts, strict=True):
            if there != here:
                raise UsageError(
                    f"the nodes are not alike: node {other.node} ({other.host}) has {name} {there}, "
                    f"node 0 ({first.host}) has {here}",
                    hint="start the same command, with the same versions, on machines of one kind",
                )
