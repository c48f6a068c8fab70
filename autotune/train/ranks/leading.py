"""What the leader of a training by several processes leaves behind when it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.distributed.ends import explain_end
from autotune.distributed.place import Place
from autotune.distributed.world import RankLostError
from autotune.errors import AutotuneError
from autotune.records.training_process import RankEnd
from autotune.train.recovery.child import AGAIN_STATUS
from autotune.train.recovery.steps_down import FreshProcessNeeded


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
