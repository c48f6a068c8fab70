"""The shipped presets: known-good combinations that a search tries first, and that a training may ask for by name."""

from __future__ import annotations

import difflib
import functools
import os
from pathlib import Path

from autotune.errors import ProfileError
from autotune.records.codec import read_record
from autotune.records.search import Preset

_PACKAGED = Path(__file__).parent / "profiles"
_CHECKOUT = Path(__file__).parent.parent / "profiles"
_LONGEST_NAME = 40


@functools.cache
def load_presets() -> tuple[Preset, ...]:
    """Return the presets in order of their names.

    Raises:
        ProfileError: a file is not a valid preset.
    """
    folder = _PACKAGED if os.path.isdir(_PACKAGED) else _CHECKOUT
    return tuple(read_record(path, Preset) for path in sorted(folder.glob("*.json")))


def find_preset(name: str) -> Preset:
    """Return a shipped preset by its name, or the one in a file: `balanced`, `presets/mine.json`.

    Raises:
        ProfileError: there is none, or a file is not a valid preset.
    """
    presets = {preset.name: preset for preset in load_presets()}
    if name in presets:
        return presets[name]
    if name.endswith(".json") or os.path.isfile(name):
        return read_record(Path(name), Preset)
    near = difflib.get_close_matches(name.lower(), presets, n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise ProfileError(
        f"there is no preset {name[:_LONGEST_NAME]!r}",
        hint=f"{suggestion}the presets are {', '.join(presets)}; a file of your own ends in .json",
    )
