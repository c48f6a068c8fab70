"""Whose fault it is that a training of several processes has ended."""

from __future__ import annotations

from typing import Literal

import pytest

from autotune.distributed.verdict import judge
from autotune.records.training_process import RankEnd
from autotune.records.trial import Cause
from autotune.train.recovery.steps_down import recoverable_causes


def make_end(
    rank: int, status: int = 5, cause: Cause = "crash-exit", saw: Literal["", "gone", "silent"] = ""
) -> RankEnd:
    detail = "another process of the training has not answered within 4 s" if saw == "silent" else "its own words"
    return RankEnd(rank=rank, status=status, cause=cause, detail=detail, saw=saw)


def test_what_the_leader_has_said_is_not_said_again() -> None:
    verdict = judge({0: make_end(0, 75), 1: make_end(1, saw="gone")}, {0: 75, 1: 5}, 2)
    assert (verdict.status, verdict.end) == (75, None)


@pytest.mark.parametrize(("cause", "is_recoverable"), [("oom-device", True), ("user-error", False), ("usage", False)])
def test_a_follower_s_own_words_come_before_its_echoes(cause: Cause, is_recoverable: bool) -> None:
    ends = {0: make_end(0, saw="gone"), 1: make_end(1, 4, cause)}
    verdict = judge(ends, {0: 5, 1: 4}, 2, recoverable=recoverable_causes())
    assert verdict.end == ends[1]
    assert (verdict.status, verdict.is_recoverable) == (4, is_recoverable)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_is_named(dead: int) -> None:
    other = 1 - dead
    verdict = judge({other: make_end(other, saw="gone")}, {other: 5, dead: -9}, 2, oom_kills=0)
    assert verdict.end is not None
    assert verdict.end.cause == "crash-signal"
    assert f"process {dead} of 2 was killed by SIGKILL" in verdict.end.detail
    assert verdict.is_recoverable


def test_a_process_killed_for_want_of_memory_needs_less() -> None:
    verdict = judge({0: make_end(0, saw="gone")}, {1: -9, 0: 5}, 2, oom_kills=1)
    assert verdict.end is not None
    assert verdict.end.cause == "oom-killed"


def test_a_hanging_process_is_named_and_not_tried_again() -> None:
    # The agent has killed it in the end, as one that was killed.
    verdict = judge({0: make_end(0, saw="silent"), 2: make_end(2, saw="silent")}, {0: 5, 2: 5, 1: -9}, 3)
    assert verdict.end is not None
    assert verdict.end.cause == "timeout"
    assert verdict.end.detail == "process 1 of 3 has not answered within 4 s; the training was ended"
    assert not verdict.is_recoverable


def test_a_process_that_ends_without_a_word_is_told_with_its_last_line() -> None:
    verdict = judge({0: make_end(0, saw="gone")}, {1: 3, 0: 5}, 2, last_line=lambda rank: f"line of {rank}")
    assert verdict.end is not None
    assert (verdict.status, verdict.end.detail) == (3, "process 1 of 2 ended with exit status 3: line of 1")


def test_a_stop_has_the_leader_s_status() -> None:
    assert judge({}, {0: 143}, 2).status == 143
    assert judge({}, {0: 143}, 2).end is None
    assert judge({}, {}, 2).status == 0


def test_a_connection_that_breaks_between_healthy_processes_is_told() -> None:
    verdict = judge({0: make_end(0, saw="gone"), 1: make_end(1, saw="gone")}, {0: 5, 1: 5}, 2)
    assert verdict.end is not None
    assert verdict.status == 5
