"""The figures of a probe as people read them. Pure."""

from __future__ import annotations

from autotune.records.probe import GainRange
from autotune.sentences import count
from autotune.units import format_duration

_HOUR, _DAY = 3600.0, 86400.0
_FINE_GAIN = 1.2


def format_time(seconds: float) -> str:
    """Return a time for people, e.g. `4.2 us`, `38.7 ms`, `1.2s`."""
    if seconds >= 0.9995:
        return format_duration(seconds)
    if seconds >= 0.9995e-3 or seconds <= 0:
        return f"{_three_digits(1e3 * seconds)} ms"
    return f"{_three_digits(1e6 * seconds)} us"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a rate of bytes in decimal units, e.g. `54 GB/s`, `3.35 TB/s`."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if bytes_per_second >= 0.9995 * 10**power:
            return f"{_three_digits(bytes_per_second / 10**power)} {prefix}B/s"
    return f"{_three_digits(bytes_per_second)} B/s"


def format_size(number: float) -> str:
    """Return a size in binary units with three digits, e.g. `64 MiB`, `19.5 GiB`."""
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1023.5:
            return f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} GiB"


def format_of(part: str, whole: str) -> str:
    """Return one figure of another, their unit once where it is the same, e.g. `15.8 of 50 TFLOP/s`."""
    number, _, unit = part.partition(" ")
    return f"{number if unit == whole.partition(' ')[2] else part} of {whole}"


def format_share(fraction: float) -> str:
    """Return a share of a whole, e.g. `62 %`; what is there but rounds to nothing is `<1 %`."""
    return "<1 %" if 0 < fraction < 0.005 else f"{100 * fraction:.0f} %"


def format_factor(factor: float) -> str:
    """Return a factor for people, e.g. `1.38x`, `24.1x`, `1,200x`."""
    if factor >= 100:
        return f"{factor:,.0f}x"
    return f"{factor:.1f}x" if factor >= 10 else f"{factor:.2f}x"


def format_gain(gain: GainRange | None) -> str:
    """Return what to expect of a change, e.g. `1.1-1.8x`; finer where all of it is small, empty when not known."""
    if gain is None:
        return ""
    digits = 2 if gain.high < _FINE_GAIN else 1 if gain.high < 100 else 0
    low, high = f"{gain.low:,.{digits}f}", f"{gain.high:,.{digits}f}"
    return f"{high}x" if low == high else f"{low}-{high}x"


def format_age(seconds: float) -> str:
    """Return how long ago something was measured, in words; empty within the hour."""
    if seconds < _HOUR:
        return ""
    days = seconds >= 2 * _DAY
    return f"measured {count(int(seconds // (_DAY if days else _HOUR)), 'day' if days else 'hour')} ago"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
