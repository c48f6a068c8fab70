"""The shipped presets: known-good combinations that a search tries first."""

from __future__ import annotations

import functools
from pathlib import Path

from autotune.records.codec import read_record
from autotune.records.search import Preset

_PACKAGED = Path(__file__).parent / "profiles"
_CHECKOUT = Path(__file__).parent.parent / "profiles"


@functools.cache
def load_presets() -> tuple[Preset, ...]:
    """Return the presets in order of their names.

    Raises:
        ProfileError: a file is not a valid preset.
    """
    folder = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    return tuple(read_record(path, Preset) for path in sorted(folder.glob("*.json")))
