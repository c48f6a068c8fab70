"""The agent of a training by several processes: torch.distributed's elastic launcher, with our ears and our last word.

    parent ──▶ launcher ── elastic agent, a thread ──▶ rank 0   autotune train, as typed: leads
           ── signals ──▶ to rank 0 alone           ──▶ rank 1…  the same words: follow

The ranks are in sessions of their own, so a Ctrl-C reaches them through here, once, and the kernel ends them with this
process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from autotune.distributed.agent import ElasticAgent, count_ranks, prepare_environment
from autotune.distributed.place import open_folder, read_ends, read_last_line, read_leader
from autotune.distributed.verdict import Verdict, judge
from autotune.errors import AutotuneError, MachineError
from autotune.machine.cgroups import count_between, read_oom_kills
from autotune.train.ranks.handover import write_verdict
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
from autotune.train.recovery.steps_down import recoverable_causes


def main(nproc_per_node: str, words: list[str]) -> int:
    """Run all ranks to their end and return the training's exit status.

    Args:
        nproc_per_node: how many, or `gpu` for one on each GPU.
        words: after `autotune train`.
    """
    from autotune.engine.device import count_accelerators

    try:
        size = count_ranks(nproc_per_node, count_accelerators())
    except AutotuneError as error:
        _say(error)
        return error.exit_code
    opened = find_given(OPENED_VARIABLE)
    assert opened is not None
    folder = open_folder(Path(opened).parent)
    os.environ.update({**keep_tie(), PARENT_VARIABLE: str(os.getpid()), RANKS_VARIABLE: str(folder)})
    prepare_environment(size)
    kills_before = read_oom_kills()
    agent = ElasticAgent(folder, size, ("-P", "-m", "autotune", "train", *words))
    ears = _Ears(folder)
    agent.run(ears.forward)
    if agent.error is not None:
        _say(MachineError(f"the processes cannot be started: {agent.error}", hint="see docs/several-devices.md"))
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


class _Ears:
    """Hears signals, and hands each on to the leader.

    Attributes:
        heard: some.
    """

    def __init__(self, folder: Path) -> None:
        self.heard = False
        self._folder, self._pending = folder, list[int]()
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self.heard = True
        self._pending.append(number)

    def forward(self) -> bool:
        """Hand on what was heard, once there is a leader to hear it; the training goes on."""
        leader = read_leader(self._folder) if self._pending else None
        while leader is not None and self._pending:
            with suppress(ProcessLookupError):
                os.kill(leader, self._pending.pop(0))
        return False


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
