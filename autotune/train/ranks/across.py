"""One node's part of a training by several: it meets the others, runs its own processes, and all judge how they ended.

    node 0 ── launcher ── agent ──▶ rank 0 … M-1        the leader among them
              │ store at the endpoint
    node 1 ── launcher ── agent ──▶ rank M … 2M-1

Nothing is started again here: the nodes' processes end together, whoever has started the nodes goes on with --resume.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autotune.distributed.agent import ElasticAgent, prepare_environment
from autotune.distributed.nodes import NodeStore, StoppedWaitingError, collect_facts, meet_nodes
from autotune.distributed.place import read_ends, read_last_line
from autotune.distributed.verdict import Verdict, judge_nodes
from autotune.errors import AutotuneError, MachineError
from autotune.machine.cgroups import count_between, read_oom_kills
from autotune.measure.memory import list_children
from autotune.records.nodes import NodeReport, Nodes
from autotune.records.training_process import RankEnd
from autotune.train.ranks.ears import Ears, say_error
from autotune.train.ranks.relay import NodeRelay
from autotune.train.recovery.child import AGAIN_STATUS
from autotune.train.recovery.steps_down import recoverable_causes

_GRACE_SECONDS = 10.0
"""Processes whose partners on another node have ended find it out by themselves, as a rule at once."""

_AGENT_SECONDS = 2.0
"""After its processes an agent ends at once, unless it waits for those of the other nodes."""

_REPORT_SECONDS = 45.0
"""An agent takes up to 30 seconds to end a process that ignores SIGTERM, and tells of it then."""

_PARTING_SECONDS = 5.0


class NodeLauncher:
    """Runs one node's processes of a training.

    Args:
        nodes: how the nodes meet.
        size: processes on each.
        folder: of this node's processes.
        opened: file in which the leader tells of its run.
    """

    def __init__(self, nodes: Nodes, size: int, folder: Path, opened: Path) -> None:
        self._nodes, self._size, self._folder, self._opened = nodes, size, folder, opened
        self._ears = Ears()
        self._hosts: dict[int, str] = {}
        self._ended_at: float | None = None
        self._alone_since: float | None = None
        self._is_cut = False

    def run(self, words: tuple[str, ...]) -> int:
        """Run them to their end and return what to exit with, on every node the same.

        Args:
            words: that each is started with, after the interpreter.
        """
        try:
            store = self._meet()
        except StoppedWaitingError:
            return 128 + self._ears.heard[0]
        except AutotuneError as error:
            say_error(error)
            return error.exit_code
        nodes = self._nodes.replace(node=store.node)
        prepare_environment(self._size, nodes=nodes)
        kills_before = read_oom_kills()
        relay = NodeRelay(store, self._folder, self._opened, self._ears)
        agent = ElasticAgent(self._folder, self._size, words, nodes=nodes)
        relay.start()
        agent.run(lambda: self._look(relay))
        report = self._report(store, agent, relay, oom_kills=count_between(kills_before, read_oom_kills()))
        reports = relay.conclude(report, seconds=_REPORT_SECONDS, parting_seconds=_PARTING_SECONDS)
        verdict = judge_nodes(reports, count=nodes.count, per_node=self._size, recoverable=recoverable_causes())
        return self._conclude(store.node, verdict, reports)

    def _meet(self) -> NodeStore:
        nodes = self._nodes
        name = "a node" if nodes.node is None else f"node {nodes.node}"
        sys.stderr.write(f"{name} of {nodes.count} waits for the others at {nodes.endpoint}\n")

        def is_stopped() -> bool:
            return bool(self._ears.heard)

        store = meet_nodes(nodes, should_stop=is_stopped)
        facts = collect_facts(store.node, processes=self._size, nodes=nodes)
        found = store.agree(facts, should_stop=is_stopped)
        self._hosts = {one.node: one.host for one in found}
        return store

    def _look(self, relay: NodeRelay) -> bool:
        """Hand on what was heard; return whether to wait for this node's processes no longer."""
        self._ears.forward(self._folder)
        if relay.error is not None or relay.failed:
            self._ended_at = self._ended_at or time.monotonic()
        if self._ended_at is None:
            return False
        now = time.monotonic()
        self._alone_since = None if list_children() else self._alone_since or now
        is_done = self._alone_since is not None and now - self._alone_since > _AGENT_SECONDS
        self._is_cut = not is_done and now - self._ended_at > _GRACE_SECONDS
        return is_done or self._is_cut

    def _report(self, store: NodeStore, agent: ElasticAgent, relay: NodeRelay, *, oom_kills: int | None) -> NodeReport:
        first, world = store.node * self._size, self._nodes.count * self._size
        ends = read_ends(self._folder, world)
        error = relay.error
        if agent.error is not None and not ends:
            error = error or MachineError(f"its processes cannot be started: {agent.error}")
        if error is not None and not ends:
            ends[first] = RankEnd(rank=first, status=error.exit_code, cause="usage", detail=error.message)
        lines = ((rank, read_last_line(self._folder, rank)) for rank in agent.exits)
        return NodeReport(
            node=store.node,
            host=socket.gethostname(),
            ends=tuple(ends.values()),
            exits=tuple(agent.exits.items()),
            lines=tuple((rank, line) for rank, line in lines if line),
            oom_kills=oom_kills,
            is_cut=self._is_cut,
        )

    def _conclude(self, here: int, verdict: Verdict, reports: Sequence[NodeReport]) -> int:
        """Say what ended the training, where its leader has not said it here; return what to exit with."""
        end, hint = verdict.end, "go on with --resume on every node"
        if end is None and verdict.status == AGAIN_STATUS:
            say_error(MachineError("the run's record has other settings for the next start", hint=hint))
            return MachineError.exit_code
        if end is None and here != 0:
            end = next((one for report in reports for one in report.ends if one.rank == 0 and not one.saw), None)
        if end is not None:
            node = end.rank // self._size
            error = AutotuneError(f"node {node} ({self._hosts.get(node, '?')}): {end.detail}")
            error.hint = hint if verdict.is_recoverable or end.cause == "timeout" else ""
            say_error(error)
        return verdict.status
