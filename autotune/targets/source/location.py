"""Find the source of a workload, `file.py:attr` or `package.module:attr`, without importing any of it.

Both sides look it up here: the parent, which never runs the user's code, and the child just before it does.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

from autotune.errors import UsageError

# Asked of os.path here and in its neighbours, not of Path, for which a name that is too long for a file is an error.

OWN_PACKAGE = Path(__file__).parents[2]
"""This package: whatever the working folder holds, its name means what runs now."""


class Location(NamedTuple):
    """Where a workload's module is.

    Attributes:
        file: its source; None where only its top-level package was found.
        top: the top-level package's folder, or the file itself.
        root: the folder that holds `top`.
        is_installed: it lies outside of the working folder, in a folder of installed packages, or in this package.
    """

    file: Path | None
    top: Path
    root: Path
    is_installed: bool


def split_spec(spec: str) -> tuple[str, str]:
    """Return the two halves of `file.py:attr` or `package.module:attr`.

    Raises:
        UsageError: it has no colon, or one half is empty.
    """
    location, colon, attribute = spec.rpartition(":")
    if not (colon and location and attribute):
        raise UsageError(
            f"target {spec!r} is not LOCATION:ATTRIBUTE", hint="write train.py:workload or package.module:workload"
        )
    return location, attribute


def locate(location: str, *, folder: Path) -> Location | None:
    """Return where a module is; None if it cannot be told without importing something.

    Args:
        location: `file.py` or `package.module`.
        folder: what a relative file name is relative to, and where a package is looked for first.
    """
    if location.endswith(".py"):
        file = folder / location
        return Location(file, file, file.parent, is_installed=False) if os.path.isfile(file) else None
    name, *parts = location.split(".")
    top = OWN_PACKAGE if name == OWN_PACKAGE.name else find_module(folder, name) or find_installed(name)
    if top is None:
        return None
    is_installed = top == OWN_PACKAGE or bool({"site-packages", "dist-packages"} & set(top.parts))
    place = top
    for part in parts:
        found = find_module(place, part) if os.path.isdir(place) else None
        if found is None:
            return Location(None, top, top.parent, is_installed)
        place = found
    file = place / "__init__.py" if os.path.isdir(place) else place
    return Location(file if os.path.isfile(file) else None, top, top.parent, is_installed)


def find_module(root: Path, name: str) -> Path | None:
    """Return the file or the package's folder that `import name` finds in a folder; None without one.

    A folder without `__init__.py` counts where there is no file of that name either.
    """
    if not name.isidentifier():
        return None
    package, file = root / name, root / f"{name}.py"
    if os.path.isfile(package / "__init__.py"):
        return package
    return file if os.path.isfile(file) else package if os.path.isdir(package) else None


def find_installed(name: str) -> Path | None:
    """Return the file or the package's folder of a top-level module on Python's path; None if it has no source."""
    try:
        spec = importlib.util.find_spec(name)  # of a name without a dot this imports nothing
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file.parent if file.name == "__init__.py" else file
