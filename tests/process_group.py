"""A process group of one process, for tests of what is shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_KEPT: list[Any] = []
"""Groups of gloo, to the end of the process: one that a loader's worker frees, forked since, waits there for a thread
that only this process has, for ever, or crashes."""


@contextmanager
def joined_alone() -> Iterator[None]:
    """Be the only process of a group of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _KEPT.extend(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
