"""What ended a training of several processes, from their own words and their exit statuses. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from autotune.isolation.causes import explain_exit
from autotune.records.nodes import NodeReport
from autotune.records.training_process import RankEnd
from autotune.records.trial import Cause


@dataclass(frozen=True)
class Verdict:
    """What the processes came to.

    Attributes:
        status: of the leader, where it has said all there is to say.
        end: of the process that is to blame; None where the leader has said it.
        is_recoverable: another attempt with other settings, or the same once more, may help.
    """

    status: int
    end: RankEnd | None = None
    is_recoverable: bool = False


def judge(
    ends: Mapping[int, RankEnd],
    exits: Mapping[int, int],
    size: int,
    *,
    recoverable: Collection[Cause] = (),
    oom_kills: int | None = None,
    last_line: Callable[[int], str] = lambda _rank: "",
) -> Verdict:
    """Return what ended the training.

    Args:
        ends: how processes say they ended, by rank.
        exits: exit statuses other than 0, minus N after signal N, in the order they were seen; those that were ended
            because of the first are among them.
        size: how many processes there were.
        recoverable: causes that another attempt may mend.
        oom_kills: kills for want of memory that the kernel counted meanwhile.
        last_line: returns the last line that a process printed.
    """
    own = {rank: end for rank, end in ends.items() if not end.saw}
    if 0 in own:
        return Verdict(own[0].status)
    if own:
        first = own[min(own)]
        return Verdict(first.status, first, first.cause in recoverable)
    echoes = {rank: end for rank, end in ends.items() if end.saw}
    quiet = [rank for rank in range(size) if rank not in ends]
    if echoes and quiet and all(end.saw == "silent" for end in echoes.values()):
        _, _, waited = next(iter(echoes.values())).detail.partition(" has ")
        detail = f"process {quiet[0]} of {size} has {waited}; the training was ended"
        return Verdict(5, RankEnd(rank=quiet[0], status=5, cause="timeout", detail=detail))
    dead = [rank for rank, status in exits.items() if status < 0 and rank in quiet]
    if dead:
        return _explain_death(dead[0], exits[dead[0]], size, oom_kills)
    wrong = [rank for rank in exits if rank in quiet]
    if wrong and wrong[0]:
        said = last_line(wrong[0])
        detail = f"process {wrong[0]} of {size} ended with exit status {exits[wrong[0]]}" + (said and f": {said}")
        status = exits[wrong[0]]
        return Verdict(status, RankEnd(rank=wrong[0], status=status, cause="crash-exit", detail=detail))
    if echoes and not wrong:
        first = echoes[min(echoes)]
        return Verdict(first.status, first)
    return Verdict(exits.get(0, 0))


def _explain_death(rank: int, status: int, size: int, oom_kills: int | None) -> Verdict:
    _, cause, sentence = explain_exit(status, log_tail=None, oom_kills=oom_kills)
    detail = f"process {rank} of {size} was {sentence}"
    return Verdict(5, RankEnd(rank=rank, status=5, cause=cause, detail=detail), is_recoverable=True)


def judge_nodes(
    reports: Sequence[NodeReport], *, count: int, per_node: int, recoverable: Collection[Cause] = ()
) -> Verdict:
    """Return what ended a training by several nodes.

    Args:
        reports: of the nodes that have told how their processes ended.
        count: how many nodes there were.
        per_node: processes on each.
        recoverable: causes that another attempt may mend.
    """
    if any(report.node == 0 and report.is_clean for report in reports):
        return Verdict(0)  # its leader ends last, when all is written
    ends = {end.rank: end for report in reports for end in report.ends}
    exits = {rank: status for report in reports for rank, status in _list_own_exits(report)}
    lines = {rank: line for report in reports for rank, line in report.lines}
    kills = [report.oom_kills for report in reports if report.oom_kills is not None]
    missing = [node for node in range(count) if all(report.node != node for report in reports)]
    is_told = any(not end.saw for end in ends.values()) or any(status < 0 for status in exits.values())
    if missing and not is_told:
        first, last = missing[0] * per_node, (missing[0] + 1) * per_node - 1
        whose = f"process {first}" if first == last else f"processes {first} to {last}"
        detail = f"node {missing[0]} of {count} is gone or cut off, and {whose} of {count * per_node} with it"
        return Verdict(5, RankEnd(rank=first, status=5, cause="timeout", detail=detail))
    return judge(
        ends,
        exits,
        count * per_node,
        recoverable=recoverable,
        oom_kills=sum(kills) if kills else None,
        last_line=lambda rank: lines.get(rank, ""),
    )


def _list_own_exits(report: NodeReport) -> list[tuple[int, int]]:
    """Return a node's exits without those that its agent brought about, because of another process."""
    is_hit = any(end.saw for end in report.ends)
    return [(rank, status) for rank, status in report.exits if not (is_hit and status == -signal.SIGTERM)]
