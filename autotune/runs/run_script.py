"""Run a script in this process as its interpreter would; torch is imported by the script itself, not before.

A script may set thread counts or visible devices in the environment ahead of its own `import torch`, so the hooks,
which need torch, are hung up right after that import.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.targets.launch.command import Launch

_NO_SCRIPT_FOLDER = ("-P", "-I")
_LINE_END = re.compile(r"[\r\n]")
_LONGEST_LINE = 2**20  # of one that has not ended, as of progress without an end; half of what may be kept of it


def run_script(launch: Launch, *, on_torch: Callable[[], None], before_torch: Callable[[], None] = lambda: None) -> int:
    """Run a script as `__main__` in the current folder and return its exit status; its exceptions pass.

    Args:
        launch: what to run.
        on_torch: called once, when the script has imported torch.
        before_torch: called right before that import.
    """
    own_rank = [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"] if launch.passes_local_rank else []
    sys.argv = [launch.name, *own_rank, *launch.arguments]
    is_file = launch.kind == "file"
    if not any(option.startswith(_NO_SCRIPT_FOLDER) for option in launch.interpreter_options):
        sys.path.insert(0, str(Path(launch.name).resolve().parent) if is_file else os.getcwd())
    call_after_import("torch", on_torch, before=before_torch)
    try:
        if is_file:
            _run_file(launch.name)
        else:
            runpy.run_module(launch.name, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0)
        sys.stderr.write(f"{stop.code}\n")
        return 1
    return 0


def _run_file(name: str) -> None:
    """Run a file as python does: `__file__` is absolute, `sys.argv[0]` stays as typed."""
    path = os.path.abspath(name)
    if not os.path.isfile(path):  # a folder or an archive with a __main__.py
        runpy.run_path(name, run_name="__main__")
        return
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)  # of what this file has from __future__
    exec(code, module.__dict__)


def forget_imports() -> None:
    """Take back every call that still waits for an import."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]


def call_after_import(name: str, function: Callable[[], None], *, before: Callable[[], None] = lambda: None) -> None:
    """Call a function once, right after a module has been imported; at once if it is there already.

    Args:
        name: of the module.
        function: to call.
        before: called once, right before the import.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _AfterImport(name, function, before))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], None], before: Callable[[], None]) -> None:
        self._name, self._function, self._before = name, function, before
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._call, self._prepare)
        return spec

    def _prepare(self) -> None:
        if self in sys.meta_path:
            self._before()

    def _call(self) -> None:
        if self in sys.meta_path:  # many only ask whether a module could be imported; this is the import itself
            sys.meta_path.remove(self)
            self._function()


class _CallingLoader(importlib.abc.Loader):
    def __init__(self, plain: Any, function: Callable[[], None], before: Callable[[], None]) -> None:
        self._plain, self._function, self._before = plain, function, before

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._plain.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._plain
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        self._before()
        self._plain.exec_module(module)
        self._function()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class LineWatch:
    """A text stream that also hands every line to a function, of a very long one the end."""

    def __init__(self, stream: Any, on_line: Callable[[str], None]) -> None:
        self._stream, self._on_line = stream, on_line
        self._parts: list[str] = []
        self._length = 0  # of the parts

    def write(self, text: str) -> int:
        """Write to the stream; a carriage return ends a line too, as progress bars have it."""
        written: int = self._stream.write(text)
        first, *others = _LINE_END.split(text)
        self._parts.append(first)  # joined when the line ends: a dot at a time would copy it each time
        self._length += len(first)
        if others:
            *whole, rest = "".join(self._parts), *others
            self._keep(rest)
            for line in whole:
                self._on_line(line)
        elif self._length > 2 * _LONGEST_LINE:
            self._keep("".join(self._parts)[-_LONGEST_LINE:])
        return written

    def _keep(self, rest: str) -> None:
        self._parts, self._length = [rest], len(rest)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts, one after another."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
