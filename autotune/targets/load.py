"""Load a workload from `file.py:attr` or `package.module:attr`.

This runs user code, so only child processes and the final training call it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import AutotuneError, TargetError, UsageError
from autotune.targets.source import by_path
from autotune.targets.source.fingerprint import find_files, fingerprint_files, mark_modules
from autotune.targets.source.location import split_spec
from autotune.targets.workload import REQUIRED, LoadedWorkload, check_workload

_MOST_SHOWN = 8

_loaded: set[str] = set()
"""Names of the files' modules that were loaded under their own name."""

_seen: dict[str, tuple[ModuleSpec, bytes]] = {}
"""Of the targets' modules, by name: which import of it was seen last, and the digest of its file then."""


_being_imported: list[str] = []
"""Where the target's module is, while it is executed."""


def refuse_call_of_target() -> None:
    """Refuse what the target's own module calls while it is imported: it would begin in each process once more.

    Raises:
        UsageError: a target's module is being executed.
    """
    if _being_imported:
        raise UsageError(
            f"{_being_imported[-1]} calls autotune while it is imported as the target",
            hint="put the call under `if __name__ == '__main__':`",
        )


def load_workload(spec: str, *, folder: Path) -> LoadedWorkload:
    """Import a workload and check that it has what a training needs.

    Args:
        spec: `file.py:attr` or `package.module:attr`; `attr` may be dotted.
        folder: what a relative file name is relative to; put first on `sys.path`.

    Raises:
        UsageError: the spec does not parse, or nothing is found where it points.
        TargetError: importing it fails, or the object is not a workload; says exactly what is missing.
    """
    location, attribute = split_spec(spec)
    files = find_files(spec, folder=folder)
    fingerprint = fingerprint_files(files) if files else None  # before its code can change anything
    _being_imported.append(location)
    try:
        module = _import_module(location, folder=folder)
    finally:
        _being_imported.pop()
        _require_unchanged(files.values())  # also where an import fails: of an old module it may
    found = _get_attribute(module, attribute, spec=spec)
    if isinstance(found, type):
        raise TargetError(
            f"{spec} is the class {found.__name__}", hint=f"name an instance: {attribute} = {found.__name__}()"
        )
    return check_workload(found, label=spec, fingerprint=fingerprint or _fingerprint(module))


def _import_module(location: str, *, folder: Path) -> ModuleType:
    if location.endswith(".py"):
        return _import_file(folder / location, folder=folder, shown=location)
    _put_on_path(folder)
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as reason:
        if reason.name is not None and (location == reason.name or location.startswith(reason.name + ".")):
            raise UsageError(
                f"there is no module {location!r}",
                hint=f"run in the folder that holds it (now: {folder}), or name a file: train.py:workload",
            ) from None
        raise TargetError(
            f"importing {location} failed: {reason}", hint="install what it imports in this environment"
        ) from reason
    except AutotuneError:
        raise
    except Exception as reason:
        raise TargetError(
            f"importing {location} failed: {type(reason).__name__}: {reason}", hint="run it with python first"
        ) from reason


def _import_file(path: Path, *, folder: Path, shown: str) -> ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {shown!r}", hint=f"it is looked up in {path.parent}")
    name, is_standard = _choose_name(path), path.stem in sys.stdlib_module_names
    for place in (folder, path.parent):
        _put_on_path(place, behind_standard=is_standard)
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except AutotuneError:
        raise
    except Exception as reason:
        raise TargetError(
            f"importing {shown} failed: {type(reason).__name__}: {reason}", hint="run it with python first"
        ) from reason
    return module


def _require_unchanged(files: Iterable[Path]) -> None:
    """Make sure that what is imported of a target is what its files hold: a process imports a module once.

    Raises:
        UsageError: a file was changed since.
    """
    paths = {os.path.realpath(file) for file in files}
    names = {os.path.basename(path) for path in paths}
    for name, module in [*sys.modules.items()]:
        found, imported = (getattr(module, "__dict__", {}).get(key) for key in ("__file__", "__spec__"))
        if imported is None or not isinstance(found, str) or os.path.basename(found) not in names:
            continue
        if os.path.realpath(found) not in paths:
            continue
        digest = hashlib.sha256(Path(found).read_bytes()).digest()
        before, held = _seen.get(name, (None, b""))
        if before is imported and held != digest:
            raise UsageError(
                f"{found} was changed since this process imported it",
                hint="restart the program, or the notebook's kernel",
            )
        _seen[name] = imported, digest


def _choose_name(path: Path) -> str:
    """Return the name of a file's module: its own, so that its neighbours can import it, unless that is another's."""
    name = path.stem
    there = sys.modules.get(name)
    is_taken = there is not None and name not in _loaded
    if name in sys.stdlib_module_names or is_taken or "." in name:
        return by_path.module_name(path.absolute())
    _loaded.add(name)
    return name


def _put_on_path(folder: Path, *, behind_standard: bool = False) -> None:
    """Put a folder first on `sys.path`, or behind the standard library, of which a file in it has a name."""
    if str(folder) in sys.path:
        return
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    places = [place for place, name in enumerate(sys.path, start=1) if name in standard or name.endswith("lib-dynload")]
    sys.path.insert(max(places, default=0) if behind_standard else 0, str(folder))


def _get_attribute(module: ModuleType, attribute: str, *, spec: str) -> Any:
    found: Any = module
    file = getattr(module, "__file__", None)
    for part in attribute.split("."):
        if not hasattr(found, part):
            workloads = [name for name, value in vars(module).items() if _is_workload(value)]
            near = difflib.get_close_matches(part, workloads or vars(module), n=1)
            suggestion = f"did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(workloads[:_MOST_SHOWN])
            described = f"workloads in it: {listed}" if listed else "nothing in it has a workload's methods"
            name = module.__name__ if file is None else Path(file).stem
            raise UsageError(f"target {spec!r}: {name} has no {part!r}", hint=suggestion + described)
        found = getattr(found, part)
    return found


def _is_workload(value: Any) -> bool:
    if isinstance(value, type | ModuleType):
        return False
    try:
        return all(callable(getattr(value, name, None)) for name in REQUIRED)
    except Exception:  # the user's own __getattr__
        return False


def _fingerprint(module: ModuleType) -> str:
    """Return the fingerprint of a module that only importing it could find."""
    file = getattr(module, "__file__", None)
    source = Path(file).read_bytes() if file else module.__name__.encode()
    return mark_modules(hashlib.sha256(source).hexdigest()[:12])
