"""How a rank's end is written down, for who started it to tell whose fault it was."""

from __future__ import annotations

from autotune.distributed.world import RankLostError
from autotune.errors import AutotuneError
from autotune.isolation.causes import explain_exception
from autotune.records.training_process import RankEnd


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
