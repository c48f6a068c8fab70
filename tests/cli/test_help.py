"""Help that helps: grouped, short, without the names of types, with examples that can be typed."""

from __future__ import annotations

import json
import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from autotune.cli import app

COMMANDS = [*get_command(app).commands]  # type: ignore[attr-defined]
MOST_LINES = 60
WIDTH = 100


def show(*words: str, width: int = WIDTH) -> str:
    return CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)}, terminal_width=width).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_it_fits_a_screen_speaks_plainly_and_ends_with_examples(name: str) -> None:
    text = show(name)
    assert "Usage:" in text
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= WIDTH
    assert not re.search(r"<(str|int|bool|float|path|list)|[<>]=|\[default: \(", text), text
    _, _, examples = text.partition("\nExamples:\n")
    lines = examples.strip().splitlines()
    assert lines
    assert all(line.strip().startswith(f"autotune {name}") for line in lines)


def test_what_belongs_together_stands_together() -> None:
    text = show("search")
    headings = re.findall(r"^([A-Z][\w ]+):$", text, re.MULTILINE)
    assert headings == ["Arguments", "Basics", "What may change", "Scripts", "Output", "Examples"]
    basics = text[text.index("Basics:") : text.index("What may change:")]
    assert "--budget TIME" in basics
    assert "--metric-regex" not in basics
    assert text.splitlines()[0].endswith("[OPTIONS] [TARGET | -- COMMAND...]")


def test_the_first_list_has_what_a_user_needs() -> None:
    text = show()
    listed = re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)
    expected = "probe search train show explain report export compare status presets history env"
    assert listed == expected.split()
    assert "..." not in text[text.index("Commands:") :]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["search", "--json", "--seed", "x"], "Invalid value for '--seed'"),
        (["search", "--budgt", "20m", "--json"], "No such option: --budgt"),
        (["export", "--json"], "Missing option '--to'."),
    ],
)
def test_what_is_mistyped_is_told_as_json_where_that_was_asked_for(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == 2
    assert error["message"].startswith(message)
    assert error["hint"] == f"{error['hint'].split(' --help')[0]} --help lists the options"
    assert done.stderr == ""


def test_what_is_mistyped_is_told_in_words_otherwise() -> None:
    done = CliRunner().invoke(app, ["search", "--budgt", "20m", "--", "python", "x.py", "--json"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "No such option: --budgt" in done.stderr
    assert "--budget" in done.stderr  # the one that was meant


@pytest.mark.parametrize("script", [["train.py"], ["python", "train.py"]])
@pytest.mark.parametrize("command", ["search", "probe"])
def test_an_option_of_a_script_is_told_where_it_is_written(command: str, script: list[str]) -> None:
    done = CliRunner().invoke(app, [command, "--json", *script, "--lr", "3"])
    message = json.loads(done.stdout)["error"]["message"]
    assert message.startswith("No such option: --lr; a script's own go after --: ")
    assert message.endswith(f" {command} -- python train.py --lr ...")
