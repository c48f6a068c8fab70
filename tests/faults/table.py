"""Print docs/faults.md: every fault, how it is injected, what has to come of it, and the test that sees to it.

    python tests/faults/table.py > docs/faults.md

The rows are the marks `@pytest.mark.fault(key, injected=..., outcome=...)` of all tests, read from their source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from catalogue import CATALOGUE, FAULTS, FINDINGS, NOT_TESTED

TESTS = Path(__file__).parents[1]
MARK, SLOW = "pytest.mark.fault", "pytest.mark.slow"

_HEAD = """\
# Faults

What can go wrong around a search or a training, how the tests make it happen, and what has to come of it. The page is
written by `python tests/faults/table.py > docs/faults.md` from the marks of the tests; a test holds it up to date.
`make test` runs the quick ones, `make test-slow` the others.

Every fault is injected for real: processes are killed, stopped and starved, disks are full, files are torn.
"""


@dataclass(frozen=True)
class Injection:
    """One fault as one test injects it.

    Attributes:
        key: of the fault.
        injected: how.
        outcome: what has to come of it.
        test: `file::name`, below tests/.
        is_slow: it runs in the slow lane alone.
    """

    key: str
    injected: str
    outcome: str
    test: str
    is_slow: bool


def read_injections(root: Path = TESTS) -> list[Injection]:
    """Return what the tests below a folder inject, in the order of their files.

    Raises:
        ValueError: a mark names no fault, is no literal, or stands elsewhere than on a test.
    """
    return [found for path in sorted(root.rglob("test_*.py")) for found in _read_file(path, root)]


def _read_file(path: Path, root: Path) -> Iterator[Injection]:
    text = path.read_text(encoding="utf-8")
    if MARK not in text:
        return
    tree = ast.parse(text)
    marks = {node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == MARK}
    all_slow = any(_is_slow(node.value) for node in tree.body if isinstance(node, ast.Assign) and _is_pytestmark(node))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        is_slow = all_slow or any(ast.unparse(one) == SLOW for one in node.decorator_list)
        for mark, in_slow_case in _find_marks(node.decorator_list):
            marks.discard(mark)
            test = f"{path.relative_to(root).as_posix()}::{node.name}"
            yield _read_mark(mark, test, is_slow or in_slow_case)
    if marks:
        lines = sorted(mark.lineno for mark in marks)
        raise ValueError(f"{path}: marks on lines {lines} stand on no test")


def _is_pytestmark(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "pytestmark"


def _is_slow(node: ast.AST) -> bool:
    return any(ast.unparse(one) == SLOW for one in ast.walk(node) if isinstance(one, ast.Attribute))


def _find_marks(decorators: Sequence[ast.expr]) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the marks of a test and of its cases, and whether the case of each is slow."""
    for decorator in decorators:
        cases = [n for n in ast.walk(decorator) if isinstance(n, ast.Call) and ast.unparse(n.func) == "pytest.param"]
        slow = {mark for case in cases if _is_slow(case) for mark in ast.walk(case)}
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == MARK:
                yield node, node in slow


def _read_mark(mark: ast.Call, test: str, is_slow: bool) -> Injection:
    key, *rest = (ast.literal_eval(argument) for argument in mark.args)
    words = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
    if rest or words.keys() != {"injected", "outcome"} or key not in FAULTS:
        raise ValueError(f"{test}: {ast.unparse(mark)} is not fault(key, injected=..., outcome=...) of a known fault")
    return Injection(key, words["injected"], words["outcome"], test, is_slow)


def find_untested(injections: Sequence[Injection]) -> list[str]:
    """Return the faults without a test and without a reason."""
    known = {one.key for one in injections} | NOT_TESTED.keys()
    return [key for key in FAULTS if key not in known]


def render(injections: Sequence[Injection]) -> str:
    """Return the page."""
    tests = {one.test for one in injections}
    slow = {one.test for one in injections if one.is_slow}
    count = f"{len(tests)} tests inject {len({one.key for one in injections})} faults; {len(slow)} of them are slow.\n"
    sections = [("The catalogue", CATALOGUE), ("Found and mended", FINDINGS)]
    return "\n".join([_HEAD, count, *(_render_section(title, faults, injections) for title, faults in sections)])


def _render_section(title: str, faults: Mapping[str, str], injections: Sequence[Injection]) -> str:
    lines = [
        f"## {title}",
        "",
        "| # | fault | injected | outcome | test | lane |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key, name in faults.items():
        rows = [
            (one.injected, one.outcome, f"`{one.test}`", "slow" if one.is_slow else "quick")
            for one in injections
            if one.key == key
        ]
        rows = rows or [(f"not tested: {NOT_TESTED.get(key, 'no test yet')}", "", "", "")]
        for number, row in enumerate(rows):
            cells = (key, name, *row) if number == 0 else ("", "", *row)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(read_injections()), end="")
