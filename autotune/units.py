"""Parse what people type and format what people read: durations, bytes, percentages, rates."""

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
            some = ", ".join(f"30{unit}" for unit in counts)
            raise UsageError(error.message, hint=f"write 8h, {some}") from None
    if float(found.group(1)) <= 0:
        raise UsageError(f"{name} {text!r} is zero", hint="it must be more than 0")
    return float(found.group(1)), found.group(2)


def format_duration(seconds: float) -> str:
    """Return a short duration for people, e.g. `0.35s`, `42s`, `3m20s`, `1h05m`."""
    if seconds < 10:
        return f"{seconds:.2g}s" if seconds < 1 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


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


def format_bytes(count: float) -> str:
    """Return a size for people in binary units, e.g. `512 B`, `40.6 MiB`, `1.25 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def format_percent(fraction: float, *, digits: int = 2) -> str:
    """Return a signed percentage, e.g. `+0.31%`."""
    return f"{100 * fraction:+.{digits}f}%"


def format_rate(per_second: float, *, unit: str = "samples/s") -> str:
    """Return a rate with three significant digits, e.g. `1,240 samples/s`."""
    if per_second >= 100:
        return f"{per_second:,.0f} {unit}"
    return f"{per_second:.3g} {unit}"


def format_flops(per_second: float) -> str:
    """Return an arithmetic rate for people, e.g. `432 GFLOP/s`, `1.58 TFLOP/s`."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M")):
        if per_second >= 10**power:
            return f"{_three_digits(per_second / 10**power)} {prefix}FLOP/s"
    return f"{_three_digits(per_second)} FLOP/s"


def format_part(part: float, whole: float) -> str:
    """Return how small a part of a whole is, e.g. `1/130`, `1/2.5`; nothing of it is `0`."""
    return "0" if part <= 0 else f"1/{float(f'{whole / part:.2g}'):,.{0 if whole / part >= 9.5 else 1}f}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
