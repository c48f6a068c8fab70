"""Options by their names of today and of earlier releases, how much is said, and what a page of help shows of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import autotune.search.run
import autotune.train.run
from autotune.cli import app
from autotune.cli.search import allow_changes
from autotune.errors import UsageError
from autotune.search.run import SearchOptions

OLD = {
    "search --planned-run 8h": "search --train-for 8h",
    "search --learning-rate-rule sqrt": "search --lr-scaling sqrt",
    "search --quality-steps 4": "search --check-steps 4",
    "search --quality-epochs=4": "search --check-epochs=4",
    "search --out x.json": "search -o x.json",
    "train --keep 3": "train --keep-checkpoints 3",
    "train --trust": "train --skip-verification",
    "train --out run": "train --run-dir run",
    "train -o run": "train --run-dir run",
    "report --out page.html": "report -o page.html",
    "export --to hf --out x.json": "export --to hf -o x.json",
}


def parse(typed: str) -> dict[str, Any]:
    name, *words = typed.split()
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    found: dict[str, Any] = command.make_context(name, words).params
    return found


@pytest.mark.parametrize("typed", OLD)
def test_an_option_is_known_by_its_earlier_name(typed: str) -> None:
    assert parse(typed) == parse(OLD[typed])
    assert parse(typed) != parse(typed.split()[0] + (" --to hf" if "export" in typed else ""))


def test_help_has_one_name_of_each_option() -> None:
    for name in ("search", "train", "report", "export"):
        text = CliRunner().invoke(app, [name, "--help"]).stdout
        old = [typed.split()[-2] for typed in OLD if typed.startswith(name)]
        shown = [word for word in old if word.startswith("--") and f"{word} " in text]
        assert shown == ([] if name == "train" else ["--out"]), text
    assert "--allow" not in CliRunner().invoke(app, ["search", "--help"]).stdout


def test_a_value_that_cannot_be_is_told_of_the_name_of_today() -> None:
    done = CliRunner().invoke(app, ["train", "--keep", "x"])
    assert "Invalid value for '--keep-checkpoints'" in done.stderr
    assert "'--keep'" not in done.stderr


def test_another_batch_is_allowed_by_either_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[SearchOptions] = []

    def remember(_target: object, options: SearchOptions, **_more: object) -> None:
        asked.append(options)
        raise UsageError("enough", hint="")

    monkeypatch.setattr(autotune.search.run, "run_search", remember)
    for typed in ("--allow batch", "--allow=batch", "--tune-batch-size", ""):
        CliRunner().invoke(app, ["search", "demo", *typed.split()])
    assert [options.allowed for options in asked] == [("batch",), ("batch",), ("batch",), ()]
    with pytest.raises(UsageError, match="--allow 'data' is no change"):
        allow_changes(SearchOptions(), ["data"], "none")


@pytest.mark.parametrize("quiet", [[], ["--quiet"], ["-q"]])
def test_who_wants_quiet_hears_errors_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quiet: list[str]) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*_arguments: object, **_options: object) -> None:
        raise UsageError("no good", hint="try again")

    monkeypatch.setattr(autotune.search.run, "run_search", fail)
    done = CliRunner().invoke(app, ["search", *quiet])
    assert done.exit_code == 2
    talk, error = done.stderr.split("error: ")
    assert error == "no good\n  try again\n"
    assert talk == "" if quiet else talk.startswith("no target given")
