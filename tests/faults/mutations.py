"""Good inputs made bad: parts of JSON exchanged for hostile ones, and bytes of anything."""

from __future__ import annotations

import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63 - 1, 2**63, 10**39, 10**400, -(2**63)),
    *(0.0, -0.0, 0.5, 1e-308, 5e-324, 1e308, -1e308, 1e17, float("nan"), float("inf")),
    *("", " ", "\x00", "\x1b[2J", "\x9b31m", "\u202e", "\ufeff", "\ud800", "a" * 5000, "\n" * 50, "1\u00b2"),
    *("../../pwned", "/etc/passwd", "file.py:x", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>"),
    *("{{7*7}}", "${HOME}", "__import__('os').system('touch pwned')", "!!python/object/apply:os.system"),
    *([], {}, [[]], {"a": 1}, {"_target_": "os.system"}, {"__class__": "x"}),
)
"""Values in place of others."""

BYTES = (
    *(
        b"\x00",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\x1b[2J",
        b"\n",
        b"\r",
        b"\x1e",
        b"{",
        b"}",
        b"[",
        b'"',
        b"\\",
        b",",
        b"=",
        b":",
    ),
    *(b"NaN", b"1e999", b"9" * 500, b"[" * 3000, b'{"a":' * 3000, b"%", b"pp", b"-", b"--", b"../", b"{x}", b"{x:1}"),
    *(b"{micro_batch_size}", b"--token", b"=", b"\xc2\x9b", b"\xed\xa0\x80", b"(", b"(?P<", b"*" * 50, b"\xe2\x80\xae"),
)
"""Put in anywhere."""


def mutate(data: bytes, generator: random.Random, *, is_json: bool, tag: bool = False) -> bytes:
    """Return an input with one to four changes.

    Args:
        data: the input.
        generator: draws them.
        is_json: it is JSON.
        tag: its first byte says what the rest is, and stays.
    """
    first, rest = (data[:1], data[1:]) if tag else (b"", data)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        change = _mutate_json if is_json and generator.random() < 0.8 else _mutate_bytes
        rest = change(rest, generator)
    return first + rest


def _mutate_json(data: bytes, generator: random.Random) -> bytes:
    try:
        plain = json.loads(data)
        places = list(_list_places(plain))
        if not places:
            return json.dumps(generator.choice(HOSTILE)).encode()
        _change(*generator.choice(places), places, generator)
        text = json.dumps(plain, indent=generator.choice([None, 2]))
    except (ValueError, RecursionError, OverflowError):  # it was no JSON, or holds itself now
        return _mutate_bytes(data, generator)
    if generator.random() < 0.05:
        text = text.replace("{", '{"verdict": 1, "verdict": 2,', 1)  # a key that stands twice
    return text.encode("utf-8", "surrogatepass")


def _change(holder: Any, key: Any, places: list[tuple[Any, Any]], generator: random.Random) -> None:
    """Change one part of a list or an object."""
    value = holder[key]
    match generator.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[generator.choice(["extra", "_target_", "\x1b", "", key.upper()])] = generator.choice(HOSTILE)
        case 2 if isinstance(holder, list) and len(holder) < 100:
            holder += holder * generator.choice([1, 50])
        case 3:
            other, there = generator.choice(places)
            holder[key] = other[there]
        case 4:
            for _ in range(generator.choice([2, 40])):
                value = [value] if generator.random() < 0.5 else {"a": value}
            holder[key] = value
        case 5 if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = value * generator.choice([-1, 0, 2, 10**6, 10**15, 1e-12])
        case 6:
            alike = [other for other in HOSTILE if type(other) is type(value)]
            holder[key] = generator.choice(alike or HOSTILE)
        case _:
            holder[key] = generator.choice(HOSTILE)


def _list_places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        yield value, key
        yield from _list_places(child)


def _mutate_bytes(data: bytes, generator: random.Random) -> bytes:
    begin = generator.randint(0, len(data))
    end = min(len(data), begin + generator.choice([0, 1, 1, 2, 8, 64]))
    match generator.randrange(6):
        case 0:
            return data[:begin] + data[end:]
        case 1:
            return data[:begin] + generator.randbytes(generator.choice([1, 2, 8])) + data[end:]
        case 2:
            return data[:begin] + data[begin:end] * generator.choice([2, 100]) + data[end:]
        case 3:
            return data[:begin]
        case _:
            return data[:begin] + generator.choice(BYTES) + data[end:]
