"""How a rank's end is written down, for who started it to tell whose fault it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.distributed.world import RankLostError
from autotune.errors import AutotuneError
from autotune.isolation.causes import explain_exception
from autotune.records.training_process import RankEnd
from autotune.train.ranks.place import Place
from autotune.train.recovery.child import AGAIN_STATUS
from autotune.train.recovery.steps_down import FreshProcessNeeded


def explain_end(error: Exception, rank: int) -> RankEnd:
    """Return how a rank ends that something was raised in."""
    if isinstance(error, RankLostError):
        return RankEnd(
            rank=rank,
            status=error.exit_code,
            cause="crash-exit",
            detail=error.message,
            saw="silent" if error.is_silent else "gone",
        )
    _, cause, detail = explain_exception(error.__cause__ or error)
    status = error.exit_code if isinstance(error, AutotuneError) else 1
    if isinstance(error, AutotuneError) and cause == "user-error":
        detail = error.message
    return RankEnd(rank=rank, status=status, cause=cause, detail=detail)


@contextmanager
def leading(place: Place | None) -> Iterator[None]:
    """Write down how the leader ends, whose own words the user reads.

    Args:
        place: of the leader; None for the only process of a training.

    Where another rank is lost, which is told by who started them all, the process ends here: past what would wait for
    that rank.
    """
    try:
        yield
    except RankLostError as error:
        assert place is not None
        place.record_end(explain_end(error, place.rank))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(error.exit_code)
    except AutotuneError as error:
        if place is not None:
            status = AGAIN_STATUS if isinstance(error, FreshProcessNeeded) else error.exit_code
            place.record_end(RankEnd(rank=place.rank, status=status, cause="", detail=error.message))
        raise
