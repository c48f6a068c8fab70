"""Which function makes a sample expensive: a few more samples are fetched under Python's profiler."""

from __future__ import annotations

import cProfile
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = Path(__file__).parents[2]
_SECONDS = 0.25
_MOST_SAMPLES = 32
_LEAST_FRACTION = 0.5
"""Of a sample's time: a function that takes less is not what makes it expensive."""


@dataclass(frozen=True)
class HotCall:
    """A function that takes most of a sample's time.

    Attributes:
        name: as `RandomCrop.forward (transforms.py:960)`.
        fraction: of a sample's time, what it calls included.
    """

    name: str
    fraction: float


def find_hot_call(samples: Iterator[Any]) -> HotCall | None:
    """Return the innermost function that takes at least half of a sample's time; None where there is none.

    Args:
        samples: fetches one when it is asked for the next; some are taken.

    Raises:
        Exception: whatever the dataset's code raises.
    """
    if sys.getprofile() is not None:
        return None  # another profiler is at work
    profiler = cProfile.Profile()
    try:
        profiler.enable()
    except ValueError:  # the same, as later releases of Python tell it
        return None
    began = time.perf_counter()
    try:
        for taken, _ in enumerate(samples, start=1):
            if taken >= _MOST_SAMPLES or time.perf_counter() - began > _SECONDS:
                break
    finally:
        profiler.disable()
    return _choose(profiler.getstats())


def _choose(entries: list[Any]) -> HotCall | None:
    whole = sum(entry.inlinetime for entry in entries)
    hot = [
        (entry.totaltime, entry.code)
        for entry in entries
        if isinstance(entry.code, CodeType)
        and entry.totaltime >= _LEAST_FRACTION * whole
        and PACKAGE not in Path(entry.code.co_filename).parents
        and not entry.code.co_name.startswith("<")
    ]
    if whole <= 0 or not hot:
        return None
    seconds, code = min(hot, key=lambda one: one[0])
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return HotCall(f"{code.co_qualname} ({place})", min(1.0, seconds / whole))
