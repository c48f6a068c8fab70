"""The source files of the user's project that a workload's module may import, found by reading and not by importing.

    train.py -> the names in its import statements, and strings that may be names for importlib
             -> name.py, or every .py below name/, in the workload's folder or the working folder
             -> the names in those, and so on; what is installed is left to the versions

More files than are imported may be among them, and never fewer of what plain imports reach.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from autotune.records.reading import read_bytes
from autotune.targets.source.location import OWN_PACKAGE, Location, find_installed, find_module

SKIPPED_FOLDERS = frozenset({"venv", "__pycache__", "site-packages", "node_modules", "build", "dist"})
"""Folders that hold no code of the project's own; those whose names begin with a dot do not either."""

MOST_FILES = 2_000
"""A project of more files is too large to be looked through."""

MOST_BYTES = 64 * 1024**2
"""And so is a larger one."""

MOST_ENTRIES = 200_000
"""Of folders looked through: a data set beside the code is not waited for."""

_LONGEST_PARSED = 1024**2
_FROM = re.compile(rb"(?:^|[;:])[ \t]*from[ \t]+(\w+)[\w.]*[ \t]+import\b", re.MULTILINE)
_IMPORT = re.compile(rb"(?:^|[;:])[ \t]*import[ \t]+([\w., \t]+)", re.MULTILINE)
_FOLDER = re.compile(rb"[\"']([^\"'\n\0]{1,200})[\"']")
_STRING = re.compile(rb"[\"']([A-Za-z_]\w*)((?:\.\w*)*)[\"'{:]")
_BY_NAME = (b"import_module", b"__import__", b"importlib")


def list_sources(location: Location, *, folder: Path) -> dict[str, Path]:
    """Return the files, by their path in the folder they come from; the module's own alone if too many.

    Args:
        location: of the workload's module.
        folder: the working folder.
    """
    found: dict[str, Path] = {}
    alone = {} if location.file is None else {location.file.relative_to(location.root).as_posix(): location.file}
    if location.is_installed:
        return alone
    roots = list(dict.fromkeys((location.root, folder, location.root / "src", folder / "src")))
    waiting: list[tuple[Path, Path]] = [(location.root, location.top)]
    names_seen = {OWN_PACKAGE.name}
    while waiting:
        root, place = waiting.pop()
        files = _list_files(place)
        if files is None or len(found) + len(files) > MOST_FILES:
            return alone
        names: set[str] = set()
        for file in files:
            found[file.relative_to(root).as_posix()] = file
            text = _read_text(file)
            roots += (more for more in _list_further_roots(text, roots[:2]) if more not in roots)
            names |= _read_names(text, roots)
        waiting += _find_all(sorted(names - names_seen), roots)
        names_seen |= names
    return found if sum(size_of(file) for file in found.values()) <= MOST_BYTES else alone


def list_python_files(root: Path) -> list[Path] | None:
    """Return every `.py` file below a folder that may be the project's own; None if they are too many.

    Args:
        root: the folder.
    """
    files: list[Path] = []
    entries = 0
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        entries += len(folders) + len(names)
        files += (Path(place, name) for name in names if name.endswith(".py"))
        if len(files) > MOST_FILES or entries > MOST_ENTRIES:
            return None
    return files


def _list_files(place: Path) -> list[Path] | None:
    return list_python_files(place) if os.path.isdir(place) else [place]


def _read_text(file: Path) -> bytes:
    """Return a file's text to look for names in; nothing where it has none or is too long for code."""
    try:
        text = read_bytes(file, max_bytes=_LONGEST_PARSED)
    except OSError:
        return b""
    return text if len(text) <= _LONGEST_PARSED else b""


def _list_further_roots(text: bytes, folders: list[Path]) -> list[Path]:
    """Return the folders that a file may add to Python's path: those that it names, and those above."""
    if b"sys.path" not in text:
        return []
    named = {folder / os.fsdecode(word) for word in _FOLDER.findall(text) for folder in folders}
    return sorted({Path(os.path.normpath(place)) for place in named} | {folder.parent for folder in folders})


def _read_names(text: bytes, roots: list[Path]) -> set[str]:
    """Return the top-level names that a file imports, and the words in it that name a module of the project."""
    names = {name.decode("ascii", "ignore") for name in _FROM.findall(text)} | set(_split_imports(text))
    # Without a dot a word is just a word, "train" say, unless something is imported by its name.
    is_telling = any(way in text for way in _BY_NAME)
    words = {name.decode("ascii", "ignore") for name, dotted in _STRING.findall(text) if dotted or is_telling} - names
    # And it may be the name of a folder of pictures too, so a folder must say that it is a package.
    return names | {word for word in words if any(_is_code(find_module(root, word)) for root in roots)}


def _split_imports(text: bytes) -> Iterator[str]:
    for names in _IMPORT.findall(text):
        for name in names.decode("ascii", "ignore").split(","):
            yield name.strip().partition(" ")[0].partition(".")[0]


def _find_all(names: list[str], roots: list[Path]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        places = [(root, place) for root in roots if (place := find_module(root, name)) is not None]
        code = next((pair for pair in places if _is_code(pair[1])), None)
        if code is not None:
            yield code
        elif places and find_installed(name) is None:  # an installed package goes before a folder without __init__.py
            yield places[0]


def _is_code(place: Path | None) -> bool:
    return place is not None and (os.path.isfile(place) or os.path.isfile(place / "__init__.py"))


def size_of(file: Path) -> int:
    """Return a file's size in bytes; 0 where that cannot be told."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
