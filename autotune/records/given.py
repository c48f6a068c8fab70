"""Records that people build themselves, from Python: what does not fit is told in a line, as anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from autotune.errors import UsageError
from autotune.records.codec import Record, explain_misfit

_MOST_SHOWN = 40
_MOST_FIELDS = 8


class GivenError(UsageError, ValueError):
    """A field of such a record is unknown, missing or has a bad value."""


class GivenRecord(Record):
    """A record that people build themselves.

    Raises:
        GivenError: a field is unknown, missing or has a bad value. Where a file is read it is pydantic's own error,
            which its reader puts into words.
    """

    if not TYPE_CHECKING:  # where the fields are the signature

        def __init__(self, /, *misplaced: object, **given: Any) -> None:
            """Check what is given, by the names of the fields."""
            if misplaced:
                raise _make_error(f"{type(self).__name__} takes its fields by name", _list_fields(type(self)))
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise explain_given(error, type(self)) from None

        __init__.__pydantic_base_init__ = True  # what is read from a file does not come by here

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed.

        Raises:
            GivenError: a changed field is unknown or has a bad value.
        """
        try:
            return super().replace(**changes)
        except ValidationError as error:
            raise explain_given(error, type(self)) from None


def explain_given(error: ValidationError, kind: type[Record]) -> GivenError:
    """Return what first does not fit in a record, what was given for it and what it takes instead."""
    first = error.errors(include_url=False)[0]
    if first["type"] in ("extra_forbidden", "missing"):
        return _make_error(f"{kind.__name__}: {explain_misfit(error, kind)}", _list_fields(kind))
    field = ".".join(str(part) for part in first["loc"])
    allowed = str(first["msg"]).removeprefix("Value error, ").replace("a valid dictionary or instance of", "a")
    if not allowed.startswith("Input should be"):
        return _make_error(f"{kind.__name__}: {field or 'it'}: {allowed}", _list_fields(kind))
    return _make_error(
        f"{kind.__name__}: {field} is {_show(first['input'])}", allowed.replace("Input should", "it should", 1)
    )


def _make_error(message: str, hint: str) -> GivenError:
    error = GivenError(message, hint=hint)
    error.add_note(hint)  # which a traceback shows
    return error


def _list_fields(kind: type[Record]) -> str:
    names = [name for name in kind.model_fields if name != "schema_version"]
    if len(names) > _MOST_FIELDS:
        return f"help({kind.__name__}) lists its fields"
    return f"write {kind.__name__}({', '.join(f'{name}=...' for name in names)})"


def _show(value: object) -> str:
    text, kind = repr(value), type(value).__name__
    return f"{text}, of type {kind}" if len(text) <= _MOST_SHOWN and text.isprintable() else f"of type {kind}"
