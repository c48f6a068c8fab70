"""Load a workload from `file.py:attr` or `package.module:attr`.

This runs user code, so only child processes and the final training call it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import AutotuneError, TargetError, UsageError
from autotune.targets.fingerprint import fingerprint_workload, mark_modules
from autotune.targets.location import split_spec
from autotune.targets.workload import REQUIRED, LoadedWorkload, check_workload

_MOST_SHOWN = 8


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
    fingerprint = fingerprint_workload(spec, folder=folder)  # before its code can change anything
    module = _import_module(location, folder=folder)
    found = _get_attribute(module, attribute, spec=spec)
    if isinstance(found, type):
        raise TargetError(
            f"{spec} is the class {found.__name__}", hint=f"name an instance: {attribute} = {found.__name__}()"
        )
    return check_workload(found, label=spec, fingerprint=fingerprint or _fingerprint(module))


def _import_module(location: str, *, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if location.endswith(".py"):
        return _import_file(folder / location, shown=location)
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


def _import_file(path: Path, *, shown: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {shown!r}", hint=f"it is looked up in {path.parent}")
    name = path.stem
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
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


def _get_attribute(module: ModuleType, attribute: str, *, spec: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            workloads = [name for name, value in vars(module).items() if _is_workload(value)]
            near = difflib.get_close_matches(part, workloads or vars(module), n=1)
            suggestion = f"did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(workloads[:_MOST_SHOWN])
            described = f"its workloads are {listed}" if listed else "nothing in it has a workload's methods"
            raise UsageError(f"target {spec!r}: {module.__name__} has no {part!r}", hint=suggestion + described)
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
