"""Say in twelve digits what a target is: the words of a script's command and the code beside it, a workload's code.

A change of a `.py` file in the script's folder, or of a settings file next to it, is another fingerprint. What the
tool itself writes is left out, and so is a folder too large to be code: then the script stands for itself.

Of a workload it is its module and those of the project that it imports, see `list_sources`. Its digits are marked with
the way they were made: before, they were of one file, and an edit of a module that it imports changed nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autotune.records.secrets import mask_words
from autotune.records.trial import Target
from autotune.targets.launch.command import Launch, find_launch
from autotune.targets.script import own_values, render_command
from autotune.targets.source.location import locate, split_spec
from autotune.targets.source.project import MOST_BYTES, MOST_FILES, list_python_files, list_sources, size_of

_SETTINGS_SUFFIXES = frozenset({".json", ".toml", ".yaml", ".yml", ".cfg", ".ini"})
_OWN_FILES = frozenset({"best.json", "autotune.toml"})
_OWN_KEYS = frozenset({"schema_version", "verdict"})
_MOST_SETTINGS_BYTES = 1024**2
_OF_MODULES = "m-"
_SETTING_VARIABLES = "ACCELERATE_"
"""Begins the names of variables that say how a script trains, not on what."""


def fingerprint_script(launch: Launch, command: Sequence[str], *, folder: Path) -> str:
    """Return twelve hexadecimal digits of a SHA-256 over the command as typed and the script's code and settings.

    Args:
        launch: how the script is started.
        command: words as typed, placeholders and all; another secret in them makes no difference.
        folder: the working folder.
    """
    digest = hashlib.sha256()
    for word in mask_words(command):
        digest.update(os.fsencode(word) + b"\0")
    for name, value in launch.environment:
        if name.startswith(_SETTING_VARIABLES):  # they may come from a file that is elsewhere
            digest.update(os.fsencode(f"{name}={value}") + b"\0")
    script, root = _find_code(launch, folder=folder.absolute())
    for file in _list_files(script, root) if root else ():
        content = _read_bytes(file)
        if content is not None and not _is_own(file, content):
            digest.update(b"\0" + os.fsencode(os.path.relpath(file, root)) + b"\0")
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:12]


def _find_code(launch: Launch, *, folder: Path) -> tuple[Path | None, Path | None]:
    """Return the script's file and the folder of its code; None for what is not there."""
    if launch.kind == "file":
        script = folder / launch.name
        return script, script.parent
    package, *parts = launch.name.split(".")
    root = folder / package
    if os.path.isdir(root):
        candidates = (root.joinpath(*parts, "__main__.py"), root.joinpath(*parts).with_suffix(".py"))
        return next((file for file in candidates if os.path.isfile(file)), None), root
    single = folder / f"{package}.py"
    return (single, folder) if os.path.isfile(single) else (None, None)


def _list_files(script: Path | None, root: Path) -> list[Path]:
    """Return the files that count, by relative path; the script alone when they are too many or too large."""
    alone = [script] if script else []
    code = list_python_files(root)
    if code is None:
        return alone
    files = {*alone, *code}
    files.update(_list_settings(script.parent if script else root))
    if len(files) > MOST_FILES or sum(size_of(file) for file in files) > MOST_BYTES:
        return alone
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _list_settings(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        file = folder / name
        is_settings = file.suffix in _SETTINGS_SUFFIXES and not name.startswith(".") and name not in _OWN_FILES
        if is_settings and size_of(file) <= _MOST_SETTINGS_BYTES:
            yield file


def _read_bytes(file: Path) -> bytes | None:
    """Return a regular file's content; None for one that cannot be read, or that is a pipe or a device."""
    try:
        return file.read_bytes() if stat.S_ISREG(file.stat().st_mode) else None
    except OSError:
        return None


def _is_own(file: Path, content: bytes) -> bool:
    """Whether this tool wrote the file, e.g. a profile under another name."""
    if file.suffix != ".json":
        return False
    try:
        written = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(written, dict) and written.keys() >= _OWN_KEYS


def fingerprint_target(target: Target, *, command: Sequence[str] = ()) -> str | None:
    """Return the fingerprint of a target as it is on disk now; None for a workload whose file is not found.

    Args:
        target: a workload or a script.
        command: words that a script is taken to be started with; its own where there are none.

    Raises:
        UsageError: a script's command cannot be started any more.
    """
    folder = Path(target.folder)
    if target.script is not None:
        words = render_command(target.script, own_values(target.script))
        return fingerprint_script(find_launch(words, folder=folder), command or target.script.command, folder=folder)
    return fingerprint_workload(target.spec, folder=folder)


def fingerprint_workload(spec: str, *, folder: Path) -> str | None:
    """Return twelve marked hexadecimal digits of a SHA-256 over a workload's code; None where its module is not found.

    Args:
        spec: `file.py:attr` or `package.module:attr`.
        folder: the working folder.
    """
    files = find_files(spec, folder=folder)
    return fingerprint_files(files) if files else None


def find_files(spec: str, *, folder: Path) -> dict[str, Path]:
    """Return the files of a workload's code, see `list_sources`; none where its module is not found.

    Args:
        spec: `file.py:attr` or `package.module:attr`.
        folder: the working folder.
    """
    folder = folder.absolute()
    location = locate(split_spec(spec)[0], folder=folder)
    return {} if location is None or location.file is None else list_sources(location, folder=folder)


def fingerprint_files(files: Mapping[str, Path]) -> str:
    """Return twelve marked hexadecimal digits of a SHA-256 over files, by name."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = _read_bytes(file)
        if content is not None:
            digest.update(os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
    return mark_modules(digest.hexdigest()[:12])


def mark_modules(digits: str) -> str:
    """Return the digits of a workload's fingerprint, marked with the way they are made."""
    return _OF_MODULES + digits


def is_older(before: str, now: str) -> bool:
    """Return whether a workload's fingerprint is one of an older version: two that cannot be compared."""
    return now.startswith(_OF_MODULES) and not before.startswith(_OF_MODULES)
