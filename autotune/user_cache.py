"""Where this user's own files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def find_user_cache() -> Path | None:
    """Return the folder, which need not exist yet; None when the user has no home.

    Source: XDG Base Directory Specification 0.8; a relative path in the variable is to be ignored.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "autotune"
