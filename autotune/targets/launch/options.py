"""Split a launcher's own options from the script it starts, where each is a word in full, with a value or without."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.errors import UsageError


@dataclass(frozen=True)
class Options:
    """What may stand before the script.

    Attributes:
        tool: name of the launcher, for messages.
        with_value: options that take a value, `_` inside.
        alone: options that take none.
        short: short names of some.
        refused: why an option is not supported, by its name or by what its name begins with.
        hint: what to do about a refused one.
    """

    tool: str
    with_value: Collection[str]
    alone: Collection[str]
    hint: str
    short: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """What was typed.

    Attributes:
        values: of the options that take one; empty for the others.
        name: of the script.
        arguments: what the script is given.
    """

    values: Mapping[str, str]
    name: str
    arguments: tuple[str, ...]


def split_options(words: Sequence[str], known: Options) -> Split:
    """Take apart what follows a launcher's name.

    Raises:
        UsageError: an option is unknown, refused or without its value, or there is no script.
    """
    values: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        index += 1
        if word == "--":
            break
        typed, equals, value = word.partition("=")
        name = known.short.get(typed, typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else "")
        _require_known(word, name, known)
        if name in known.with_value and not equals:
            if index == len(words):
                raise UsageError(f"{known.tool}'s option {word!r} needs a value", hint=f"write {typed}=VALUE")
            value = words[index]
            index += 1
        elif name in known.alone and equals:
            raise UsageError(f"{known.tool}'s option {word!r} takes no value", hint=f"write {typed} alone")
        values[name] = value
    if index == len(words):
        raise UsageError(f"{known.tool} is given no script", hint=f"write {known.tool} ... train.py ...")
    return Split(values, words[index], tuple(words[index + 1 :]))


def read_count(values: Mapping[str, str], name: str, tool: str) -> int | None:
    """Return a whole number that was typed; None where it was not.

    Raises:
        UsageError: it is none.
    """
    if name not in values:
        return None
    try:
        return int(values[name])
    except ValueError:
        raise UsageError(f"{tool}'s --{name} {values[name]!r} is no whole number", hint=f"write --{name} 2") from None


def _require_known(word: str, name: str, known: Options) -> None:
    why = next((why for refused, why in known.refused.items() if name and name.startswith(refused)), None)
    if name in known.with_value or name in known.alone:
        return
    if why is not None:
        raise UsageError(f"{known.tool}'s option {word!r} is not supported: {why}", hint=known.hint)
    names = (*known.with_value, *known.alone)
    near = difflib.get_close_matches(name, names, n=1)
    raise UsageError(
        f"{known.tool}'s option {word!r} is not one that autotune knows",
        hint=f"write it in full: --{near[0]}" if near else known.hint,
    )
