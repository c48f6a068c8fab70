"""What a search makes best: part of what it is asked, and of its answer."""

from __future__ import annotations

from enum import StrEnum

from autotune.errors import UsageError

LEAST_SPEED = 0.97
"""Of the user's own speed: what saves memory has to keep so much of it. Launches of one setting differ by as much."""

MOST_MEMORY = 0.98
"""Of the user's own peak: what saves less saves nothing. Peaks of one setting differ by about a hundredth on a host."""


class Objective(StrEnum):
    """What a search makes best."""

    THROUGHPUT = "throughput"
    """Most samples per second once the training runs; what is paid once does not count."""
    TIME_TO_FINISH = "time-to-finish"
    """Shortest time of the planned training, its compilation included."""
    MEMORY = "memory"
    """Least peak memory of what is not slower than the user's own settings."""


def read_objective(given: object, *, name: str) -> Objective:
    """Return the objective that is meant.

    Args:
        given: its name.
        name: what it was given by, for an error.

    Raises:
        UsageError: there is none of that name.
    """
    found = next((one for one in Objective if one == given), None)
    if found is None:
        raise UsageError(f"{name} is {given!r}", hint=f"it is one of {', '.join(Objective)}")
    return found


def usual_objective(*, is_length_known: bool) -> Objective:
    """Return what is made best where nothing was said: of a training whose length was given, the time it takes."""
    return Objective.TIME_TO_FINISH if is_length_known else Objective.THROUGHPUT
