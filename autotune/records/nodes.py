"""What the nodes of one training tell each other, and how they are told to meet."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import Field

from autotune.errors import UsageError
from autotune.records.codec import Record
from autotune.records.measurement import NonNegative
from autotune.records.run import Count, RunPlan
from autotune.records.training_process import RankEnd

_ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")
_LARGEST_PORT = 65535


class Nodes(Record):
    """Where the nodes of a training meet, as it was typed on one of them."""

    count: Annotated[int, Field(ge=2)]
    """How many there are."""
    endpoint: str
    """`HOST:PORT` of the first."""
    rdzv_id: str
    """Tells this training from others at the same endpoint."""
    node: Count | None
    """Number of this one; None to be given one."""
    patience_seconds: NonNegative
    """Longest wait for the others."""

    @property
    def is_one_machine(self) -> bool:
        """All nodes are on this machine, as their endpoint tells: for trying it out."""
        host, _ = read_endpoint(self.endpoint)
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


class NodeFacts(Record):
    """What has to be the same on all nodes of a training, and where each is."""

    node: Count
    """Its number."""
    host: str
    """Its name."""
    process: Count
    """The process that stands for it there."""
    facts: tuple[tuple[str, str], ...]
    """What has to be the same: names and values."""


class NodePlan(Record):
    """What is trained, as the first node tells the others."""

    plan: RunPlan
    """Of the run."""
    folder: str
    """Absolute path of the run's folder, on a disk that all nodes share."""


class NodeReport(Record):
    """How the processes of one node ended."""

    node: Count
    """Its number."""
    host: str
    """Its name."""
    ends: tuple[RankEnd, ...] = ()
    """By their own account."""
    exits: tuple[tuple[int, int], ...] = ()
    """Rank and exit status, minus N after signal N, of those that did not exit with 0, in the order they were seen."""
    lines: tuple[tuple[int, str], ...] = ()
    """Rank and the last line it printed."""
    oom_kills: Count | None = None
    """Kills for want of memory that the kernel counted there meanwhile; None where that cannot be read."""

    is_cut: bool = False
    """They had not ended when they were waited for no longer, because of another node."""

    @property
    def is_clean(self) -> bool:
        """All of them exited with 0."""
        return not self.ends and not self.exits and not self.is_cut


def read_endpoint(text: str) -> tuple[str, int]:
    """Return the host and the port of an endpoint.

    Raises:
        UsageError: it is none.
    """
    found = _ENDPOINT.fullmatch(text)
    port = int(found["port"]) if found else 0
    if found is None or not 0 < port <= _LARGEST_PORT:
        raise UsageError(
            f"--rdzv-endpoint {text}: no HOST:PORT", hint="give the first node's address and a free port: node0:29500"
        )
    return found["v6"] or found["host"], port
