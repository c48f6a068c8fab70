"""Small files of /proc and /sys as text and as numbers; None for one that cannot be read."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Return the text of a file without the blanks around it; None when there is no such file or it is closed to us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_cpu_list(path: Path) -> frozenset[int] | None:
    """Return the numbers in a list like `0-3,8`; None when it cannot be read.

    Source: Linux `Documentation/admin-guide/cputopology.rst`.
    """
    text = read_text(path)
    if text is None:
        return None
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return None
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
