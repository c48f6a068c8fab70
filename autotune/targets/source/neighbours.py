"""Find the trainings beside the user: the scripts of a folder that import torch. They are read and never run."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from autotune.records.reading import read_bytes
from autotune.targets.source.names import imports_torch, parse_source, read_names

_MOST_LOOKED_AT = 200
_LONGEST_SOURCE = 1024 * 1024
_NOT_SCRIPTS = ("test_", "conftest", "setup.py", "_")


class Training(NamedTuple):
    """A training that a folder holds.

    Attributes:
        file: its name.
        words: what names it on the command line: `train.py:workload`, or `-- python train.py`.
    """

    file: str
    words: str


class _Source(NamedTuple):
    name: str
    tree: ast.Module
    is_main: bool


def find_trainings(folder: Path, *, most: int = 5) -> list[Training]:
    """Return the trainings of a folder, those that say that they are programs first.

    A file that another one imports is left out unless it says that it is a program too.

    Args:
        folder: looked at itself, not below it.
        most: of them to return.
    """
    sources = list(_read_sources(folder))
    imported = {name for source in sources for name in _list_imported(source.tree)}
    programs = [one for one in sources if one.is_main or one.name.removesuffix(".py") not in imported]
    programs = [one for one in programs if imports_torch(one.tree)]
    programs.sort(key=lambda one: not one.is_main)  # in order of their names otherwise
    return [Training(one.name, _name_training(one)) for one in programs[:most]]


def _read_sources(folder: Path) -> Iterator[_Source]:
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".py")
    except OSError:
        return
    for file in files[:_MOST_LOOKED_AT]:
        if file.name.startswith(_NOT_SCRIPTS):
            continue
        try:
            text = read_bytes(file, max_bytes=_LONGEST_SOURCE)
            tree = parse_source(text) if len(text) <= _LONGEST_SOURCE else None
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if tree is not None:
            yield _Source(file.name, tree, b"__main__" in text)


def _list_imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _name_training(source: _Source) -> str:
    workloads = read_names(source.tree).workloads
    name = shlex.quote(source.name)
    return f"{name}:{workloads[0]}" if workloads else f"-- python {name}"
