"""The agent of a training by several processes: torch.distributed's elastic launcher, with our ears and our last word.

    parent ──▶ launcher ── elastic agent, a thread ──▶ rank 0   autotune train, as typed: leads
           ── signals ──▶ to rank 0 alone           ──▶ rank 1…  the same words: follow

The ranks are in sessions of their own, so a Ctrl-C reaches them through here, once, and the kernel ends them with this
process.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from autotune.distributed.agent import ElasticAgent, count_ranks, prepare_environment
from autotune.distributed.place import open_folder, read_ends, read_last_line
from autotune.distributed.verdict import Verdict, judge
from autotune.errors import AutotuneError, MachineError
from autotune.machine.cgroups import count_between, read_oom_kills
from autotune.records.codec import parse_record
from autotune.records.nodes import Nodes
from autotune.train.ranks.across import NodeLauncher
from autotune.train.ranks.ears import Ears, say_error
from autotune.train.ranks.handover import write_verdict
from autotune.train.recovery.child import (
    AGAIN_STATUS,
    OPENED_VARIABLE,
    PARENT_VARIABLE,
    RANKS_VARIABLE,
    find_given,
    keep_tie,
    tie_to_parent,
)
from autotune.train.recovery.steps_down import recoverable_causes
from autotune.train.recovery.workload import NO_NODES


def main(nproc_per_node: str, nodes: Nodes | None, words: list[str]) -> int:
    """Run all ranks to their end and return the training's exit status.

    Args:
        nproc_per_node: how many, or `gpu` for one on each GPU.
        nodes: how those of several nodes meet; None without others.
        words: after `autotune train`.
    """
    from autotune.engine.device import count_accelerators

    try:
        size = count_ranks(nproc_per_node, count_accelerators())
    except AutotuneError as error:
        say_error(error)
        return error.exit_code
    opened = find_given(OPENED_VARIABLE)
    assert opened is not None
    folder = open_folder(Path(opened).parent)
    os.environ.update({**keep_tie(), PARENT_VARIABLE: str(os.getpid()), RANKS_VARIABLE: str(folder)})
    command = ("-P", "-m", "autotune", "train", *words)
    if nodes is not None:
        return NodeLauncher(nodes, size, folder, Path(opened)).run(command)
    return _train_here(folder, size, command)


def _train_here(folder: Path, size: int, command: tuple[str, ...]) -> int:
    prepare_environment(size)
    kills_before = read_oom_kills()
    agent, ears = ElasticAgent(folder, size, command), Ears()
    agent.run(lambda: ears.forward(folder))
    if agent.error is not None:
        say_error(MachineError(f"the processes cannot be started: {agent.error}", hint="see docs/several-devices.md"))
        return MachineError.exit_code
    if ears.heard and agent.exits.get(0, 0) < 0:  # it was asked to end before it could listen
        return 128 - agent.exits[0]
    verdict = judge(
        read_ends(folder, size),
        agent.exits,
        size,
        recoverable=recoverable_causes(),
        oom_kills=count_between(kills_before, read_oom_kills()),
        last_line=lambda rank: read_last_line(folder, rank),
    )
    return _conclude(folder, verdict)


def _conclude(folder: Path, verdict: Verdict) -> int:
    """Say what ended the training, or leave it to the parent; return what to exit with."""
    if verdict.end is None:
        return verdict.status
    if verdict.is_recoverable or verdict.end.cause == "timeout":
        write_verdict(folder, verdict.end)
        return AGAIN_STATUS
    error = AutotuneError(f"process {verdict.end.rank}: {verdict.end.detail}")
    say_error(error)
    return verdict.status


if __name__ == "__main__":
    tie_to_parent()
    logging.disable(logging.CRITICAL)  # the agent tells of every failed process, and so do we
    given = parse_record(sys.argv[2], Nodes, name="the nodes") if sys.argv[2] != NO_NODES else None
    status = main(sys.argv[1], given, sys.argv[3:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # past what still waits for other nodes
