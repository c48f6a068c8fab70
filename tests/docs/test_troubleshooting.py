"""docs/troubleshooting.md and docs/answer.md: every message and line in them is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
_FIRST_CELL = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)
_ANYTHING = "\0"


def list_messages() -> list[str]:
    headings = _HEADING.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    return [*headings, *_FIRST_CELL.findall((DOCS / "answer.md").read_text(encoding="utf-8"))]


def list_templates() -> Iterator[str]:
    """Yield every text of the code but docstrings and comments; what is filled in stands as a mark."""
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else _ANYTHING for one in node.values)
                yield "".join(str(part) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                yield node.value


def split_message(message: str) -> list[str]:
    return [piece for piece in message.split("...") if piece.strip(" :;,()")]


def is_message_of(message: str, template: str) -> bool:
    """Return whether what a message is sure of stands in a template, in its order."""
    start = 0
    for piece in split_message(message):
        place = template.find(piece, start)
        if place < 0:
            return False
        start = place + len(piece)
    return True


@pytest.fixture(scope="module")
def templates() -> list[str]:
    return list(list_templates())


def test_every_message_is_one_of_the_code(templates: list[str]) -> None:
    """The words before, between and after what differs stand in one text of the code, in this order."""
    messages = list_messages()
    assert messages
    too_little_to_be_told_by = [one for one in messages if sum(map(len, split_message(one))) <= 6]
    assert too_little_to_be_told_by == []
    unknown = [one for one in messages if not any(is_message_of(one, template) for template in templates)]
    assert unknown == []


def test_messages_that_are_not_ours_are_found_out(templates: list[str]) -> None:
    assert not any(is_message_of("the moon is not installed in ...", template) for template in templates)
