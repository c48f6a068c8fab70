"""What ended a training of several processes, from their own words and their exit statuses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from autotune.isolation.causes import explain_exit
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
