"""The layers of the package, read from its own imports; run as a command it draws them.

    python tests/layers.py > docs/architecture.svg

A room is a package, or a part of one that has a row of its own. A room imports only from rows below its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import autotune

ROOT = Path(autotune.__file__).parent

LAYERS = {
    "autotune.errors": 0,
    "autotune.format": 0,
    "autotune.lifeline": 0,
    "autotune.scratch": 0,
    "autotune.units": 0,
    "autotune.user_cache": 0,
    "autotune.version": 0,
    "autotune.records": 1,
    "autotune.arguments": 1,
    "autotune.arithmetics": 2,
    "autotune.knobs": 2,
    "autotune.lock": 2,
    "autotune.presets": 2,
    "autotune.sentences": 2,
    "autotune.space": 2,
    "autotune.targets": 2,
    "autotune.engine": 3,
    "autotune.machine": 4,
    "autotune.measure": 4,
    "autotune.drift": 5,
    "autotune.drift.compare": 5,
    "autotune.isolation": 5,
    "autotune.distributed": 6,
    "autotune.drift.record": 6,
    "autotune.drift.guard": 7,
    "autotune.runs": 7,
    "autotune.probe": 8,
    "autotune.runs.script": 9,
    "autotune.runs.workload": 9,
    "autotune.isolation.script_entry": 10,
    "autotune.isolation.entry": 11,
    "autotune.isolation.warm.forkserver": 11,
    "autotune.search": 12,
    "autotune.drift.gate": 13,
    "autotune.search.session": 14,
    "autotune.search.run": 15,
    "autotune.emit": 16,
    "autotune.explain": 16,
    "autotune.selftest": 16,
    "autotune.loggers": 16,
    "autotune.train": 16,
    "autotune.adapters": 17,
    "autotune.cli": 17,
    "autotune.api": 18,
    "autotune.hf": 18,
    "autotune.lightning": 18,
    "autotune.__main__": 18,
    "autotune": 19,
}
"""Row of a module by its longest prefix; a module imports from rows above its own, and from its own package."""


@dataclass(frozen=True)
class Import:
    """One import statement's target.

    Attributes:
        target: module imported, e.g. `autotune.runs.workload`.
        for_types: it stands under TYPE_CHECKING.
        lazy: it stands in a function.
    """

    target: str
    for_types: bool
    lazy: bool


def name_of(path: Path) -> str:
    parts = ("autotune", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def find_trees() -> Mapping[str, ast.Module]:
    """Return the parsed source of every module: seconds, so not at every import of this one."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def is_below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def home_of(module: str) -> str:
    return max((prefix for prefix in LAYERS if is_below(module, prefix)), key=len)


def read_imports(node: ast.AST, *, for_types: bool = False, lazy: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, for_types, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import of {child.module}"
            assert child.module is not None
            for alias in child.names:
                submodule = f"{child.module}.{alias.name}"
                is_module = submodule in SOURCES or child.module == "autotune"
                yield Import(submodule if is_module else child.module, for_types, lazy)
        else:
            is_guard = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from read_imports(child, for_types=for_types or is_guard, lazy=lazy or is_function)


@cache
def find_imports() -> Mapping[str, tuple[Import, ...]]:
    """Return what every module imports."""
    return {name: tuple(read_imports(tree)) for name, tree in find_trees().items()}


def list_imports() -> Iterator[tuple[str, Import]]:
    yield from ((module, found) for module in SOURCES for found in find_imports()[module])


def find_room_imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports from, without what another one of them brings along already."""
    direct: dict[str, set[str]] = {room: set() for room in LAYERS}
    for module, found in list_imports():
        home = home_of(module)
        if is_below(found.target, "autotune") and not found.for_types and home_of(found.target) != home:
            direct[home].add(home_of(found.target))
    reached = {room: _reach(room, direct) for room in direct}
    return {
        room: {one for one in found if not any(one in reached[other] for other in found - {one})}
        for room, found in direct.items()
    }


def _reach(room: str, direct: Mapping[str, set[str]]) -> set[str]:
    found, waiting = set(), [room]
    while waiting:
        for one in direct[waiting.pop()] - found:
            found.add(one)
            waiting.append(one)
    return found


_WIDTH, _ROW_HEIGHT, _BOX_HEIGHT, _MARGIN = 960, 62, 30, 20
_STYLE = """
  text { font: 13px system-ui, sans-serif; text-anchor: middle; fill: #1f2328 }
  rect { fill: #eef2f7; stroke: #8b98a9 } path { fill: none; stroke: #8b98a9; opacity: .7 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } rect { fill: #1c2430; stroke: #7d8da1 } path { stroke: #7d8da1 }
  }
"""


def draw() -> str:
    """Return the picture: the rooms in their rows, the highest on top, a line to each that a room needs directly."""
    rows: dict[int, list[str]] = {}
    for room, row in LAYERS.items():
        rows.setdefault(row, []).append(room)
    height = 2 * _MARGIN + _ROW_HEIGHT * (len(rows) - 1) + _BOX_HEIGHT
    boxes = dict(_place(rows, height))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="the layers of autotune">',
        f"<style>{_STYLE}</style>",
    ]
    edges = find_room_imports()
    for room, needed in edges.items():
        x, y, _ = boxes[room]
        for other in sorted(needed):
            to_x, to_y, _ = boxes[other]
            bend = (y + to_y) / 2
            ends = f"{x:.0f},{bend:.0f} {to_x:.0f},{bend:.0f} {to_x:.0f},{to_y:.0f}"
            lines.append(f'<path d="M{x:.0f},{y + _BOX_HEIGHT:.0f} C{ends}"/>')
    used = {room for room, needed in edges.items() if needed} | {one for needed in edges.values() for one in needed}
    for room, (x, y, width) in boxes.items():
        if room not in used:  # holds nothing but rooms
            continue
        name = room.removeprefix("autotune.")
        lines.append(f'<rect x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" height="{_BOX_HEIGHT}" rx="6"/>')
        lines.append(f'<text x="{x:.0f}" y="{y + 20:.0f}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _place(rows: Mapping[int, list[str]], height: float) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Yield middle, upper edge and width of each room's box."""
    for row, rooms in rows.items():
        y = height - _MARGIN - _BOX_HEIGHT - row * _ROW_HEIGHT
        widths = [max(54.0, 8.0 * len(room.removeprefix("autotune.")) + 16.0) for room in rooms]
        gap = (_WIDTH - sum(widths)) / (len(rooms) + 1)
        x = gap
        for room, width in zip(rooms, widths, strict=True):
            yield room, (x + width / 2, y, width)
            x += width + gap


if __name__ == "__main__":
    print(draw(), end="")
