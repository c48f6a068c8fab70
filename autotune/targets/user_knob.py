r"""Read a knob of the script's own: `name=v1,v2[,...][:exact|rounding|semantic]` in, `UserKnob` out.

A value is a whole number, a number, true, false or text; a backslash stands before a `,`, a `:` or a `\` inside it.
"""

from __future__ import annotations

import math
import re
from typing import get_args

from autotune.errors import UsageError
from autotune.records.config import KnobValue
from autotune.records.script import Numerics, UserKnob

_HINT = "write NAME=VALUE,VALUE or NAME=VALUE,VALUE:CLASS, e.g. --knob lr=1e-3,2e-3:semantic"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # 007 and longer ones stay text: they would not be written the same
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?")
_ESCAPED = re.compile(r"\\([\\,:])")
_TOKEN = re.compile(r"\\[\\,:]|.", re.DOTALL)


def read_knob(text: str) -> UserKnob:
    """Return the knob that a `--knob` declares.

    Raises:
        UsageError: it does not parse, its class is unknown, or it has not two different values.
    """
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"--knob {text!r} has no values", hint=_HINT)
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"--knob {text!r}: {name!r} is not a name of letters, digits and _", hint=_HINT)
    choices, *classes = _split(rest, ":")
    numerics = _read_numerics(classes, text=text)
    values: list[KnobValue] = []
    for part in _split(choices, ","):
        value = parse_value(_ESCAPED.sub(r"\1", part.strip()))
        if value == "":
            raise UsageError(f"--knob {text!r} has an empty value", hint=_HINT)
        if value in values:
            raise UsageError(f"--knob {text!r} has the value {part.strip()!r} twice", hint="every value once")
        values.append(value)
    if len(values) < 2:
        raise UsageError(f"--knob {text!r} has one value, so there is nothing to choose", hint=_HINT)
    return UserKnob(name=name, values=tuple(values), numerics=numerics)


def parse_value(text: str) -> KnobValue:
    """Return the whole number, number, boolean (`true`, `false`) or text that is written."""
    if text in {"true", "false"}:
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def format_value(value: KnobValue) -> str:
    """Return a value as it is written into a command."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_knob(knob: UserKnob) -> str:
    """Return a knob as `read_knob` reads it."""
    values = (re.sub(r"([\\,:])", r"\\\1", format_value(value)) for value in knob.values)
    return f"{knob.name}={','.join(values)}:{knob.numerics}"


def _split(text: str, separator: str) -> list[str]:
    parts = [""]
    for token in _TOKEN.findall(text):
        if token == separator:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def _read_numerics(classes: list[str], *, text: str) -> Numerics:
    if not classes:
        return "semantic"
    written = ":".join(classes).strip()
    for known in get_args(Numerics):
        if written == known:
            found: Numerics = known
            return found
    raise UsageError(
        f"--knob {text!r}: {written!r} is no class of knobs",
        hint=f"it is one of {', '.join(get_args(Numerics))}; a colon inside a value is written \\:",
    )
