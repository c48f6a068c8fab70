"""The one place that opens a file to read it whole: a regular file only, so long and so deep and no more.

What a record is read from may have been written by anybody. A pipe would be waited for without end, a device has no
end, and a text nested deeply enough ends the parser's stack.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_DEPTH = 32
"""Levels of lists and objects that a file of ours has at most."""

MAX_BYTES = 64 * 1024 * 1024
"""Longest file that is read where nothing smaller is said."""

_MOST_PRESET_BYTES = 2**20

MOST_COUNT = 2**63 - 1
"""Largest whole number in a file: a larger one counts nothing, and overflows as soon as it is computed with."""


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a file's content, one byte more than `max_bytes` of a longer one; never waits for another process.

    Raises:
        OSError: there is none, it cannot be read, or it is a pipe, a device, a socket or a folder.
    """
    # Without O_NONBLOCK opening a pipe waits for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        kind = describe_kind(os.fstat(descriptor).st_mode)
        if kind:
            raise OSError(errno.EINVAL, f"is {kind}, not a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    finally:
        os.close(descriptor)


def describe_kind(mode: int) -> str:
    """Return what something is that is no regular file, e.g. `a pipe`; empty for a regular file.

    Args:
        mode: of `os.stat`.
    """
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    if stat.S_ISREG(mode):
        return ""
    return next((kind for is_one, kind in kinds if is_one(mode)), "a device")


def is_text(name: str) -> bool:
    """Return whether a name can be a file's and be written into one: the system's own need not be UTF-8."""
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def parse_json(text: str) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a key twice in one object, NaN, infinity or a number
            of more than 64 bits.
    """
    try:
        plain = json.loads(
            text, object_pairs_hook=_refuse_duplicate_keys, parse_constant=_refuse_constant, parse_int=_read_integer
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if _is_too_deep(plain):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return plain


def is_preset(path: Path) -> bool:
    """Return whether a file is a preset, right or wrong, and so no profile."""
    try:
        found = parse_json(read_bytes(path, max_bytes=_MOST_PRESET_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "settings" in found


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} stands twice")
        found[key] = value
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _read_integer(text: str) -> int:
    number = int(text) if len(text) <= len(str(-MOST_COUNT)) else None
    if number is None or abs(number) > MOST_COUNT:
        raise ValueError(f"the number {text[:20]}... is too large")
    return number


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return False
    return True
