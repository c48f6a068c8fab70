"""A database that cannot be used is one line, in which no password stands."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.search.run import SearchOptions, run_search
from autotune.search.share.address import open_storage, read_address

SECRET = "p@ss/w0rd"
QUOTED = "p%40ss%2Fw0rd"
NOBODY = f"postgresql+psycopg://me:{QUOTED}@127.0.0.1:1/studies"


def refuse(name: str) -> Callable[..., Any]:
    """Return an `__import__` for a machine without a package."""
    real = builtins.__import__

    def import_others(wanted: str, *rest: Any, **named: Any) -> Any:
        if wanted.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)
        return real(wanted, *rest, **named)

    return import_others


@pytest.mark.parametrize(
    "text", ["study", "postgres:/me:p@ss/w0rd@host", "://", "postgresql://host:port/db", "", "me:p@ss/w0rd"]
)
def test_what_is_no_url_is_refused_and_not_repeated_where_it_may_hold_a_password(text: str) -> None:
    with pytest.raises(UsageError, match="is no URL of a database") as error:
        read_address(text)
    assert "w0rd" not in error.value.message + error.value.hint
    assert "postgresql+psycopg://user@host/db" in error.value.hint


def test_an_address_is_shown_without_user_password_and_query() -> None:
    address = read_address(f"postgresql+psycopg://me:{QUOTED}@db.example:5433/studies?sslpassword=k3y&sslmode=require")
    assert address.shown == "postgresql://db.example:5433/studies"
    assert "w0rd" not in repr(address)
    assert "k3y" not in repr(address)
    hidden = address.hide(f"failed: {address.url} {SECRET} {QUOTED} k3y sslmode=require")
    assert hidden == "failed: *** *** *** *** sslmode=require"


def test_options_do_not_show_where_the_database_is() -> None:
    assert "w0rd" not in repr(SearchOptions(storage=NOBODY))


@pytest.mark.parametrize("kind", ["postgres", "postgresql"])
def test_the_usual_names_of_postgresql_take_the_driver_of_the_extra(kind: str) -> None:
    assert read_address(f"{kind}://host/db").url == "postgresql+psycopg://host/db"


def test_a_database_in_memory_is_shared_with_nobody() -> None:
    with pytest.raises(UsageError, match="no other worker sees it"):
        read_address("sqlite://")


@pytest.mark.fault("F20", injected="psycopg cannot be imported", outcome="exit 2 with the extra to install")
def test_a_missing_driver_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    address = read_address(NOBODY)
    with monkeypatch.context() as without:
        without.setattr(builtins, "__import__", refuse("psycopg"))
        with pytest.raises(UsageError, match="psycopg is not installed") as error:
            open_storage(address)
    assert error.value.hint == 'pip install "autotune-torch[postgres]"'
    assert "\n" not in error.value.message
    with pytest.raises(UsageError, match="no such kind of database"):
        open_storage(read_address("fable://host/db"))


@pytest.mark.fault(
    "F20",
    injected="nobody listens at the port",
    outcome="exit 5 in one line without the password; no folder",
)
def test_an_unreachable_database_ends_a_search_before_it_begins(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="the driver is not installed")
    with pytest.raises(
        MachineError, match=r"--storage postgresql://127.0.0.1:1/studies cannot be used: .*refused"
    ) as error:
        run_search("autotune.targets.demo:workload", SearchOptions(storage=NOBODY), folder=tmp_path)
    assert "w0rd" not in error.value.message + error.value.hint
    assert "\n" not in error.value.message
    assert not (tmp_path / ".autotune" / "lock").exists()
    assert error.value.exit_code == 5


def test_a_file_that_cannot_be_opened_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="unable to open database file"):
        open_storage(read_address(f"sqlite:///{tmp_path}/nowhere/study.db"))
