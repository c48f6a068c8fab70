"""Packages that a process has imported beforehand, and that its script imports all the same, where it says so.

What hangs on that import happens where it would: hooks are hung up, generators are seeded, and a script that never
gets there has not imported it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_MAIN_IN_WORKERS = "__mp_main__"
"""What multiprocessing calls the script in a worker that it has spawned, and in this process once it is imported."""


def hide_imports(packages: Mapping[str, Sequence[str]]) -> None:
    """Make packages look as if they were not imported, as far as they were; their import takes no time then.

    Args:
        packages: top-level names, each with those of them that its own import brings along.
    """
    sys.modules.pop(_MAIN_IN_WORKERS, None)
    for package, brought in packages.items():
        if package in sys.modules:
            sys.meta_path.insert(0, _Hidden(package, brought))


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package that was imported before, with its modules."""

    def __init__(self, package: str, brought: Sequence[str]) -> None:
        self._package, self._brought = package, brought
        self._modules = {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if name == package or name.startswith(f"{package}.")
        }
        self._spec = self._modules[package].__spec__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package or self._spec is None:
            return None
        found = ModuleSpec(fullname, self, origin=self._spec.origin, is_package=True)
        found.submodule_search_locations = self._spec.submodule_search_locations
        found.has_location = self._spec.has_location
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[self._package]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        module.__loader__ = None if self._spec is None else self._spec.loader
        sys.modules.update(self._modules)
        for name in self._brought:
            importlib.import_module(name)
        if "multiprocessing" in sys.modules:
            sys.modules.setdefault(_MAIN_IN_WORKERS, sys.modules["__main__"])
