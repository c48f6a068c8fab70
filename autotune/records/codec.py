"""Records to JSON and back: strict, versioned, bounded; a crash while writing leaves the old file or the new one."""

from __future__ import annotations

import difflib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from autotune.errors import AutotuneError, ProfileError
from autotune.records.reading import MAX_BYTES, parse_json, read_bytes
from autotune.scratch import claim, seize

SCHEMA_VERSION = 1
"""Version of every file this release writes. 1: the first."""

_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)
_NOT_KEPT: set[str] = set()
"""Stands for the names of the fields that were given."""


class Record(BaseModel):
    """A frozen value that flows between stages: strict types, no unknown field, no NaN."""

    hint_to_mend: ClassVar[str] = ""
    """What to do about a file of it that does not parse, where people may write or change one."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def model_post_init(self, _context: Any) -> None:
        """Forget which fields were given: nobody asks, and the names take half of a record's memory."""
        object.__setattr__(self, "__pydantic_fields_set__", _NOT_KEPT)

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed.

        Raises:
            pydantic.ValidationError: a changed field is unknown or has a bad value.
        """
        return type(self).model_validate({**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def to_json(self) -> str:
        """Return indented JSON with a newline at its end."""
        return self.model_dump_json(indent=2) + "\n"


R = TypeVar("R", bound=Record)


def parse_record(
    text: str,
    kind: type[R],
    *,
    name: str,
    max_bytes: int = MAX_BYTES,
    error: Callable[..., AutotuneError] = ProfileError,
) -> R:
    """Return the record in a JSON text.

    Args:
        text: JSON, untrusted.
        kind: the record's type.
        name: what the text is called in an error, usually its path.
        max_bytes: longest text accepted.
        error: the AutotuneError to raise.

    Raises:
        AutotuneError: too large or deep, not JSON, a duplicate key, a newer schema, or a field that does not fit.
    """
    if len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise error(f"{name} is larger than {max_bytes} bytes", hint="this is not a file autotune wrote")
    hint = kind.hint_to_mend or f"expected a {kind.__name__} of schema_version {SCHEMA_VERSION}"
    try:
        plain = parse_json(text)
    except ValueError as reason:
        raise error(f"{name} is not valid JSON: {_printable(str(reason))}", hint=hint) from None
    _check_schema_version(plain, name=name, error=error)
    try:
        return kind.model_validate_json(text)
    except ValidationError as reason:
        raise error(f"{name}: {_printable(explain_misfit(reason, kind))}", hint=hint) from None


def explain_misfit(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return what first does not fit in a record, e.g. `config: unknown key 'precison', did you mean 'precision'?`.

    Args:
        error: of its validation.
        kind: the record's type.
    """
    first = error.errors(include_url=False)[0]
    places = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(places[-1], _known_keys(kind, places[:-1]), n=1)
        reason = f"unknown key {places.pop()!r}" + (f", did you mean {near[0]!r}?" if near else "")
    elif first["type"] == "missing":
        reason = f"{places.pop()!r} is missing"
    else:
        reason = str(first["msg"]).removeprefix("Value error, ")
        places = places or ["the whole file"] * (reason == first["msg"])
    return ": ".join([".".join(places), reason] if places else [reason])


def _known_keys(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of the record at a place inside another; none where there is no one record."""
    for part in path:
        if part in kind.model_fields:
            inside = _find_record(kind.model_fields[part].annotation)
            if inside is None:
                return []
            kind = inside
    return list(kind.model_fields)


def _find_record(annotation: Any) -> type[BaseModel] | None:
    """Return the record that a field holds, as it is or in a list or a table of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_find_record, get_args(annotation))), None)


def read_record(
    path: Path,
    kind: type[R],
    *,
    max_bytes: int = MAX_BYTES,
    error: Callable[..., AutotuneError] = ProfileError,
) -> R:
    """Return the record in a file; errors as `parse_record`, and a missing or unreadable file.

    Raises:
        AutotuneError: the file is missing, unreadable, or its text is refused.
    """
    try:
        raw = read_bytes(path, max_bytes=max_bytes)
    except OSError as reason:
        raise error(f"{path}: {reason.strerror or reason}", hint="check the path and its permissions") from None
    return parse_record(raw.decode("utf-8", "replace"), kind, name=str(path), max_bytes=max_bytes, error=error)


def write_record(path: Path, record: Record, *, private: bool = False) -> None:
    """Write a record so that a reader sees the old file or the new one, never a part; arguments as of `write_text`.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file is untouched.
    """
    write_text(path, record.to_json(), private=private)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically, in UTF-8: as `write_bytes`.

    Args:
        path: of the file.
        text: its content.
        private: nobody else on the machine may read it.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file is untouched.
    """
    write_bytes(path, text.encode(), private=private)


def write_bytes(path: Path, content: bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write a file atomically: temporary file in the same folder, fsync, rename, fsync of the folder.

    Args:
        path: of the file; a link there is replaced, not followed.
        content: of the file.
        durable: it outlives a power cut; one that can be made again need not wait for the disk.
        private: nobody else on the machine may read it.

    Raises:
        OSError: the folder cannot be written, or the disk is full; the old file is untouched.
    """
    with _unfinished(path) as (temporary, file):
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
        temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files of writers that died, as far as that is possible; those of living ones stay.

    Args:
        folder: holds them.
        name: of the file that was to be written; None for any.
    """
    with suppress(OSError):
        for entry in os.listdir(folder):
            found = _UNFINISHED.fullmatch(entry)
            if found is not None and name in (None, found[1]):
                with suppress(OSError):
                    _remove_unfinished(folder / entry)


@contextmanager
def _unfinished(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a temporary file beside a path, locked so that it is seen to be in use; gone in the end, if not renamed."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with temporary.open("xb") as file:
            try:
                if claim(file.fileno(), temporary):
                    yield temporary, file
                    return
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


def _remove_unfinished(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and seize(descriptor):
            path.unlink()
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, so that no power cut takes them away with what is in them.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside a folder durable (a no-op where folders cannot be synced)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _check_schema_version(plain: Any, *, name: str, error: Callable[..., AutotuneError]) -> None:
    version = plain.get("schema_version", SCHEMA_VERSION) if isinstance(plain, dict) else SCHEMA_VERSION
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise error(
            f"{name} was written by a newer version (schema {str(version)[:20]}, this one reads {SCHEMA_VERSION})",
            hint="upgrade autotune",
        )


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:300]
