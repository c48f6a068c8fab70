"""Make sure that a target is there before anything is started or written: by reading, never by importing.

What only running the user's code can tell is left to the child that does.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from autotune.errors import TargetError, UsageError
from autotune.format import with_article
from autotune.records.reading import read_bytes
from autotune.records.trial import Target
from autotune.targets.launch.command import find_launch
from autotune.targets.launch.refused import refuse_notebook
from autotune.targets.script import own_values, render_command
from autotune.targets.source.location import Location, locate, split_spec
from autotune.targets.source.names import SourceNames, parse_source, read_names
from autotune.targets.workload import DOCS_PART, REQUIRED

_LONGEST_SOURCE = 4 * 1024 * 1024
_MOST_SHOWN = 8


def check_target(target: Target, *, command: str = "search") -> None:
    """Make sure that a target's script, or its file and the name in it, are there.

    Args:
        target: as it was named.
        command: of this tool, for the hints.

    Raises:
        UsageError: something is not there, or is no target.
        TargetError: its file is not Python, or the name is no workload.
    """
    folder = Path(target.folder)
    if target.script is not None:
        find_launch(render_command(target.script, own_values(target.script)), folder=folder)
        return
    refuse_notebook(target.spec.partition(":")[0])
    if ":" not in target.spec:
        raise _explain_no_name(target.spec, folder, command)
    location, attribute = split_spec(target.spec)
    names = _read_module(location, folder=folder)
    if names is None or names.is_open:
        return
    first, *more = attribute.split(".")
    if first not in names.names:
        raise _explain_missing_name(target.spec, first, names)
    if not more:
        _check_object(target.spec, attribute, names)


def find_workloads(file: Path) -> tuple[str, ...]:
    """Return the names of a file's workloads, as far as its source shows them."""
    try:
        names = _read_source(file)
    except SyntaxError:
        return ()
    return () if names is None else names.workloads


def _read_module(location: str, *, folder: Path) -> SourceNames | None:
    """Return the names that a workload's module has; None where only importing it can tell.

    Raises:
        UsageError: there is no such file or module.
        TargetError: it is not Python.
    """
    found = locate(location, folder=folder)
    if found is None and location.endswith(".py"):
        raise _explain_missing_file(location, folder)
    is_missing = not _is_importable(location.partition(".")[0]) if found is None else _lacks_module(found, location)
    if is_missing:
        raise UsageError(
            f"there is no module {location!r}",
            hint=f"run in the folder that holds it (now: {folder}), or name a file: train.py:workload",
        )
    if found is None or found.file is None or found.file.name == "__init__.py":
        return None  # a package may get its names from anywhere
    try:
        return _read_source(found.file)
    except SyntaxError as reason:
        raise TargetError(f"importing {location} failed: SyntaxError: {reason}", hint="mend it first") from reason


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None  # of a name without a dot this imports nothing
    except (ImportError, ValueError, AttributeError):
        return True  # something is there that cannot be asked


def _lacks_module(found: Location, location: str) -> bool:
    """Return whether a package of the project has no module of a name, of any kind."""
    if found.file is not None or found.is_installed:
        return False
    place = found.root.joinpath(*location.split("."))
    try:
        initial = read_bytes(found.top / "__init__.py", max_bytes=_LONGEST_SOURCE)
    except OSError:
        initial = b""
    is_there = os.path.isdir(place.parent) and any(place.parent.glob(f"{place.name}.*"))
    return b"__path__" not in initial and not is_there


def _read_source(file: Path) -> SourceNames | None:
    """Return the names in a file; None where it cannot be read or is too large or too deep to look at.

    Raises:
        SyntaxError: it is not Python.
    """
    try:
        source = read_bytes(file, max_bytes=_LONGEST_SOURCE)
        return read_names(parse_source(source)) if len(source) <= _LONGEST_SOURCE else None
    except (OSError, ValueError, RecursionError, MemoryError):
        return None


def _check_object(spec: str, attribute: str, names: SourceNames) -> None:
    if attribute in names.classes:
        made = next(iter(names.workloads), None)
        hint = f"name the instance: {made}" if made else f"name an instance: {attribute.lower()} = {attribute}()"
        raise TargetError(f"{spec} is the class {attribute}", hint=hint)
    if attribute in names.incomplete:
        kind, missing = names.incomplete[attribute]
        raise TargetError(
            f"{spec} is {with_article(kind)} without {', '.join(f'{name}()' for name in missing)}",
            hint=f"a workload has the methods {', '.join(REQUIRED)}; see {DOCS_PART}",
        )


def _explain_no_name(spec: str, folder: Path, command: str) -> UsageError:
    """Return the error for a word that is neither a workload's name nor a program."""
    file, tool = folder / spec, f"autotune {command}"
    if os.path.isfile(file) and spec.endswith(".py"):
        named = find_workloads(file)
        if named:
            listed = ", ".join(f"{tool} {spec}:{name}" for name in named[:_MOST_SHOWN])
            return UsageError(f"{spec!r} does not say which workload of it is meant", hint=f"write {listed}")
        return UsageError(
            f"{spec!r} is a script, not a workload", hint=f"write its command: {tool} -- python {shlex.quote(spec)}"
        )
    words = spec.removeprefix("--").split()
    if len(words) > 1:
        return UsageError(
            f"{spec!r} is one word", hint=f"write the command without quotes: {tool} -- {' '.join(words)}"
        )
    if spec.endswith(".py"):
        return _explain_missing_file(spec, folder)
    if os.path.isdir(file):
        return UsageError(f"{spec!r} is a folder", hint=f"name the script in it: {tool} -- python {spec}/train.py")
    if os.path.isfile(folder / f"{spec}.py"):
        return UsageError(
            f"there is no target {spec!r}", hint=f"did you mean {tool} -- python {spec}.py, or {spec}.py:workload?"
        )
    return UsageError(
        f"there is no target {spec!r}",
        hint=f"write {tool} -- python train.py, or train.py:workload; {tool} --help says more",
    )


def _explain_missing_file(location: str, folder: Path) -> UsageError:
    place = (folder / location).parent
    there = sorted(path.name for path in place.glob("*.py")) if os.path.isdir(place) else []
    near = _find_near(Path(location).name, there, least=0.75)
    hint = f"did you mean {Path(location).with_name(near)}?" if near else f"it is looked up in {place}"
    return UsageError(f"there is no file {location!r}", hint=hint)


def _explain_missing_name(spec: str, first: str, names: SourceNames) -> UsageError:
    location, _ = split_spec(spec)
    near = _find_near(first, names.workloads) or _find_near(first, sorted(names.names))
    suggestion = f"did you mean {near!r}? " if near else ""
    listed = ", ".join(names.workloads[:_MOST_SHOWN])
    described = f"workloads in it: {listed}" if listed else "no object in it has a workload's methods, as far as seen"
    return UsageError(f"target {spec!r}: {location} has no {first!r}", hint=f"{suggestion}{described}")


def _find_near(word: str, known: Iterable[str], *, least: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=least)), None)
