"""What a module's top level gives names to, read from its source: nothing is imported and nothing is run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.targets.workload import REQUIRED

_REACHES_NAMES = frozenset({"globals", "locals", "vars", "setattr", "exec", "eval", "__dict__", "modules"})
"""With one of these a module may give itself names that its source does not show."""


@dataclass(frozen=True)
class SourceNames:
    """The names of a module's top level.

    Attributes:
        names: every one that is given to something, private ones included.
        workloads: those of instances of the module's own classes with the required methods.
        classes: those of plain classes, and of nothing else.
        incomplete: of each name that is no workload, what it is and the required methods that it does not have.
        is_open: the module may have names that its source does not show.
    """

    names: frozenset[str]
    workloads: tuple[str, ...]
    classes: frozenset[str]
    incomplete: dict[str, tuple[str, tuple[str, ...]]]
    is_open: bool


def parse_source(source: bytes) -> ast.Module:
    """Return a module's syntax tree, without the warnings that importing it would show.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it has a null byte.
        RecursionError: it is nested too deeply.
        MemoryError: likewise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def read_names(tree: ast.Module) -> SourceNames:
    """Return what a module's top level gives names to."""
    given: dict[str, list[ast.AST]] = {}
    for name, node in _iterate_given(tree.body):
        given.setdefault(name, []).append(node)
    classes = {
        name: nodes[0]
        for name, nodes in given.items()
        if len(nodes) == 1 and isinstance(nodes[0], ast.ClassDef) and not nodes[0].decorator_list
    }
    plain = {name: node for name, node in classes.items() if isinstance(node, ast.ClassDef) and not node.keywords}
    workloads, incomplete = [], {}
    for name, nodes in given.items():
        made = _class_of(nodes[-1], plain)
        missing = None if made is None else _missing_methods(made, plain)
        if made is not None and missing == ():
            workloads.append(name)
        elif made is not None and missing and len(nodes) == 1 and not _sets_any(tree, missing):
            incomplete[name] = (made.name, missing)
        elif len(nodes) == 1 and (kind := _kind_of(nodes[0])) is not None:
            incomplete[name] = (kind, REQUIRED)
    return SourceNames(frozenset(given), tuple(workloads), frozenset(plain), incomplete, _is_open(tree))


def imports_torch(tree: ast.Module) -> bool:
    """Return whether a module imports torch anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "torch" for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            return True
    return False


def _iterate_given(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name and what it is given to, through `if`, `try`, `with` and loops, not in functions and classes."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and getattr(node, "value", None) is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            plain = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from ((name, node.value or node) for name in plain)
            waiting.extend(target for target in targets if not isinstance(target, ast.Name))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            yield node.name, node
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))
        elif not isinstance(node, ast.Lambda):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _class_of(node: ast.AST, classes: dict[str, ast.ClassDef]) -> ast.ClassDef | None:
    """Return the module's own class that a value is made with; None for another value."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return classes.get(node.func.id)
    return None


def _kind_of(node: ast.AST) -> str | None:
    """Return what a value is that can be nothing else; None for any other."""
    if isinstance(node, ast.Constant):
        return type(node.value).__name__
    kinds = ((ast.List, "list"), (ast.Tuple, "tuple"), (ast.Dict, "dict"), (ast.Set, "set"), (ast.JoinedStr, "str"))
    return next((name for kind, name in kinds if isinstance(node, kind)), None)


def _missing_methods(made: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> tuple[str, ...] | None:
    """Return the required methods that a class does not have; None where a base from elsewhere may have them."""
    found: set[str] = set()
    waiting, seen = [made], {made.name}
    is_known = True
    while waiting:
        current = waiting.pop()
        found |= {name for name, _ in _iterate_given(current.body)}
        for base in current.bases:
            known = classes.get(base.id) if isinstance(base, ast.Name) else None
            is_known = is_known and (known is not None or (isinstance(base, ast.Name) and base.id == "object"))
            if known is not None and known.name not in seen:
                seen.add(known.name)
                waiting.append(known)
    missing = tuple(name for name in REQUIRED if name not in found)
    return missing if not missing or (is_known and "__getattr__" not in found) else None


def _sets_any(tree: ast.Module, names: tuple[str, ...]) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names
        for node in ast.walk(tree)
    )


def _is_open(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) or (isinstance(node, ast.alias) and node.name == "*"):
            return True
        if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__getattribute__", "__new__"):
            return True
        if getattr(node, "id", getattr(node, "attr", None)) in _REACHES_NAMES:
            return True
    return False
