"""The README and the pages of docs/: their links lead somewhere, and what they tell to type can be typed."""

from __future__ import annotations

import ast
import html
import inspect
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import api_pages
import budget_table
import knob_pages
import pytest
import torch
from emit_records import make_report, write_search
from rich.text import Text
from torch.utils.data import DataLoader, TensorDataset
from train_world import CONFIG, make_profile
from typer.main import get_command

import autotune
from autotune.cli import app
from autotune.cli.target import COMMAND_FOLLOWS
from autotune.engine.live import Applied
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


def test_what_a_page_tells_to_type_is_understood() -> None:
    """Every command and every option is there; what a search of it would answer is told by other tests."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    shown, wrong = sorted(set(list_commands())), []
    assert shown
    for page, line in shown:
        _, *words = shlex.split(line.replace("{", "").replace("}", ""))
        own = words[: words.index(COMMAND_FOLLOWS)] if COMMAND_FOLLOWS in words else words
        known = {name for one in commands[own[0]].params for name in one.opts} if own[0] in commands else set()
        used = {word.partition("=")[0] for word in own[1:] if word.startswith("-")}
        if own[0] not in commands or not used <= known | {"--help"}:
            wrong.append(f"{page}: {line}")
    assert wrong == []


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


def list_calls() -> Iterator[tuple[str, ast.Call, Callable[..., Any]]]:
    """Yield the calls of ours that a page shows: of the package, of an answer, of what it is applied to."""
    owners: dict[str, Any] = {"autotune": autotune, "profile": autotune.Profile, "applied": Applied}
    for page, code in list_blocks("python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = ast.unparse(node.func.value), node.func.attr
                if owner in owners and name not in Applied.__dataclass_fields__:
                    yield page, node, getattr(owners[owner], name)


def test_calls_that_a_page_shows_have_these_parameters() -> None:
    calls = [*list_calls()]
    assert len(calls) > 10
    for page, node, function in calls:
        bound = [] if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "autotune" else [None]
        named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
        try:
            inspect.signature(function).bind(*bound, *node.args, **named)
        except TypeError as error:
            raise AssertionError(f"{page}: {ast.unparse(node)}: {error}") from None


def test_the_page_on_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the probe and the search, which take minutes, stand their records; the rest is done."""
    shutil.copy(ROOT / "tests" / "train" / "noisy_workload.py", tmp_path / "train.py")
    with (tmp_path / "train.py").open("a") as file:
        file.write("\nworkload = Noisy()\n")
    monkeypatch.chdir(tmp_path)
    profile = make_profile(tmp_path, "train.py:workload", CONFIG.replace(prefetch_factor=4))
    write_search(tmp_path, "train.py:workload", profile)
    profile.save(tmp_path / "best.json")
    monkeypatch.setattr("autotune.probe.run.run_probe", lambda *_words, **_named: make_report())
    monkeypatch.setattr("autotune.search.run.run_search", lambda *_words, **_named: profile)
    model = torch.nn.Linear(6, 1)
    data = TensorDataset(torch.randn(20, 6), torch.randn(20, 1))
    names: dict[str, Any] = {"build": lambda: (model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4))}
    before = model.weight.clone()
    for page, code in list_blocks("python"):
        if page == "from-python.md":
            exec(compile(code.replace("epochs=30", "epochs=1"), page, "exec"), names)
    assert (tmp_path / "report.html").exists()
    assert not torch.equal(model.weight, before)
    assert names["summary"].finished


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
