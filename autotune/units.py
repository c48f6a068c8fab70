"""What people type, in units: durations, amounts, sizes. How numbers are written is in `format`."""

from __future__ import annotations

import re

from autotune.errors import UsageError

_NUMBER = r"\d{1,15}(?:\.\d+)?"  # bounded: three hundred digits would be infinity
_SECONDS_PER_UNIT = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(rf"(?:{_NUMBER}[dhms])+", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})([dhms])", re.ASCII)
_CLOCK = re.compile(r"(\d{1,9}):([0-5]?\d):([0-5]?\d)", re.ASCII)
_BYTES = re.compile(rf"({_NUMBER})\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)
_LONGEST_SECONDS = 100 * 365 * 86400.0  # clocks and timers count no further than some hundred years
_MOST_BYTES = 2**63 - 1
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_duration(text: str, *, name: str = "duration") -> float:
    """Return seconds for `90s`, `20m`, `1h30m`, `1.5h`, `2d` or `00:20:00`.

    Raises:
        UsageError: the text is none of these; a bare number has no unit and is refused.
    """
    stripped = text.strip().lower()
    clock = _CLOCK.fullmatch(stripped)
    if clock is not None:
        hours, minutes, seconds = (int(part) for part in clock.groups())
        total = hours * 3600.0 + minutes * 60.0 + seconds
    elif _DURATION.fullmatch(stripped):
        total = sum(float(n) * _SECONDS_PER_UNIT[unit] for n, unit in _DURATION_PART.findall(stripped))
    else:
        hint = f"{stripped}m or {stripped}s?" if stripped.isdigit() else "write 90s, 20m, 1h30m or 00:20:00"
        raise UsageError(f"{name} {text!r} is not a duration with a unit", hint=hint)
    if total <= 0:
        raise UsageError(f"{name} {text!r} is zero", hint="it must be longer than 0s")
    if total > _LONGEST_SECONDS:
        raise UsageError(f"{name} {text!r} is too long", hint="it must be less than a hundred years")
    return total


def parse_amount(text: str, *, counts: tuple[str, ...], name: str = "amount") -> tuple[float, str]:
    """Return a number and its unit: `seconds` for what is a duration, else one of `counts`, e.g. `30epochs`.

    Raises:
        UsageError: the text is neither, or it is zero.
    """
    found = re.fullmatch(rf"({_NUMBER})\s*({'|'.join(counts)})", text.strip().lower(), re.ASCII)
    if found is None:
        try:
            return parse_duration(text, name=name), "seconds"
        except UsageError as error:
            number = text.strip() if text.strip().isdecimal() else "30"
            some = ", ".join(f"{number}{unit}" for unit in ("h", *counts))
            raise UsageError(f"{name} {text!r} has no unit that is known", hint=f"write {some}") from error
    if float(found.group(1)) <= 0:
        raise UsageError(f"{name} {text!r} is zero", hint="it must be more than 0")
    return float(found.group(1)), found.group(2)


def parse_bytes(text: str, *, name: str = "size") -> int:
    """Return bytes for `800MiB`, `16Gi`, `8g` (binary) or `8GB` (decimal).

    A suffix with a capital or small `b` and no `i` is decimal (`GB` = 10^9); every other one is binary.

    Raises:
        UsageError: the text is no size, or it is zero.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or not match.group(2):
        raise UsageError(f"{name} {text!r} is not a size with a unit", hint="write 800MiB, 16GiB or 8g")
    decimal = text.strip().lower().endswith("b") and not match.group(3)
    base = 1000 if decimal else 1024
    total = int(float(match.group(1)) * base ** _POWERS[match.group(2).lower()])
    if total <= 0:
        raise UsageError(f"{name} {text!r} is zero", hint="it must be larger than 0")
    if total > _MOST_BYTES:
        raise UsageError(f"{name} {text!r} is too large", hint="it must be less than 8 EiB")
    return total
