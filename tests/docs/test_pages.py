"""The README and the pages of docs/: their links lead somewhere, and what they tell to type can be typed."""

from __future__ import annotations

import ast
import html
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import api_pages
import budget_table
import knob_pages
import pytest
from rich.text import Text
from typer.main import get_command

from autotune.cli import app
from autotune.cli.target import COMMAND_FOLLOWS
from autotune.targets.resolve import ProjectSettings
from autotune.version import VERSION

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_README_WORDS = 1200
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def list_links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            if not link.startswith(("http://", "https://", "mailto:")):
                yield page, link


def find_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def list_commands() -> Iterator[tuple[str, str]]:
    """Yield every command of ours that a page shows: in an indented block, after a prompt, or between backticks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^(?:    |\$ )(autotune [a-z].*)$", text, re.MULTILINE)
        for line in (*lines, *(one for one in re.findall(r"`(autotune [a-z][^`\n]+)`", text))):
            yield page.name, re.split(r"\s{3,}| \| ", line)[0]


def list_blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, code)
        for page in PAGES
        for kind, code in _FENCE.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page, link in list_links():
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in find_anchors(target)):
            broken.append(f"{page.name}: {link}")
    assert broken == []


@pytest.mark.parametrize(("page", "line"), sorted(set(list_commands())))
def test_what_a_page_tells_to_type_is_understood(page: str, line: str) -> None:
    """Every command and every option is there; what a search of it would answer is told by other tests."""
    _, *words = shlex.split(line.replace("{", "").replace("}", ""))
    own = words[: words.index(COMMAND_FOLLOWS)] if COMMAND_FOLLOWS in words else words
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert own[0] in commands, line
    known = {name for parameter in commands[own[0]].params for name in parameter.opts}
    used = {word.partition("=")[0] for word in own[1:] if word.startswith("-")}
    assert used <= known | {"--help"}, line


def test_programs_of_ours_that_a_page_names_are_there() -> None:
    """`python benchmarks/replay.py --budgets 2m`: the file is there and knows the option; `make demo`: so is that."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for file, options in re.findall(r"python ((?:benchmarks|tests)/[\w/]+\.py)([^`\n#|)]*)", text):
            code = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
            unknown = [one for one in re.findall(r"(?<=\s)--[\w-]+", options.split("  ")[0]) if f'"{one}"' not in code]
            wrong += [f"{page.name}: {file} {' '.join(unknown)}"] if unknown or not code else []
        goals = re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)
        wrong += [f"{page.name}: make {goal}" for goal in goals if f"\n{goal}:" not in makefile]
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_settings_that_a_page_shows_are_ours() -> None:
    blocks = list_blocks("toml")
    assert blocks
    for _, text in blocks:
        settings = tomllib.loads(text)["tool"]["autotune"]
        assert ProjectSettings(**settings)


def test_code_that_a_page_shows_is_python() -> None:
    blocks = list_blocks("python")
    assert blocks
    for page, code in blocks:
        compile(code, page, "exec", ast.PyCF_ONLY_AST)


def test_the_readme_is_read_to_its_end() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_README_WORDS


def test_the_page_of_settings_is_up_to_date() -> None:
    page = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert page == knob_pages.render(), "run: python tests/docs/knob_pages.py > docs/knobs.md"


def test_the_page_of_the_interface_is_up_to_date() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == api_pages.render(), "run: python tests/docs/api_pages.py > docs/api.md"


def test_the_table_of_budgets_is_up_to_date() -> None:
    table = "\n".join(budget_table.list_lines())
    assert table in (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), "run: python tests/docs/budget_table.py"


def test_the_picture_is_of_what_was_kept() -> None:
    kept = Text.from_ansi((ROOT / "docs" / "search.txt").read_text(encoding="utf-8")).plain.splitlines()
    picture = html.unescape((ROOT / "docs" / "search.svg").read_text(encoding="utf-8")).replace("\xa0", " ")
    (verdict,) = (line for line in kept if line.startswith(("improved", "keep", "inconclusive")))
    assert kept[0] in picture
    assert verdict in picture, "run: python benchmarks/picture.py --from docs/search.txt"
    assert "url(http" not in picture, "a page that shows it fetches nothing"


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
