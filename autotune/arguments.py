"""What a caller in Python gives: a value of the wrong type is the caller's error, told before it breaks anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autotune.errors import AutotuneError, UsageError

_WORDS: dict[Any, str] = {
    NoneType: "None",
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "text",
}


@contextmanager
def shown_hints() -> Iterator[None]:
    """Have the hint of an error that is raised inside stand below its message in a traceback."""
    try:
        yield
    except AutotuneError as error:
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            error.add_note(error.hint)
        raise


def check_fields(options: Any, hints: Mapping[str, str]) -> None:
    """Make sure that the fields of a frozen dataclass have the types they are declared with; lists become tuples.

    Args:
        options: just built.
        hints: what to write instead, by field.

    Raises:
        UsageError: a field has another type; says which are allowed.
    """
    kinds = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, kind = getattr(options, field.name), kinds[field.name]
        if isinstance(value, list) and get_origin(kind) is tuple:
            value = tuple(value)
            object.__setattr__(options, field.name, value)
        if not _fits(value, kind):
            raise UsageError(
                f"{type(options).__name__}: {field.name} is {shorten(value)}",
                hint=hints.get(field.name, f"it is {_describe(kind)}"),
            )


def shorten(value: object) -> str:
    """Return a value as an error shows it: its type, and itself where that is short."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text}, of type {kind}" if len(text) <= 40 and text.isprintable() else f"of type {kind}"


def _fits(value: object, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, arguments[0]) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_describe(one) for one in arguments)
    if origin is Literal:
        return " or ".join(repr(one) for one in arguments)
    if origin is tuple:
        return f"a list, each {_describe(arguments[0])}"
    return _WORDS.get(kind) or f"a {kind.__name__}"
