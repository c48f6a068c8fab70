"""What the user's code raises becomes an error of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autotune.errors import AutotuneError, TargetError


@contextmanager
def blame_target(where: str) -> Iterator[None]:
    """Turn what the user's code raises into a TargetError that keeps it as its cause.

    Raises:
        TargetError: the code inside raised something.
    """
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise TargetError(f"{where} raised {type(error).__name__}: {text}"[:600]) from error
