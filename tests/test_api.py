"""The search as Python calls it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune import api
from autotune.errors import UsageError
from autotune.records import DriftLimits, Margin
from autotune.records.script import Script
from autotune.search import run as stage
from autotune.search.run import SearchOptions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, SearchOptions, Any]]:
    found: list[tuple[Any, SearchOptions, Any]] = []

    def search(target: Any, options: SearchOptions, *, reporter: Any, **_others: Any) -> None:
        found.append((target, options, reporter))

    monkeypatch.setattr(stage, "run_search", search)
    return found


def test_the_package_shows_its_names() -> None:
    assert "run_search" in dir(autotune)
    assert set(dir(autotune)) == set(autotune.__all__)
    assert autotune.run_search is api.run_search
    for name in autotune.__all__:
        assert getattr(autotune, name) is not None


def test_options_are_as_on_the_command_line(asked: list[Any]) -> None:
    autotune.run_search("toy.py:workload", budget="20m", max_drift=["1%", "accuracy:0.1pp"])
    autotune.run_search(budget=90.0, max_drift="0.2%")
    options = SearchOptions(budget_seconds=60.0, seed=3)
    autotune.run_search(None, options)
    (target, first, reporter), (_, second, _), (_, third, _) = asked
    assert (target, first.budget_seconds, reporter) == ("toy.py:workload", 1200.0, None)
    assert first.max_drift.loss == Margin(amount=0.01)
    assert first.max_drift.of("accuracy").amount == pytest.approx(0.001)
    assert (second.budget_seconds, second.max_drift) == (90.0, DriftLimits(loss=Margin(amount=0.002)))
    assert third == options


def test_progress_is_shown_where_nobody_listens(asked: list[Any]) -> None:
    autotune.run_search("toy.py:workload", progress=True)
    assert type(asked[0][2]).__name__ == "SearchView"


@pytest.mark.parametrize(("given", "message"), [({"budget": "20"}, "budget"), ({"max_drift": "much"}, "much")])
def test_what_does_not_parse_is_our_error(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        autotune.run_search("toy.py:workload", **given)  # type: ignore[arg-type]


class Workload:
    """Stands for one."""


def test_an_object_is_named_by_where_it_is_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = types.ModuleType("package.training")
    held.workload = Workload()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "package.training", held)
    assert api.name_target(held.workload, tmp_path) == "package.training:workload"
    main = types.ModuleType("__main__")
    main.mine, main.__file__ = Workload(), str(tmp_path / "src" / "train.py")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert api.name_target(main.mine, tmp_path) == "src/train.py:mine"
    main.__file__ = None
    with pytest.raises(UsageError, match="defined in a session or a notebook"):
        api.name_target(main.mine, tmp_path)
    with pytest.raises(UsageError, match="a Workload that no module holds by a name"):
        api.name_target(Workload(), tmp_path)


def test_a_list_of_words_is_a_scripts_command(tmp_path: Path) -> None:
    script = api.name_target([sys.executable, "train.py", "--epochs", "3"], tmp_path)
    assert isinstance(script, Script)
    assert script.command == (sys.executable, "train.py", "--epochs", "3")
    assert api.name_target(script, tmp_path) is script
    assert api.name_target(None, tmp_path) is None
