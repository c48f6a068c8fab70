"""Where the database of a shared study is: read, opened, and shown without what is secret in it.

Messages of drivers and of SQLAlchemy may repeat what they were given, so that each is passed through `Address.hide`.
"""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, RDBStorage, get_storage

from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.records.secrets import MASK

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_ALLOWED = "postgresql+psycopg://user@host/db, or sqlite:///study.db for several searches on one machine"
_WHERE_PASSWORDS_GO = "a password is best kept in ~/.pgpass"
_POSTGRES = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}
_EXTRA = 'pip install "autotune-torch[postgres]"'
_SECRET = re.compile(r"passw|secret|token", re.IGNORECASE)
_MOST_REASON = 200
_MOST_ATTEMPTS = 5
"""To make the tables: several workers that begin together are in each other's way, and find them made then."""

# A pool tells of each connection that it loses, and so does the search, in a sentence of its own.
logging.getLogger("sqlalchemy.pool").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Address:
    """Of a database.

    Attributes:
        url: as SQLAlchemy takes it, with its password.
        shown: the same for people: kind, host and name, nothing else.
        secrets: what no message may repeat.
    """

    url: str = field(repr=False)
    shown: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def hide(self, text: str) -> str:
        """Return a text without the secrets of this address."""
        for secret in sorted((self.url, *self.secrets), key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def explain(self, error: BaseException) -> str:
        """Return why a database failed, in a few words of its own."""
        while error.__cause__ is not None and not hasattr(error, "orig"):
            error = error.__cause__
        reason = getattr(error, "orig", None) or error
        first = next((line.strip() for line in str(reason).splitlines() if line.strip()), type(reason).__name__)
        return self.hide(first)[:_MOST_REASON]


def read_address(text: str) -> Address:
    """Return the address in the text of an option.

    Raises:
        UsageError: it is no URL of a database, or of one that no other process can reach.
    """
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # the latter of a port that is none
        given = "the value" if {*"@?="} & {*text} else repr(text[:80])  # a password may stand in it
        raise UsageError(f"--storage: {given} is no URL of a database", hint=f"give {_ALLOWED}") from None
    url = url.set(drivername=_POSTGRES.get(url.drivername, url.drivername))
    shown = _show(url)
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise UsageError(f"--storage {shown} is in memory, where no other worker sees it", hint=f"give {_ALLOWED}")
    values = [value for name, value in url.normalized_query.items() if _SECRET.search(name)]
    passwords = [one for one in (url.password, *itertools.chain(*values)) if one]
    secrets = (text, *passwords, *(quote(one, safe="") for one in passwords))
    return Address(url.render_as_string(hide_password=False), shown, secrets)


def _show(url: URL) -> str:
    port = "" if url.port is None else f":{url.port}"
    return f"{url.get_backend_name()}://{url.host or ''}{port}/{url.database or ''}"


def open_storage(address: Address) -> BaseStorage:
    """Return the storage at an address, its tables made where there are none.

    Raises:
        UsageError: there is no such kind of database, or its driver is not installed.
        MachineError: it cannot be reached, refuses, or was made by another Optuna.
    """
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for attempt in range(1, 1 + _MOST_ATTEMPTS):
        try:
            return get_storage(RDBStorage(address.url, engine_kwargs={"pool_pre_ping": True}))
        except Exception as error:  # SQLAlchemy's, a driver's or Optuna's own: each has its errors
            is_race = isinstance(error, IntegrityError | ProgrammingError) or (
                isinstance(error, OperationalError) and "already exists" in str(error)
            )
            if not is_race or attempt == _MOST_ATTEMPTS:
                raise _describe(address, error) from None
    raise AssertionError


def _describe(address: Address, error: Exception) -> AutotuneError:
    from sqlalchemy.exc import NoSuchModuleError

    if isinstance(error, NoSuchModuleError):
        return UsageError(f"--storage {address.shown}: no such kind of database", hint=f"give {_ALLOWED}")
    if isinstance(error, ImportError):
        return _describe_driver(address, error)
    hint = "check that it runs and lets this machine in, or leave --storage out to search alone"
    if "password" in str(error).lower():
        hint = f"{hint}; {_WHERE_PASSWORDS_GO}"
    return MachineError(f"--storage {address.shown} cannot be used: {address.explain(error)}", hint=hint)


def _describe_driver(address: Address, error: ImportError) -> UsageError:
    named = (one.name for one in (error, error.__cause__) if isinstance(one, ImportError) and one.name)
    name = next(named, "its driver")
    hint = "install the package that has it, or name another driver in the URL"
    if address.shown.startswith("postgresql:"):
        hint = _EXTRA if name == "psycopg" else f"{_EXTRA}, and give postgresql+psycopg://..."
    return UsageError(f"--storage {address.shown}: {name} is not installed", hint=hint)
