"""Every number as people read it: times, sizes, rates, shares, factors, losses. Pure; floats in, text out.

A figure has three digits, which is what a timing is good for, and its unit after a space; a duration and a factor have
theirs at once (`3m20s`, `1.38x`). What must stay true when it is rounded (at least, at most) says which way it goes.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

TIMES = "\N{MULTIPLICATION SIGN}"
"""Sign of a factor on a page with typography; a terminal's is `x`."""
EN_DASH = "\N{EN DASH}"

_HOUR, _DAY = 3600.0, 86400.0
_UNIT_ROUNDED_UP = 0.9995
"""From here on three digits show the next unit: 999.5 ms would be 1,000 ms."""
_MINUTES_UP_TO = 3 * _HOUR
_HOURS_UP_TO = 72
_DATE_FROM_SECONDS = 12 * _HOUR
_ROUNDS_TO_NOTHING = 0.005
_FINE_RANGE = 1.2
_SMALLEST_PLAIN, _LARGEST_PLAIN = 1e-3, 1e5
_MOST_WRITTEN_OUT = 1e15
"""A factor beyond that is no measurement; the decimal module refuses it from 1e26 on."""


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, e.g. `1 pair`, `1,240 steps`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def times(number: float) -> str:
    """Return how often something happens, e.g. `once`, `3 times`, `0.5 times`."""
    return "once" if f"{number:.3g}" == "1" else f"{number:.3g} times"


def with_article(name: str) -> str:
    """Return a name as it stands in a sentence, e.g. `an int`, `a list`."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


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


def format_time(seconds: float) -> str:
    """Return the time of a step, or of a part of one, e.g. `4.2 us`, `38.7 ms`, `1.2s`."""
    if seconds >= _UNIT_ROUNDED_UP:
        return format_duration(seconds)
    if seconds >= 1e-3 * _UNIT_ROUNDED_UP or seconds <= 0:
        return f"{_three_digits(1e3 * seconds)} ms"
    return f"{_three_digits(1e6 * seconds)} us"


def format_budget(seconds: float) -> str:
    """Return a duration as it can be typed, rounded up to what is worth distinguishing, e.g. `25m` or `3h`."""
    if seconds < _MINUTES_UP_TO:
        return f"{math.ceil(seconds / 60)}m"
    hours = math.ceil(seconds / _HOUR)
    return f"{hours}h" if hours < _HOURS_UP_TO else f"{math.ceil(hours / 24)}d"


def format_clock(now: datetime, seconds: float) -> str:
    """Return the time of day it will be in so many seconds, with the date where that is not plain."""
    try:
        then = now + timedelta(seconds=seconds)
    except OverflowError:
        return "never"
    return f"{then:%H:%M}" if seconds < _DATE_FROM_SECONDS else f"{then:%d %b %H:%M}"


def format_age(seconds: float) -> str:
    """Return how long ago something was measured, in words; empty within the hour."""
    if seconds < _HOUR:
        return ""
    days = seconds >= 2 * _DAY
    return f"measured {count(int(seconds // (_DAY if days else _HOUR)), 'day' if days else 'hour')} ago"


def format_bytes(number: float) -> str:
    """Return a size in binary units, e.g. `512 B`, `64 MiB`, `19.5 GiB`."""
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024 * _UNIT_ROUNDED_UP:
            return f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} GiB"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a rate of bytes in decimal units, e.g. `54 GB/s`, `3.35 TB/s`."""
    return _format_decimal(bytes_per_second, ((12, "T"), (9, "G"), (6, "M"), (3, "k")), "B/s")


def format_flops(per_second: float) -> str:
    """Return an arithmetic rate, e.g. `432 GFLOP/s`, `1.58 TFLOP/s`."""
    return _format_decimal(per_second, ((12, "T"), (9, "G"), (6, "M")), "FLOP/s")


def format_rate(per_second: float, *, unit: str = "samples/s") -> str:
    """Return a throughput with three significant digits, e.g. `1,240 samples/s`; the number alone without a unit."""
    return f"{per_second:,.0f} {unit}".rstrip() if per_second >= 100 else f"{per_second:.3g} {unit}".rstrip()


def format_percent(fraction: float, *, digits: int = 2) -> str:
    """Return a signed change, e.g. `+0.31%`."""
    return f"{100 * fraction:+.{digits}f}%"


def format_share(fraction: float) -> str:
    """Return a share of a whole, e.g. `62 %`; what is there but rounds to nothing is `<1 %`."""
    return "<1 %" if 0 < fraction < _ROUNDS_TO_NOTHING else f"{100 * fraction:.0f} %"


def format_progress(done: int, total: int | None) -> str:
    """Return the share that is done, never 100 % before it is, e.g. `41 %`; empty without a total."""
    return f"{min(100, math.floor(100 * done / total))} %" if total else ""


def format_part(part: float, whole: float) -> str:
    """Return how small a part of a whole is, e.g. `1/130`, `1/2.5`; nothing of it is `0`."""
    return "0" if part <= 0 else f"1/{float(f'{whole / part:.2g}'):,.{0 if whole / part >= 9.5 else 1}f}"


def format_of(part: str, whole: str) -> str:
    """Return one figure of another, their unit once where it is the same, e.g. `15.8 of 50 TFLOP/s`."""
    number, _, unit = part.partition(" ")
    return f"{number if unit == whole.partition(' ')[2] else part} of {whole}"


def format_factor(factor: float, *, sign: str = "x") -> str:
    """Return a factor, e.g. `1.38x`, `24.1x`, `1,200x`."""
    return _round_factor(factor, ROUND_HALF_EVEN) + sign


def format_factor_down(factor: float, *, sign: str = "x") -> str:
    """Return a factor rounded down, so that `at least` stays true."""
    return _round_factor(factor, ROUND_FLOOR) + sign


def format_rough_factor(factor: float) -> str:
    """Return a factor that is good for two digits only, e.g. `3.2x`, `23x`, `140x`."""
    return f"{float(f'{factor:.2g}'):,g}x"


def format_bounds(low: float, high: float, *, dash: str = "-") -> str:
    """Return an interval of factors to two places, rounded outwards, e.g. `1.31-1.46`."""
    return f"{_round_factor(low, ROUND_FLOOR, '0.01')}{dash}{_round_factor(high, ROUND_CEILING, '0.01')}"


def format_gain(low: float, high: float, *, sign: str = "x", dash: str = "-") -> str:
    """Return the range of factors to expect of a change, e.g. `1.1-1.8x`; finer where all of it is small."""
    digits = 2 if high < _FINE_RANGE else 1 if high < 100 else 0
    least, most = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return f"{most}{sign}" if least == most else f"{least}{dash}{most}{sign}"


def format_figure(value: float | None) -> str:
    """Return a loss or a metric: four decimals, or the power of ten of one that is tiny or huge."""
    if value is None:
        return "not finite"
    is_plain = value == 0 or _SMALLEST_PLAIN <= abs(value) < _LARGEST_PLAIN
    return f"{value:.4f}" if is_plain else f"{value:.3e}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _format_decimal(value: float, units: tuple[tuple[int, str], ...], unit: str) -> str:
    for power, prefix in units:
        if value >= _UNIT_ROUNDED_UP * 10**power:
            return f"{_three_digits(value / 10**power)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _round_factor(factor: float, rounding: str, step: str = "") -> str:
    if not abs(factor) < _MOST_WRITTEN_OUT:
        return f"{factor:.3g}"
    step = step or ("1" if abs(factor) >= 100 else "0.1" if abs(factor) >= 10 else "0.01")
    # repr first: 1.13 is stored a little below 1.13, and must not be rounded down to 1.12.
    return f"{Decimal(repr(factor)).quantize(Decimal(step), rounding=rounding):,}"
