"""Files that are made at first use and kept in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from autotune.errors import TargetError


def find_cached(name: str, write: Callable[[Path], None], *, anew: bool = False) -> Path:
    """Return a file of the cache folder, made unless it is there.

    Args:
        name: of the file; says all that its content depends on.
        write: makes the file at the path it is given.
        anew: make it also if it is there.

    Raises:
        TargetError: it cannot be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "autotune-examples" / "text_price" / name
    try:
        if anew or not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, write)
    except OSError as reason:
        hint = "set XDG_CACHE_HOME to a folder that can be written"
        raise TargetError(f"cannot write {path}: {reason.strerror or reason}", hint=hint) from None
    return path


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Make a file. Of several processes each writes its own, and the last name change counts."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        write(Path(temporary))
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
